"""The options of several commands for how a sharding key chooses its queue."""

from __future__ import annotations

from typing import Annotated

import typer

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.routing.selector import KeyedSelectorName, Keying
from orderedmq.routing.sharding_key import KeyType

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


def chosen_keying(selector: KeyedSelectorName | None, key_type: KeyType | None) -> Keying | None:
    """Return the keying that the two options define, None if both are missing. Raises OptionError CONFLICT if they are contradictory."""
    if selector is None and key_type is None:
        return None
    if selector == "mod" and key_type == "text":
        raise OptionError(
            OptionCondition.CONFLICT,
            "option --selector mod needs keys that are whole numbers, so it excludes --sharding-key-type text",
        )
    return Keying(selector or "hash", key_type or ("long" if selector == "mod" else "text"))
