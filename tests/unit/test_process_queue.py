"""ProcessQueue against a plain model of single messages, as Java keeps them."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orderedmq.model import OffsetRange
from orderedmq.ownership.process_queue import MAX_BYTES, MAX_MESSAGES, ProcessQueue, Slice
from tests.examples import examples

#: Bytes of every message of the model: parts of a slice then have exact sizes.
BYTES = 7


def rows(begin: int, end: int) -> pa.RecordBatch:
    return pa.record_batch({"queue_offset": pa.array(range(begin, end), pa.int64())})


def offsets(slices: list[Slice]) -> list[int]:
    return [offset for held in slices for offset in range(held.begin, held.end)]


def expand(ranges: list[OffsetRange]) -> list[int]:
    return [offset for begin, end in ranges for offset in range(begin, end)]


def queue(*slices: Slice) -> ProcessQueue:
    result = ProcessQueue(0.0)
    for held in slices:
        result.put(held)
    return result


class JavaQueue:
    """RocketMQ's ProcessQueue message by message; offsets in consumption are not taken in again, and the maximum is one."""

    def __init__(self) -> None:
        self.pending: set[int] = set()
        self.taken: set[int] = set()
        self.maximum = 0
        self.consuming = False

    def put(self, new: range) -> bool:
        for offset in new:
            if offset not in self.taken and offset not in self.pending:
                self.pending.add(offset)
                self.maximum = max(self.maximum, offset)
        if self.pending and not self.consuming:
            self.consuming = True
            return True
        return False

    def take(self, n: int) -> list[int]:
        result = sorted(self.pending)[:n]
        self.pending.difference_update(result)
        self.taken.update(result)
        if not result:
            self.consuming = False
        return result

    def commit(self) -> int:
        offset = max(self.taken) + 1 if self.taken else -1
        self.taken.clear()
        return offset

    def again(self, some: range) -> None:
        back = self.taken.intersection(some)
        self.taken -= back
        self.pending |= back

    def remove(self, some: range) -> int:
        if not self.pending:
            return -1
        self.pending.difference_update(some)
        return min(self.pending) if self.pending else self.maximum + 1


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real = ProcessQueue(0.0)
        self.model = JavaQueue()
        self.now = 0.0

    @rule(begin=st.integers(0, 60), count=st.integers(0, 25), bare=st.booleans())
    def put(self, begin: int, count: int, bare: bool) -> None:
        end = begin + count
        batch = None if bare else rows(begin, end)
        assert self.real.put(Slice(begin, end, count * BYTES, batch)) == self.model.put(range(begin, end))

    @rule(gap=st.integers(0, 3), count=st.integers(1, 25), bare=st.booleans())
    def put_next(self, gap: int, count: int, bare: bool) -> None:
        begin = self.model.maximum + 1 + gap
        self.put(begin, count, bare)

    @rule(n=st.integers(0, 30))
    def take(self, n: int) -> None:
        self.now += 1
        got = self.real.take(n, self.now)
        assert offsets(got) == self.model.take(n)
        assert self.real.last_consume == self.now
        for held in got:
            assert held.size == held.count * BYTES
            assert held.rows is None or held.rows["queue_offset"].to_pylist() == list(range(held.begin, held.end))

    @rule()
    def commit(self) -> None:
        assert self.real.commit() == self.model.commit()

    @rule()
    def rollback(self) -> None:
        self.real.rollback()
        self.model.again(range(10_000))

    @rule(some=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 20)), max_size=3))
    def make_to_consume_again(self, some: list[tuple[int, int]]) -> None:
        self.real.make_to_consume_again([Slice(begin, begin + count) for begin, count in some])
        for begin, count in some:
            self.model.again(range(begin, begin + count))

    @rule(begin=st.integers(0, 80), count=st.integers(0, 40))
    def remove(self, begin: int, count: int) -> None:
        self.now += 1
        assert self.real.remove(begin, begin + count, self.now) == self.model.remove(range(begin, begin + count))
        assert self.real.last_consume == self.now

    @rule()
    def clear(self) -> None:
        self.real.clear()
        self.model.pending.clear()
        self.model.taken.clear()
        self.model.maximum = 0

    @invariant()
    def agrees(self) -> None:
        real, model = self.real, self.model
        real._check()
        assert expand(real.pending()) == sorted(model.pending)
        assert expand(real.taken()) == sorted(model.taken)
        held = len(model.pending) + len(model.taken)
        assert (real.message_count, real.message_size) == (held, held * BYTES)
        assert real.has_temp_message == bool(model.pending)
        assert real.max_span == (max(model.pending) - min(model.pending) if model.pending else 0)
        assert real.queue_offset_max == model.maximum
        for ranges in (real.pending(), real.taken()):
            assert all(a.end < b.begin for a, b in pairwise(ranges))
        for offset in (0, 17, 33, 60):
            assert real.contains(offset) == (offset in model.pending)


Machine.TestCase.settings = settings(examples(3), stateful_step_count=30)
TestAgainstTheModel = Machine.TestCase


def test_commit_with_nothing_taken_returns_minus_one():
    q = queue(Slice(5, 9))
    assert q.commit() == -1
    q.take(4, 1.0)
    assert q.commit() == 9
    assert q.commit() == -1


def test_has_temp_message_asks_what_is_cached_and_not_taken():
    q = queue(Slice(0, 3))
    assert q.has_temp_message
    q.take(3, 1.0)
    assert not q.has_temp_message
    assert q.taken() == [OffsetRange(0, 3)]
    q.rollback()
    assert q.has_temp_message


def test_commit_returns_the_offset_after_the_last_taken_and_keeps_what_is_pending():
    q = queue(Slice(10, 20, 1000))
    assert q.take(4, 1.0) == [Slice(10, 14, 400)]
    assert q.commit() == 14
    assert (q.pending(), q.message_count, q.message_size) == ([OffsetRange(14, 20)], 6, 600)


def test_a_replayed_batch_is_taken_again_after_a_rollback():
    q = queue(Slice(0, 10))
    first = q.take(6, 1.0)
    q.rollback()
    assert offsets(q.take(6, 2.0)) == offsets(first)


def test_taken_has_a_gap_only_where_pending_had_one():
    q = queue(Slice(0, 3), Slice(5, 8))
    assert offsets(q.take(4, 1.0)) == [0, 1, 2, 5]
    assert q.taken() == [OffsetRange(0, 3), OffsetRange(5, 6)]
    assert q.commit() == 6


def test_put_asks_for_one_consumer_until_a_take_finds_nothing():
    q = ProcessQueue(0.0)
    assert not q.put(Slice(0, 0))
    assert q.put(Slice(0, 2))
    assert not q.put(Slice(2, 4))
    q.take(10, 1.0)
    assert not q.put(Slice(4, 5))
    q.take(10, 1.0)
    assert q.take(10, 1.0) == []
    assert q.put(Slice(5, 6))


def test_pulls_that_arrive_out_of_order_are_taken_in_order():
    q = queue(Slice(32, 64, 320, rows(32, 64)), Slice(0, 32, 320, rows(0, 32)))
    assert [(s.begin, s.end) for s in q.take(40, 1.0)] == [(0, 32), (32, 40)]
    assert q.queue_offset_max == 63


def test_an_offset_that_is_held_is_not_counted_again():
    q = queue(Slice(0, 10, 100))
    q.take(5, 1.0)
    q.put(Slice(0, 12, 120))
    assert (q.message_count, q.message_size) == (12, 120)
    assert (q.taken(), q.pending()) == ([OffsetRange(0, 5)], [OffsetRange(5, 12)])


def test_sizes_of_parts_add_up():
    whole = Slice(0, 7, 100, rows(0, 7))
    sizes = []
    rest = whole
    while rest.count:
        one, rest = rest.split(1)
        sizes.append(one.size)
        assert one.rows is not None
        assert one.rows["queue_offset"].to_pylist() == [one.begin]
    assert sum(sizes) == 100
    assert max(sizes) - min(sizes) <= 1
    q = queue(whole)
    while q.take(2, 1.0):
        q._check()
        q.commit()
    assert (q.message_count, q.message_size) == (0, 0)


def test_bare_ranges_that_touch_become_one():
    q = ProcessQueue(0.0)
    for begin in range(1000):
        q.put(Slice(begin, begin + 1, 3))
    assert q.take(1000, 1.0) == [Slice(0, 1000, 3000)]


def test_a_bare_range_does_not_join_a_slice_with_rows():
    q = queue(Slice(0, 2, 0, rows(0, 2)), Slice(2, 4))
    assert [(s.begin, s.end, s.rows is None) for s in q.take(4, 1.0)] == [(0, 2, False), (2, 4, True)]


def test_remove_returns_the_first_offset_still_pending_then_the_one_after_the_highest():
    q = queue(Slice(0, 10))
    assert q.remove(3, 5, 1.0) == 0
    assert q.remove(0, 3, 2.0) == 5
    assert q.remove(0, 100, 3.0) == 10
    assert q.remove(0, 100, 4.0) == -1
    assert q.last_consume == 4.0


def test_a_late_put_below_a_taken_message_breaks_no_other_invariant():
    q = queue(Slice(10, 20))
    q.take(5, 1.0)
    q.put(Slice(0, 3))
    q._check()
    assert offsets(q.take(4, 1.0)) == [0, 1, 2, 15]
    assert q.commit() == 16
    q._check()


def test_check_finds_a_message_that_was_taken_before_a_lower_one():
    q = queue(Slice(10, 20))
    q.take(5, 1.0)
    q._pending[0] = Slice(0, 1)
    q.message_count += 1
    with pytest.raises(AssertionError, match="before a lower one"):
        q._check()


def test_a_queue_is_full_above_its_thresholds():
    q = ProcessQueue(0.0, max_messages=10, max_bytes=100)
    q.put(Slice(0, 10, 100))
    assert not q.full
    q.put(Slice(10, 11))
    assert q.full
    q.take(11, 1.0)
    assert q.full
    q.commit()
    q.put(Slice(11, 12, 101))
    assert q.full
    assert (ProcessQueue(0.0).max_messages, ProcessQueue(0.0).max_bytes) == (MAX_MESSAGES, MAX_BYTES) == (65_536, 104_857_600)


def test_a_lock_expires_after_30_s_and_a_pull_after_120_s():
    q = ProcessQueue(100.0)
    assert (q.dropped, q.locked) == (False, False)
    assert not q.lock_expired(130.0)
    assert q.lock_expired(130.1)
    assert not q.pull_expired(220.0)
    assert q.pull_expired(220.1)
    q.last_lock = q.last_pull = 220.0
    assert not q.lock_expired(230.0)
    assert not q.pull_expired(230.0)


def test_clear_forgets_messages_and_keeps_flags():
    q = queue(Slice(0, 10, 50))
    q.locked = q.dropped = True
    q.take(3, 1.0)
    q.clear()
    q._check()
    assert (q.pending(), q.taken(), q.message_count, q.message_size, q.queue_offset_max) == ([], [], 0, 0, 0)
    assert q.locked
    assert q.dropped


@pytest.mark.parametrize(
    "make", [lambda: Slice(3, 2), lambda: Slice(0, 2, -1), lambda: Slice(2, 2, 1), lambda: Slice(0, 2, 1, rows(0, 3))]
)
def test_a_slice_refuses_numbers_that_contradict_each_other(make):
    with pytest.raises(ValueError):
        make()


def test_a_split_or_a_take_refuses_a_count_that_cannot_be():
    for n in (-1, 4):
        with pytest.raises(ValueError):
            Slice(0, 3).split(n)
    with pytest.raises(ValueError):
        queue(Slice(0, 3)).take(-1, 0.0)


def test_repr_shows_ranges():
    q = queue(Slice(0, 4, 8))
    q.take(1, 0.0)
    assert repr(q) == "ProcessQueue(pending=[1-4], taken=[0-1], messages=4, bytes=8)"
