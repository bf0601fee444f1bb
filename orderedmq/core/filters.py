"""A filter of messages as a subscription has it: some tags, or SQL that a RocketMQ broker evaluates.

Rules: a filter chooses rows and never offsets: what does not match counts in every range, limit and group offset. Members of a group must
have the same one, so a filter has one text, however it was written. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self

import pyarrow as pa
import pyarrow.compute as pc

FilterType = Literal["TAG", "SQL92"]

#: The expression that lets everything through.
ALL: Final = "*"


def tags_of(expression: str) -> tuple[str, ...]:
    """The tags of RocketMQ's ``A || B``, sorted; none when it lets everything through (FilterAPI.buildSubscriptionData)."""
    text = expression.strip()
    return () if text == ALL else tuple(sorted({tag.strip() for tag in text.split("||")} - {""}))


def canonical(expression: str, kind: str) -> str:
    """The one text of an expression, as members of a group compare it. An empty one means all."""
    return expression.strip() if kind != "TAG" else " || ".join(tags_of(expression)) or ALL


@dataclass(frozen=True)
class Filter:
    """``tags`` has at least one, or ``sql`` is not empty; exactly one of them is given."""

    tags: tuple[str, ...] = ()
    sql: str = ""

    @classmethod
    def by_tags(cls, expression: str) -> Self | None:
        """None for an expression that lets everything through."""
        tags = tags_of(expression)
        return cls(tags=tags) if tags else None

    @property
    def kind(self) -> FilterType:
        return "SQL92" if self.sql else "TAG"

    @property
    def expression(self) -> str:
        """Canonical; what a broker is told."""
        return self.sql or " || ".join(self.tags)

    def matching(self, tags: pa.Array) -> pa.Array:
        """Which of these rows have one of the tags, exactly; a row without a tag has none. Not for SQL."""
        return pc.is_in(tags, value_set=pa.array(self.tags, tags.type))
