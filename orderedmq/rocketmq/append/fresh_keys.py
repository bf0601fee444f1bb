"""Makes UNIQ_KEYs for messages that are sent now."""

from __future__ import annotations

import os
import secrets
import threading
import time

import pyarrow as pa

from orderedmq.rocketmq.codec.message_id import UniqueKeys


class FreshKeys:
    """Makes UNIQ_KEYs that no other producer makes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Random bytes instead of an IP address, because a host has several addresses and containers share them.
        self._keys = UniqueKeys(secrets.token_bytes(4), os.getpid(), secrets.randbits(32))

    def take(self, count: int) -> pa.Array:
        """Return ``count`` new keys, as strings."""
        with self._lock:
            return self._keys.take(count, time.time_ns() // 1_000_000)
