"""OpenTelemetry spans of listeners and producers, and the context that messages carry from one to the other."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pyspark.sql import DataFrame

import orderedmq
from ordered_source import ConsumeOrderlyStatus, consume_concurrently, consume_orderly
from ordered_source.listener.calls import Cancelled, function_of
from orderedmq import trace_context
from orderedmq.broker import Broker
from orderedmq.errors import SchemaError
from orderedmq.listening.key_engine import OrderPerKey
from orderedmq.model import MessageQueue
from orderedmq.trace_context import in_spans
from tests.micro_batches import Frame

QUEUE = MessageQueue("orders", "broker-a", 3)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
OTHER = "00-1af7651916cd43dd8448eb211c80319d-c7ad6b7169203332-01"
SUCCESS = ConsumeOrderlyStatus.SUCCESS
CONTEXT = SimpleNamespace(message_queue=QUEUE)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("orderedmq.trace_context._tracer", lambda: provider.get_tracer("orderedmq"))
    return exporter


def message(number: int, traceparent: str | None = None, **more: Any) -> Any:
    properties = (
        [("a", "b")] if traceparent is None else [("traceparent", traceparent), ("tracestate", "x=1"), ("baggage", "user=me")]
    )
    fields = {"message_id": f"ID{number}", "keys": None, "reconsume_times": 0, "properties": properties}
    return SimpleNamespace(topic="orders", tags="T", **{**fields, **more})


def called(listener: Any, *messages: Any) -> Any:
    return function_of(listener, in_spans("billing"))(messages, CONTEXT)


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    [span] = spans.get_finished_spans()
    return span


def parent(span: ReadableSpan) -> str:
    """The traceparent property of a message that was sent within a span."""
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def linked(span: ReadableSpan) -> list[str]:
    return [f"{link.context.trace_id:032x}-{link.context.span_id:016x}" for link in span.links]


@pytest.mark.holds("trace context")
def test_a_call_with_one_message_is_a_child_of_its_context_and_linked_to_it(spans: InMemorySpanExporter) -> None:
    inside: list[dict[str, str]] = []

    def listener(messages: Sequence[Any], context: Any) -> ConsumeOrderlyStatus:
        inside.append(trace_context.inject({"mine": "1"}))
        return SUCCESS

    assert called(listener, message(1, PARENT, keys="k1 k2")) is SUCCESS
    span = only(spans)
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert linked(span) == [f"{TRACE}-{SPAN}"]
    assert (span.name, span.kind, span.status.status_code) == ("process orders", SpanKind.CONSUMER, StatusCode.UNSET)
    assert dict(span.attributes or {}) == {
        "messaging.system": "rocketmq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "broker-a/3",
        "messaging.consumer.group.name": "billing",
        "messaging.message.id": "ID1",
        "messaging.rocketmq.message.tag": "T",
        "messaging.rocketmq.message.keys": ("k1", "k2"),
        "orderedmq.listener.status": "SUCCESS",
    }
    # The messages that the listener sends are children of this span. Baggage is also passed on.
    assert inside == [{"mine": "1", "traceparent": parent(span), "tracestate": "x=1", "baggage": "user=me"}]


def test_a_call_with_several_messages_is_linked_to_each_and_has_no_parent(spans: InMemorySpanExporter) -> None:
    assert called(lambda messages, context: SUCCESS, message(1, PARENT), message(2), message(3, OTHER)) is SUCCESS
    span = only(spans)
    assert span.parent is None
    assert linked(span) == [f"{TRACE}-{SPAN}", OTHER[3:-3]]
    attributes = dict(span.attributes or {})
    assert attributes["messaging.batch.message_count"] == 3
    assert "messaging.message.id" not in attributes


def test_an_exception_of_the_listener_is_in_the_span_and_goes_on(spans: InMemorySpanExporter) -> None:
    def listener(messages: Sequence[Any], context: Any) -> None:
        raise ValueError("no such order")

    with pytest.raises(ValueError, match="no such order"):
        called(listener, message(1, PARENT))
    span = only(spans)
    assert span.status.status_code is StatusCode.ERROR
    assert [event.name for event in span.events] == ["exception"]
    assert dict(span.attributes or {})["error.type"] == "ValueError"
    assert not trace.get_current_span().get_span_context().is_valid


def test_calls_that_await_at_once_are_each_in_their_own_span_until_they_were_awaited(spans: InMemorySpanExporter) -> None:
    inside: list[tuple[str, str]] = []

    class Listener:
        async def __call__(self, messages: Sequence[Any], context: Any) -> Any:
            before = trace_context.inject()["traceparent"]
            await asyncio.sleep(0.03 if messages[0].message_id == "ID1" else 0.01)
            if messages[0].message_id == "ID3":
                await asyncio.Event().wait()
            inside.append((before, trace_context.inject()["traceparent"]))
            return SUCCESS

    async def run() -> list[Any]:
        call = function_of(Listener, in_spans("billing"))
        tasks = [
            asyncio.create_task(call([message(number, text)], CONTEXT)) for number, text in ((1, PARENT), (2, OTHER), (3, None))
        ]
        await asyncio.sleep(0.05)
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    *answers, cut_off = asyncio.run(run())
    assert answers == [SUCCESS, SUCCESS]
    assert isinstance(cut_off, Cancelled)
    second, first, third = spans.get_finished_spans()
    assert inside == [(parent(second),) * 2, (parent(first),) * 2]
    assert (linked(first), linked(second)) == ([f"{TRACE}-{SPAN}"], [OTHER[3:-3]])
    assert dict(first.attributes or {})["orderedmq.listener.status"] == "SUCCESS"
    assert dict(third.attributes or {})["error.type"] == "Cancelled"
    assert all((span.end_time or 0) - (span.start_time or 0) > 9e6 for span in (first, second, third))


# -- producers


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[tuple[orderedmq.Producer, Broker]]:
    with orderedmq.connect(tmp_path) as broker:
        broker.admin.create_topic("orders", 1)
        yield orderedmq.Producer(broker.log, "orders", trace_context=True), broker


def carried(broker: Broker) -> list[Mapping[str, str]]:
    pulled = broker.log.pull(broker.log.queues("orders")[0], 0, 100, 1 << 20, ("properties",))
    return [dict(pairs) for pairs in pulled.column(0).to_pylist()]


@pytest.mark.holds("trace context")
def test_what_a_producer_sends_carries_the_context_of_its_span(
    spans: InMemorySpanExporter, producer: tuple[orderedmq.Producer, Broker]
) -> None:
    producer[0].send(pa.record_batch({"body": ["a", "b"]}))
    span = only(spans)
    context = {"traceparent": parent(span)}
    assert carried(producer[1]) == [context, context]
    assert (span.name, span.kind, span.links) == ("send orders", SpanKind.PRODUCER, ())
    assert dict(span.attributes or {}) == {
        "messaging.system": "orderedmq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.batch.message_count": 2,
    }


def test_a_message_that_has_a_context_keeps_it_and_is_linked(
    spans: InMemorySpanExporter, producer: tuple[orderedmq.Producer, Broker]
) -> None:
    given = pa.array([[("traceparent", OTHER), ("a", "1")], [("a", "2")], None], pa.map_(pa.string(), pa.string()))
    producer[0].send(pa.record_batch({"body": ["a", "b", "c"], "properties": given}))
    producer[0].send(pa.record_batch({"body": pa.array([], pa.string())}))
    span = only(spans)
    assert linked(span) == [OTHER[3:-3]]
    own = parent(span)
    assert carried(producer[1]) == [{"traceparent": OTHER, "a": "1"}, {"a": "2", "traceparent": own}, {"traceparent": own}]


def test_properties_of_another_type_are_refused_by_name(
    spans: InMemorySpanExporter, producer: tuple[orderedmq.Producer, Broker]
) -> None:
    with pytest.raises(SchemaError, match=r"WRONG_TYPE.*'properties'"):
        producer[0].send(pa.record_batch({"body": ["a"], "properties": ["a=1"]}))


# -- wrong requests

COLUMNS = ["topic", "broker_name", "queue_id", "queue_offset", "body", "lock_token", "sharding_key", "ticket"]


def frame(*more: str) -> DataFrame:
    return cast(
        DataFrame,
        SimpleNamespace(columns=[*COLUMNS, *more], mapInArrow=lambda run, schema: "planned", sparkSession=Frame.sparkSession),
    )


@pytest.mark.parametrize("consume", [consume_orderly, partial(consume_orderly, order=OrderPerKey()), consume_concurrently])
def test_what_a_trace_context_needs_is_checked_at_once(consume: Any) -> None:
    def planned(df: DataFrame) -> Any:
        return consume(df, lambda messages, context: None, trace_context=True)

    with pytest.raises(SchemaError, match=r"MISSING_COLUMN.*trace_context=True needs the columns properties"):
        planned(frame())
    assert planned(frame("properties")) == "planned"


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import pyarrow as pa
import orderedmq
from types import SimpleNamespace
from ordered_source import consume_orderly
from orderedmq import trace_context
with orderedmq.connect(sys.argv[1]) as broker:
    broker.admin.create_topic("orders", 1)
    orderedmq.Producer(broker.log, "orders").send(pa.record_batch({"body": ["a"]}))
    df = SimpleNamespace(columns=["topic", "broker_name", "queue_id", "queue_offset", "body", "lock_token", "properties"])
    for wanted in (
        lambda: orderedmq.Producer(broker.log, "orders", trace_context=True),
        lambda: consume_orderly(df, print, trace_context=True),
        lambda: trace_context.inject(),
        lambda: trace_context.extract({}),
    ):
        try:
            wanted()
        except orderedmq.OrderedMQError as error:
            print(error)
"""


def test_only_tracing_needs_the_package_opentelemetry(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path / "store")], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 4
    for line, what in zip(told, ("Producer(trace_context=True)", "listener with trace_context=True", "inject", "extract")):
        assert "ORDEREDMQ_OPTION.MISSING" in line
        assert what in line
        assert "pip install 'orderedmq[opentelemetry]'" in line
