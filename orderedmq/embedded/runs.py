"""Registers which queues a run of a micro-batch reads: tasks write small files in the store's directory, and the publish reads them.

Registrations are files, not entries of the store, because each task writes one per batch, and a transaction for each would cost an
fsync. They need not survive a loss of power, which ends all tasks of the run. The next run registers again.

    runs/<query id>/<batch id>/<run id>/<random>      one JSON object and, on a second line, its xxh3
    runs/<query id>/<batch id>/.ended                 the runs whose registrations were removed, one a line

If a batch is repeated again and again, only its last two runs keep their registrations, as they keep their segments (`garbage`). A run
without its registrations would publish without the check of its locks, so it is first written into ``.ended`` and cannot publish any more.
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

from orderedmq.conditions import SinkCondition, StoreCondition
from orderedmq.embedded.clock import FORGOTTEN, is_forgotten
from orderedmq.errors import SinkError, StoreError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange
from orderedmq.ownership.lock import Instant, LockToken
from orderedmq.ownership.micro_batch import SourceRun

FOLDER: Final = "runs"
#: How many runs of a batch keep what they wrote: the last one, which is at work, and the one before, whose publish may have begun.
KEPT_RUNS: Final = 2
#: Seconds after its registration from which a run counts as ended if its query's client is dead.
_SETTLED: Final = 600.0
_ENDED: Final = ".ended"
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FILE = re.compile(r"\.?[0-9a-f]{32}")


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
    """Write the registration ``what``.

    A batch's first registration removes the query's files of batches before the previous one, and a run's first registration those of all
    other runs of the batch but the last. Raises SinkError TOKEN_GONE if the run's own registrations were removed.
    """
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
    while True:
        # Nothing removes the folder of all queries, so FileNotFoundError means here that the store is gone.
        query.parent.mkdir(mode=0o700, exist_ok=True)
        # If `sweep` or a later batch removes a folder before it has this file, make the folder again.
        with contextlib.suppress(FileNotFoundError):
            _write(_made_folder(query, run), uuid.uuid4().hex, json.dumps(record))
            return


def _made_folder(query: Path, run: SourceRun) -> Path:
    """Return the folder of a run's registrations, which is made if it is missing."""
    batch = query / str(run.batch_id)
    folder = batch / _plain(run.run_id)
    # parents=True would create the parents with the process's default mode.
    _is_new(query)
    if _is_new(batch):
        _forget_before(query, run.batch_id - 1)
    if not folder.is_dir():
        _require_at_work(batch, run)
        if _is_new(folder):
            others = sorted((other for other in _runs(batch) if other != folder), key=_age)
            for other in others[KEPT_RUNS - 1 :]:
                _end(other)
    return folder


def _is_new(folder: Path) -> bool:
    """Make a folder. Return False if it exists, even if `sweep` removes it at this moment, as Path.mkdir with exist_ok would not."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


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
    try:
        with os.scandir(_folder(store, run)) as files:
            return any(not file.name.startswith(".") for file in files)
    except FileNotFoundError:
        return False


def registered(store: Path, run: SourceRun) -> list[Registration]:
    """Return the registrations of exactly this run, without duplicates.

    Raises StoreError CORRUPT, SinkError TOKEN_GONE if they were removed.
    """
    folder = _folder(store, run)
    try:
        return _read(folder, run)
    finally:
        # Some files may be gone already, and others may still be there, so this is looked up last.
        _require_at_work(folder.parent, run)


def _folder(store: Path, run: SourceRun) -> Path:
    return store / FOLDER / _plain(run.query_id) / str(run.batch_id) / _plain(run.run_id)


def _require_at_work(batch: Path, run: SourceRun) -> None:
    """Require that the registrations of a run were not removed. Raises SinkError TOKEN_GONE."""
    with contextlib.suppress(FileNotFoundError):
        if _plain(run.run_id) in (batch / _ENDED).read_text().splitlines():
            raise SinkError(
                SinkCondition.TOKEN_GONE,
                f"this run of batch {run.batch_id} cannot publish it any more: two other runs of the batch have begun since, or the process of "
                "its source has ended. Restart the query, unless another run continues it",
            )


def _read(folder: Path, run: SourceRun) -> list[Registration]:
    out: dict[tuple[str | None, MessageQueue, OffsetRange, int], Registration] = {}
    for path in _entries(folder):
        if path.name.startswith("."):
            continue
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
    names: dict[str, str] = {}
    for path in _files(store):
        try:
            record = _record(path)
        except FileNotFoundError:
            continue
        # A damaged or incomplete file is skipped.
        if record is not None and record["token"] is not None and record["query"][1] is not None:
            names[record["token"][2]] = record["query"][1]
    return names


def _files(store: Path) -> Iterator[Path]:
    """Yield the files of all registrations, including incomplete ones, but no files of other programs."""
    for batch in _batches(store):
        for run in _runs(batch):
            yield from _files_of(run)


def _batches(store: Path) -> Iterator[Path]:
    for query in _entries(store / FOLDER):
        yield from (batch for batch in _entries(query) if batch.name.isdigit())


def _runs(batch: Path) -> list[Path]:
    """Return the folders of a batch's runs. A folder of another program has no file of ours."""
    return [run for run in _entries(batch) if run.name != _ENDED and _files_of(run)]


def _files_of(run: Path) -> list[Path]:
    return [path for path in _entries(run) if _FILE.fullmatch(path.name)]


def _age(path: Path) -> float:
    """Return the seconds since a file, or the list of a folder's files, was last changed, infinite if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


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


def _end(run: Path) -> None:
    """Remove the registrations of a run, and keep it from publishing, because it may have tasks or a commit left."""
    with open(run.parent / _ENDED, "a", opener=lambda name, flags: os.open(name, flags, 0o600)) as ended:
        ended.write(f"{run.name}\n")
    _remove(run)


def _remove(run: Path) -> None:
    # Files of other programs stay, and so does a folder that has one.
    with contextlib.suppress(OSError):
        for path in _files_of(run):
            path.unlink(missing_ok=True)
        run.rmdir()


def sweep(store: Path, now: Instant, alive: Callable[[str], bool]) -> None:
    """Remove the registrations of runs that have ended. ``alive``: whether a client is alive."""
    for batch in _batches(store):
        for run in _runs(batch):
            # An error does not keep other files from being removed.
            with contextlib.suppress(OSError):
                _sweep_run(run, now, alive)
        with contextlib.suppress(OSError):
            if _age(batch / _ENDED) > FORGOTTEN:
                (batch / _ENDED).unlink(missing_ok=True)
            batch.rmdir()
            batch.parent.rmdir()


def _sweep_run(run: Path, now: Instant, alive: Callable[[str], bool]) -> None:
    """Remove a run's registrations if it is forgotten, or if the process of its source has ended.

    A damaged or incomplete file shows only its age.
    """
    paths = _files_of(run)
    records = [record for record in map(_record, paths) if record is not None]
    began = [Instant(*record["at"]) for record in records]
    clients = {record["token"][2] for record in records if record["token"] is not None}
    if any(map(alive, clients)):
        return
    if all(is_forgotten(at, now) for at in began):
        if len(records) == len(paths) or all(_age(path) > FORGOTTEN for path in paths):
            _remove(run)
    elif clients and all(now.since(at) > _SETTLED for at in began):
        _end(run)
