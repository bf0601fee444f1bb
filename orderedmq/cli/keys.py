"""The options of several commands for sharding keys, and for how a key chooses its queue."""

from __future__ import annotations

from typing import Annotated

import typer

from orderedmq.routing.selector import KeyedSelectorName
from orderedmq.routing.sharding_key import KeyType
from orderedmq.text import text_of


def stored_key(typed: str) -> str:
    """Return a key from the command line as the column sharding_key has it, so that a key that is not UTF-8 is found."""
    return text_of(typed.encode("utf-8", "surrogateescape"))


KeyTypeOption = Annotated[
    KeyType | None,
    typer.Option(
        "--sharding-key-type",
        help="The Java type of the key that a producer hashes: text (String), int (Integer) or long (Long). Default: text; with mod: long.",
        show_default=False,
    ),
]
SelectorOption = Annotated[
    KeyedSelectorName | None,
    typer.Option(
        help="How a key chooses its queue: hash (as in Java, the default) or mod (the key modulo the number of queues).",
        show_default=False,
    ),
]
