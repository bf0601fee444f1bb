"""The orderly listener's interface: answers, settings and hooks, and the properties that tell a dead letter's origin. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, TypeVar

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import MAX_PROPERTIES_BYTES, MessageQueue

#: Properties that tell a dead letter's origin: RocketMQ's names (MessageConst), and our own where it has none.
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QUEUE: Final = "REAL_QID"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
RECONSUME_TIME: Final = "RECONSUME_TIME"
ORIGIN_BROKER: Final = "ORDEREDMQ_BROKER"
ORIGIN_OFFSET: Final = "ORDEREDMQ_OFFSET"
ERROR: Final = "ORDEREDMQ_ERROR"
#: Maximum bytes kept of an error's text.
MAX_ERROR_BYTES: Final = 4096
#: Bytes that a broker may add to the properties of a message that it stores.
_SPARE_BYTES: Final = 256

#: The answers of a kind of listener.
Status = TypeVar("Status", bound=Enum)


class ConsumeOrderlyStatus(Enum):
    """A listener's answer to a batch of messages, with the names of RocketMQ's ConsumeOrderlyStatus.

    SUCCESS: the batch is accepted; without ``auto_commit`` it is taken, and waits for a commit. COMMIT: everything taken is
    accepted. ROLLBACK: everything taken comes again after the suspension, which is no retry. COMMIT and ROLLBACK count as
    SUCCESS, with a warning, unless ``auto_commit`` is False. SUSPEND_CURRENT_QUEUE_A_MOMENT: the batch comes again after the
    suspension, as after an exception, until it has no retries left and becomes dead letters.
    """

    SUCCESS = "SUCCESS"
    ROLLBACK = "ROLLBACK"
    COMMIT = "COMMIT"
    SUSPEND_CURRENT_QUEUE_A_MOMENT = "SUSPEND_CURRENT_QUEUE_A_MOMENT"


@dataclass(slots=True)
class ConsumeOrderlyContext:
    """One call's context, as RocketMQ's class of this name.

    ``message_queue`` has the fields topic, broker_name and queue_id. The listener may set ``auto_commit`` to False, to commit
    several calls at once, and ``suspend_current_queue_time_millis`` to the suspension after this call in milliseconds (cut to
    10 to 30,000; -1: as in `consume_orderly`).
    """

    message_queue: MessageQueue
    auto_commit: bool = True
    suspend_current_queue_time_millis: int = -1


def check_bounds(settings: object, bounds: Mapping[str, tuple[int, int]]) -> None:
    """Check that these attributes are whole numbers within their bounds. Raises OptionError INVALID."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        if type(value) is not int or not low <= value <= high:
            raise OptionError(OptionCondition.INVALID, f"{name} is {value!r}: give a whole number from {low} to {high}")


@dataclass(frozen=True)
class OrderlySettings:
    """RocketMQ's parameters (``max_time_consume_continuously`` in seconds). Raises OptionError INVALID."""

    consume_message_batch_max_size: int = 1
    suspend_current_queue_time_millis: int = 1000
    max_reconsume_times: int = 16
    max_time_consume_continuously: float = 60.0

    def __post_init__(self) -> None:
        most = 2**31 - 1
        bounds = {"consume_message_batch_max_size": (1, 1024), "suspend_current_queue_time_millis": (0, most)}
        check_bounds(self, bounds | {"max_reconsume_times": (-1, most)})
        seconds: object = self.max_time_consume_continuously
        if type(seconds) not in (int, float) or not self.max_time_consume_continuously > 0:
            raise OptionError(OptionCondition.INVALID, f"max_time_consume_continuously is {seconds!r}: give seconds above 0")


def suspend_seconds(millis: int, default: int) -> float:
    """Return the seconds for which a queue is suspended: ``millis``, or ``default`` for -1, between 10 ms and 30 s."""
    return min(max(default if millis == -1 else millis, 10), 30_000) / 1000


#: (messages, context) → status.
Listener = Callable[[Sequence[Any], ConsumeOrderlyContext], ConsumeOrderlyStatus | None]


class ConsumeMessageHook(Protocol):
    """Called before and after every call of the listener. After it, exactly one of ``status`` and ``error`` is None."""

    def consume_message_before(self, messages: Sequence[Any], context: ConsumeOrderlyContext) -> None: ...

    def consume_message_after(
        self, messages: Sequence[Any], context: ConsumeOrderlyContext, status: ConsumeOrderlyStatus | None, error: str | None
    ) -> None: ...


def call_listener(
    listener: Listener,
    messages: Sequence[Any],
    context: ConsumeOrderlyContext,
    hooks: Sequence[ConsumeMessageHook],
    warn: Callable[[str], None],
) -> tuple[ConsumeOrderlyStatus | None, str | None]:
    """Call the listener and its hooks. Return its answer and error, for `OrderlyQueue.consumed`.

    An answer that is not a ConsumeOrderlyStatus, and an exception, give an error. A hook's exception gives only a warning, as
    in Java.
    """
    return call(listener, messages, context, hooks, warn, ConsumeOrderlyStatus)


class Context(Protocol):
    """What every listener's context has."""

    @property
    def message_queue(self) -> MessageQueue: ...


def call(
    listener: Callable[[Sequence[Any], Any], object],
    messages: Sequence[Any],
    context: Context,
    hooks: Sequence[Any],
    warn: Callable[[str], None],
    statuses: type[Status],
) -> tuple[Status | None, str | None]:
    """`call_listener` for a listener that answers with one of ``statuses``."""

    def tell(hook: Callable[..., None], *what: object) -> None:
        try:
            hook(messages, context, *what)
        except Exception as raised:
            warn(f"a hook of the listener of queue {context.message_queue} raised {type(raised).__name__}: {raised}")

    for hook in hooks:
        tell(hook.consume_message_before)
    status, error = None, None
    try:
        answer = listener(messages, context)
        if isinstance(answer, statuses):
            status = answer
        else:
            error = f"the listener returned {answer!r}, not a {statuses.__name__}"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    if error is not None:
        # A Python text may have lone surrogates, an Arrow column may not.
        error = error.encode("utf-8", "replace").decode()
    for hook in hooks:
        tell(hook.consume_message_after, status, error)
    return status, error


def clip(text: str, limit: int) -> str:
    """Return at most ``limit`` bytes of a text, fit for a property.

    RocketMQ separates properties by the characters 1 and 2, and UTF-8 has no surrogates.
    """
    plain = text.translate({0: " ", 1: " ", 2: " "}).encode("utf-8", "replace")
    return plain[: max(limit, 0)].decode("utf-8", "ignore")


def dead_letter_id(group: str, queue: MessageQueue, offset: int) -> str:
    """Return a dead letter's identity. A message that is put aside again after a replay has the same."""
    return f"{group}/{queue}/{offset}"


def dead_letter_properties(
    queue: MessageQueue,
    offset: int,
    *,
    message_id: str,
    reconsume_times: int,
    error: str,
    properties: Mapping[str, str],
    room: int = MAX_PROPERTIES_BYTES - _SPARE_BYTES,
) -> dict[str, str]:
    """Return a dead letter's properties: the message's own ``properties`` and its origin, under RocketMQ's names where they exist.

    ``room`` is their maximum size in bytes: less than the default if the message has keys or tags. The error is cut first, then
    the message's own properties that do not fit are left out. A message that was a dead letter before keeps its first message
    id, as in Java.
    """
    origin = {
        REAL_TOPIC: queue.topic,
        REAL_QUEUE: str(queue.queue_id),
        ORIGIN_MESSAGE_ID: properties.get(ORIGIN_MESSAGE_ID) or message_id,
        RECONSUME_TIME: str(reconsume_times),
        ORIGIN_BROKER: queue.broker_name,
        ORIGIN_OFFSET: str(offset),
        ERROR: "",
    }
    # RocketMQ writes a property as name, value and two separators.
    room -= sum(len(f"{name}{value}".encode()) + 2 for name, value in origin.items())
    result = {}
    for name, value in properties.items():
        size = len(f"{name}{value}".encode()) + 2
        if name not in origin and size <= room:
            result[name] = value
            room -= size
    return {**result, **origin, ERROR: clip(error, min(MAX_ERROR_BYTES, room))}
