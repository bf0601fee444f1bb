"""Finds sharding keys that occur in several tasks of a batch and therefore have no order, by their 64-bit hashes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

#: The number of hashes to collect before duplicates are removed.
_GATHER: Final = 1 << 18
#: Size of the table of recently seen hashes, which fits into a core's cache.
_KNOWN: Final = 1 << 16


class SeenKeys:
    """The keys of one task as sorted unique hashes. The task sends them as bytes in its commit message."""

    def __init__(self) -> None:
        self._unique: Words = np.empty(0, dtype=np.uint64)
        self._waiting: list[Words] = []
        self._count = 0
        #: Index: the last bits of a hash. Value: an added hash with these bits; at first, a value whose last bits differ from the index.
        self._known: Words = np.arange(1, _KNOWN + 1, dtype=np.uint64)

    def add(self, hashes: Words) -> None:
        # Keys repeat, and a lookup is several times faster than sorting.
        mask = np.uint64(_KNOWN - 1)
        new = _distinct(hashes[self._known[hashes & mask] != hashes])
        self._known[new & mask] = new
        self._waiting.append(new)
        self._count += len(new)
        if self._count > _GATHER:
            self._merge()

    def _merge(self) -> None:
        self._unique = _distinct(np.concatenate([self._unique, *self._waiting]))
        self._waiting, self._count = [], 0

    def to_bytes(self) -> bytes:
        self._merge()
        return self._unique.tobytes()


def _distinct(hashes: Words) -> Words:
    """Return the sorted unique hashes, as np.unique does. (That takes 3 times as long if keys repeat and 12 times if they do not.)"""
    every = np.sort(hashes)
    return every[np.concatenate(([True], every[1:] != every[:-1]))] if len(every) else every


def count_shared(tasks: Sequence[bytes]) -> int:
    """Return how many keys occur in more than one of the tasks."""
    hashes_by_task = [np.frombuffer(keys, dtype=np.uint64) for keys in tasks if keys]
    if len(hashes_by_task) < 2:
        return 0
    every = np.sort(np.concatenate(hashes_by_task))
    same = every[1:] == every[:-1]
    # A key in three tasks makes two pairs of equal neighbours, but counts once.
    return int(np.count_nonzero(same & ~np.concatenate(([False], same[:-1]))))
