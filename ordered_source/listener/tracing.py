"""Records a listener's calls in RocketMQ's message trace, and in OpenTelemetry spans within the trace context of the messages."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

from pyspark.sql import DataFrame

from ordered_source.columns import TaskLock
from ordered_source.listener import calls
from ordered_source.listener.task_rows import require_columns
from orderedmq.broker import Broker
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.listening.listener import is_async
from orderedmq.model import check_topic
from orderedmq.rows.message_trace import TRACE_TOPIC, Ended, ReturnType, TracedCall, TracedMessage, region_of
from orderedmq.trace_context import processing, require

#: (messages, context) → status, or for an async listener a coroutine that returns the status.
Called = Callable[[Sequence[Any], Any], Any]
#: Receives the answer of a call.
Answered = Callable[[Any], None]
#: The names of the answers that accept a batch, in ConsumeOrderlyStatus and ConsumeConcurrentlyStatus.
_SUCCESS: Final = frozenset(("SUCCESS", "COMMIT", "CONSUME_SUCCESS"))


@dataclass(frozen=True)
class Tracing:
    """Tracing of a listener's calls, which is off by default.

    With ``enable_msg_trace=True`` and RocketMQ as the source, each call is recorded in RocketMQ's message trace like a Java consumer's
    call, in the topic ``customized_trace_topic`` (default: RMQ_SYS_TRACE_TOPIC). The DataFrame then needs the column message_id. With
    ``trace_context=True``, each call runs in an OpenTelemetry span in the trace context of its messages (`orderedmq.trace_context`). This
    needs ``includeProperties=true`` and the package opentelemetry-api. Raises OptionError CONFLICT for a trace topic without
    ``enable_msg_trace``, and TopicError BAD_NAME.
    """

    enable_msg_trace: bool = False
    customized_trace_topic: str | None = None
    trace_context: bool = False

    def __post_init__(self) -> None:
        if self.customized_trace_topic is not None:
            if not self.enable_msg_trace:
                raise OptionError(
                    OptionCondition.CONFLICT,
                    "customized_trace_topic needs enable_msg_trace=True. Set it, or leave out the topic",
                )
            check_topic(self.customized_trace_topic, writing=True)

    def check(self, df: DataFrame) -> None:
        """Check the requirements of tracing. Raises OptionError MISSING without opentelemetry-api, and SchemaError MISSING_COLUMN."""
        if self.enable_msg_trace:
            require_columns(df, ("message_id",), "Tracing(enable_msg_trace=True)", "Do not drop this column")
        if self.trace_context:
            require("Tracing(trace_context=True)")
            require_columns(df, ("properties",), "Tracing(trace_context=True)", "Read with includeProperties=true")

    def broker(self, lock: TaskLock) -> Broker:
        """Return the task's connection to the broker. With ``enable_msg_trace``, it traces the messages that it sends."""
        if not self.enable_msg_trace:
            return lock.broker
        return lock.broker.traced(self.customized_trace_topic or TRACE_TOPIC, check=False)

    def listener(self, listener: Any, lock: TaskLock) -> Called:
        """Return the function by which a task calls a listener or, for a class, the current thread's object. See `calls.kept`."""
        called: Called = calls.kept(listener, _in_spans(lock.token.group) if self.trace_context else None)
        if not self.enable_msg_trace:
            return called
        record = self.broker(lock).trace
        assert record is not None, "a traced connection records calls"
        return _during(called, lambda messages, _: _recording(messages, lock.token.group, record))


NO_TRACING: Final = Tracing()


def _during(listener: Called, around: Callable[[Sequence[Any], Any], AbstractContextManager[Answered]]) -> Called:
    """Return a listener whose calls run inside ``around(messages, context)``. For an async listener, this includes the await."""
    if is_async(listener):

        @wraps(listener)
        async def call_async(messages: Sequence[Any], context: Any) -> Any:
            with around(messages, context) as answered:
                answer = await listener(messages, context)
                answered(answer)
                return answer

        return call_async

    @wraps(listener)
    def call(messages: Sequence[Any], context: Any) -> Any:
        with around(messages, context) as answered:
            answer = listener(messages, context)
            answered(answer)
            return answer

    return call


def _in_spans(group: str) -> Callable[[Called], Called]:
    """Return a decorator that runs each call of a listener in a span."""
    require("Tracing(trace_context=True)")

    @contextmanager
    def in_span(messages: Sequence[Any], context: Any) -> Iterator[Answered]:
        with processing(context.message_queue, group, messages) as span:
            yield lambda answer: span.set_attribute("orderedmq.listener.status", getattr(answer, "name", "None"))

    return lambda listener: _during(listener, in_span)


@contextmanager
def _recording(messages: Sequence[Any], group: str, record: Callable[[TracedCall], None]) -> Iterator[Answered]:
    """Record a call twice: before it starts, and with its result after it has ended."""
    began = _before(messages, group)
    if began is None:
        yield lambda _: None
        return
    record(began)
    start, how = time.monotonic(), ReturnType.EXCEPTION

    def answered(answer: Any) -> None:
        nonlocal how
        name = getattr(answer, "name", None)
        how = ReturnType.RETURNNULL if answer is None else ReturnType.SUCCESS if name in _SUCCESS else ReturnType.FAILED

    try:
        yield answered
    finally:
        cost = int((time.monotonic() - start) * 1000) // len(messages)
        record(began._replace(ended=Ended(cost, how)))


def _before(messages: Sequence[Any], group: str) -> TracedCall | None:
    """Return the record of a call that begins, or None if tracing is off at the brokers of all its messages."""
    traced, region = [], None
    for message in messages:
        where = region_of(dict(getattr(message, "properties", None) or ()))
        if where is not None:
            region = where
            traced.append(
                TracedMessage(
                    message.message_id or "null", getattr(message, "keys", None), getattr(message, "reconsume_times", 0) or 0
                )
            )
    if region is None:
        return None
    return TracedCall(group, region, uuid.uuid4().hex.upper(), time.time_ns() // 1_000_000, tuple(traced))
