"""A seal: the checksum behind every value that is not a payload, over database, key and value. Pure.

It covers the key because a changed bit there moves an entry to a key under which it was never written. The index has the
checksums of payloads.
"""

from __future__ import annotations

from typing import Final

import xxhash

from orderedmq.embedded.store.layout import DATABASES

SIZE: Final = 8
#: The database whose values have no seal.
UNSEALED: Final = "payloads"
#: The key in ``meta`` whose value has no seal: earlier versions read it to learn that a store is too new for them.
FORMAT_KEY: Final = b"format"

#: Seeds by database. The length of the key is added, so that a seal also covers where the key ends.
_SEEDS: Final = {name: number << 16 for number, name in enumerate(DATABASES)}


def sealed(database: str, key: bytes, value: bytes) -> bytes:
    return value + xxhash.xxh3_64_digest(key + value, _SEEDS[database] | len(key))


def opened(database: str, key: bytes, value: bytes) -> bytes | None:
    """Return the value without its seal, None if it is not what was written under this key."""
    plain = value[:-SIZE]
    if xxhash.xxh3_64_digest(key + plain, _SEEDS[database] | len(key)) != value[-SIZE:]:
        return None
    return plain
