"""A segment file: the payloads that one attempt of a task has written, one after another. A complete segment never changes.

    segments/<token>.open       a segment that is being written; its writer holds ``flock`` on it
    segments/<token>.segment    a complete segment; its content and its name are on the disk

The file begins with a header of 512 bytes: text that says which store the segment belongs to and who may still publish it, and a
checksum. The file has no table of contents. The attempt's receipt has the index entries, and a segment is published only with its
receipt. After that, the index has the position and the checksum of each payload.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import xxhash

from orderedmq.embedded.store.filesystem import sync_folder

UNFINISHED: Final = ".open"
COMPLETE: Final = ".segment"
HEADER_BYTES: Final = 512
_MAGIC: Final = b"orderedmq segment\n"
_CHECKSUM: Final = 8
#: After this many bytes, the kernel is asked to begin writing them to the disk, so that the sync at the end has little left to do.
WRITE_BACK_BYTES: Final = 2 * 1024 * 1024
_SYNC_FILE_RANGE_WRITE: Final = 2
_libc: Final = ctypes.CDLL(None)
_fdatasync: Final = getattr(os, "fdatasync", os.fsync)


@dataclass(frozen=True)
class Header:
    """The header of a segment.

    ``sink``, ``batch``: the batch that the segment was written for, if the batch has an identity. ``run``: a hash of the
    run or job that writes the batch. ``own``: whether only the process that writes the segment can publish it. That process holds the
    file's lock until the segment is published. ``boot``, ``since``: when the writing began, as the boot id and the seconds of an
    `Instant`.
    """

    token: str
    store_id: str
    own: bool
    sink: str | None = None
    batch: int = 0
    run: str = ""
    boot: str = ""
    since: float = 0.0

    def pack(self) -> bytes:
        text = _MAGIC + json.dumps(asdict(self), separators=(",", ":")).encode()
        text = text.ljust(HEADER_BYTES - _CHECKSUM - 1) + b"\n"
        assert len(text) == HEADER_BYTES - _CHECKSUM, "a sink's key and all names have a maximum length"
        return text + xxhash.xxh3_64_digest(text)

    @classmethod
    def unpack(cls, content: bytes) -> Header | None:
        """Return the header of a file that begins with ``content``, or None if it has no valid header."""
        text, checksum = content[: HEADER_BYTES - _CHECKSUM], content[HEADER_BYTES - _CHECKSUM : HEADER_BYTES]
        if not text.startswith(_MAGIC) or xxhash.xxh3_64_digest(text) != checksum:
            return None
        return cls(**json.loads(text[len(_MAGIC) :]))


def was_begun(content: bytes) -> bool:
    """Whether a file that begins with ``content`` is a segment with an incomplete header.

    A writer that was killed at its first step leaves an empty file. A loss of power can truncate a file that was not synced, or
    leave zeros in it.
    """
    begun = content.rstrip(b"\0")[: len(_MAGIC)]
    return _MAGIC.startswith(begun) and Header.unpack(content) is None


class SegmentWriter:
    """Writes one segment. One thread at a time may use it. It is unusable after an error: `abandon` it, and write another segment.

    A failed sync must not be repeated, because the kernel reports the error only once, drops the pages, and lets the next sync succeed.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.token = header.token
        self.size = HEADER_BYTES
        self._folder = folder
        self._path = folder / f"{header.token}{UNFINISHED}"
        self._written_back = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor: int | None = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            self._write([header.pack()], 0)
        except BaseException:
            self.abandon()
            raise

    def append(self, payload: Sequence[bytes | pa.Buffer]) -> int:
        """Append a payload, which is given in pieces. Return the position of its first byte."""
        position = self.size
        self.size = self._write(payload, position)
        if self.size - self._written_back >= WRITE_BACK_BYTES:
            self._begin_writing_back()
        return position

    def finish(self) -> None:
        """Complete the segment. When this returns, its content and its name survive a loss of power."""
        _fdatasync(self._open)
        complete = self._path.with_suffix(COMPLETE)
        os.rename(self._path, complete)
        self._path = complete
        sync_folder(self._folder)

    def close(self) -> None:
        """Close the file and release its lock, so that other processes see that this writer has ended."""
        if self._descriptor is not None:
            # Closing is not enough, because a process that was forked in the meantime may have the file open too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def abandon(self) -> None:
        """Delete the segment. Do nothing after `close`."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self.close()

    @property
    def _open(self) -> int:
        assert self._descriptor is not None, "the segment is not closed"
        return self._descriptor

    def _write(self, pieces: Sequence[bytes | pa.Buffer], position: int) -> int:
        """Write pieces at a position, and return the position after them."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        while views:
            done = os.pwritev(self._open, views, position)
            position += done
            # The system may have written only a part of the pieces.
            while views and done >= views[0].nbytes:
                done -= views.pop(0).nbytes
            if views:
                views[0] = views[0][done:]
        return position

    def _begin_writing_back(self) -> None:
        begin, self._written_back = self._written_back, self.size
        # Only Linux has this call. Its result does not matter, because the sync at the end writes the rest and reports errors.
        if hasattr(_libc, "sync_file_range"):
            size = ctypes.c_int64(self.size - begin)
            _libc.sync_file_range(self._open, ctypes.c_int64(begin), size, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
