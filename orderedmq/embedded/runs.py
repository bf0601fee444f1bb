"""Registers which queues a run of a micro-batch reads: tasks write small files in the store's directory, and the publish reads them.

Registrations are files, not entries of the store, because each task writes one per batch, and a transaction for each would cost an
fsync. They need not survive a loss of power, which ends all tasks of the run. The next run registers again.

    runs/<query id>/<batch id>/<run id>.<random>      one JSON object and, on a second line, its xxh3
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from orderedmq.conditions import StoreCondition
from orderedmq.embedded.clock import FORGOTTEN, is_forgotten
from orderedmq.errors import StoreError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange
from orderedmq.ownership.lock import Instant, LockToken
from orderedmq.ownership.micro_batch import SourceRun

FOLDER: Final = "runs"
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FILE = re.compile(rf"\.?{_PLAIN.pattern}\.[0-9a-f]{{32}}")


@dataclass(frozen=True)
class Registration:
    """Says that a task reads ``offsets`` of ``queue``, under the lock ``token`` if the query has a group."""

    queue: MessageQueue
    offsets: OffsetRange
    token: LockToken | None


def _checksum(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _plain(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def register(store: Path, run: SourceRun, what: Registration, now: Instant) -> None:
    """Write the registration ``what``. A batch's first registration removes the query's files of batches before the previous one."""
    query = store / FOLDER / _plain(run.query_id)
    token = what.token
    record = {
        "topic": what.queue.topic,
        "queue_id": what.queue.queue_id,
        "begin": what.offsets.begin,
        "end": what.offsets.end,
        "query": [run.query_id, run.name],
        "at": [now.boot_id, now.seconds],
        "token": None if token is None else [token.group, token.owner, token.client_id, token.epoch, token.tenure],
    }
    name = f"{_plain(run.run_id)}.{uuid.uuid4().hex}"
    while True:
        # Nothing removes the folder of all queries, so FileNotFoundError means here that the store is gone.
        query.parent.mkdir(mode=0o700, exist_ok=True)
        # If `sweep` or a later batch removes a folder before it has this file, make the folder again.
        with contextlib.suppress(FileNotFoundError):
            _write(_batch_folder(query, run.batch_id), name, json.dumps(record))
            return


def _batch_folder(query: Path, batch_id: int) -> Path:
    folder = query / str(batch_id)
    try:
        # parents=True would create the parents with the process's default mode.
        query.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    else:
        _forget_before(query, batch_id - 1)
    return folder


def _write(folder: Path, name: str, text: str) -> None:
    unpublished = folder / f".{name}"
    descriptor = os.open(unpublished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(f"{text}\n{_checksum(text)}\n")
        os.rename(unpublished, folder / name)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            unpublished.unlink()
        raise


def has_sources(store: Path, run: SourceRun) -> bool:
    """Whether a task of this run has registered what it reads."""
    prefix = f"{_plain(run.run_id)}."
    try:
        with os.scandir(store / FOLDER / _plain(run.query_id) / str(run.batch_id)) as files:
            return any(file.name.startswith(prefix) for file in files)
    except FileNotFoundError:
        return False


def registered(store: Path, run: SourceRun) -> list[Registration]:
    """Return the registrations of exactly this run, without duplicates. Raises StoreError CORRUPT."""
    folder = store / FOLDER / _plain(run.query_id) / str(run.batch_id)
    prefix = f"{_plain(run.run_id)}."
    out: dict[tuple[str | None, MessageQueue, OffsetRange, int], Registration] = {}
    try:
        files = [path for path in folder.iterdir() if path.name.startswith(prefix)]
    except FileNotFoundError:
        return []
    for path in files:
        record = _record(path)
        if record is None:
            raise StoreError(
                StoreCondition.CORRUPT,
                f"{path}, in which a task of batch {run.batch_id} registered what it reads, fails its checksum: the disk or another program "
                "changed it. Restart the query, whose next run registers again",
            )
        queue = MessageQueue(record["topic"], EMBEDDED_BROKER, record["queue_id"])
        span = OffsetRange(record["begin"], record["end"])
        token = None
        if record["token"] is not None:
            group, owner, client_id, epoch, tenure = record["token"]
            token = LockToken(group, queue, owner, client_id, epoch, tenure)
        out[(token.group if token else None, queue, span, token.epoch if token else 0)] = Registration(queue, span, token)
    return [out[key] for key in sorted(out, key=lambda key: (key[0] or "", *key[1:]))]


def query_names(store: Path) -> dict[str, str]:
    """Return the Spark names of queries by client id, for queries that have a name and a registration."""
    found: dict[str, str] = {}
    for path in _files(store):
        try:
            record = _record(path)
        except FileNotFoundError:
            continue
        # A damaged or incomplete file is skipped.
        if record is not None and record["token"] is not None and record["query"][1] is not None:
            found[record["token"][2]] = record["query"][1]
    return found


def _files(store: Path) -> Iterator[Path]:
    """Yield the files of all registrations, including incomplete ones, but no files of other programs."""
    for query in _entries(store / FOLDER):
        for batch in _entries(query):
            yield from (path for path in _entries(batch) if batch.name.isdigit() and _FILE.fullmatch(path.name))


def _entries(path: Path) -> list[Path]:
    """Return the entries of a folder, or an empty list if ``path`` is a file or was removed by a later batch or by `sweep`."""
    try:
        return list(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _record(path: Path) -> dict[str, Any] | None:
    """Return the content of a registration's file, or None if it fails its checksum."""
    text, _, checksum = path.read_bytes().decode(errors="replace").partition("\n")
    record: dict[str, Any] = json.loads(text) if checksum == f"{_checksum(text)}\n" else {}
    return record or None


def _forget_before(query: Path, batch_id: int) -> None:
    for old in _entries(query):
        if old.name.isdigit() and int(old.name) < batch_id:
            shutil.rmtree(old, ignore_errors=True)


def sweep(store: Path, now: Instant, alive: Callable[[str], bool]) -> None:
    """Remove the registrations of runs that have ended. ``alive``: whether a client is alive."""
    for path in _files(store):
        # The folders are removed with their last file. An error does not keep other files from being removed.
        with contextlib.suppress(OSError):
            if _has_ended(path, now, alive):
                path.unlink()
                path.parent.rmdir()
                path.parent.parent.rmdir()


def _has_ended(path: Path, now: Instant, alive: Callable[[str], bool]) -> bool:
    """Whether the run of a registration has ended. A damaged or incomplete file shows only its age."""
    record = _record(path)
    if record is None:
        return time.time() - path.stat().st_mtime > FORGOTTEN
    token = record["token"]
    return is_forgotten(Instant(*record["at"]), now) and not (token is not None and alive(token[2]))
