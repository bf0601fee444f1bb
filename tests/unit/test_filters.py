"""Filters: equal filters have equal text, and tags are compared exactly."""

from __future__ import annotations

import pyarrow as pa
import pytest

from orderedmq.options.parse import parse
from orderedmq.options.source import SourceOptions
from orderedmq.rows.filters import Filter, canonical, tags_of

CLUSTER = {"namesrvAddr": "h:9876", "topic": "orders", "consumerGroup": "billing"}


@pytest.mark.parametrize(
    ("expression", "tags"),
    [("*", ()), (" * ", ()), ("", ()), ("a", ("a",)), ("b|| a ||b", ("a", "b")), ("b c || a", ("a", "b c")), ("||a||", ("a",))],
)
def test_an_expression_is_a_set_of_tags(expression: str, tags: tuple[str, ...]) -> None:
    """A Java member's heartbeat may contain such an expression."""
    assert tags_of(expression) == tags
    assert canonical(expression, "TAG") == (" || ".join(tags) or "*")
    assert Filter.by_tags(expression) == (Filter(tags=tags) if tags else None)


def test_sql_is_kept_as_it_is() -> None:
    assert canonical(" a > 5 || b ", "SQL92") == "a > 5 || b"
    parsed = parse(SourceOptions, {**CLUSTER, "filterSql": " a > 5 "}, streaming=True).matching
    assert parsed is not None
    assert (parsed.kind, parsed.expression) == ("SQL92", "a > 5")


@pytest.mark.parametrize("text", [None, "*", " * "])
def test_without_a_filter_everything_is_read(text: str | None) -> None:
    options = CLUSTER if text is None else {**CLUSTER, "tags": text}
    assert parse(SourceOptions, options, streaming=True).matching is None


def test_tags_are_compared_exactly_and_no_tag_matches_none() -> None:
    tags = pa.array(["Aa", "BB", None, "aa", "Aa ", "b c"], pa.string())
    assert Filter(tags=("Aa", "b c")).matching(tags).to_pylist() == [True, False, False, False, False, True]
    assert Filter(tags=("x",)).matching(pa.array([], pa.string())).to_pylist() == []
