"""One transaction of a store, with its databases by name. Values that are not payloads are sealed when written, verified when read.

A seal says that an entry is what was written there. That one is *not* there is verified by its neighbours: a changed bit in a key moves
the entry, which is then the next or the last before the place where it is sought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from orderedmq.embedded import layout, seal
from orderedmq.errors import StoreError

#: The key in ``meta`` of the transaction that wrote last. LMDB finds its newest snapshot by a number that nothing protects.
WRITTEN: Final = b"written"


class Transaction:
    """Gets, puts and scans. ``removable`` looks at a payload's pages before they are freed."""

    __slots__ = ("_handles", "_path", "_removable", "_txn", "_wrote")

    def __init__(
        self, txn: Any, handles: dict[str, Any], path: object, removable: Callable[[bytes], None] | None = None
    ) -> None:
        self._txn = txn
        self._handles = handles
        self._path = path
        self._removable = removable
        self._wrote = False

    def get(self, database: str, key: bytes) -> bytes | None:
        """Raises StoreError CORRUPT when the entry, or a neighbour of the place where there is none, is not what was written."""
        value: bytes | None = self._txn.get(key, db=self._handles[database])
        if database == seal.UNSEALED:
            return value
        if value is None:
            self._require_absent(database, key)
            return None
        return self._opened(database, key, value)

    def put(self, database: str, key: bytes, value: Any, *, append: bool = False) -> None:
        self._wrote = True
        if database != seal.UNSEALED:
            value = seal.sealed(database, key, value)
        self._txn.put(key, value, db=self._handles[database], append=append)

    def delete(self, database: str, key: bytes) -> bool:
        self._wrote = True
        if database == seal.UNSEALED and self._removable is not None:
            self._removable(key)
        return bool(self._txn.delete(key, db=self._handles[database]))

    def scan(self, database: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Entries whose key begins with ``prefix``, in key order. Do not write while it runs. Raises StoreError CORRUPT."""
        cursor = self._txn.cursor(db=self._handles[database])
        found = cursor.set_range(prefix)
        self._require_before(database, prefix)
        last = None
        if found:
            for key, value in cursor:
                last = self._require_after(last, database, key)
                within = key.startswith(prefix)
                if within or database != seal.UNSEALED:
                    # The first one behind them, too: it may have been one of them.
                    plain = value if database == seal.UNSEALED else self._opened(database, key, value)
                if not within:
                    return
                yield key, plain

    def floor(self, database: str, key: bytes) -> tuple[bytes, bytes] | None:
        """The entry of ``key``, else the last one before it; whether that is the right one, the caller can tell.

        Raises StoreError CORRUPT.
        """
        cursor = self._txn.cursor(db=self._handles[database])
        # prev() after a failed set_range stands on the last entry; before the first there is none.
        if not (cursor.set_range(key) and cursor.key() == key) and not cursor.prev():
            return None
        return self._entry(database, cursor)

    def last(self, database: str, prefix: bytes) -> bytes | None:
        """The last key that begins with ``prefix``, behind which eight bytes are a number. Raises StoreError CORRUPT."""
        end = prefix + b"\xff" * 8
        self._require_absent(database, end)
        entry = self.floor(database, end)
        return entry[0] if entry is not None and entry[0].startswith(prefix) else None

    def following(self, database: str, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Entries from ``key`` on, in key order. Raises StoreError CORRUPT."""
        cursor = self._txn.cursor(db=self._handles[database])
        last = None
        if cursor.set_range(key):
            for found, value in cursor:
                last = self._require_after(last, database, found)
                yield found, self._opened(database, found, value)

    def take_number(self, name: str) -> int:
        """The next of a sequence of numbers kept in ``meta``."""
        key = name.encode()
        value = self.get("meta", key)
        following = (layout.to_number(value) if value else 0) + 1
        self.put("meta", key, layout.number(following))
        return following

    def sign(self) -> None:
        """Before the commit of what has written: note the transaction's number."""
        if self._wrote:
            self.put("meta", WRITTEN, written(self._txn.id()))

    def damaged(self, what: str) -> StoreError:
        """Of this store."""
        return damaged(self._path, what)

    # -- seals ---------------------------------------------------------------------------------------------------------------

    def _opened(self, database: str, key: bytes, value: bytes) -> bytes:
        if database == "meta" and key == seal.FORMAT_KEY:
            return value
        plain = seal.opened(database, key, value)
        if plain is None:
            raise self.damaged(f"{layout.described(database, key)} fails its checksum")
        return plain

    def _entry(self, database: str, cursor: Any) -> tuple[bytes, bytes]:
        key, value = cursor.item()
        return key, self._opened(database, key, value)

    def _require_after(self, last: bytes | None, database: str, key: bytes) -> bytes:
        """A walk goes forward, so it ends."""
        if last is not None and key <= last:
            raise self.damaged(f"{layout.described(database, key)} comes after a later one")
        return key

    def _require_absent(self, database: str, key: bytes) -> None:
        cursor = self._txn.cursor(db=self._handles[database])
        if cursor.set_range(key):
            self._entry(database, cursor)
        # Behind the last entry, this goes to the last one.
        if cursor.prev():
            self._entry(database, cursor)

    def _require_before(self, database: str, prefix: bytes) -> None:
        if prefix and database != seal.UNSEALED:
            cursor = self._txn.cursor(db=self._handles[database])
            cursor.set_range(prefix)
            if cursor.prev():
                self._entry(database, cursor)


def written(transaction: int, version: int = layout.FORMAT) -> bytes:
    """The value of WRITTEN. The format, which earlier versions must be able to read, is in it again, sealed."""
    return layout.number(transaction) + layout.number(version)


def damaged(path: object, what: str) -> StoreError:
    """What every reader of a damaged store says."""
    return StoreError(
        "CORRUPT",
        f"the store at {path} is damaged: {what}: the disk or another program changed its file; `orderedmq check {path}` names all "
        "that is damaged; restore the store from a copy",
    )
