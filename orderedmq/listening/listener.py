"""Contexts and answers of a user's listener, with RocketMQ's names, and the code that calls the listener. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from inspect import isawaitable, iscoroutine, iscoroutinefunction
from typing import Any, Final, NamedTuple, Protocol

from orderedmq.conditions import ListenerCondition, OptionCondition
from orderedmq.errors import ListenerError, OptionError
from orderedmq.model import MessageQueue

#: The ``ack_index`` of a new context, which means all messages of the batch.
ALL: Final = 2**31 - 1


class ConsumeOrderlyStatus(Enum):
    """A listener's answer to a batch of messages, with the names of RocketMQ's ConsumeOrderlyStatus.

    SUCCESS: the batch is accepted. Without ``auto_commit`` it is only taken, and waits for a commit. COMMIT: this batch and all batches
    taken before are accepted. ROLLBACK: the listener gets these batches again after the suspension, which does not count as a retry.
    COMMIT and ROLLBACK count as SUCCESS, with a warning, unless ``auto_commit`` is False. SUSPEND_CURRENT_QUEUE_A_MOMENT: the listener
    gets the messages again after the suspension, as after an exception, each of them alone. A message that has failed alone and has no
    retries left becomes a dead letter.
    """

    SUCCESS = "SUCCESS"
    ROLLBACK = "ROLLBACK"
    COMMIT = "COMMIT"
    SUSPEND_CURRENT_QUEUE_A_MOMENT = "SUSPEND_CURRENT_QUEUE_A_MOMENT"


class ConsumeConcurrentlyStatus(Enum):
    """A listener's answer to a batch of messages, with the names of RocketMQ's ConsumeConcurrentlyStatus.

    CONSUME_SUCCESS: the messages up to ``context.ack_index`` (by default all) are done. RECONSUME_LATER: the listener gets all messages
    again later, as after an exception.
    """

    CONSUME_SUCCESS = "CONSUME_SUCCESS"
    RECONSUME_LATER = "RECONSUME_LATER"


@dataclass(slots=True)
class ConsumeOrderlyContext:
    """The context of one call, like RocketMQ's class of this name.

    ``message_queue`` has the fields topic, broker_name and queue_id. The listener may set ``auto_commit`` to False to commit several calls
    together. It may set ``suspend_current_queue_time_millis``, the milliseconds of suspension after this call (limited to 10 to 30,000).
    The default -1 means the value in the settings.

    Of a batch, the listener may set ``ack_index`` to the index of the last message that it has processed, for example after each message.
    If the call then fails or the batch has further messages, the messages up to this index are accepted and the next one has failed. -1:
    the first one has failed. RocketMQ's class has no such field.
    """

    message_queue: MessageQueue
    auto_commit: bool = True
    suspend_current_queue_time_millis: int = -1
    ack_index: int = ALL


@dataclass(slots=True)
class ConsumeConcurrentlyContext:
    """The context of one call, like RocketMQ's class of this name.

    ``message_queue`` has the fields topic, broker_name and queue_id. The listener may set ``ack_index`` to the index of the last message
    that succeeded, or to -1 if none did. This counts only with CONSUME_SUCCESS. For the other messages, it may set
    ``delay_level_when_next_consume``: 0 waits longer with each retry (10 s, 30 s, 1 min … 2 h), 1 to 18 is a delay level of RocketMQ
    (1 s … 2 h), and -1 makes the messages dead letters immediately.
    """

    message_queue: MessageQueue
    delay_level_when_next_consume: int = 0
    ack_index: int = ALL


class ConsumeMessageHook(Protocol):
    """A hook that is called before and after every call of the listener.

    ``context`` and ``status`` are those of the listener: ConsumeOrderlyContext and ConsumeOrderlyStatus, or
    ConsumeConcurrentlyContext and ConsumeConcurrentlyStatus. After the call, exactly one of ``status`` and ``error`` is None. The methods
    are plain functions, even if the listener is async.
    """

    def consume_message_before(self, messages: Sequence[Any], context: Any) -> None: ...

    def consume_message_after(self, messages: Sequence[Any], context: Any, status: Any, error: str | None) -> None: ...


#: (messages, context) → status, or a coroutine that returns the status.
OrderlyListener = Callable[
    [Sequence[Any], ConsumeOrderlyContext], ConsumeOrderlyStatus | Awaitable[ConsumeOrderlyStatus | None] | None
]
ConcurrentListener = Callable[
    [Sequence[Any], ConsumeConcurrentlyContext], ConsumeConcurrentlyStatus | Awaitable[ConsumeConcurrentlyStatus | None] | None
]


class Answer(NamedTuple):
    """The result of a call.

    ``status``: None if the listener raised an exception or returned no status; ``error`` then says what happened. ``context``: the
    context with the listener's changes.
    """

    status: Any
    error: str | None
    context: Any


def is_async(function: Any) -> bool:
    """Whether calling this function or object, or an instance of this class, returns a coroutine."""
    while isinstance(function, partial):
        function = function.func
    called = function if isinstance(function, type) else type(function)
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(called, "__call__", None))  # noqa: B004


def name_of(function: Any) -> str:
    """Return the name of a listener or hook for messages to the user. For a wrapper, return the name of the function that it calls."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def check_listener(listener: Any) -> None:
    """Raise OptionError INVALID if neither the listener nor, if it is a class, an object of it can be called."""
    # Each class can be called itself, which makes an object.
    called = getattr(listener, "__mro__", (object,))[:-1] if isinstance(listener, type) else type(listener).__mro__
    if not any("__call__" in kind.__dict__ for kind in called):
        raise OptionError(
            OptionCondition.INVALID,
            f"the listener {name_of(listener)} cannot be called with messages and a context. Give a function, or a class with the method "
            "__call__",
        )


def check_hooks(hooks: Sequence[ConsumeMessageHook]) -> None:
    """Raise OptionError INVALID if a hook is async."""
    for hook in hooks:
        for method in (hook.consume_message_before, hook.consume_message_after):
            if is_async(method):
                raise OptionError(
                    OptionCondition.INVALID,
                    f"the hook {name_of(method)} is async, but hooks are not awaited. Make it a plain method (def), which may start a task "
                    "with asyncio.create_task if the listener is async",
                )


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls a listener and its hooks. The listener should return one of ``statuses``.

    An exception of the listener becomes the error of the answer. An exception of a hook only causes a warning, as in Java.
    """

    listener: Callable[[Sequence[Any], Any], Any]
    hooks: Sequence[ConsumeMessageHook]
    warn: Callable[[str], None]
    statuses: type[Enum]

    def call(self, messages: Sequence[Any], context: Any) -> Answer:
        """Call the listener. Raises ListenerError NOT_AWAITED if it returns a coroutine or another object that has to be awaited."""
        self._before(messages, context)
        returned, raised = None, None
        try:
            returned = self.listener(messages, context)
        except Exception as error:
            raised = error
        return self._answer(messages, context, returned, raised)

    async def call_async(self, messages: Sequence[Any], context: Any) -> Answer:
        """Call an async listener and await it. The hooks are called before the call and after the await."""
        self._before(messages, context)
        returned, raised = None, None
        try:
            returned = await self.listener(messages, context)
        except Exception as error:
            raised = error
        return self._answer(messages, context, returned, raised)

    def _before(self, messages: Sequence[Any], context: Any) -> None:
        for hook in self.hooks:
            self._tell(hook.consume_message_before, messages, context)

    def _answer(self, messages: Sequence[Any], context: Any, returned: object, raised: Exception | None) -> Answer:
        status, error = None, None
        if isinstance(returned, self.statuses):
            status = returned
        elif raised is not None:
            error = _text_of(raised)
        elif isawaitable(returned):
            raise self._not_awaited(returned)
        else:
            error = f"the listener returned {_shown(repr, returned)}, not a {self.statuses.__name__}"
        if error is not None:
            # A Python text may contain lone surrogates, but an Arrow column must not.
            error = error.encode("utf-8", "replace").decode()
        for hook in self.hooks:
            self._tell(hook.consume_message_after, messages, context, status, error)
        return Answer(status, error, context)

    def _not_awaited(self, returned: object) -> ListenerError:
        if iscoroutine(returned):
            # Otherwise Python warns that the coroutine was never awaited.
            returned.close()
        return ListenerError(
            ListenerCondition.NOT_AWAITED,
            f"the listener {name_of(self.listener)} returned a {type(returned).__name__}, which nobody awaits, so its work was not done. "
            "Define the listener itself with async def, or a class with async def __call__, and await such objects in it",
        )

    def _tell(self, hook: Callable[..., None], messages: Sequence[Any], context: Any, *what: object) -> None:
        try:
            hook(messages, context, *what)
        except Exception as raised:
            self.warn(f"a hook of the listener of queue {context.message_queue} raised {_text_of(raised)}")


def _text_of(raised: Exception) -> str:
    return f"{type(raised).__name__}: {_shown(str, raised)}"


def _shown(text: Callable[[object], str], what: object) -> str:
    """Return ``text(what)``, which runs the user's code, or another text if that code fails."""
    try:
        return text(what)
    except Exception as error:
        return f"<{type(what).__name__}, whose text raises {type(error).__name__}>"


def check_bounds(settings: object, bounds: Mapping[str, tuple[int, int]]) -> None:
    """Raise OptionError INVALID if one of these attributes is not a whole number within its bounds."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        if type(value) is not int or not low <= value <= high:
            raise OptionError(OptionCondition.INVALID, f"{name} is {value!r}, but must be a whole number from {low} to {high}")


def suspend_seconds(millis: int, default: int) -> float:
    """Return the seconds for which a queue is suspended: ``millis``, or ``default`` if it is -1, limited to 10 ms to 30 s."""
    return min(max(default if millis == -1 else millis, 10), 30_000) / 1000
