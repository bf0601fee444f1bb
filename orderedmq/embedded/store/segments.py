"""The folder of a store's segment files: creating, reading and deleting them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from orderedmq.embedded.store.filesystem import opened
from orderedmq.embedded.store.segment_file import COMPLETE, HEADER_BYTES, UNFINISHED, Header, SegmentWriter

FOLDER: Final = "segments"
_NAME: Final = re.compile(rf"([0-9a-f]{{32}})({re.escape(COMPLETE)}|{re.escape(UNFINISHED)})")


class SegmentName(NamedTuple):
    name: str
    segment: str
    complete: bool


def parse_name(name: str) -> SegmentName | None:
    """Return the parts of a file's name, or None if it is not the name of a segment file."""
    found = _NAME.fullmatch(name)
    return None if found is None else SegmentName(name, found[1], found[2] == COMPLETE)


def name_of(segment: str) -> str:
    return f"{segment}{COMPLETE}"


class Segments:
    """The segment files of one store. Thread-safe.

    A file is opened for each read. That costs a few µs per chunk, keeps no descriptor open, and shows immediately that a file is
    gone. Files are read by a system call, not through a map, so that a truncated file or a bad sector raises an error, not a signal.

    ``store`` returns the store's path. ``require_here`` raises StoreError REPLACED or MISSING if that path leads to another store.
    """

    def __init__(self, store: Callable[[], Path], store_id: str, require_here: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self.store_id = store_id
        self.require_here = require_here

    @property
    def folder(self) -> Path:
        return self._store() / FOLDER

    def create(self, header: Header) -> SegmentWriter:
        return SegmentWriter(self.folder, header)

    def read(self, segment: str, position: int, size: int) -> pa.Buffer:
        """Return ``size`` bytes of a segment from ``position`` on, or fewer if it ends earlier. Raises FileNotFoundError."""
        buffer = pa.allocate_buffer(size)
        view, done = memoryview(buffer), 0
        descriptor = os.open(f"{self.folder}/{name_of(segment)}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < size:
                count = os.preadv(descriptor, [view[done:]], position + done)
                if not count:
                    break
                done += count
        finally:
            os.close(descriptor)
        return buffer if done == size else buffer.slice(0, done)

    def size(self, segment: str) -> int | None:
        """Return the size of a complete segment's file in bytes, or None if the file does not exist."""
        try:
            return os.stat(self.folder / name_of(segment)).st_size
        except FileNotFoundError:
            return None

    def header(self, name: str) -> Header | None:
        """Return the header of a file in the folder, or None if the file has no header. Raises OSError."""
        with open(self.folder / name, "rb") as file:
            return Header.unpack(file.read(HEADER_BYTES))

    def delete(self, segment: str) -> None:
        """Delete a complete segment, if it exists. A file that cannot be deleted is left to the garbage collection.

        Raises StoreError REPLACED or MISSING.
        """
        with contextlib.suppress(OSError):
            self.remove(name_of(segment))

    def remove(self, name: str) -> None:
        """Delete a file of the folder, if it exists. Raises StoreError REPLACED or MISSING, or OSError."""
        with opened(self.folder) as folder, contextlib.suppress(FileNotFoundError):
            # The folder is open, so a store that takes this one's place after the check keeps its file, which may have the same name.
            self.require_here()
            os.unlink(name, dir_fd=folder)

    def names(self) -> list[str]:
        """Return the names of all files in the folder, including files that are not segments."""
        return sorted(os.listdir(self.folder))
