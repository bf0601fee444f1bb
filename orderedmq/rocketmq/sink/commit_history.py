"""Which of a sink's last batches are committed, as numbers that a broker can store as offsets. Pure.

A *block* is `WIDTH` consecutive batch numbers, with a bit for each that is committed. Its number and its bits are one number of
63 bits, which is stored in one of `SLOTS` slots. So a commit changes one number, and a broker that forgets its last seconds has an
earlier state of it, never a mixture. A slot whose block has another number than the one that is asked for counts as empty.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from orderedmq.ownership.micro_batch import KEPT_BATCHES

WIDTH: Final = 32
#: Any KEPT_BATCHES consecutive numbers are in this many blocks at most, and these are in different slots.
SLOTS: Final = (KEPT_BATCHES - 2) // WIDTH + 2
_BITS: Final = (1 << WIDTH) - 1
#: The block's number has its last 31 bits only, so that the stored number has 63.
_NUMBER: Final = (1 << 31) - 1


class Committed(NamedTuple):
    """What a broker knows of the sink's committed batches: the newest one (-1 for none), and the history of those around one batch."""

    newest: int = -1
    history: int = 0

    def has(self, batch: int) -> bool:
        """Whether the batch is known to be committed."""
        return batch == self.newest or (batch < self.newest and has(self.history, batch))


def slot_of(batch: int) -> int:
    """Return the slot, below `SLOTS`, in which the batch's block is stored."""
    return batch // WIDTH % SLOTS


def has(stored: int, batch: int) -> bool:
    """Whether the number stored in the batch's slot says that the batch is committed."""
    return _block_of(stored, batch) >> batch % WIDTH & 1 == 1


def with_batch(stored: int, batch: int) -> int:
    """Return the number to store in the batch's slot once the batch is committed."""
    bits = _block_of(stored, batch) | 1 << batch % WIDTH
    return (batch // WIDTH & _NUMBER) << WIDTH | bits


def _block_of(stored: int, batch: int) -> int:
    """Return the bits of the batch's block; 0 if the slot has another one."""
    return stored & _BITS if stored >> WIDTH == batch // WIDTH & _NUMBER else 0
