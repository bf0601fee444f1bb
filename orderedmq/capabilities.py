"""How the kinds of brokers differ by nature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Capabilities:
    """The promises of a kind of broker.

    fenced: the broker itself refuses a change under a stale lock epoch, and a tenure continues across a restart (lineage).
    atomic_publish: one transaction makes a batch visible and moves the group offsets of its source.
    names_owner: the refusal of a lock names the owner.
    """

    fenced: bool
    atomic_publish: bool
    names_owner: bool


#: The capabilities of each kind of broker. Option checks need them before a connection exists.
EMBEDDED: Final = Capabilities(fenced=True, atomic_publish=True, names_owner=True)
ROCKETMQ: Final = Capabilities(fenced=False, atomic_publish=False, names_owner=False)
