"""Distinguishes living owners from dead ones: each owner holds ``flock`` on a small file until it dies.

A process that can take the shared lock on an owner's file knows that the owner is dead.

Rules: the file is locked before its name is published. ``flock`` is used instead of ``lockf``, whose record locks are dropped when any
code of the owner's process opens and closes the file. A process that the owner has forked holds the lock too, so the owner seems alive
while that process lives, and its queues become free when their locks expire. The garbage collection removes the files of dead owners.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import uuid
from pathlib import Path

from orderedmq.embedded.store.filesystem import without_owner
from orderedmq.ownership.lock import ClientIdentity

FOLDER = "owners"
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_@.-]{0,199}")
#: The names of files that a `Presence` makes: of a client id, of a hash, and before the file is published.
_OURS = re.compile(r".+@.+-[0-9]+-[0-9a-f]{8}\.alive|[0-9a-f]{64}\.alive|\.[0-9a-f]{32}")


class Presence:
    """Shows other processes that this process is alive as ``client``, until ``close`` or until the process dies."""

    def __init__(self, store: Path, owner: str) -> None:
        self.client = ClientIdentity(owner, f"{owner}@{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._path = _file(store, self.client.client_id)
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        self._descriptor: int | None = None
        while self._descriptor is None:
            self._descriptor = _publish(self._path)

    def close(self) -> None:
        if self._descriptor is not None:
            # If the store was moved, replaced or made read-only, the file may remain. It is unlocked, so its owner counts as dead.
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None


def _publish(path: Path) -> int | None:
    """Create and lock a file, and return its descriptor, or None if `sweep` removed the file before it was locked."""
    unpublished = path.with_name(f".{uuid.uuid4().hex}")
    descriptor = os.open(unpublished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(unpublished, path)
    except FileNotFoundError:
        os.close(descriptor)
        return None
    return descriptor


def _file(store: Path, client_id: str) -> Path:
    """Return the path of the client's file.

    Client ids come from checkpoints and tokens, so an id that could lead to another folder is hashed.
    """
    plain = client_id if _PLAIN.fullmatch(client_id) else hashlib.blake2b(client_id.encode(), digest_size=32).hexdigest()
    return store / FOLDER / f"{plain}.alive"


def is_alive(store: Path, client_id: str) -> bool:
    """Whether the process of ``client_id`` is alive, even if suspended. The file of a dead process is removed if possible."""
    return _is_held(_file(store, client_id))


def sweep(store: Path) -> None:
    """Remove the files of dead processes, including files that a process had not published when it died."""
    with contextlib.suppress(FileNotFoundError):
        for path in (store / FOLDER).iterdir():
            if _OURS.fullmatch(path.name):
                # An error does not keep other files from being removed.
                with contextlib.suppress(OSError):
                    _is_held(path)


def _is_held(path: Path) -> bool:
    """Whether a process holds the lock of a file. A file that no process holds is removed if possible."""
    try:
        with without_owner(path), contextlib.suppress(OSError):
            path.unlink()
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
