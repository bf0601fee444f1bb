"""The same key in two tasks of one batch has no defined order: finding such keys by their 64-bit hashes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

#: Hashes gathered before they are made unique.
_GATHER: Final = 1 << 18


class SeenKeys:
    """The keys of one task as sorted unique hashes; bytes in a commit message."""

    def __init__(self) -> None:
        self._unique: Words = np.empty(0, dtype=np.uint64)
        self._waiting: list[Words] = []
        self._count = 0

    def add(self, hashes: Words) -> None:
        # Keys repeat within a batch: made unique here, the rest is small.
        self._waiting.append(_distinct(hashes))
        self._count += len(self._waiting[-1])
        if self._count > _GATHER:
            self._merge()

    def _merge(self) -> None:
        self._unique = _distinct(np.concatenate([self._unique, *self._waiting]))
        self._waiting, self._count = [], 0

    def to_bytes(self) -> bytes:
        self._merge()
        return self._unique.tobytes()


def _distinct(hashes: Words) -> Words:
    """As np.unique, whose hash table takes 3 times as long for keys that repeat, 12 times for keys that do not."""
    every = np.sort(hashes)
    return every[np.concatenate(([True], every[1:] != every[:-1]))] if len(every) else every


def shared(tasks: Sequence[bytes]) -> int:
    """How many keys occur in more than one of the tasks."""
    known = [np.frombuffer(keys, dtype=np.uint64) for keys in tasks if keys]
    if len(known) < 2:
        return 0
    every = np.sort(np.concatenate(known))
    same = every[1:] == every[:-1]
    # A key of three tasks makes two neighbouring pairs and is one key.
    return int(np.count_nonzero(same & ~np.concatenate(([False], same[:-1]))))
