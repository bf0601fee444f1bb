"""Declares options on the fields of dataclasses, so that each option's name, default, parser and meaning exist once.

Rules: options are checked as text, before any side effect. Names are case-insensitive (Spark passes them in lower case) and shown
in camelCase. An error is one line with the option, the wrong value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

from orderedmq.options.values import Parser

T = TypeVar("T")
DEFAULT_DIRECTORY: Final = "orderedmq-data"
_OPTION: Final = "option"


@dataclass(frozen=True)
class Option:
    """One option. `option` explains the fields. ``shown``: the default as tables show it."""

    name: str
    parse: Parser[Any]
    meaning: str
    shown: str
    default: str | None
    cluster: str | None
    absent: Any
    only_cluster: str
    secret: bool

    def value(self, given: Mapping[str, str]) -> Any:
        """Return the option's value among the given texts, or its default. Raises the errors of its parser."""
        default = self.default if "namesrvAddr" not in given else self.cluster or self.default
        text = given.get(self.name, default)
        return self.absent if text is None else self.parse(text, self.name)


def option(
    parse: Parser[T],
    meaning: str,
    default: str | None = None,
    *,
    name: str = "",
    cluster: str | None = None,
    shown: str = "",
    absent: T | None = None,
    only_cluster: str = "",
    secret: bool = False,
) -> T:
    """Return a dataclass's field that is an option. Its value is what ``parse`` makes of the option's text.

    ``meaning``: one line for the tables of the documents. ``default``: the text that is parsed if the option is not given; without one
    the value is ``absent``. ``cluster``: another default with namesrvAddr. ``name``: the option's name if it is not the field's in
    camelCase. ``shown``: what tables show instead of the default. ``only_cluster``: the reason why a store does not need the option,
    which is refused with a path. ``secret``: no repr shows the value.
    """
    default_shown = shown or (default or "none") + (f", {cluster} with namesrvAddr" if cluster else "")
    declared = Option(name, parse, meaning, default_shown, default, cluster, absent, only_cluster, secret)
    value: Any = absent if default is None else parse(default, name)
    made: T = field(default=value, repr=not secret, metadata={_OPTION: declared})
    return made


def options_of(kind: type) -> Mapping[str, Option]:
    """Return the options that a dataclass's fields declare, by field and in declared order."""
    declared: dict[str, Option] = {one.name: one.metadata[_OPTION] for one in fields(kind)}
    return {name: replace(each, name=each.name or _camel_case(name)) for name, each in declared.items()}


def names_of(kind: type) -> dict[str, str]:
    """Return the names of a dataclass's options by their names in lower case."""
    return {each.name.lower(): each.name for each in options_of(kind).values()}


def _camel_case(name: str) -> str:
    return re.sub("_(.)", lambda match: match[1].upper(), name)
