"""One transaction of a store: the rows of its index, and the segment files that they point to.

A transaction seals each row that it writes, and verifies the seal of each row that it reads. Only payloads have no seals.

A seal shows that a row is the one that was written under its key. To verify that a key is *absent*, the seals of the neighbouring
rows are checked: if a changed bit in a key hides a row, a search for the original key ends next to that row.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import pyarrow as pa

from orderedmq.conditions import StoreCondition
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.schema import INLINE, PAYLOADS, SETTINGS, TABLES, TRANSACTION, Payload, Setting, Table
from orderedmq.embedded.store.segment_file import Header, SegmentWriter
from orderedmq.embedded.store.segments import Segments, name_of
from orderedmq.errors import StoreError
from orderedmq.model import MAX_OFFSET

#: Maximum bytes of payloads that a transaction writes into the index. Further payloads go to a segment, which costs a second sync of
#: the disk.
INLINE_BYTES: Final = 64 * 1024

Row = TypeVar("Row", bound=tuple[Any, ...])


class Transaction:
    """Gets, puts, deletes and scans rows; reads and writes payloads."""

    __slots__ = ("_dropped", "_inline", "_path", "_signed", "_sql", "_writer", "_wrote", "missing", "segments")

    def __init__(self, connection: sqlite3.Connection, path: object, segments: Segments) -> None:
        self._sql = connection.execute
        self._path = path
        self.segments = segments
        self._wrote = False
        self._inline = 0
        self._writer: SegmentWriter | None = None
        self._signed = False
        #: The segment whose file was not found, if any.
        self.missing: str | None = None
        #: Segments to which no chunk points once this transaction is committed.
        self._dropped: set[str] = set()

    def get(self, table: Table[Row], *key: Any) -> Row | None:
        """Return the row of a key, or None if there is none.

        Raises StoreError CORRUPT if the row, or a neighbour of a missing row, fails its seal.
        """
        values = self._sql(table.get, key).fetchone()
        if values is not None:
            return self._verified(table, values)
        if table.sealed:
            self._require_absent(table, key)
        return None

    def put(self, row: tuple[Any, ...]) -> None:
        """Write a row into the table of its type. It replaces the row of the same key."""
        self._wrote = True
        table = TABLES[type(row)]
        self._sql(table.put, table.with_seal(row))

    def delete(self, table: Table[Any], *key: Any) -> bool:
        """Delete the row of a key. Return whether there was one."""
        self._wrote = True
        return self._sql(table.delete, key).rowcount > 0

    def scan(self, table: Table[Row], *prefix: Any, begin: int | None = None) -> Iterator[Row]:
        """Yield the rows whose key begins with ``prefix``, in the order of their keys.

        ``begin``: leave out rows whose next part of the key is below this number. Do not write until the iteration ends. Raises
        StoreError CORRUPT.
        """
        size = len(prefix)
        key = (*prefix, *table.least[size:]) if begin is None else (*prefix, begin)
        if prefix and (values := self._sql(table.before, key).fetchone()) is not None:
            self._verified(table, values)
        for row in self.following(table, *key):
            # The first row after the wanted ones is also verified, because it may be a wanted row whose key was damaged.
            if row[:size] != prefix:
                return
            yield row

    def following(self, table: Table[Row], *key: Any) -> Iterator[Row]:
        """Yield the rows from ``key`` on, in the order of their keys.

        Raises StoreError CORRUPT, also if the keys do not grow, so that a walk over damaged pages ends.
        """
        last: tuple[Any, ...] = ()
        for values in self._sql(table.following, key):
            row = self._verified(table, values)
            if row[: table.keys] <= last:
                raise self.damaged(f"{table.described(values)} comes after a later one")
            last = row[: table.keys]
            yield row

    def floor(self, table: Table[Row], *key: Any) -> Row | None:
        """Return the row of ``key``, or else the last row before it, or else None.

        The caller checks whether it is the right row. Raises StoreError CORRUPT.
        """
        values = self._sql(table.up_to, key).fetchone()
        return None if values is None else self._verified(table, values)

    def last(self, table: Table[Row], *prefix: Any) -> Row | None:
        """Return the last row whose key consists of ``prefix`` and a number, or None. Raises StoreError CORRUPT."""
        end = (*prefix, MAX_OFFSET)
        # The row after it is verified too, because it may be the last one with a damaged key.
        self._require_absent(table, end)
        row = self.floor(table, *end)
        return row if row is not None and row[: len(prefix)] == prefix else None

    def take_number(self, name: str) -> int:
        """Return the next number of a sequence, which is the setting ``name``."""
        number = self.number(name) + 1
        self.put(Setting(name, number))
        return number

    def number(self, name: str = TRANSACTION) -> int:
        """Return a setting that is a number: the number of the last write that this transaction sees, or of a sequence."""
        setting = self.get(SETTINGS, name)
        return 0 if setting is None or setting.number is None else setting.number

    def damaged(self, what: str) -> StoreError:
        return damaged(self._path, what)

    # -- payloads ------------------------------------------------------------------------------------------------------------

    def payload(self, chunk: schema.Chunk) -> bytes | pa.Buffer:
        """Return a chunk's payload, unverified. It may be truncated, or empty if it is missing from the index.

        Raises StoreError CORRUPT and sets ``missing`` if its segment's file is missing. `Store.consult` handles that.
        """
        if chunk.segment == INLINE:
            payload = self.get(PAYLOADS, chunk.position)
            return b"" if payload is None else payload.content
        try:
            return self.segments.read(chunk.segment, chunk.position, chunk.stored_bytes)
        except FileNotFoundError:
            self.missing = chunk.segment
            raise self.damaged(f"segment file {name_of(chunk.segment)} is missing") from None

    def place(self, payload: Sequence[bytes | pa.Buffer]) -> tuple[str, int]:
        """Write a payload, given in pieces, into the index or into this transaction's segment. Return its segment and position."""
        size = sum(map(len, payload))
        if self._inline + size <= INLINE_BYTES:
            self._inline += size
            number = self.take_number(schema.LAST_PAYLOAD)
            self.put(Payload(number, b"".join(payload)))
            return INLINE, number
        if self._writer is None:
            self._writer = self.segments.create(Header(uuid.uuid4().hex, self.segments.store_id, own=True))
        return self._writer.token, self._writer.append(payload)

    def drop(self, segment: str) -> None:
        """Delete the file of a segment after the commit, because no chunk points to it any more."""
        self._dropped.add(segment)

    def keep(self, segment: str) -> None:
        """Undo `drop`, because a chunk points to the segment again."""
        self._dropped.discard(segment)

    # -- the end -------------------------------------------------------------------------------------------------------------

    def sign(self) -> int | None:
        """Number this transaction if it has written anything, and sync its segment. Return the number. Call this before the commit.

        Raises StoreError REPLACED or MISSING.
        """
        number = self.take_number(TRANSACTION) if self._wrote else None
        if self._writer is not None:
            self._writer.finish()
            # If another store has taken this one's place, the segment may be in that store's folder. Then its chunks must not be
            # committed here. This does not notice if the former store was put back in the meantime.
            self.segments.require_here()
        self._signed = True
        return number

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

    def _verified(self, table: Table[Row], values: tuple[Any, ...]) -> Row:
        row = table.without_seal(values)
        if row is None:
            raise self.damaged(f"{table.described(values)} fails its checksum")
        return row

    def _require_absent(self, table: Table[Any], key: tuple[Any, ...]) -> None:
        for statement in (table.from_key, table.before):
            values = self._sql(statement, key).fetchone()
            if values is not None:
                self._verified(table, values)


def damaged(path: object, what: str) -> StoreError:
    return StoreError(
        StoreCondition.CORRUPT,
        f"the store at {path} is damaged: {what}, because the disk or another program changed its file. Run `orderedmq check {path}` "
        "to list all damage. Restore the store from a copy",
    )
