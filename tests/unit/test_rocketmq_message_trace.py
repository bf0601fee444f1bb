"""Message traces as Java writes them. The Java lines are output of its TraceDataEncoder; tests/rocketmq compares with that class again."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.model import MessageQueue
from orderedmq.rocketmq.append.broker_port import send_request
from orderedmq.rocketmq.codec import message_trace
from orderedmq.rocketmq.codec.encode import Packing, encode
from orderedmq.rocketmq.codec.message_trace import MAX_BODY, MAX_KEYS, Sent, Trace, of_call, of_sent, packed
from orderedmq.rocketmq.messages import trace_dispatcher
from orderedmq.rocketmq.messages.sender import UniqueKeys
from orderedmq.rocketmq.messages.trace_dispatcher import TraceDispatcher
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.message_requests import SendResult, SendStatus
from orderedmq.rocketmq.wire.namespaces import Namespaces
from orderedmq.rows.message_rows import normalise
from orderedmq.rows.message_trace import Ended, ReturnType, TracedCall, TracedMessage, region_of
from orderedmq.schema import PRODUCER_SCHEMA

BORN = 1_700_000_000_000


def sent(rows: dict[str, list[Any]], *, alone: bool = False) -> tuple[list[str], list[Sent]]:
    """The ids of rows, and their requests as a broker has stored them."""
    columns = {name: pa.array(values, PRODUCER_SCHEMA.field(name).type) for name, values in rows.items() if name != "body"}
    batch = normalise(pa.RecordBatch.from_pydict({"body": rows["body"], **columns}), "here")
    keys = UniqueKeys(b"\x7f\x00\x00\x01", 1, 2).take(batch.num_rows, BORN)
    out = []
    for body in encode(batch, keys, "here", packing=Packing.ALONE if alone else Packing.BATCH):
        ids = ",".join(f"OFFSET{number}" for number in range(body.first, body.first + body.rows))
        out.append(Sent("orders", "OMQ_SINK", "DefaultRegion", "127.0.0.1:10911", body, BORN, 7, ids, True))
    return keys.to_pylist(), out


def fields(trace: Trace) -> list[str]:
    assert trace.text[-1] == "\x02"
    return trace.text[:-1].split("\x01")


def test_each_message_of_a_batch_has_a_trace() -> None:
    rows: dict[str, list[Any]] = {
        "body": ["a", "bcd", "ü"],
        "tags": ["T", None, None],
        "keys": ["k1 k2", None, "k3"],
        "properties": [[("UNIQ_KEYS", "x"), ("xTAGS", "y")], None, [("z", "TAGS")]],
    }
    ids, (request,) = sent(rows)
    traces = list(of_sent(request))
    head, tail = ["Pub", str(BORN), "DefaultRegion", "OMQ_SINK", "orders"], ["7", "0"]
    assert [fields(trace) for trace in traces] == [
        [*head, ids[0], "T", "k1 k2", "127.0.0.1:10911", "1", *tail, "OFFSET0", "true"],
        [*head, ids[1], "null", "null", "127.0.0.1:10911", "3", *tail, "OFFSET1", "true"],
        [*head, ids[2], "null", "k3", "127.0.0.1:10911", "2", *tail, "OFFSET2", "true"],
    ]
    assert [trace.keys for trace in traces] == [(ids[0], "k1", "k2"), (ids[1],), (ids[2], "k3")]


def test_a_message_alone_in_its_request() -> None:
    ids, requests = sent({"body": ["a"]}, alone=True)
    ((trace,),) = (list(of_sent(request._replace(success=False))) for request in requests)
    assert fields(trace)[5:] == [ids[0], "null", "null", "127.0.0.1:10911", "1", "7", "0", "OFFSET0", "false"]


def test_ids_that_the_broker_did_not_give_are_left_out() -> None:
    _, (request,) = sent({"body": ["a", "b"]})
    assert [fields(trace)[12] for trace in of_sent(request._replace(message_ids="ONE"))] == ["", ""]


CALL = TracedCall(
    "billing", "DefaultRegion", "REQUEST", BORN, (TracedMessage("ID1", "k1 k2", 0), TracedMessage("ID2", None, 3))
)


def test_a_call_has_a_line_for_each_message_before_and_after_it() -> None:
    assert list(of_call(CALL)) == [
        Trace(
            "SubBefore\x011700000000000\x01DefaultRegion\x01billing\x01REQUEST\x01ID1\x010\x01k1 k2\x02", ("ID1", "k1", "k2")
        ),
        Trace("SubBefore\x011700000000000\x01DefaultRegion\x01billing\x01REQUEST\x01ID2\x013\x01null\x02", ("ID2",)),
    ]
    assert [trace.text for trace in of_call(CALL._replace(ended=Ended(12, ReturnType.SUCCESS)))] == [
        "SubAfter\x01REQUEST\x01ID1\x0112\x01true\x01k1 k2\x010\x011700000000000\x01billing\x02",
        "SubAfter\x01REQUEST\x01ID2\x0112\x01true\x01null\x010\x011700000000000\x01billing\x02",
    ]


@pytest.mark.parametrize(("how", "code"), [(ReturnType.EXCEPTION, "2"), (ReturnType.RETURNNULL, "3"), (ReturnType.FAILED, "4")])
def test_a_call_that_failed(how: ReturnType, code: str) -> None:
    first, _ = of_call(CALL._replace(ended=Ended(0, how)))
    assert fields(first)[3:7] == ["0", "false", "k1 k2", code]


def test_messages_of_the_trace_topic_have_bounded_bodies_and_keys() -> None:
    ids, (request,) = sent({"body": ["x"] * 3000, "keys": ["same"] * 3000})
    traces = list(of_sent(request))
    messages = list(packed(traces))
    assert b"".join(body for body, _ in messages) == "".join(trace.text for trace in traces).encode()
    assert all(len(body) <= MAX_BODY and len(keys) <= MAX_KEYS for body, keys in messages)
    # As few messages as the keys allow: 33 bytes for each id and 5 for the other key.
    assert len(messages) == 29
    assert [key for _, keys in messages for key in keys.split() if key != "same"] == ids
    for body, keys in messages:
        assert all(key.encode() in body for key in keys.split())


def test_a_trace_larger_than_a_message_is_one_and_keys_that_do_not_fit_are_left_out() -> None:
    large = Trace("x" * (MAX_BODY + 1) + "\x02", ("ID1", "k" * MAX_KEYS, "short"))
    small = Trace("y\x02", ("ID2",))
    assert list(packed([small, large, small])) == [
        (b"y\x02", "ID2"),
        (large.text.encode(), "ID1 short"),
        (b"y\x02", "ID2"),
    ]
    assert list(packed([])) == []


def test_a_brokers_region_and_its_wish_for_no_traces() -> None:
    assert region_of({}) == "DefaultRegion"
    assert region_of({"MSG_REGION": "hangzhou", "TRACE_ON": "true"}) == "hangzhou"
    assert region_of({"MSG_REGION": "hangzhou", "TRACE_ON": "false"}) is None


def test_the_separators_are_those_of_java() -> None:
    assert (message_trace.FIELD_END, message_trace.TRACE_END) == ("\x01", "\x02")


# -- which sends are traced


ANSWER = {"queueId": "3", "queueOffset": "17", "msgId": "OFFSET0"}


def dispatcher(monkeypatch: pytest.MonkeyPatch) -> TraceDispatcher:
    """A dispatcher whose thread does nothing."""
    monkeypatch.setattr(TraceDispatcher, "_run", lambda self: None)
    return TraceDispatcher(Client("127.0.0.1:1"), "traces")


def answered(traces: TraceDispatcher, topic: str, code: int = 0, **fields: str) -> SendResult:
    """Answer a request whose answer is reported to a dispatcher."""
    _, (request,) = sent({"body": ["a", "b"]})
    request_to_send = send_request(MessageQueue(topic, "broker-a", 3), request.body, "me", traces.sent)
    return request_to_send.answer(RemotingCommand(code, ext={**ANSWER, **fields}), "127.0.0.1:1")


def test_a_send_is_told_with_what_its_broker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = dispatcher(monkeypatch)
    assert answered(traces, "orders", MSG_REGION="here").queue_offset == 17
    assert answered(traces, "orders", code=11).status is SendStatus.SLAVE_NOT_AVAILABLE
    first, second = (item.what for item in traces._waiting)
    assert isinstance(first, Sent)
    assert isinstance(second, Sent)
    assert (first.topic, first.group, first.region, first.message_ids, first.success) == (
        "orders",
        "me",
        "here",
        "OFFSET0",
        True,
    )
    assert (second.region, second.success) == ("DefaultRegion", False)
    assert traces._messages == 4


def test_a_send_to_the_trace_topic_or_to_a_broker_that_wants_no_traces_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = dispatcher(monkeypatch)
    answered(traces, "traces")
    answered(traces, "orders", TRACE_ON="false")
    assert (len(traces._waiting), traces.dropped) == (0, 0)


@pytest.mark.holds("message trace")
@pytest.mark.parametrize("bound", ["MAX_BYTES", "MAX_WAITING"])
def test_waiting_traces_have_a_bound(bound: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    traces = dispatcher(monkeypatch)
    _, (request,) = sent({"body": ["a", "b"]})
    monkeypatch.setattr(trace_dispatcher, bound, 2 * len(request.body.body) if bound == "MAX_BYTES" else 4)
    with caplog.at_level(logging.WARNING, "orderedmq"):
        for _ in range(3):
            answered(traces, "orders")
    assert (traces._messages, traces.dropped) == (4, 2)
    assert "came faster than they could be sent" in caplog.text


def test_a_send_succeeds_without_a_thread_for_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    traces = dispatcher(monkeypatch)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(trace_dispatcher, "_CLOSE_TIMEOUT", 0.0)
    for _ in range(2):
        assert answered(traces, "orders").queue_offset == 17
    traces.close()
    assert traces.dropped == 4


def test_the_trace_topic_is_in_no_namespace_of_version_1() -> None:
    traces = TraceDispatcher(Client("127.0.0.1:1", names=Namespaces("acme", "second")), "traces")
    assert traces._client.names == Namespaces(None, "second")
