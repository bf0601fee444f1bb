"""A subscription's filter of messages: tags, or SQL that a RocketMQ broker evaluates. Pure.

Rules: a filter selects rows, never offsets: messages that do not match still count in every range, limit and group offset. All
members of a group must have the same filter, so a filter has one canonical text, however it was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self

import pyarrow as pa
import pyarrow.compute as pc

FilterType = Literal["TAG", "SQL92"]

#: The expression that matches every message.
ALL: Final = "*"


def tags_of(expression: str) -> tuple[str, ...]:
    """Return the sorted tags of RocketMQ's ``A || B``, none if it matches every message (FilterAPI.buildSubscriptionData)."""
    text = expression.strip()
    return () if text == ALL else tuple(sorted({tag.strip() for tag in text.split("||")} - {""}))


def canonical(expression: str, kind: str) -> str:
    """Return the canonical text of an expression, which members of a group compare. An empty TAG expression matches all messages."""
    return expression.strip() if kind != "TAG" else " || ".join(tags_of(expression)) or ALL


@dataclass(frozen=True)
class Filter:
    """A filter by tags or by SQL. Exactly one of ``tags`` and ``sql`` is not empty."""

    tags: tuple[str, ...] = ()
    sql: str = ""

    @classmethod
    def by_tags(cls, expression: str) -> Self | None:
        """Return the filter of a tag expression, or None if the expression matches every message."""
        tags = tags_of(expression)
        return cls(tags=tags) if tags else None

    @property
    def kind(self) -> FilterType:
        return "SQL92" if self.sql else "TAG"

    @property
    def expression(self) -> str:
        """The canonical text, as it is sent to brokers."""
        return self.sql or " || ".join(self.tags)

    def matching(self, tags: pa.Array) -> pa.Array:
        """Return for each row's tag whether it equals one of the filter's tags, false for a row without a tag.

        Call this only for a filter by tags.
        """
        return pc.is_in(tags, value_set=pa.array(self.tags, tags.type))
