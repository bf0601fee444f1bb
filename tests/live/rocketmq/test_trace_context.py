"""One trace from a Java producer through a Spark query to a Java consumer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

import orderedmq
from ordered_source import ConsumeOrderlyContext, ConsumeOrderlyStatus, consume_orderly
from tests.live.rocketmq.peers import Peers
from tests.live.rocketmq.test_spark import Rig, rig
from tests.waits import until

__all__ = ["rig"]

pytestmark = pytest.mark.spark

TRACES = {f"{number}": (f"{number + 1:032x}", f"{number + 17:016x}") for number in range(3)}


def listener(address: str, topic: str, spans: str) -> type:
    """Return a listener class as a user would write it. It writes each span to a file as a line of JSON."""

    class Listener:
        def __init__(self) -> None:
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

            out = open(spans, "a", buffering=1)  # noqa: SIM115 (it stays open)
            # Another test may have set a tracer provider in this worker.
            provider = trace.get_tracer_provider()
            if not isinstance(provider, TracerProvider):
                provider = TracerProvider()
                trace.set_tracer_provider(provider)
            exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")
            provider.add_span_processor(SimpleSpanProcessor(exporter))
            self.tracer = trace.get_tracer("billing")
            self.producer = orderedmq.Producer(orderedmq.connect(namesrv_addr=address).log, topic, trace_context=True)

        def __call__(self, messages: Sequence[Any], context: ConsumeOrderlyContext) -> ConsumeOrderlyStatus:
            import pyarrow as pa

            with self.tracer.start_as_current_span("charge"):
                self.producer.send(pa.record_batch({"body": [message.body for message in messages]}))
            return ConsumeOrderlyStatus.SUCCESS

    return Listener


@pytest.mark.holds("trace context")
@pytest.mark.nightly
def test_one_trace_from_java_over_spark_to_java(rig: Rig, peers: Peers) -> None:
    source, target = (rig.topic(name, 1) for name in ("in", "out"))
    producer = peers.producer(rig.address)
    for body, (trace, span) in TRACES.items():
        properties = {"traceparent": f"00-{trace}-{span}-01", "tracestate": "java=1", "baggage": "user=me"}
        producer.send(source, body.encode(), "k", properties=properties)
    queue = rig.broker.log.queues(source)[0]
    until(lambda: rig.broker.log.bounds([queue])[queue].max_offset == 3, "the messages can be read")
    # A copied message carries the same trace context as its source.
    rig.write(rig.stream(source, consumerGroup=f"{rig.group}-copy", includeProperties="true"), target)
    spans = rig.folder / "spans"
    rows = rig.stream(source, includeProperties="true", includeLockToken="true")
    outcomes = consume_orderly(rows, listener(rig.address, target, str(spans)), trace_context=True)
    writer = outcomes.writeStream.format("noop").option("checkpointLocation", str(rig.folder / "listener"))
    writer.trigger(availableNow=True).start().awaitTermination()
    consumer = peers.consumer(rig.address, f"java-{target}", target)
    received = [(message.body.decode(), message.properties) for message in consumer.wait(6)]
    consumer.stop()
    spans_by_id = {span["context"]["span_id"]: span for span in map(json.loads, spans.read_text().splitlines())}
    assert len(spans_by_id) == 9
    for body, (trace, span) in TRACES.items():
        # The sink's copy comes first, because the sink wrote before the listener's producer did.
        copied, produced = [properties for text, properties in received if text == body]
        assert copied["traceparent"] == f"00-{trace}-{span}-01"
        assert (produced["tracestate"], produced["baggage"]) == ("java=1", "user=me")
        _, carried, at, _ = produced["traceparent"].split("-")
        assert carried == trace
        chain = []
        while at != span:
            one = spans_by_id[f"0x{at}"]
            assert one["context"]["trace_id"] == f"0x{trace}"
            chain.append((one["name"], one["kind"]))
            at = one["parent_id"].removeprefix("0x")
        assert chain == [
            (f"send {target}", "SpanKind.PRODUCER"), ("charge", "SpanKind.INTERNAL"), (f"process {source}", "SpanKind.CONSUMER"),
        ]  # fmt: skip
        process = next(
            one for one in spans_by_id.values() if one["name"] == f"process {source}" and one["parent_id"] == f"0x{span}"
        )
        assert process["attributes"]["messaging.consumer.group.name"] == rig.group
        assert [link["context"]["span_id"] for link in process["links"]] == [f"0x{span}"]
