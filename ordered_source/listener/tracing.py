"""What tells others of a listener's calls: RocketMQ's message trace, and OpenTelemetry spans in the messages' trace context."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame

from ordered_source.listener import calls
from ordered_source.read_context import TaskLock
from orderedmq.conditions import OptionCondition, SchemaCondition
from orderedmq.core.message_trace import TRACE_TOPIC, Ended, ReturnType, TracedCall, TracedMessage, region_of
from orderedmq.errors import OptionError, SchemaError
from orderedmq.model import check_topic
from orderedmq.trace_context import processing, require

#: (messages, context) → status.
Called = Callable[[Sequence[Any], Any], Any]
#: The answers that accept a batch, by name: Java's ConsumeOrderlyStatus, and ours and Java's ConsumeConcurrentlyStatus.
_SUCCESS: Final = frozenset(("SUCCESS", "COMMIT", "CONSUME_SUCCESS"))


class Tracing(NamedTuple):
    """What a user wants of it. ``topic``: of message traces; None: none. ``context``: spans in the messages' trace context."""

    topic: str | None = None
    context: bool = False

    @classmethod
    def parse(
        cls, df: DataFrame, listener: str, enable_msg_trace: bool, customized_trace_topic: str | None, trace_context: bool
    ) -> Tracing:
        """Check the parameters of a listener. Raises OptionError, SchemaError MISSING_COLUMN, TopicError BAD_NAME."""
        if customized_trace_topic is not None:
            if not enable_msg_trace:
                raise OptionError(
                    OptionCondition.CONFLICT,
                    "customized_trace_topic needs enable_msg_trace=True; set it, or leave out the topic",
                )
            check_topic(customized_trace_topic, writing=True)
        if enable_msg_trace:
            _require_column(df, "message_id", f"{listener}(enable_msg_trace=True)", "do not drop it")
        if trace_context:
            require(f"{listener}(trace_context=True)")
            _require_column(df, "properties", f"{listener}(trace_context=True)", "read with includeProperties=true")
        return cls((customized_trace_topic or TRACE_TOPIC) if enable_msg_trace else None, trace_context)

    def listener(self, listener: Any, lock: TaskLock) -> Called:
        """Return the function that calls a listener, or the current thread's object of a class, in a task; see `calls.kept`."""
        called: Called = calls.kept(listener, _in_spans(lock.token.group) if self.context else None)
        if self.topic is None:
            return called
        record = lock.broker.traced(self.topic, check=False).trace
        assert record is not None, "a traced connection records calls"
        return _recorded(called, lock.token.group, record)


NO_TRACING: Final = Tracing()


def _require_column(df: DataFrame, column: str, what: str, remedy: str) -> None:
    if column not in df.columns:
        raise SchemaError(
            SchemaCondition.MISSING_COLUMN,
            f"{what} needs the column {column}, the DataFrame has {', '.join(df.columns)}: {remedy}",
        )


def _in_spans(group: str) -> Callable[[Called], Called]:
    """Return what makes a listener run in a span for each call."""
    require("trace_context=True of a listener")

    def made(listener: Called) -> Called:
        def call(messages: Sequence[Any], context: Any) -> Any:
            with processing(context.message_queue, group, messages) as span:
                answer = listener(messages, context)
                span.set_attribute("orderedmq.listener.status", getattr(answer, "name", "None"))
                return answer

        return call

    return made


def _recorded(listener: Called, group: str, record: Callable[[TracedCall], None]) -> Called:
    """Return a listener whose calls are recorded: before, and with their end."""

    def call(messages: Sequence[Any], context: Any) -> Any:
        began = _before(messages, group)
        if began is None:
            return listener(messages, context)
        record(began)
        start, how = time.monotonic(), ReturnType.EXCEPTION
        try:
            answer = listener(messages, context)
            name = getattr(answer, "name", None)
            how = ReturnType.RETURNNULL if answer is None else ReturnType.SUCCESS if name in _SUCCESS else ReturnType.FAILED
            return answer
        finally:
            cost = int((time.monotonic() - start) * 1000) // len(messages)
            record(began._replace(ended=Ended(cost, how)))

    return call


def _before(messages: Sequence[Any], group: str) -> TracedCall | None:
    """Return the call as it begins; None if the brokers want no trace of any of its messages."""
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
