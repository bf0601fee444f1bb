"""What a user's listener is given and answers, with RocketMQ's names, and the call itself. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import MessageQueue

#: ``ack_index`` of a new context: all messages of the batch.
ALL: Final = 2**31 - 1


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


class ConsumeConcurrentlyStatus(Enum):
    """A listener's answer to a batch of messages, with the names of RocketMQ's ConsumeConcurrentlyStatus.

    CONSUME_SUCCESS: the messages up to ``context.ack_index`` are done, by default all. RECONSUME_LATER: all come again later, as
    after an exception.
    """

    CONSUME_SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


@dataclass(slots=True)
class ConsumeOrderlyContext:
    """One call's context, as RocketMQ's class of this name.

    ``message_queue`` has the fields topic, broker_name and queue_id. The listener may set ``auto_commit`` to False, to commit
    several calls at once, and ``suspend_current_queue_time_millis`` to the suspension after this call in milliseconds (cut to
    10 to 30,000; -1: as in the settings).
    """

    message_queue: MessageQueue
    auto_commit: bool = True
    suspend_current_queue_time_millis: int = -1


@dataclass(slots=True)
class ConsumeConcurrentlyContext:
    """One call's context, as RocketMQ's class of this name.

    ``message_queue`` has the fields topic, broker_name and queue_id. The listener may set ``ack_index`` to the index of the last
    message that succeeded (-1: none; it counts with CONSUME_SUCCESS only), and ``delay_level_when_next_consume`` for those that
    did not: 0 waits longer with each retry (10 s, 30 s, 1 min … 2 h), 1 to 18 is that delay level of RocketMQ (1 s … 2 h), and
    -1 makes dead letters of them at once.
    """

    message_queue: MessageQueue
    delay_level_when_next_consume: int = 0
    ack_index: int = ALL


class ConsumeMessageHook(Protocol):
    """Called before and after every call of the listener. After it, exactly one of ``status`` and ``error`` is None.

    ``context`` and ``status`` are those of the listener: ConsumeOrderlyContext and ConsumeOrderlyStatus, or
    ConsumeConcurrentlyContext and ConsumeConcurrentlyStatus.
    """

    def consume_message_before(self, messages: Sequence[Any], context: Any) -> None: ...

    def consume_message_after(self, messages: Sequence[Any], context: Any, status: Any, error: str | None) -> None: ...


#: (messages, context) → status.
OrderlyListener = Callable[[Sequence[Any], ConsumeOrderlyContext], ConsumeOrderlyStatus | None]
ConcurrentListener = Callable[[Sequence[Any], ConsumeConcurrentlyContext], ConsumeConcurrentlyStatus | None]


class Answer(NamedTuple):
    """What came of a call. ``status``: None if the listener raised an exception or returned anything else; ``error`` says what then.

    ``context``: as the listener left it.
    """

    status: Any
    error: str | None
    context: Any


def call(
    listener: Callable[[Sequence[Any], Any], object],
    messages: Sequence[Any],
    context: Any,
    hooks: Sequence[ConsumeMessageHook],
    warn: Callable[[str], None],
    statuses: type[Enum],
) -> Answer:
    """Call the listener and its hooks. Its answer should be one of ``statuses``.

    An exception of the listener is an error of the answer. One of a hook gives only a warning, as in Java.
    """

    def tell(hook: Callable[..., None], *what: object) -> None:
        try:
            hook(messages, context, *what)
        except Exception as raised:
            warn(f"a hook of the listener of queue {context.message_queue} raised {type(raised).__name__}: {raised}")

    for hook in hooks:
        tell(hook.consume_message_before)
    status, error = None, None
    try:
        returned = listener(messages, context)
        if isinstance(returned, statuses):
            status = returned
        else:
            error = f"the listener returned {returned!r}, not a {statuses.__name__}"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    if error is not None:
        # A Python text may have lone surrogates, an Arrow column may not.
        error = error.encode("utf-8", "replace").decode()
    for hook in hooks:
        tell(hook.consume_message_after, status, error)
    return Answer(status, error, context)


def check_bounds(settings: object, bounds: Mapping[str, tuple[int, int]]) -> None:
    """Check that these attributes are whole numbers within their bounds. Raises OptionError INVALID."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        if type(value) is not int or not low <= value <= high:
            raise OptionError(OptionCondition.INVALID, f"{name} is {value!r}: give a whole number from {low} to {high}")


def suspend_seconds(millis: int, default: int) -> float:
    """Return the seconds for which a queue is suspended: ``millis``, or ``default`` for -1, between 10 ms and 30 s."""
    return min(max(default if millis == -1 else millis, 10), 30_000) / 1000
