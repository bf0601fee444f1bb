"""The set of a sink's last committed batches, encoded as numbers that a broker can store as offsets. Pure.

A *block* is `WIDTH` consecutive batch numbers, with a bit for each batch that says whether it is committed. The block's number and
its bits together are one number of 63 bits, which is stored in one of `SLOTS` slots. So a commit changes one number. A broker that
loses the changes of its last seconds has an earlier state of this number, never a mixture. If a slot holds another block than the
wanted one, it counts as empty.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from orderedmq.ownership.micro_batch import KEPT_BATCHES

WIDTH: Final = 32
#: The number of slots. Any KEPT_BATCHES consecutive batch numbers are in at most this many blocks, each in a different slot.
SLOTS: Final = (KEPT_BATCHES - 2) // WIDTH + 2
_BITS: Final = (1 << WIDTH) - 1
#: Only the last 31 bits of the block's number are stored, so that the stored number has 63 bits.
_NUMBER: Final = (1 << 31) - 1


class Committed(NamedTuple):
    """A broker's knowledge of the sink's committed batches: the newest one (-1 for none), and the stored block of one batch."""

    newest: int = -1
    history: int = 0

    def has(self, batch: int) -> bool:
        """Return whether the batch is known to be committed."""
        return batch == self.newest or (batch < self.newest and has(self.history, batch))


def slot_of(batch: int) -> int:
    """Return the slot, below `SLOTS`, in which the batch's block is stored."""
    return batch // WIDTH % SLOTS


def has(stored: int, batch: int) -> bool:
    """Return whether the number stored in the batch's slot says that the batch is committed."""
    return _block_of(stored, batch) >> batch % WIDTH & 1 == 1


def with_batch(stored: int, batch: int) -> int:
    """Return the number to store in the batch's slot once the batch is committed."""
    bits = _block_of(stored, batch) | 1 << batch % WIDTH
    return (batch // WIDTH & _NUMBER) << WIDTH | bits


def _block_of(stored: int, batch: int) -> int:
    """Return the bits of the batch's block; 0 if the slot holds another block."""
    return stored & _BITS if stored >> WIDTH == batch // WIDTH & _NUMBER else 0
