"""Pulls of one queue from a broker whose answers are short, late, out of order or wrong, or come from replicas.

The module is long because each of these needs the same `FakeBroker`.
"""

from __future__ import annotations

import platform
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.broker import PullSettings
from orderedmq.conditions import RocketMQCondition, TopicCondition, UnavailableCondition
from orderedmq.errors import DataLossError, OrderedMQError, ProtocolError, RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.messages import fetch
from orderedmq.rocketmq.messages.fetch import IN_FLIGHT
from orderedmq.rocketmq.messages.log import find_first
from orderedmq.rocketmq.messages.puller import Puller
from orderedmq.rocketmq.messages.topic_anchor import Anchor, is_same_topic, message_at, position_of
from orderedmq.rocketmq.net import lane
from orderedmq.rocketmq.net.account import NO_ACCOUNT
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.message_requests import PullResult, PullStatus
from orderedmq.rocketmq.wire.namespaces import NO_NAMESPACES, Namespaces
from orderedmq.rocketmq.wire.pull_frames import PullTemplate
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rows.filters import Filter
from tests import evidence
from tests.stored_messages import V2, Stored

QUEUE = MessageQueue("orders", "broker-a", 3)
COLUMNS = ("queue_offset", "body")
FOUND, NO_NEW, NO_MATCHED, ILLEGAL = PullStatus
Answer = PullResult | OrderedMQError


class FakeLane:
    """The broker's answers on one connection, in any order if the broker has a seed."""

    account = NO_ACCOUNT
    names = NO_NAMESPACES

    def __init__(self, broker: FakeBroker, replica: int) -> None:
        self.closed = False
        self.proxied = broker.proxied
        self._broker = broker
        self._replica = replica
        self._waiting: list[tuple[int, int, Answer]] = []

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def ask(self, template: PullTemplate, ranges: list[tuple[int, int]], deadline: float) -> None:
        self._broker.filtering = template._matching is not None
        for begin, count in ranges:
            self._broker.asked.append((begin, count, self._replica))
            self._waiting.append((begin, count, self._broker._answer(begin, count)))
        self._broker.most_in_flight = max(self._broker.most_in_flight, len(self._waiting))

    def receive(self, timeout: float) -> list[lane.Answer]:
        draw = self._broker.random
        answers: list[lane.Answer] = []
        for _ in range(1 if draw is None else draw.randint(0, len(self._waiting))):
            begin, count, answer = self._waiting.pop(0 if draw is None else draw.randrange(len(self._waiting)))
            answers.append((begin, count, answer))
            if isinstance(answer, OrderedMQError) and answer.sub == UnavailableCondition.CONNECTION_LOST:
                self.closed = True
                answers += [(begin, count, answer) for begin, count, _ in self._waiting]
                self._waiting.clear()
                break
        return answers


class FakeBroker:
    """A broker and its client at the same time, with a queue of messages [least, end)."""

    def __init__(self, least: int = 0, end: int = 0, *, limit: int = 32, size: int = 4, seed: int | None = None) -> None:
        self.least, self.end, self.limit, self.size = least, end, limit, size
        #: Answers that replace the right ones, by offset; they are used in turn.
        self.instead: dict[int, list[Answer]] = {}
        self.asked: list[tuple[int, int, int]] = []
        self.most_in_flight = 0
        #: Whether the client reaches the broker through a Proxy.
        self.proxied = False
        self.doubts = 0
        self.suggested = 0
        #: Whether the route has no master until a client doubts the route.
        self.away = False
        self.names = NO_NAMESPACES
        #: Messages that the broker skips although they are within the queue's bounds.
        self.gone: Collection[int] = ()
        #: The messages before this one are in a file of the consume queue that is being deleted, although the queue's minimum is lower.
        self.file_end = 0
        #: Whether the current request has a filter.
        self.filtering = False
        #: Changes of all messages, and changes of single messages by offset.
        self.change: dict[str, Any] = {}
        self.changed: dict[int, dict[str, Any]] = {}
        self.random = None if seed is None else random.Random(seed)
        self.given_back: list[FakeLane] = []

    # methods of Client

    def address(self, topic: str, name: str, deadline: float, replica: int = 0, *, any_replica: bool = False) -> str:
        assert (topic, name, any_replica) == (QUEUE.topic, QUEUE.broker_name, True)
        return "1" if self.away else str(replica)

    def is_master(self, topic: str, name: str, address: str, deadline: float) -> bool:
        return address == "0"

    def doubt(self, topic: str) -> None:
        self.doubts += 1
        self.away = False

    def lane(self, address: str, deadline: float) -> FakeLane:
        return FakeLane(self, int(address))

    def give_back(self, found: FakeLane) -> None:
        self.given_back.append(found)

    def call(self, request: Request[Any], deadline: float, *, topic: str, broker_name: str) -> Answer | int:
        assert (topic, broker_name) == (QUEUE.topic, QUEUE.broker_name)
        if request.code == RequestCode.GET_MIN_OFFSET:
            return self.least
        return self._answer(int(request.ext["queueOffset"]), int(request.ext["maxMsgNums"]))

    def _answer(self, begin: int, count: int) -> Answer:
        if self.instead.get(begin):
            return self.instead[begin].pop(0)
        if begin < self.least:
            return self.says(ILLEGAL, self.least)
        if begin > self.end or (self.end == 0 and begin):
            return self.says(ILLEGAL, self.end)
        if begin == self.end:
            return self.says(NO_NEW, begin)
        if begin < self.file_end:
            return self.says(NO_NEW, self.file_end)
        if begin in self.gone:
            return self._after_gone(begin, count)
        given = min(count, self.limit, self.end - begin)
        if self.random is not None:
            given = self.random.randint(1, given)
        return self.found(begin, begin + given)

    def _after_gone(self, begin: int, count: int) -> PullResult:
        """Return the messages after those that are gone, as DefaultMessageStore.getMessage does: it examines at least 800."""
        end = min(self.end, begin + max(count, 800))
        first = next((n for n in range(begin, end) if n not in self.gone), end)
        return self.says(NO_MATCHED, end) if first == end else self.found(first, min(end, first + min(count, self.limit)))

    def says(self, status: PullStatus, next_offset: int) -> PullResult:
        return PullResult(status, next_offset, self.least, self.end, self.suggested, b"")

    def found(self, begin: int, end: int, *, without: int | None = None) -> PullResult:
        messages = (self.message(n).pack() for n in range(begin, end) if n != without)
        return PullResult(FOUND, end, self.least, self.end, self.suggested, b"".join(messages))

    def message(self, number: int) -> Stored:
        given = Stored(offset=number, body=body_of(number, self.size))
        return replace(given, **self.change, **self.changed.get(number, {}))


def body_of(number: int, size: int = 4) -> bytes:
    return b"%d" % number * size


def puller_of(broker: FakeBroker, patience: float = 5.0) -> Puller:
    return Puller(broker, patience=patience)  # type: ignore[arg-type]


def everything(puller: Puller, begin: int, most: int = 1 << 40, size: int = 1 << 40, until: int | None = None) -> list[int]:
    offsets: list[int] = []
    while batch := puller.pull(QUEUE, begin + len(offsets), most, size, COLUMNS, until).to_pydict()["queue_offset"]:
        offsets += batch
    return offsets


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker(10, 5000)


@given(
    seed=st.integers(0, 1 << 30),
    least=st.integers(0, 100),
    count=st.integers(0, 600),
    limit=st.sampled_from([1, 3, 8, 32, 1024]),
    most=st.sampled_from([30, 100, 400, 1 << 40]),
    size=st.sampled_from([1000, 20_000, 1 << 40]),
    piece=st.sampled_from([1, 50, 200, 4096]),
    ahead=st.booleans(),
)
def test_any_short_and_disordered_answers_become_rows_without_a_gap(
    seed, least, count, limit, most, size, piece, ahead
) -> None:
    """An answer has at most 32 messages or 256 KiB, whatever is requested, and it says where to continue."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fetch.PIECE", "puller.AHEAD"):
            patch.setattr(f"orderedmq.rocketmq.messages.{name}", piece)
        _disordered(seed, least, count, limit, most, size, least + count if ahead else None)


def _disordered(seed: int, least: int, count: int, limit: int, most: int, size: int, until: int | None) -> None:
    broker = FakeBroker(least, least + count, limit=limit, seed=seed)
    puller = puller_of(broker)
    for _ in range(2):
        assert everything(puller, least, most, size, until) == list(range(least, least + count))
    assert broker.most_in_flight <= IN_FLIGHT


def test_many_pulls_are_on_their_way_once_the_brokers_limit_is_known(broker: FakeBroker) -> None:
    puller = puller_of(broker)
    batch = puller.pull(QUEUE, 10, 4000, 1 << 30, COLUMNS)
    assert batch.column("queue_offset").to_pylist() == list(range(10, 4010))
    assert batch.column("body").to_pylist() == [body_of(n) for n in range(10, 4010)]
    assert broker.asked[0] == (10, 1024, 0)
    assert broker.asked[1:4] == [(42, 32, 0), (74, 32, 0), (106, 32, 0)]
    assert len(broker.asked) == 125
    broker.asked.clear()
    puller.pull(QUEUE, 4010, 64, 1 << 30, COLUMNS)
    assert broker.asked == [(4010, 32, 0), (4042, 32, 0)]


def test_the_limit_of_messages_per_answer_is_learned_again(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orderedmq.rocketmq.messages.fetch._STEP_AGE", 0.0)
    puller = puller_of(broker)
    for limit in (8, 32, 1024, 2):
        broker.limit = limit
        assert everything(puller, 10, 1500)[-1] == 4999
        assert puller._facts[QUEUE].step == limit


def test_pieces_that_are_decoded_one_by_one_are_one_batch(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull ends before an unreadable message, wherever a piece begins. The pull that begins at this message raises an error that names it."""
    monkeypatch.setattr("orderedmq.rocketmq.messages.fetch.PIECE", 64)
    puller = puller_of(broker)
    assert puller.pull(QUEUE, 10, 1000, 1 << 40, COLUMNS).column("queue_offset").to_pylist() == list(range(10, 1010))
    for lost in (10, 42, 73, 74, 75, 137, 138, 600):
        if lost > 10:
            at = lost - (lost - 10) % 32
            broker.instead[at] = [broker.found(at, at + 32, without=lost)]
            assert puller.pull(QUEUE, 10, 1000, 1 << 40, COLUMNS).column("queue_offset").to_pylist() == list(range(10, lost))
        broker.instead[lost] = [broker.found(lost, lost + 32, without=lost)]
        with pytest.raises(DataLossError, match=f"AGED_OUT.*{lost} to {lost} "):
            puller.pull(QUEUE, lost, 1000, 1 << 40, COLUMNS)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_of_a_decoded_piece_serves_the_next_one() -> None:
    code = """
import resource
import numpy as np
from orderedmq.rocketmq.messages.puller import keep_freed_pages
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for turn in range(50):
        held = [np.ones(400_000, np.uint8) for _ in range(6)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
leave = faults()
keep_freed_pages()
faults()
print(leave, faults())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    leave, keep = map(int, done.stdout.split())
    assert keep < 100
    assert leave > 1000, "the function under test has no effect any more"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fetch.PIECE", "puller.AHEAD"):
        monkeypatch.setattr(f"orderedmq.rocketmq.messages.{name}", 64)


@pytest.mark.usefixtures("small_pieces")
def test_the_next_messages_of_a_task_are_read_ahead(broker: FakeBroker) -> None:
    puller = puller_of(broker)
    offsets: list[int] = []
    while len(offsets) < 2000:
        begin = 10 + len(offsets)
        offsets += puller.pull(QUEUE, begin, min(500, 2010 - begin), 1 << 40, COLUMNS, 2010).column("queue_offset").to_pylist()
        asked = max(at + count for at, count, _ in broker.asked)
        assert asked > 10 + len(offsets) or asked == 2010
    assert offsets == list(range(10, 2010))
    assert max(at + count for at, count, _ in broker.asked) == 2010, "no message after the end must be requested"
    assert len({at for at, _, _ in broker.asked}) == len(broker.asked), "no message must be requested twice"
    assert [lane.in_flight for lane in broker.given_back] == [0], "there must be one lane, and it must be idle at the end"


def test_a_piece_has_enough_messages_or_bytes_and_a_pull_that_reads_ahead_is_one_piece(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orderedmq.rocketmq.messages.puller.AHEAD", 64)
    puller = puller_of(broker)
    size = len(broker.found(1000, 1032).body)
    for piece, size_of_piece, rows in ((128, 1 << 30, 128), (1 << 30, 3 * size, 96)):
        monkeypatch.setattr("orderedmq.rocketmq.messages.fetch.PIECE", piece)
        monkeypatch.setattr("orderedmq.rocketmq.messages.fetch.PIECE_BYTES", size_of_piece)
        assert puller.pull(QUEUE, 1000, 1024, 1 << 40, COLUMNS, 4000).num_rows == rows
        assert puller.pull(QUEUE, 1000 + rows, 1024, 1 << 40, COLUMNS, 4000).num_rows == rows
        # Nothing follows these messages, so they come in one piece.
        assert puller.pull(QUEUE, 1000, 1024, 1 << 40, COLUMNS).num_rows == 1024
        assert everything(puller_of(broker), 1000, 1024, until=5000) == list(range(1000, 5000))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("how", ["elsewhere", "late", "smaller", "error"])
def test_messages_read_ahead_are_discarded_if_the_next_pull_differs(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    puller = puller_of(broker)
    first = puller.pull(QUEUE, 10, 512, 1 << 40, COLUMNS, 4000).num_rows
    assert not broker.given_back
    broker.asked.clear()
    begin, most = 10 + first, 512
    if how == "elsewhere":
        begin = 10
    elif how == "late":
        monkeypatch.setattr("orderedmq.rocketmq.messages.puller._AHEAD_AGE", 0.0)
    elif how == "smaller":
        most = 20
    else:
        broker.instead[4970] = [TopicError(TopicCondition.MISSING, "gone")]
        begin = 4970
        with pytest.raises(TopicError):
            puller.pull(QUEUE, begin, most, 1 << 40, COLUMNS)
    offsets = puller.pull(QUEUE, begin, most, 1 << 40, COLUMNS).column("queue_offset").to_pylist()
    assert offsets == list(range(begin, min(begin + most, 5000)))
    assert broker.asked[0][0] == begin
    assert broker.given_back[0].in_flight > 0, "the lane must be given back with its pulls in flight, so that it is closed"


def test_a_lane_is_given_back_however_a_pull_ends(broker: FakeBroker) -> None:
    puller = puller_of(broker)
    puller.pull(QUEUE, 10, 1000, 1 << 40, COLUMNS)
    assert [lane.in_flight for lane in broker.given_back] == [0]
    broker.instead[10] = [TopicError(TopicCondition.MISSING, "gone")]
    with pytest.raises(TopicError):
        puller.pull(QUEUE, 10, 1000, 1 << 40, COLUMNS)
    assert len(broker.given_back) == 2


def test_memory_is_bounded() -> None:
    broker = FakeBroker(0, 200_000, limit=1024, size=1)
    got = puller_of(broker).pull(QUEUE, 0, 1 << 40, 1 << 40, ("queue_offset",))
    assert 65_536 <= got.num_rows <= 65_536 + (IN_FLIGHT + 1) * 1024


def test_messages_that_are_held_have_a_limit(broker: FakeBroker) -> None:
    puller = Puller(broker, PullSettings(max_messages=100))  # type: ignore[arg-type]
    assert puller.pull(QUEUE, 10, 4000, 1 << 40, COLUMNS).num_rows == 100
    assert max(begin + count for begin, count, _ in broker.asked) == 110, "no message after the limit must be requested"


@pytest.mark.parametrize("hold", [1, 20_000, 100_000])
def test_bytes_that_are_held_and_on_their_way_have_a_limit(hold: int) -> None:
    broker = FakeBroker(0, 5000, size=30)
    puller = Puller(broker, PullSettings(max_bytes=hold))  # type: ignore[arg-type]
    one = len(broker.found(1000, 1032).body)
    for begin in (1000, 2000):
        broker.asked.clear()
        got = puller.pull(QUEUE, begin, 4000, 1 << 40, COLUMNS)
        assert got.num_rows >= 32
        assert len(broker.asked) * one < hold + 2 * one


def test_an_account_that_may_read_in_its_own_group_only_reads_in_that(broker: FakeBroker) -> None:
    asked: list[str] = []

    def ask(group: str) -> str:
        asked.append(group)
        if group != "billing":
            raise RocketMQError(RocketMQCondition.NO_PERMISSION, group)
        return group

    puller = Puller(broker, PullSettings("billing"))  # type: ignore[arg-type]
    assert [puller.ask_as_group(ask) for _ in range(2)] == ["billing", "billing"]
    assert asked == ["TOOLS_CONSUMER", "billing", "billing"]
    for how in (PullSettings(), PullSettings("other")):
        with pytest.raises(RocketMQError, match="NO_PERMISSION"):
            Puller(broker, how).ask_as_group(ask)  # type: ignore[arg-type]


def test_an_empty_answer_is_no_end_while_there_are_messages(broker: FakeBroker) -> None:
    """Acknowledged messages may not be visible yet. Empty answers also come during a deletion, or late, from before a reset."""
    waits = [broker.says(NO_NEW, 42), broker.says(NO_MATCHED, 500), broker.says(ILLEGAL, 20), broker.says(NO_NEW, 900)]
    broker.instead[42] = list(waits)
    assert everything(puller_of(broker), 10) == list(range(10, 5000))
    assert [begin for begin, _, _ in broker.asked].count(42) == 1 + len(waits)


def test_messages_that_aged_out_are_named_and_those_before_them_are_read(broker: FakeBroker) -> None:
    puller = puller_of(broker)
    with pytest.raises(DataLossError, match=r"AGED_OUT.*4 to 9 \(6\)"):
        puller.pull(QUEUE, 4, 100, 1 << 30, COLUMNS)
    broker.instead[42] = [PullResult(ILLEGAL, 4000, 4000, 5000, 0, b"")]
    assert puller.pull(QUEUE, 10, 1000, 1 << 30, COLUMNS).num_rows == 32
    broker.least = 4000
    with pytest.raises(DataLossError, match=r"AGED_OUT.*42 to 3999"):
        puller.pull(QUEUE, 42, 1000, 1 << 30, COLUMNS)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker may skip messages for a moment after its start, but here this moment is short."""
    monkeypatch.setattr(fetch, "HOLE_PATIENCE", 0.1)


@pytest.mark.parametrize("gone", [range(10, 5000), range(10, 4000)], ids=["all messages", "all but the last"])
@pytest.mark.usefixtures("impatient")
def test_messages_that_a_broker_skips_for_long_are_lost_though_the_queue_begins_before_them(
    broker: FakeBroker, gone: range
) -> None:
    """RocketMQ 4.9 never corrects the minimum of an idle queue whose messages were all deleted."""
    broker.gone = gone
    puller = puller_of(broker)
    with pytest.raises(DataLossError, match=rf"AGED_OUT.*10 to {gone[-1]} \({len(gone)}\)") as caught:
        puller.pull(QUEUE, 10, 1000, 1 << 30, COLUMNS)
    assert [begin for begin, _, _ in broker.asked].count(10) > 1, "a broker that has just started skips messages for a moment"
    assert everything(puller, caught.value.resume_at or 0) == list(range(gone[-1] + 1, 5000))


@pytest.mark.usefixtures("impatient")
def test_messages_whose_file_of_the_consume_queue_is_deleted_are_lost_up_to_the_next_file(broker: FakeBroker) -> None:
    """A file that a pull uses during its deletion stays, unreadable, until more files are deleted, and so does the minimum."""
    broker.file_end = 4000
    puller = puller_of(broker)
    with pytest.raises(DataLossError, match=r"AGED_OUT.*10 to 3999 \(3990\)") as caught:
        puller.pull(QUEUE, 10, 1000, 1 << 30, COLUMNS)
    assert [begin for begin, _, _ in broker.asked].count(10) > 1, "a minimum is usually corrected a moment after the deletion"
    assert everything(puller, caught.value.resume_at or 0) == list(range(4000, 5000))


@pytest.mark.usefixtures("impatient")
def test_messages_from_a_minimum_on_that_was_corrected_during_a_pull_are_not_lost(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to such a pull has the former minimum, and names the next file, although later messages of this file exist."""
    broker.file_end = 4000
    call = broker.call

    def corrected(request: Request[Any], *deadline: float, **where: Any) -> Any:
        answer = call(request, *deadline, **where)
        broker.least, broker.file_end = 20, 0
        return answer

    monkeypatch.setattr(broker, "call", corrected)
    with pytest.raises(DataLossError, match=r"AGED_OUT.*10 to 19 \(10\)"):
        puller_of(broker).pull(QUEUE, 10, 1000, 1 << 30, COLUMNS)


@pytest.mark.usefixtures("impatient")
def test_messages_that_a_broker_skips_after_it_was_away_are_not_lost(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "call", lambda *given, **named: broker.says(NO_MATCHED, 800))
    cuts = [RocketMQUnavailableError(UnavailableCondition.CONNECTION_LOST, f"cut {number}") for number in range(5)]
    broker.instead[10] = [*cuts, broker.says(NO_MATCHED, 800)]
    assert puller_of(broker).pull(QUEUE, 10, 10, 1 << 30, COLUMNS).column(0).to_pylist() == list(range(10, 20))


def test_a_hole_in_a_queue_is_never_passed_over(broker: FakeBroker) -> None:
    puller = puller_of(broker)
    broker.instead[10] = [broker.found(10, 42, without=20)] * 2
    assert puller.pull(QUEUE, 10, 100, 1 << 30, COLUMNS).column(0).to_pylist() == list(range(10, 20))
    broker.instead[20] = [broker.found(20, 52, without=20)]
    with pytest.raises(DataLossError, match=r"AGED_OUT.*20 to 20 \(1\)"):
        puller.pull(QUEUE, 20, 100, 1 << 30, COLUMNS)


def test_messages_that_are_deleted_while_others_are_found_are_never_passed_over(broker: FakeBroker) -> None:
    """A broker skips messages that it has just deleted, and only nextBeginOffset shows that (DefaultMessageStore.getMessage)."""
    puller = puller_of(broker)
    first, later = broker.found(10, 20), broker.found(500, 522)
    broker.instead[10] = [PullResult(FOUND, 522, 10, 5000, 0, bytes(first.body) + bytes(later.body))]
    assert puller.pull(QUEUE, 10, 100, 1 << 30, COLUMNS).column(0).to_pylist() == list(range(10, 20))
    broker.instead[20] = [later]
    with pytest.raises(DataLossError, match=r"AGED_OUT.*20 to 499"):
        puller.pull(QUEUE, 20, 1000, 1 << 30, COLUMNS)


def test_behind_the_end_is_named_also_of_an_empty_queue(broker: FakeBroker) -> None:
    """An empty queue answers every offset but 0 as illegal, and says that the next offset is 0."""
    puller = puller_of(broker)
    assert puller.pull(QUEUE, 5000, 10, 10, COLUMNS).num_rows == 0
    with pytest.raises(DataLossError, match="BEYOND_END.*5000.*5001"):
        puller.pull(QUEUE, 5001, 10, 10, COLUMNS)
    broker.least = broker.end = 0
    assert puller.pull(QUEUE, 0, 10, 10, COLUMNS).num_rows == 0
    with pytest.raises(DataLossError, match="BEYOND_END.*7") as caught:
        puller.pull(QUEUE, 7, 10, 10, COLUMNS)
    # In a cluster there is no store that a user could have copied, so the message must not mention one.
    assert "its broker died before its last messages were on its disk" in caught.value.message
    assert "store" not in caught.value.message


def test_a_replica_that_failed_is_not_read_again_for_a_while_though_its_master_suggests_it(broker: FakeBroker) -> None:
    broker.suggested = 1
    puller = puller_of(broker)
    assert puller.pull(QUEUE, 10, 32, 1 << 30, COLUMNS).num_rows == 32
    broker.instead[42] = [RocketMQUnavailableError(UnavailableCondition.BUSY, "slaveReadEnable is false")]
    broker.asked.clear()
    assert everything(puller, 42) == list(range(42, 5000))
    assert {replica for begin, _, replica in broker.asked if begin > 42 + 1024} == {0}


def test_a_replica_is_read_when_the_broker_says_so_and_left_when_it_has_nothing(broker: FakeBroker) -> None:
    broker.suggested = 1
    puller = puller_of(broker)
    puller.pull(QUEUE, 10, 32, 1 << 30, COLUMNS)
    puller.pull(QUEUE, 42, 32, 1 << 30, COLUMNS)
    assert [replica for _, _, replica in broker.asked] == [0, 1]
    for answer in (broker.says(NO_MATCHED, 74), broker.says(ILLEGAL, 0), broker.says(NO_NEW, 74)):
        broker.asked.clear()
        broker.instead[74] = [answer]
        assert puller.pull(QUEUE, 74, 32, 1 << 30, COLUMNS).num_rows == 32
        assert [replica for _, _, replica in broker.asked] == [1, 0]


@pytest.mark.parametrize("what", ["ends earlier", "ends here", "begins later", "does not know the topic"])
def test_a_replica_in_place_of_its_master_is_not_believed_about_where_a_queue_ends(broker: FakeBroker, what: str) -> None:
    """The replica may lag behind, and may have been added later."""
    lagging = FakeBroker(broker.least, 74)
    answers: dict[str, Answer] = {
        "ends earlier": lagging.says(ILLEGAL, 74),
        "ends here": FakeBroker(10, 100).says(NO_NEW, 100),
        "begins later": FakeBroker(200, 5000).says(ILLEGAL, 200),
        "does not know the topic": TopicError(TopicCondition.MISSING, "gone"),
    }
    broker.away = True
    broker.instead[100] = [answers[what]]
    puller = puller_of(broker)
    assert puller.pull(QUEUE, 100, 32, 1 << 30, COLUMNS).num_rows == 32
    # The client then requests the route again. The new route contains the master.
    assert [replica for _, _, replica in broker.asked] == [1, 0]


def test_a_replica_in_place_of_its_master_is_read_as_far_as_it_has_messages(broker: FakeBroker) -> None:
    broker.away = True
    assert puller_of(broker).pull(QUEUE, 10, 1000, 1 << 30, COLUMNS).num_rows == 1000
    assert {replica for _, _, replica in broker.asked} == {1}
    assert broker.doubts == 0


def test_lost_connections_and_busy_brokers_are_asked_again(broker: FakeBroker) -> None:
    broker.instead[42] = [
        RocketMQUnavailableError(UnavailableCondition.CONNECTION_LOST, "cut"),
        RocketMQUnavailableError(UnavailableCondition.BUSY, "later"),
    ]
    broker.instead[10] = [RocketMQUnavailableError(UnavailableCondition.TIMEOUT, "late")]
    assert everything(puller_of(broker), 10) == list(range(10, 5000))
    assert broker.doubts == 2


class Delays:
    """A back-off that never waits. It records the number of failures at each request for a delay."""

    def __init__(self) -> None:
        self.failures: list[int] = []

    def delay(self, failures: int, draw: float) -> float:
        self.failures.append(failures)
        return 0.0


def test_a_lost_connection_is_one_failure_however_many_requests_were_on_it(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = Delays()
    monkeypatch.setattr("orderedmq.rocketmq.messages.fetch.RETRY", delays)
    monkeypatch.setattr("orderedmq.rocketmq.messages.fetch.IN_FLIGHT", 128)
    for begin in range(42, 42 + 32 * 128, 32):
        broker.instead[begin] = [RocketMQUnavailableError(UnavailableCondition.CONNECTION_LOST, "cut")]
    assert everything(puller_of(broker), 10) == list(range(10, 5000))
    assert delays.failures == [1] * 128


def test_connections_that_are_lost_one_after_the_other_are_failures_in_a_row(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = Delays()
    monkeypatch.setattr("orderedmq.rocketmq.messages.fetch.RETRY", delays)
    broker.instead[10] = [RocketMQUnavailableError(UnavailableCondition.CONNECTION_LOST, "cut") for _ in range(3)]
    assert everything(puller_of(broker), 10) == list(range(10, 5000))
    assert delays.failures == [1, 2, 3]


def test_time_without_progress_is_an_error(broker: FakeBroker) -> None:
    broker.instead[10] = [broker.says(NO_MATCHED, 11)] * 1000
    begin = time.monotonic()
    with pytest.raises(RocketMQUnavailableError, match=r"TIMEOUT.*orders/broker-a/3.*offset 10 for 0\.3 s.*NO_MATCHED"):
        puller_of(broker, 0.3).pull(QUEUE, 10, 10, 10, COLUMNS)
    assert 0.3 <= time.monotonic() - begin < 3


def test_time_in_which_the_process_was_stopped_does_not_count_as_waiting(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = FakeLane.ask

    def stopped(self: FakeLane, *request: Any) -> None:
        ask(self, *request)
        time.sleep(0.2)

    monkeypatch.setattr(FakeLane, "ask", stopped)
    assert puller_of(broker, 0.1).pull(QUEUE, 10, 10, 1 << 20, COLUMNS).num_rows == 10


def test_a_refused_pull_is_an_error_of_the_caller(broker: FakeBroker) -> None:
    broker.instead[42] = [TopicError(TopicCondition.MISSING, "gone")]
    puller = puller_of(broker)
    with pytest.raises(TopicError):
        puller.pull(QUEUE, 10, 1000, 1 << 30, COLUMNS)
    assert not puller.knows(QUEUE)


def test_bytes_bound_what_is_returned_and_what_is_asked_for(broker: FakeBroker) -> None:
    puller = puller_of(broker)
    got = puller.pull(QUEUE, 1000, 4000, 1000, COLUMNS)
    assert sum(map(len, got.column("body").to_pylist())) <= 1000
    assert len(broker.asked) <= 1 + IN_FLIGHT
    assert puller.pull(QUEUE, 1000, 4000, 0, COLUMNS).num_rows == 1
    assert puller.average(QUEUE) == 16


@given(low=st.integers(0, 50), length=st.integers(0, 60), at=st.integers(-5, 120), hint=st.integers(-100, 200))
def test_a_search_finds_the_first_whatever_the_hint(low, length, at, hint) -> None:
    """Before 5.1.1, a broker answers with the nearest message."""
    high = low + length
    asked: list[int] = []

    def late(offset: int) -> bool:
        assert low <= offset < high
        asked.append(offset)
        return offset >= at

    assert find_first(late, low, high, hint) == min(max(at, low), high)
    assert len(asked) <= 15
    if hint == at:
        assert len(asked) <= 2


# -- with a filter -------------------------------------------------------------------------------------------------------------


class FilteringBroker(FakeBroker):
    """A broker that finds messages with these tags. An answer has up to ``limit`` messages, and a pull examines up to ``scan``."""

    def __init__(
        self, tags: dict[int, str], least: int, end: int, *, limit: int = 32, scan: int = 800, seed: int | None = None
    ):
        super().__init__(least, end, limit=limit, seed=seed)
        self.tags, self.scan = tags, scan

    def _answer(self, begin: int, count: int) -> Answer:
        if not self.filtering or self.instead.get(begin) or not self.least <= begin < self.end:
            return super()._answer(begin, count)
        found: list[int] = []
        at, removing = begin, False
        # DefaultMessageStore.getMessage examines 800 messages, or as many as are requested if that is more.
        while at < min(self.end, begin + max(self.scan, count)) and len(found) < min(count, self.limit):
            removing = at in self.tags and at in self.gone
            if at in self.tags and not removing:
                found.append(at)
            at += 1
        body = b"".join(self.message(n).pack() for n in found)
        status = FOUND if found else NO_MATCHED
        return PullResult(status, at, self.least, self.end, self.suggested, body, filtered=not found and not removing)

    def message(self, number: int) -> Stored:
        return replace(super().message(number), properties=f"TAGS\x01{self.tags.get(number, 'none')}\x02".encode())


A = Filter(tags=("a",))


def matching(puller: Puller, begin: int, end: int, size: int = 1 << 40, step: int = 1 << 40) -> list[int]:
    offsets: list[int] = []
    while begin < end:
        batch, after = puller.pull_matching(QUEUE, begin, min(end - begin, step), size, COLUMNS, A)
        assert begin < after <= end
        offsets += batch.column("queue_offset").to_pylist()
        begin = after
    return offsets


@given(
    seed=st.integers(0, 1 << 30),
    count=st.integers(1, 6000),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    limit=st.sampled_from([1, 8, 32]),
    scan=st.sampled_from([1, 100, 800, 5000]),
    size=st.sampled_from([200, 1 << 40]),
    step=st.sampled_from([1000, 1 << 40]),
)
def test_every_match_comes_once_and_nothing_else(seed, count, share, limit, scan, size, step) -> None:
    draw = random.Random(seed)
    tags = {n: draw.choice(["a", "a", "same hash"]) for n in range(10, 10 + count) if draw.random() < share}
    if count > 2000 and (limit == 1 or scan == 1 or size == 200):
        count = 2000
    broker = FilteringBroker(tags, 10, 10 + count, limit=limit, scan=scan, seed=seed)
    begin, end = 10 + draw.randint(0, count // 2), 10 + count - draw.randint(0, count // 3)
    assert matching(puller_of(broker), begin, end, size, step) == [n for n in range(begin, end) if tags.get(n) == "a"]
    assert broker.most_in_flight <= IN_FLIGHT
    assert all(begin <= at and at + asked <= end for at, asked, _ in broker.asked), "no message after the end must be requested"


def test_ranges_that_a_broker_looks_at_in_one_go_are_asked_for_side_by_side() -> None:
    broker = FilteringBroker({}, 0, 20_000)
    assert puller_of(broker).pull_matching(QUEUE, 0, 16_000, 1 << 40, COLUMNS, A)[1] == 16_000
    # The last request shows that no message was deleted before the broker examined it.
    assert broker.asked == [*((at, 800, 0) for at in range(0, 16_000, 800)), (0, 1, 0)]
    assert broker.most_in_flight > 1


def test_messages_that_are_gone_are_not_taken_for_others_that_do_not_match() -> None:
    broker = FilteringBroker({50: "a"}, 0, 2000)
    puller = puller_of(broker)
    # MESSAGE_WAS_REMOVING has the code of "no match", and resumes after the messages that it removes.
    broker.instead[0] = [broker.says(NO_MATCHED, 800), broker.says(NO_NEW, 900)]
    assert matching(puller, 0, 2000) == [50]
    assert [begin for begin, count, _ in broker.asked if count > 1].count(0) == 3
    broker.instead[0] = [PullResult(NO_MATCHED, 800, 700, 2000, 0, b"", filtered=True)]
    with pytest.raises(DataLossError, match=r"AGED_OUT.*0 to 699"):
        puller.pull_matching(QUEUE, 0, 500, 1 << 40, COLUMNS, A)


@pytest.mark.parametrize(
    "tags", [range(1000), range(0, 1000, 3), range(700, 1000, 3), range(0)], ids=["all", "some", "late", "none"]
)
@pytest.mark.parametrize("gone", [1, 50, 690, 701, 1000])
@pytest.mark.usefixtures("impatient")
def test_messages_that_a_broker_skips_are_not_taken_for_others_that_do_not_match(tags: range, gone: int) -> None:
    """A broker skips deleted messages before it corrects the queue's minimum, and then answers as if they did not match."""
    broker = FilteringBroker(dict.fromkeys(tags, "a"), 0, 1000)
    broker.gone = range(gone)
    puller = puller_of(broker)
    with pytest.raises(DataLossError, match=rf"AGED_OUT.* 0 to {gone - 1} \({gone}\)") as caught:
        puller.pull_matching(QUEUE, 0, 1000, 1 << 40, COLUMNS, A)
    assert matching(puller, caught.value.resume_at or 0, 1000) == [n for n in tags if n >= gone]


@pytest.mark.usefixtures("impatient")
def test_messages_that_are_deleted_during_a_pull_end_it() -> None:
    """The first answers have matching messages, and the next ones were examined after a deletion."""
    broker = FilteringBroker(dict.fromkeys(range(1000), "a"), 0, 1000)
    broker.instead[0] = [broker.found(0, 32)]
    broker.gone = range(100)
    puller = puller_of(broker)
    rows, end = puller.pull_matching(QUEUE, 0, 800, 1 << 40, COLUMNS, A)
    assert (rows.column(0).to_pylist(), end) == (list(range(32)), 32)
    with pytest.raises(DataLossError, match=r"AGED_OUT.* 32 to 99"):
        puller.pull_matching(QUEUE, 32, 800, 1 << 40, COLUMNS, A)


def test_a_replica_that_finds_no_match_is_believed_when_it_says_so() -> None:
    broker = FilteringBroker({}, 0, 2000)
    broker.suggested = 1
    assert matching(puller_of(broker), 0, 2000, step=800) == []
    assert [replica for _, count, replica in broker.asked if count > 1] == [0, 1, 1]


# -- messages of other queues, and damaged bodies ---------------------------------------------------------------------------------


#: Messages of another queue that may be found at a requested offset.
FOREIGN: dict[str, dict[str, Any]] = {
    "another queue": {"queue_id": 4},
    "no queue": {"queue_id": -1},
    "another topic": {"topic": b"ordert"},
    "a longer topic": {"topic": b"orders2"},
    "a shorter topic": {"topic": b"order"},
    "a topic of another namespace": {"topic": b"acme%orders"},
    "the retry topic of a group": {"topic": b"%RETRY%orders"},
    "a long topic": {"topic": b"g" * 300, "magic": V2},
}


@pytest.mark.fault("lying broker")
@pytest.mark.holds("foreign answer")
@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("count", [1, 32, 320], ids=["one message", "one answer", "many answers"])
def test_a_message_of_another_queue_is_an_error_and_never_a_row(count: int, what: str) -> None:
    broker = FilteringBroker(dict.fromkeys(range(10, 330), "a"), 10, 330)
    puller = puller_of(broker)
    assert puller.pull(QUEUE, 10, 320, 1 << 40, COLUMNS).num_rows == 320
    places = {10, 10 + count // 2, 10 + count - 1}
    for place in places:
        broker.changed = {place: FOREIGN[what]}
        for pull in (
            partial(puller.pull, QUEUE, 10, count, 1 << 40, COLUMNS),
            partial(puller.pull, QUEUE, 10, count, 1 << 40, ("keys",)),
            partial(puller.pull_matching, QUEUE, 10, count, 1 << 40, COLUMNS, A),
        ):
            with pytest.raises(ProtocolError) as caught:
                pull()
            assert caught.value.condition == "ORDEREDMQ_ROCKETMQ.PROTOCOL"
            queue_id, topic = FOREIGN[what].get("queue_id", 3), FOREIGN[what].get("topic", b"orders").decode()
            where = f"a pull of queue {QUEUE} with a message of queue {queue_id} of topic {topic!r}, at queue offset {place}"
            assert where in caught.value.message
    broker.changed = {}
    assert everything(puller, 10) == list(range(10, 330))
    evidence.note(runs=3 * len(places))


@pytest.mark.holds("foreign answer")
@pytest.mark.parametrize("offset", [9, 42])
def test_a_message_of_another_queue_beyond_what_was_requested_is_an_error_as_well(broker: FakeBroker, offset: int) -> None:
    """Without an error, the message would count as missing, and failOnDataLoss=false would skip it."""
    stranger = replace(broker.message(offset), queue_id=4).pack()
    right = broker.found(10, 41)
    body = bytes(right.body) + stranger if offset > 10 else stranger + bytes(right.body)
    broker.instead[10] = [right._replace(body=body, next_begin_offset=42)]
    with pytest.raises(ProtocolError, match=f"at queue offset {offset}"):
        puller_of(broker).pull(QUEUE, 10, 32, 1 << 40, COLUMNS)


def test_messages_are_stored_under_the_name_that_the_broker_knows(broker: FakeBroker) -> None:
    broker.names = Namespaces("acme")
    broker.change = {"topic": b"acme%orders"}
    assert puller_of(broker).pull(QUEUE, 10, 320, 1 << 40, ("queue_offset", "topic")).num_rows == 320
    broker.change = {"topic": b"orders"}
    with pytest.raises(ProtocolError, match="pull of queue acme%orders/broker-a/3 with a message of queue 3 of topic 'orders'"):
        puller_of(broker).pull(QUEUE, 10, 320, 1 << 40, COLUMNS)


def test_a_message_of_another_queue_does_not_tell_whether_a_topic_is_the_same(broker: FakeBroker) -> None:
    client: Any = SimpleNamespace(names=NO_NAMESPACES, call=lambda *given, **rest: broker.found(20, 21))
    assert position_of(client, "g", QUEUE, 20) == 128
    for change in ({"queue_id": 4}, {"topic": b"ordert"}):
        broker.change = change
        with pytest.raises(ProtocolError, match="at queue offset 20"):
            position_of(client, "g", QUEUE, 20)


#: Answers to a pull of message 20, and whether they show that the topic is the same.
STILL_THERE: dict[str, tuple[PullResult, bool | None]] = {
    "the message": (FakeBroker(0, 30).found(20, 21), True),
    "being deleted": (PullResult(NO_MATCHED, 30, 0, 30, 0, b""), None),
    "later messages": (FakeBroker(0, 30).found(25, 30), None),
    "a later minimum": (PullResult(ILLEGAL, 25, 25, 30, 0, b""), None),
    "the end": (PullResult(NO_NEW, 20, 0, 20, 0, b""), False),
    "beyond the end": (PullResult(ILLEGAL, 0, 0, 0, 0, b""), False),
}


@pytest.mark.parametrize("what", STILL_THERE)
def test_a_deleted_message_is_no_sign_of_another_topic_even_if_the_minimum_is_old(what: str) -> None:
    """A broker corrects a queue's minimum after it has deleted messages, and 4.9 never does so for an idle queue."""
    answer, same = STILL_THERE[what]
    client: Any = SimpleNamespace(names=NO_NAMESPACES, call=lambda *given, **rest: answer)
    assert is_same_topic(client, "g", QUEUE.topic, Anchor(QUEUE.broker_name, QUEUE.queue_id, 20, 128)) is same
    assert (message_at(client, QUEUE, 20, answer) is not None) is (same is True)


def test_a_message_before_the_requested_one_is_an_error() -> None:
    client: Any = SimpleNamespace(names=NO_NAMESPACES)
    with pytest.raises(ProtocolError, match=r"a pull at offset 20 of queue .* returned message 19 first"):
        message_at(client, QUEUE, 20, FakeBroker(0, 30).found(19, 21))


@pytest.mark.holds("changed body")
@pytest.mark.parametrize("count", [32, 320], ids=["one answer", "many answers"])
def test_rows_end_before_a_body_whose_checksum_is_wrong_if_that_is_verified(count: int) -> None:
    broker = FilteringBroker({n: "ab"[n % 2] for n in range(10, 330)}, 10, 330)
    broker.changed = {20: {"crc": (zlib.crc32(broker.message(20).body) ^ 1) & 0x7FFFFFFF}}
    puller = Puller(broker, PullSettings(verify_body_crc=True))  # type: ignore[arg-type]

    def offsets(begin: int, columns: tuple[str, ...] = COLUMNS) -> list[int]:
        column: list[int] = puller.pull(QUEUE, begin, count, 1 << 40, columns).column(0).to_pylist()
        return column

    assert offsets(10) == list(range(10, 20))
    with pytest.raises(DataLossError, match="UNREADABLE.* message 20 ") as caught:
        offsets(20)
    assert caught.value.resume_at == 21
    assert offsets(21) == list(range(21, min(21 + count, 330)))
    # A pull without the body returns the row. A pull with another tag skips it.
    assert offsets(10, ("queue_offset",)) == list(range(10, 10 + count))
    batch, end = puller.pull_matching(QUEUE, 10, count, 1 << 40, COLUMNS, A)
    assert (batch.column(0).to_pylist(), end) == (list(range(10, 20, 2)), 20)
    with pytest.raises(DataLossError, match="UNREADABLE.* message 20 "):
        puller.pull_matching(QUEUE, 20, count, 1 << 40, COLUMNS, A)
    batch, end = puller.pull_matching(QUEUE, 10, count, 1 << 40, COLUMNS, Filter(tags=("b",)))
    assert (batch.column(0).to_pylist(), end) == (list(range(11, 10 + count, 2)), 10 + count)
    # By default checksums are not verified.
    assert puller_of(broker).pull(QUEUE, 10, count, 1 << 40, COLUMNS).num_rows == count
