"""The reader's options that filter messages: ``tags`` and ``filterSql``. Rules: as in declared.py."""

from __future__ import annotations

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.options.declared import Given
from orderedmq.options.values import conflict, invalid, shown
from orderedmq.rows.filters import ALL, Filter


def parse_filter(given: Given, *, embedded: bool) -> Filter | None:
    """Return the filter, or None for all messages. Raises OptionError. SQL is not checked here, because the brokers check it."""
    if given.has("tags") and given.has("filterSql"):
        raise conflict("options tags and filterSql exclude each other. Drop one, or write the tags into the SQL: TAGS = 'a'")
    if given.has("filterSql") and embedded:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            "option filterSql is not supported by the embedded broker, because RocketMQ's brokers evaluate it. Filter the DataFrame instead "
            "(DataFrame.filter), or use tags",
        )
    tags = given.optional("tags", _tags)
    sql = given.optional("filterSql", _sql)
    return Filter(sql=sql) if sql is not None else Filter.by_tags(ALL if tags is None else tags)


def _tags(text: str, option: str) -> str:
    if text == ALL:
        return text
    for tag in (part.strip() for part in text.split("||")):
        # Java ignores empty tags and accepts any other text as a tag, so what is meant as a list or as a pattern would silently make a
        # query read nothing.
        if not tag or any(character in tag for character in (ALL, "|", ",")):
            raise invalid(
                option,
                f"{shown(text)} is not an expression of tags, which are separated by || and have no patterns. Write for example A || B, or "
                f"{ALL} for all",
            )
    return text


def _sql(text: str, option: str) -> str:
    if not text:
        raise invalid(option, "the expression is empty. Write for example TAGS = 'a' AND amount > 5, or drop the option")
    return text
