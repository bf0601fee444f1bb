"""Makes messages for the engines of listeners, and a broker's refusal of a write."""

from __future__ import annotations

from typing import Any

from orderedmq.conditions import StoreFullCondition
from orderedmq.errors import StoreFullError
from orderedmq.listening.engine import Message

#: A refusal that passes.
FULL = StoreFullError(StoreFullCondition.FULL, "no room")


def message(offset: int, key: str | None = None, rows: Any = None, number: int = 0, **state: Any) -> Message:
    """Return a message with this state, for example ``attempts=2`` for two failed calls."""
    made = Message(offset, key, rows, number)
    for name, value in state.items():
        setattr(made, f"_{name}", value)
    return made
