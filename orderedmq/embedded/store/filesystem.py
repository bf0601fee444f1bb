"""A store's directory in the file system: the type of the file system, folders, other files, missing rights."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from orderedmq.conditions import StoreCondition
from orderedmq.embedded.store.store_file import FILE
from orderedmq.errors import StoreError
from orderedmq.options.values import DEFAULT_DIRECTORY

#: Names in the directory of a store that another process may be creating now, and the folder on every new disk (lost+found).
_OF_STORES: Final = frozenset(
    (
        *(f"{FILE}{new}{suffix}" for new in ("", ".new") for suffix in ("", "-journal", "-wal", "-shm")),
        "index.lock",
        "owners",
        "runs",
        "segments",
        "lost+found",
    )
)
#: What may be in a store's folders only if there is a store.
_INSIDE: Final = ("owners/*", "runs/*", "segments/*.segment", f"{FILE}-wal")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that holds ``path``, or "" if it is unknown. ``mounts``: the kernel's list of mounts."""
    with contextlib.suppress(OSError, ValueError):
        best, kind = "", ""
        real = os.path.realpath(path)
        # A mount may have any name. The kernel writes only blanks, tabs, newlines and backslashes in octal, and all else as it is.
        for line in os.fsdecode(mounts.read_bytes()).split("\n")[:-1]:
            left, _, right = line.partition(" - ")
            mount = _OCTAL.sub(lambda found: chr(int(found[1], 8)), left.split(" ")[4])
            if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
                best, kind = mount, right.split(" ")[0]
        return kind
    return ""


def refuse_other_files(path: Path) -> None:
    """Require an empty or missing directory for a new store. Raises StoreError NOT_EMPTY or NOT_A_STORE, or PermissionError."""
    try:
        others = sorted(set(os.listdir(path)) - _OF_STORES)
        inside = sorted(str(file.relative_to(path)) for file in _contents(path))
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise StoreError(
            StoreCondition.NOT_A_STORE, f"{path} is a file or is below one. Give a directory, which may be missing"
        ) from error
    if others:
        raise StoreError(
            StoreCondition.NOT_EMPTY,
            f"{path} has other files ({', '.join(others[:3])}{', …' if others[3:] else ''}) and no store. Give an empty or missing "
            f"directory for a new store, for example {path / DEFAULT_DIRECTORY}",
        )
    # Another process may have made the store since the folder was listed.
    if inside and not (path / FILE).exists():
        raise StoreError(
            StoreCondition.NOT_EMPTY,
            f"{path} has files in the folders of a store ({', '.join(inside[:3])}{', …' if inside[3:] else ''}) and no {FILE}. If they are a "
            f"store's, put {FILE} back, or restore the store from a copy. Otherwise give an empty or missing directory for a new store",
        )


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Open a folder for the block, and yield its descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names of new, renamed and deleted files in it survive a loss of power."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _holding(path: Path, flags: int, lock: int) -> Iterator[int]:
    """Hold a lock (``flock``) on a file or folder in the block, and yield its descriptor."""
    descriptor = os.open(path, flags | os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, lock)
        yield descriptor
    finally:
        # Closing the descriptor is not enough, because a process that was forked in the meantime has it open too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder in the block. Other processes and threads that want the same lock wait.

    Raises FileNotFoundError if the folder was removed before this process had the lock.
    """
    with _holding(folder, os.O_DIRECTORY, fcntl.LOCK_EX) as descriptor:
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, "the folder was replaced", str(folder))
        yield


def without_owner(path: Path) -> contextlib.AbstractContextManager[int]:
    """Hold a shared lock on a file in the block, so that no process becomes its owner meanwhile, and yield its descriptor.

    Raises BlockingIOError if a living process owns the file, FileNotFoundError, or another OSError.
    """
    return _holding(path, 0, fcntl.LOCK_SH | fcntl.LOCK_NB)


def make_folder(path: Path) -> None:
    """Make a folder that only this user can use, and missing folders above it. They survive a loss of power.

    If a sync fails, the new folders are removed again. Otherwise the next attempt would find them and not sync their names, because
    the system counts a name whose sync has failed as written. For the same reason, a process that finds the folder waits until the
    process that made it has synced its name.
    """
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(path):
        try:
            for folder in new:
                sync_folder(folder.parent)
        except OSError:
            with contextlib.suppress(OSError):
                for folder in new:
                    folder.rmdir()
            raise


def missing_rights(path: Path) -> str:
    """Return the end of an error message: which file of the store at ``path`` this process may not use, and what to do about it."""
    me = os.geteuid()
    try:
        there = next(above for above in (path, *path.parents) if above.exists())
        for file in (there, *(path / name for name in sorted(_OF_STORES - {"lost+found"})), *_contents(path)):
            # Other processes may remove files meanwhile.
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                if usable(file):
                    continue
                owner = f"{file} belongs to user {_user(status.st_uid)} and has mode {status.st_mode & 0o7777:04o}"
                if status.st_uid == me:
                    return f"{owner}. Allow its owner to use it: chmod -R u+rwX {there}"
                return (
                    f"{owner}, but this process runs as user {_user(me)}. Run as user {_user(status.st_uid)}, or give the files to user "
                    f"{_user(me)}: chown -R {_user(me)} {there}"
                )
    except PermissionError as error:
        return f"user {_user(me)} may not enter the directory of {error.filename}. Allow it, or run as the user who owns the directory"
    return (
        f"this process runs as user {_user(me)}. Try again if rights were just changed. Otherwise run as the user who owns the store, or "
        "choose another path"
    )


def _contents(path: Path) -> list[Path]:
    """Return the files in the folders of a store, except of those that this process may not enter."""
    return [file for pattern in _INSIDE for file in path.glob(pattern)]


def usable(file: Path) -> bool:
    """Whether this process may read and change a file, or the entries of a directory."""
    rights = os.R_OK | os.W_OK | (os.X_OK if file.is_dir() else 0)
    return os.access(file, rights, effective_ids=os.access in os.supports_effective_ids)


def _user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)
