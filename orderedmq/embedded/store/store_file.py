"""Identifies a store's file. The store's directory may be replaced, moved or deleted while the store is open."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from orderedmq.conditions import StoreCondition
from orderedmq.errors import StoreError

#: The name of the index, which makes a directory a store.
FILE: Final = "index.db"

#: Device and inode. While a file is open, no other file has the same pair.
File = tuple[int, int]


def file_at(path: str | Path) -> File | None:
    """Return the store's file in a directory, or None if the directory has none.

    Raises PermissionError if a directory cannot be entered, StoreError NOT_A_STORE if no directory can have that path.
    """
    try:
        status = os.stat(f"{path}/{FILE}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        # A NUL in a path is a ValueError.
        if isinstance(error, OSError) and error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        name, why = str(path), getattr(error, "strerror", error)
        raise StoreError(StoreCondition.NOT_A_STORE, f"{name!r} cannot be a directory ({why}). Give another path") from error
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def not_the_same(path: str | Path) -> StoreError:
    """Return the error for using a store to which ``path`` no longer leads."""
    if file_at(path) is None:
        return StoreError(
            StoreCondition.MISSING,
            f"the store at {path} was moved or deleted while it was in use. Put it back or create it again, and restart the programs "
            "that used it",
        )
    return StoreError(
        StoreCondition.REPLACED,
        f"the store at {path} was replaced by another store, perhaps a copy, while it was in use. Put the former store back, or restart "
        "the programs that used it to continue with the new one",
    )


def another_store(path: str | Path) -> StoreError:
    """Return the error for using offsets that belong to another store than the one at ``path``."""
    return StoreError(
        StoreCondition.REPLACED,
        f"the store at {path} is not the one that this query's checkpoint has read: the path is wrong, or a new store was made there. "
        "Correct option path, put the former store or a copy of it back, or start with a new checkpointLocation",
    )
