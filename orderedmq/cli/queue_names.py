"""The names that users read and type, of queues (TOPIC/BROKER/QUEUE or a short form that identifies one queue) and keys. Shell completion.

Rules: a queue's number is never an index into a list, because each of several brokers has a queue 0. A short form that matches
several queues is refused, and the error lists them. JSON has the fields topic, broker and queue_id.

Completion offers the topics and groups of the broker that the incomplete command line names. It takes at most two seconds, prints nothing
if the broker cannot be reached, and creates nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import typer

from orderedmq.cli.shell import Column, Shell
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError, OrderedMQError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.options.values import find_queue, whole_number

if TYPE_CHECKING:
    from orderedmq.broker import Broker
from typing import Annotated

from orderedmq.routing.selector import KeyedSelectorName
from orderedmq.routing.sharding_key import KeyType
from orderedmq.text import text_of


def queue_fields(queue: MessageQueue) -> dict[str, Any]:
    return {"topic": queue.topic, "broker": queue.broker_name, "queue_id": queue.queue_id}


def columns(rows: Sequence[Mapping[str, Any]], *, topic: bool = True) -> tuple[Column, ...]:
    """Return the columns that name a queue. Leaves out the name of the embedded broker, because it is always the same."""
    brokers = any(row["broker"] not in (None, EMBEDDED_BROKER) for row in rows)
    return (
        *((Column("topic", "topic"),) if topic else ()),
        *((Column("broker", "broker"),) if brokers else ()),
        Column("queue_id", "queue", right=True),
    )


def topic_of(text: str) -> str:
    """Return the topic of TOPIC, TOPIC/QUEUE or TOPIC/BROKER/QUEUE. Raises OptionError INVALID."""
    topic, *rest = text.split("/")
    if not topic or len(rest) > 2 or (rest and not (all(rest) and whole_number(rest[-1]) is not None)):
        raise OptionError(
            OptionCondition.INVALID,
            f"{text!r} is neither TOPIC nor TOPIC/BROKER/QUEUE. Write for example orders, orders/3 or orders/broker-a/3",
        )
    return topic


def find_all(text: str, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Return the queues that a text of the form TOPIC, TOPIC/QUEUE or TOPIC/BROKER/QUEUE names. ``queues``: all queues of the topic.

    Raises OptionError INVALID, TopicError.
    """
    topic = topic_of(text)
    rest = text[len(topic) + 1 :]
    return [find_queue(rest, queues)] if rest else list(queues)


#: Maximum seconds that a user waits after TAB.
PATIENCE: Final = 2.0


def topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the topics whose names begin with ``incomplete``."""
    return _names(ctx, incomplete, lambda broker: [topic.name for topic in broker.log.topics()])


def groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the consumer groups whose names begin with ``incomplete``."""
    return _names(ctx, incomplete, lambda broker: broker.admin.groups())


def _names(ctx: typer.Context, incomplete: str, look: Callable[[Broker], list[str]]) -> list[str]:
    shell, names = _shell(ctx), list[str]()

    def ask() -> None:
        try:
            with shell.broker() as broker:
                names.extend(look(broker))
        except (OrderedMQError, OSError):
            return

    # A daemon thread, so that it does not keep the process alive while it waits for a cluster.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return [name for name in names if name.startswith(incomplete)]


def _shell(ctx: typer.Context) -> Shell:
    """Return the broker options of the command line. Options of an inner command override those of an outer command."""
    above = Shell() if ctx.parent is None else _shell(ctx.parent)  # type: ignore[arg-type]
    texts = {name: ctx.params.get(name) or getattr(above, name) for name in ("path", "namesrv", "namespace", "profile")}
    # The parameter of --option is called option before the command, and options after it.
    options = [*(above.options or ()), *(ctx.params.get("option") or ctx.params.get("options") or ())]
    return Shell(**texts, options=options)


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
