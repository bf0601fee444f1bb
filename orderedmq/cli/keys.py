"""The options of several commands that say how a sharding key chooses its queue."""

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
        help="What a Java producer hashes: text (a String), int (an Integer), long (a Long). Default: text; long with mod.",
        show_default=False,
    ),
]
SelectorOption = Annotated[
    KeyedSelectorName | None,
    typer.Option(help="How a key chooses its queue: hash (Java's, the default) or mod (id % queues).", show_default=False),
]


def chosen_keying(selector: KeyedSelectorName | None, key_type: KeyType | None) -> Keying | None:
    """Return the keying of both options, None if neither was given. Raises OptionError CONFLICT if they exclude each other."""
    if selector is None and key_type is None:
        return None
    if selector == "mod" and key_type == "text":
        raise OptionError(
            OptionCondition.CONFLICT,
            "option --selector mod needs keys that are whole numbers: it excludes --sharding-key-type text",
        )
    return Keying(selector or "hash", key_type or ("long" if selector == "mod" else "text"))
