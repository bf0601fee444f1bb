"""W3C trace context in messages' properties, by OpenTelemetry: ``traceparent``, ``tracestate``, ``baggage``.

Needs the package opentelemetry-api (``pip install 'orderedmq[opentelemetry]'``), which is imported on first use. Without an SDK that
you set up, spans are not recorded, and the context of a message is passed on as it is. The properties are those of OpenTelemetry's
global propagator, so ``OTEL_PROPAGATORS`` may choose others.

Spans follow OpenTelemetry's semantic conventions for messaging. A call of a listener is a span ``process <topic>`` of kind CONSUMER
with a link to the context of each message; the context of a single message is its parent, too. A span ``send <topic>`` of kind
PRODUCER covers what a producer sends; a message that has a context keeps it, and is linked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import EMBEDDED_BROKER, PROPERTIES_TYPE, MessageQueue
from orderedmq.text import valid

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, Tracer

#: A message's properties, as a mapping or as the pairs that a listener's message has.
Properties = Mapping[str, str] | Sequence[tuple[str, str]]

#: The property without which a message has no context (W3C Trace Context).
TRACEPARENT: Final = "traceparent"


def require(wanted: str) -> None:
    """Check that opentelemetry-api is installed. ``wanted``: what needs it, for the error. Raises OptionError MISSING."""
    try:
        import opentelemetry.propagate
        import opentelemetry.trace  # noqa: F401
    except ImportError as error:
        raise OptionError(
            OptionCondition.MISSING,
            f"{wanted} needs the package opentelemetry-api, here and on each executor: pip install 'orderedmq[opentelemetry]', or leave it out",
        ) from error


def extract(properties: Properties | None) -> Context:
    """Return the OpenTelemetry context that a message's properties carry; an empty one if they carry none.

    Start a span of your own under it, for example one per message of a batch: ``tracer.start_as_current_span(name,
    context=extract(message.properties))``. Raises OptionError MISSING without the package.
    """
    require("trace_context.extract")
    from opentelemetry.context import Context
    from opentelemetry.propagate import extract

    # Not the current context: a message without one has no parent.
    return extract(dict(properties or ()), context=Context())


def inject(properties: Properties | None = None) -> dict[str, str]:
    """Return properties with the current OpenTelemetry context, for a message to be sent.

    Raises OptionError MISSING without the package.
    """
    require("trace_context.inject")
    from opentelemetry.propagate import inject

    carried = dict(properties or ())
    inject(carried)
    return carried


@contextmanager
def processing(queue: MessageQueue, group: str, messages: Sequence[Any]) -> Iterator[Span]:
    """Run a call of a listener in its span. ``messages`` have ``properties`` and perhaps other columns. An exception is recorded."""
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
    # The message's whole context becomes the current one: its baggage goes on, too.
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
    """Run a send in its span. Yields the rows; those whose ``properties`` carry no context get that of the span."""
    from opentelemetry.trace import SpanKind

    index = rows.schema.get_field_index("properties")
    given: list[Any] = [None] * rows.num_rows
    if index >= 0:
        try:
            given = valid(rows.column(index).cast(PROPERTIES_TYPE))[0].to_pylist()
        except pa.ArrowException:
            # `Log.append` refuses them by name.
            yield rows
            return
    carried = [dict(one or ()) for one in given]
    attributes: dict[str, Any] = _attributes(broker_name, "send", topic)
    if len(carried) != 1:
        attributes["messaging.batch.message_count"] = len(carried)
    links = _links([extract(one) for one in carried if TRACEPARENT in one])
    with _tracer().start_as_current_span(f"send {topic}", kind=SpanKind.PRODUCER, attributes=attributes, links=links):
        context = inject()
        # Their own context first: it is the one in which they were made.
        column = pa.array(
            [list((one if TRACEPARENT in one else {**one, **context}).items()) for one in carried], PROPERTIES_TYPE
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
    """Return a link to each of the contexts that has a span."""
    from opentelemetry.trace import Link, get_current_span

    spans = [get_current_span(context).get_span_context() for context in contexts]
    return [Link(span) for span in spans if span.is_valid]
