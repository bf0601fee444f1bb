"""Seals: a checksum of database, key and value, stored after every value except payloads. Pure.

A seal covers the key, because a changed bit in the key moves an entry to a key under which it was never written. The checksums of
payloads are in the index.
"""

from __future__ import annotations

from typing import Final

import xxhash

from orderedmq.embedded.store.layout import DATABASES

SIZE: Final = 8
#: The database whose values have no seal.
UNSEALED: Final = "payloads"
#: The key in ``meta`` whose value has no seal, because earlier versions read it to see that a store is too new for them.
FORMAT_KEY: Final = b"format"

#: Seeds by database. The length of the key is added to a seed, so that a seal also covers where the key ends.
_SEEDS: Final = {name: number << 16 for number, name in enumerate(DATABASES)}


def sealed(database: str, key: bytes, value: bytes) -> bytes:
    return value + xxhash.xxh3_64_digest(key + value, _SEEDS[database] | len(key))


def opened(database: str, key: bytes, value: bytes) -> bytes | None:
    """Return the value without its seal, or None if this value was not written under this key."""
    plain = value[:-SIZE]
    if xxhash.xxh3_64_digest(key + plain, _SEEDS[database] | len(key)) != value[-SIZE:]:
        return None
    return plain
