"""The rules of a group's retry topic, without a cluster: options, members, lock tokens, and which messages a listener sends back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from ordered_source import ConsumeConcurrentlyContext, ConsumeConcurrentlyStatus, plan
from ordered_source.listener import shell
from ordered_source.listener.send_back import SendBack
from ordered_source.listener.shell import Consumer
from ordered_source.read_context import ReadContext
from orderedmq.broker import Broker, TopicInfo
from orderedmq.conditions import UnavailableCondition
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.endpoint import Endpoint
from orderedmq.errors import LockError, OptionError, RocketMQUnavailableError, SchemaError, TopicError, lost
from orderedmq.listening.concurrent_engine import ConcurrentSettings
from orderedmq.listening.engine import Settings
from orderedmq.listening.key_engine import OrderPerKey
from orderedmq.listening.queue_engine import OrderPerQueue
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.options.parse import parse
from orderedmq.options.source import SourceOptions
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.membership import Subscription
from orderedmq.rocketmq.group import running_info
from tests.contract.support import locked, rows
from tests.engine_messages import message

QUEUE = MessageQueue("orders", "embedded", 0)
RETRY = MessageQueue("%RETRY%g", "embedded", 0)
STREAM = {"topic": "orders", "consumerGroup": "g", "retryTopic": "true"}
CLUSTER = {**STREAM, "namesrvAddr": "h:9876"}
DONE, LATER = ConsumeConcurrentlyStatus.CONSUME_SUCCESS, ConsumeConcurrentlyStatus.RECONSUME_LATER


# -- options and members


@pytest.mark.parametrize(
    ("given", "streaming", "says"),
    [
        (STREAM, True, "CONFLICT.*retryTopic.*parkingLot=true.*namesrvAddr"),
        ({**CLUSTER, "parkingLot": "true"}, True, "CONFLICT.*parkingLot and retryTopic"),
        (CLUSTER, False, "UNSUPPORTED.*retryTopic.*batch"),
        (
            {"namesrvAddr": "h:9876", "topic": "orders", "retryTopic": "true", "messageModel": "broadcasting"},
            True,
            "CONFLICT.*retryTopic.*consumerGroup",
        ),
        (
            {
                **CLUSTER,
                "assignment": "shared",
                "allocateMessageQueueStrategy": "CONFIG",
                "allocateQueues": '{"orders": {"a": [0]}}',
            },
            True,
            "CONFLICT.*retryTopic.*CONFIG",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, str], streaming: bool, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse(SourceOptions, given, streaming=streaming)


@pytest.mark.holds("members agree on retries")
@pytest.mark.parametrize(
    ("mine", "theirs", "says"),
    [
        ("", "parkingLot", "parkingLot=false and retryTopic=false, not parkingLot=true"),
        ("retryTopic", "", "retryTopic=true, not parkingLot=false and retryTopic=false"),
        ("parkingLot", "retryTopic", "parkingLot=true, not retryTopic=true"),
    ],
)
def test_members_must_agree_where_failed_messages_wait(mine: str, theirs: str, says: str) -> None:
    one, other = (Subscription("shared", "orders", "AVG", failures=failures) for failures in (mine, theirs))
    assert one.differences(other) == [says]
    assert one.differences(one) == []


#: fastjson writes a map with objects as keys like this. A concurrent consumer also reports such a map, but has no locks.
LOCKED = (
    b',"mqTable":{{"brokerName":"embedded","queueId":0,"topic":"orders"}:{"locked":true,"droped":false,"lastLockTimestamp":1}}}'
)


@pytest.mark.holds("members agree on retries")
@pytest.mark.parametrize(
    ("orderly", "mine", "agrees"),
    [
        ("true", "", True),
        ("true", "retryTopic", True),
        ("true", "parkingLot", False),
        ("false", "", False),
        ("false", "retryTopic", True),
        ("false", "parkingLot", False),
    ],
)
def test_a_java_consumer_agrees_if_it_reads_what_this_query_puts_aside_and_the_reverse(
    orderly: str, mine: str, agrees: bool
) -> None:
    """An orderly consumer sends nothing back. A concurrent one does, and this query may own the queue of the retry topic to which it sends."""
    body = {
        "properties": {"PROP_CONSUMEORDERLY": orderly, "PROP_CONSUMER_START_TIMESTAMP": "1"},
        "subscriptionSet": [{"topic": "orders", "subString": "*", "expressionType": "TAG"}],
    }
    like = Subscription("shared", "orders", "AVG", failures=mine)
    info = running_info.decode("10.0.0.1@12#34", json.dumps(body)[:-1].encode() + LOCKED)
    assert [held.queue for held in info.held] == ([QUEUE] if orderly == "true" else [])
    found = running_info.with_like_texts(info.member, like, ["orders"])
    assert (like.differences(found.subscription) == []) is agrees


def test_a_pattern_must_match_another_topic_than_the_retry_topic() -> None:
    given = {"namesrvAddr": "h:9876", "topicPattern": "order.*", "consumerGroup": "g", "retryTopic": "true"}
    options = parse(SourceOptions, given, streaming=True)
    there = [TopicInfo("%RETRY%g", 1, "")]
    log = SimpleNamespace(topics=lambda: there, topic=lambda name: TopicInfo(name, 1, ""), require_rights=lambda *names: None)
    broker = cast(Broker, SimpleNamespace(log=log))
    with pytest.raises(TopicError, match=r"TOPIC.MISSING.*no topic matches topicPattern 'order\.\*' yet"):
        plan.check(broker, options)
    there.append(TopicInfo("orders", 1, ""))
    plan.check(broker, options)


# -- sending back


class Groups:
    """A broker's answers to send_back: how many messages it accepts each time, or an error."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers = list(answers)
        self.sent: list[tuple[int, int]] = []
        self.most: set[int] = set()

    def send_back(self, token: LockToken, messages: Sequence[tuple[int, int]], max_reconsume_times: int) -> int:
        self.most.add(max_reconsume_times)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self.sent += messages[:answer]
        return answer


TOKEN = LockToken("g", RETRY, "", "me", 1, 0)


def away() -> RocketMQUnavailableError:
    return RocketMQUnavailableError(UnavailableCondition.UNAVAILABLE, "the broker is away")


def test_what_was_sent_back_before_an_error_is_not_sent_again() -> None:
    groups = Groups(2, away(), away(), 1, 1)
    back = SendBack(cast(Broker, SimpleNamespace(groups=groups)), TOKEN, 5)
    messages = [message(offset, level=offset) for offset in (3, 4, 5)]
    for _ in range(2):
        with pytest.raises(RocketMQUnavailableError, match="messages 3 to 5 of queue .* cannot be sent back: .*away"):
            back.send(messages)
    back.send(messages)
    assert groups.sent == [(3, 3), (4, 4), (5, 5)]
    back.give_up(messages[0])
    assert groups.sent[3:] == [(3, -1)]
    assert groups.most == {5}


def test_a_lost_lock_ends_it() -> None:
    gone = lost("g", RETRY, 1, "in a test")
    back = SendBack(cast(Broker, SimpleNamespace(groups=Groups(gone, gone))), TOKEN, 5)
    with pytest.raises(LockError):
        back.send([message(3)])
    with pytest.raises(LockError):
        back.give_up(message(3))


# -- tasks


class Rig:
    """A task's rows with retryTopic=true: two messages of the retry topic that were originally sent to different topics."""

    def __init__(self, path: Path) -> None:
        self.broker = EmbeddedBroker(path / "store")
        self.broker.admin.create_topic("orders", 1)
        (token,) = locked(self.broker, "g", self.broker.groups.join("me"), [QUEUE])
        context = ReadContext.of(Endpoint(str(path / "store")), self.broker.identity, token, stored_in="orders")
        columns: dict[str, Any] = {
            "topic": ["orders", "bills"],
            "broker_name": ["embedded"] * 2,
            "queue_id": pa.array([0, 0], pa.int32()),
            "queue_offset": [7, 8],
            "body": [b"7", b"8"],
            "reconsume_times": pa.array([0, 1], pa.int32()),
            "lock_token": [context.to_text()] * 2,
        }
        self.rows = pa.record_batch(columns)


def test_a_message_of_the_retry_topic_is_known_by_the_queue_that_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The column topic and the message have the original topic. The context and the outcomes have the queue of the retry topic."""
    rig, heard, groups = Rig(tmp_path), [], Groups(1)
    monkeypatch.setattr(type(rig.broker.groups), "send_back", lambda _, *args: groups.send_back(*args))

    def listener(messages: Sequence[Any], context: ConsumeConcurrentlyContext) -> ConsumeConcurrentlyStatus:
        (one,) = messages
        heard.append((one.topic, one.reconsume_times, context.message_queue))
        return LATER if one.topic == "bills" else DONE

    consumer = Consumer(listener, ConcurrentSettings())
    told = [row for batch in shell.consume([rig.rows], consumer) for row in batch.to_pylist()]
    assert heard == [("orders", 0, QUEUE), ("bills", 1, QUEUE)]
    assert [(row["topic"], row["begin_offset"], row["status"], row["attempts"]) for row in told] == [
        ("orders", 7, "SUCCESS", 1),
        ("orders", 8, "SENT_BACK", 2),
    ]
    assert groups.sent == [(8, 4)]
    assert groups.most == {16}


@pytest.mark.parametrize("order", [OrderPerKey(), OrderPerQueue()])
def test_other_listeners_refuse_a_retry_topic(tmp_path: Path, order: Settings) -> None:
    with pytest.raises(OptionError, match=r"UNSUPPORTED.*retryTopic=true.*Use consume_concurrently"):
        list(shell.consume([Rig(tmp_path).rows], Consumer(print, order)))


def test_the_number_of_retries_must_not_be_dropped(tmp_path: Path) -> None:
    rows = Rig(tmp_path).rows.drop_columns(["reconsume_times"])
    with pytest.raises(SchemaError, match=r"MISSING_COLUMN.*reconsume_times"):
        list(shell.consume([rows], Consumer(print, ConcurrentSettings())))


def test_the_embedded_broker_has_no_retry_topic(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "store") as broker:
        broker.admin.create_topic("orders", 1)
        (token,) = locked(broker, "g", broker.groups.join("me"), [QUEUE])
        assert broker.log.append({QUEUE: rows(["a"])})[QUEUE] == OffsetRange(0, 1)
        with pytest.raises(OptionError, match=r"UNSUPPORTED.*parkingLot=true"):
            broker.groups.send_back(token, [(0, 1)], 16)
