"""Reads and writes W3C trace context in the properties of messages (``traceparent``, ``tracestate``, ``baggage``) by OpenTelemetry.

Needs the package opentelemetry-api (``pip install 'orderedmq[opentelemetry]'``), which is imported on first use. Unless you set up an
SDK, no spans are recorded, and the context of a message is passed on unchanged. OpenTelemetry's global propagator chooses the
properties, so you can change them with ``OTEL_PROPAGATORS``.

Spans follow OpenTelemetry's semantic conventions for messaging. Each call of a listener is a span ``process <topic>`` of kind CONSUMER
with a link to the context of each message. If the call has only one message, its context is also the parent of the span. Each send of a
producer is a span ``send <topic>`` of kind PRODUCER. A message that already has a context keeps it, and the span is linked to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from orderedmq.errors import missing_package
from orderedmq.listening.listener import is_async
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.schema import PROPERTIES_TYPE
from orderedmq.text import repaired

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, Tracer

__all__ = ["extract", "inject"]

#: The properties of a message, as a mapping, or as (name, value) pairs as in a listener's messages.
Properties = Mapping[str, str] | Sequence[tuple[str, str]]

#: The property that every message with a context has (W3C Trace Context).
TRACEPARENT: Final = "traceparent"
#: The attribute of a span with the listener's answer.
_STATUS: Final = "orderedmq.listener.status"


def require(wanted: str) -> None:
    """Check that opentelemetry-api is installed. ``wanted``: the feature that needs it, for the error. Raises OptionError MISSING."""
    try:
        import opentelemetry.propagate
        import opentelemetry.trace  # noqa: F401
    except ImportError as error:
        raise missing_package(wanted, "opentelemetry-api", "opentelemetry", "do without trace contexts") from error


def extract(properties: Properties | None) -> Context:
    """Return the OpenTelemetry context in a message's properties, or an empty context if they have none.

    Use it as the parent of a span, for example of one span per message of a batch: ``tracer.start_as_current_span(name,
    context=extract(message.properties))``. Raises OptionError MISSING if opentelemetry-api is not installed.
    """
    require("trace_context.extract")
    from opentelemetry.context import Context
    from opentelemetry.propagate import extract

    # Do not start from the current context, because a message without a context has no parent.
    return extract(dict(properties or ()), context=Context())


def inject(properties: Properties | None = None) -> dict[str, str]:
    """Return the properties with the current OpenTelemetry context added, for a message to be sent.

    Raises OptionError MISSING if opentelemetry-api is not installed.
    """
    require("trace_context.inject")
    from opentelemetry.propagate import inject

    carried = dict(properties or ())
    inject(carried)
    return carried


def in_spans(group: str) -> Callable[[Any], Any]:
    """Return a decorator that runs each call of a listener ``(messages, context) -> status`` in a span, which has the answer's name.

    For an async listener, the span includes the await. Raises OptionError MISSING if opentelemetry-api is not installed.
    """
    require("a listener with trace_context=True")

    def decorated(listener: Any) -> Any:
        if is_async(listener):

            @wraps(listener)
            async def call_async(messages: Sequence[Any], context: Any) -> Any:
                with _processing(context.message_queue, group, messages) as span:
                    answer = await listener(messages, context)
                    span.set_attribute(_STATUS, getattr(answer, "name", "None"))
                    return answer

            return call_async

        @wraps(listener)
        def call(messages: Sequence[Any], context: Any) -> Any:
            with _processing(context.message_queue, group, messages) as span:
                answer = listener(messages, context)
                span.set_attribute(_STATUS, getattr(answer, "name", "None"))
                return answer

        return call

    return decorated


@contextmanager
def _processing(queue: MessageQueue, group: str, messages: Sequence[Any]) -> Iterator[Span]:
    """Run the block, a call of a listener, in a span that records its exception. ``messages`` have at least the field ``properties``."""
    from opentelemetry.context import Context, attach, detach
    from opentelemetry.trace import SpanKind

    contexts = [extract(message.properties) for message in messages]
    first, alone = messages[0], len(messages) == 1
    topic = getattr(first, "topic", queue.topic)
    attributes: dict[str, Any] = {
        **_attributes(queue.broker_name, "process", topic),
        "messaging.consumer.group.name": group,
        "messaging.destination.partition.id": f"{queue.broker_name}/{queue.queue_id}",
    }
    if alone:
        for name, column in (("message.id", "message_id"), ("rocketmq.message.tag", "tags")):
            if value := getattr(first, column, None):
                attributes[f"messaging.{name}"] = value
        if keys := getattr(first, "keys", None):
            attributes["messaging.rocketmq.message.keys"] = keys.split()
    else:
        attributes["messaging.batch.message_count"] = len(messages)
    links = _links(contexts)
    # The whole context of the message becomes the current context, so that its baggage is also passed on.
    before = attach(contexts[0] if alone else Context())
    try:
        kind = SpanKind.CONSUMER
        with _tracer().start_as_current_span(f"process {topic}", kind=kind, attributes=attributes, links=links) as span:
            try:
                yield span
            except Exception as error:
                span.set_attribute("error.type", type(error).__qualname__)
                raise
    finally:
        detach(before)


@contextmanager
def sending(broker_name: str, topic: str, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Run the block, which sends the yielded rows, in a span. Rows whose ``properties`` have no context get the context of the span."""
    from opentelemetry.trace import SpanKind

    index = rows.schema.get_field_index("properties")
    properties: list[Any] = [None] * rows.num_rows
    if index >= 0:
        try:
            properties = repaired(rows.column(index).cast(PROPERTIES_TYPE))[0].to_pylist()
        except pa.ArrowException:
            # `Log.append` will refuse the column with an error that names it.
            yield rows
            return
    carried = [dict(pairs or ()) for pairs in properties]
    attributes: dict[str, Any] = _attributes(broker_name, "send", topic)
    if len(carried) != 1:
        attributes["messaging.batch.message_count"] = len(carried)
    links = _links([extract(pairs) for pairs in carried if TRACEPARENT in pairs])
    with _tracer().start_as_current_span(f"send {topic}", kind=SpanKind.PRODUCER, attributes=attributes, links=links):
        context = inject()
        # A message keeps its own context, because that is the context in which it was made.
        column = pa.array(
            [list((pairs if TRACEPARENT in pairs else {**pairs, **context}).items()) for pairs in carried], PROPERTIES_TYPE
        )
        yield rows.set_column(index, "properties", column) if index >= 0 else rows.append_column("properties", column)


def _tracer() -> Tracer:
    from opentelemetry.trace import get_tracer

    return get_tracer("orderedmq")


def _attributes(broker_name: str, operation: str, topic: str) -> dict[str, Any]:
    return {
        "messaging.system": "orderedmq" if broker_name == EMBEDDED_BROKER else "rocketmq",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }


def _links(contexts: Sequence[Context]) -> list[Link]:
    """Return links to the contexts that have a span."""
    from opentelemetry.trace import Link, get_current_span

    spans = [get_current_span(context).get_span_context() for context in contexts]
    return [Link(span) for span in spans if span.is_valid]


def __dir__() -> list[str]:
    """Return the public names, for Tab."""
    return __all__
