"""Which file a store is, and whether a path still leads to it: its directory may be replaced, moved or deleted while it is open."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from orderedmq.errors import StoreError

#: Device and inode. While a file is open, no other has the same.
File = tuple[int, int]


def file_at(path: str | Path) -> File | None:
    """The file of the store in a directory; None where there is none. Raises PermissionError where a directory cannot be entered."""
    try:
        status = os.stat(f"{path}/data.mdb")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def not_the_same(path: str | Path) -> StoreError:
    """The error of whoever uses a store to which ``path`` does not lead any more."""
    if file_at(path) is None:
        return StoreError(
            "MISSING",
            f"the store at {path} was moved or deleted while it was in use; put it back, or make it anew, and start again what used it",
        )
    return StoreError(
        "REPLACED",
        f"the store at {path} was replaced by another one while it was in use, perhaps by a copy; put the former one back, or start again "
        "what used it, to go on with the one that is there now",
    )


def recognised(path: Path, before: File | None, store_id: str, expected: str) -> tuple[File, str]:
    """The file and the identity of a store that was opened just now, ``before`` which ``path`` led to that file.

    ``expected``: its identity when it was opened for the first time, "" if it never was. Raises StoreError REPLACED or MISSING.
    """
    file = file_at(path)
    identity = store_id if file is None else f"{store_id}-{file[1]:x}"
    if file is None or before not in (None, file) or expected not in ("", identity):
        raise not_the_same(path)
    return file, identity


class Whereabouts:
    """The paths by which a process opened one store's file."""

    def __init__(self, path: Path, file: File) -> None:
        self.path = path
        self.file = file
        self._paths = {path: str(path)}

    def also(self, path: Path) -> None:
        """It was opened by this path, too: a link, or where it was moved to."""
        self._paths[path] = str(path)

    def require(self) -> None:
        """Raises StoreError REPLACED or MISSING when no path leads to the file. Costs a question to the system, about 1 µs."""
        try:
            if file_at(self._paths[self.path]) == self.file:
                return
            for path, text in list(self._paths.items()):
                if file_at(text) == self.file:
                    self.path = path
                    return
        except OSError:
            # It cannot be told: a directory above may not be entered just now.
            return
        raise not_the_same(self.path)
