"""One transaction of a store: its entries in LMDB, and the segment files that they point to.

A transaction seals each value that it writes, and verifies the seal of each value that it reads. Only payloads have no seals.

A seal shows that a value is the one that was written under its key. To verify that a key is *absent*, the seals of the neighbouring
entries are checked: if a changed bit in a key hides an entry, a search for the original key ends next to that entry.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from orderedmq.conditions import StoreCondition
from orderedmq.embedded.store import layout
from orderedmq.embedded.store.segment_file import Header, SegmentWriter
from orderedmq.embedded.store.segments import Segments, name_of
from orderedmq.errors import StoreError

#: The key in ``meta`` for the number of the last write transaction. It is needed because LMDB finds its newest snapshot by a number
#: without a checksum.
WRITTEN: Final = b"written"
#: Maximum bytes of payloads that a transaction writes into LMDB. Further payloads go to a segment, which costs a second sync of the disk.
INLINE_BYTES: Final = 64 * 1024


class Transaction:
    """Gets, puts, deletes and scans entries; reads and writes payloads."""

    __slots__ = ("_dropped", "_handles", "_inline", "_path", "_signed", "_txn", "_writer", "_wrote", "missing", "segments")

    def __init__(self, txn: Any, handles: dict[str, Any], path: object, segments: Segments) -> None:
        self._txn = txn
        self._handles = handles
        self._path = path
        self.segments = segments
        self._wrote = False
        self._inline = 0
        self._writer: SegmentWriter | None = None
        self._signed = False
        #: The segment whose file was not found, if any.
        self.missing: bytes | None = None
        #: Segments to which no index entry points once this transaction is committed.
        self._dropped: set[bytes] = set()

    def get(self, database: str, key: bytes) -> bytes | None:
        """Return the value of a key, or None if there is no entry.

        Raises StoreError CORRUPT if the entry, or a neighbour of a missing entry, fails its seal.
        """
        value: bytes | None = self._txn.get(key, db=self._handles[database])
        if database == layout.UNSEALED:
            return value
        if value is None:
            self._require_absent(database, key)
            return None
        return self._opened(database, key, value)

    def put(self, database: str, key: bytes, value: Any, *, append: bool = False) -> None:
        self._wrote = True
        if database != layout.UNSEALED:
            value = layout.sealed(database, key, value)
        self._txn.put(key, value, db=self._handles[database], append=append)

    def delete(self, database: str, key: bytes) -> bool:
        self._wrote = True
        return bool(self._txn.delete(key, db=self._handles[database]))

    def scan(self, database: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield entries whose key begins with ``prefix``, in key order.

        Do not write until the iteration ends. Raises StoreError CORRUPT.
        """
        return self._walk(database, prefix, lambda key: key.startswith(prefix))

    def between(self, database: str, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield entries from the key ``begin`` up to ``end`` (exclusive), in key order. The rules of `scan` apply."""
        return self._walk(database, begin, lambda key: key < end)

    def _walk(self, database: str, begin: bytes, includes: Callable[[bytes], bool]) -> Iterator[tuple[bytes, bytes]]:
        cursor = self._txn.cursor(db=self._handles[database])
        is_there = cursor.set_range(begin)
        self._require_before(database, begin)
        last = None
        if is_there:
            for key, value in cursor:
                last = self._require_after(last, database, key)
                within = includes(key)
                if within or database != layout.UNSEALED:
                    # The first entry after the wanted ones is also verified, because it may be a wanted entry whose key was damaged.
                    plain = value if database == layout.UNSEALED else self._opened(database, key, value)
                if not within:
                    return
                yield key, plain

    def floor(self, database: str, key: bytes) -> tuple[bytes, bytes] | None:
        """Return the entry of ``key``, or else the last entry before it, or else None.

        The caller checks whether it is the right entry. Raises StoreError CORRUPT.
        """
        cursor = self._txn.cursor(db=self._handles[database])
        # If set_range finds no entry, prev() moves to the last entry. At the first entry, prev() returns False.
        if not (cursor.set_range(key) and cursor.key() == key) and not cursor.prev():
            return None
        return self._entry(database, cursor)

    def last(self, database: str, prefix: bytes) -> bytes | None:
        """Return the last key that consists of ``prefix`` and an eight-byte number, or None. Raises StoreError CORRUPT."""
        end = prefix + b"\xff" * 8
        self._require_absent(database, end)
        entry = self.floor(database, end)
        return entry[0] if entry is not None and entry[0].startswith(prefix) else None

    def following(self, database: str, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield entries from ``key`` on, in key order. Raises StoreError CORRUPT."""
        cursor = self._txn.cursor(db=self._handles[database])
        last = None
        if cursor.set_range(key):
            for at, value in cursor:
                last = self._require_after(last, database, at)
                yield at, self._opened(database, at, value)

    def take_number(self, name: str) -> int:
        """Return the next number of a sequence that is kept in ``meta``."""
        key = name.encode()
        value = self.get("meta", key)
        following = (layout.to_number(value) if value else 0) + 1
        self.put("meta", key, layout.number(following))
        return following

    def number(self) -> int:
        """Return the number of the snapshot that this transaction reads."""
        return int(self._txn.id())

    def damaged(self, what: str) -> StoreError:
        return damaged(self._path, what)

    # -- payloads ------------------------------------------------------------------------------------------------------------

    def payload(self, chunk: layout.Chunk) -> bytes | pa.Buffer:
        """Return a chunk's payload, unverified. It may be truncated, or empty if it is missing from LMDB.

        Raises StoreError CORRUPT and sets ``missing`` if its segment's file is missing. `Store.consult` handles that.
        """
        if chunk.segment == layout.INLINE:
            return self.get("payloads", layout.number(chunk.position)) or b""
        try:
            return self.segments.read(chunk.segment, chunk.position, chunk.stored_bytes)
        except FileNotFoundError:
            self.missing = chunk.segment
            raise self.damaged(f"segment file {name_of(chunk.segment)} is missing") from None

    def place(self, payload: Sequence[bytes | pa.Buffer]) -> tuple[bytes, int]:
        """Write a payload, given in pieces, into LMDB or into this transaction's segment. Return its segment and position."""
        size = sum(map(len, payload))
        if self._inline + size <= INLINE_BYTES:
            self._inline += size
            number = self.take_number("payload")
            self.put("payloads", layout.number(number), b"".join(payload), append=True)
            return layout.INLINE, number
        if self._writer is None:
            self._writer = self.segments.create(Header(uuid.uuid4().hex, self.segments.store_id, own=True))
        return self._writer.segment, self._writer.append(payload)

    def drop(self, segment: bytes) -> None:
        """Delete the file of a segment after the commit, because no index entry points to it any more."""
        self._dropped.add(segment)

    def keep(self, segment: bytes) -> None:
        """Undo `drop`, because an index entry points to the segment again."""
        self._dropped.discard(segment)

    # -- the end -------------------------------------------------------------------------------------------------------------

    def sign(self, *, always: bool = False) -> None:
        """Store the number of this transaction if it has written anything, and sync its segment. Call this before the commit.

        Raises StoreError REPLACED or MISSING.
        """
        if self._wrote or always:
            self.put("meta", WRITTEN, written(self._txn.id()))
        if self._writer is not None:
            self._writer.finish()
            # If another store has taken this one's place, the segment may be in that store's folder. Then its index entries must not be
            # committed here. This does not notice if the former store was put back in the meantime.
            self.segments.require_here()
        self._signed = True

    def end(self, *, committed: bool) -> None:
        """Delete files to which the index does not point any more. Call this after the commit, which may have failed.

        If the files were deleted before the commit, a loss of power could lose messages. After a failed commit, it is unknown whether
        the changes are on the disk, so this transaction's segment is left to the garbage collection.

        Raises StoreError REPLACED or MISSING.
        """
        if self._writer is not None and not self._signed:
            self._writer.abandon()
        elif self._writer is not None:
            self._writer.close()
        for segment in self._dropped if committed else ():
            self.segments.delete(segment)

    # -- seals ---------------------------------------------------------------------------------------------------------------

    def _opened(self, database: str, key: bytes, value: bytes) -> bytes:
        if database == "meta" and key == layout.FORMAT_KEY:
            return value
        plain = layout.without_seal(database, key, value)
        if plain is None:
            raise self.damaged(f"{layout.described(database, key)} fails its checksum")
        return plain

    def _entry(self, database: str, cursor: Any) -> tuple[bytes, bytes]:
        key, value = cursor.item()
        return key, self._opened(database, key, value)

    def _require_after(self, last: bytes | None, database: str, key: bytes) -> bytes:
        """Return ``key``. Raises StoreError CORRUPT if it is not after ``last``, so that a walk over damaged keys ends."""
        if last is not None and key <= last:
            raise self.damaged(f"{layout.described(database, key)} comes after a later one")
        return key

    def _require_absent(self, database: str, key: bytes) -> None:
        cursor = self._txn.cursor(db=self._handles[database])
        if cursor.set_range(key):
            self._entry(database, cursor)
        # If set_range finds no entry, prev() moves to the last entry.
        if cursor.prev():
            self._entry(database, cursor)

    def _require_before(self, database: str, begin: bytes) -> None:
        if begin and database != layout.UNSEALED:
            cursor = self._txn.cursor(db=self._handles[database])
            cursor.set_range(begin)
            if cursor.prev():
                self._entry(database, cursor)


def written(transaction: int) -> bytes:
    """Return the value of WRITTEN. It repeats the number of the format, because that number's own entry has no seal."""
    return layout.number(transaction) + layout.number(layout.FORMAT)


def damaged(path: object, what: str) -> StoreError:
    return StoreError(
        StoreCondition.CORRUPT,
        f"the store at {path} is damaged: {what}, because the disk or another program changed its file. Run `orderedmq check {path}` "
        "to list all damage. Restore the store from a copy",
    )
