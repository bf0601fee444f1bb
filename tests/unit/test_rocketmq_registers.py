"""Registers: no two registers share a place, and none has the place of a queue."""

from __future__ import annotations

from itertools import product

from orderedmq.model import MAX_QUEUES, MessageQueue
from orderedmq.rocketmq.sink import commit_history
from orderedmq.rocketmq.wire import registers


def test_no_two_registers_of_a_group_share_a_place_even_if_a_sink_uses_the_group_of_a_source() -> None:
    queues = [MessageQueue(topic, broker, number) for topic, broker, number in product("ab", "xy", (0, 1, MAX_QUEUES - 1))]
    of_brokers = [queue for queue in queues if queue.queue_id == 0]
    places = [
        *queues,
        *(made(queue) for made in (registers.fence, registers.tenure, registers.reset, registers.writer) for queue in queues),
        *(made(queue) for made in (registers.mark, registers.committed) for queue in of_brokers),
        *(registers.history(queue, slot) for queue in of_brokers for slot in range(commit_history.SLOTS)),
        *(registers.settled(queue, block) for queue in queues if queue.queue_id < 1024 for block in (0, 1, 2**20 - 1)),
    ]
    assert len(set(places)) == len(places)
    # A broker reads a queue's id as a signed 32-bit number.
    assert all(0 <= place.queue_id < 2**31 for place in places)


def test_the_queue_of_a_register_exists() -> None:
    queue = MessageQueue("a", "x", 7)
    for made in (registers.fence, registers.tenure, registers.reset, registers.writer):
        assert registers.queue_of(made(queue)) == queue
    assert [registers.queue_of(registers.settled(queue, block)) for block in (0, 9, 2**20 - 1)] == [queue] * 3
    for made in (registers.mark, registers.committed, lambda one: registers.history(one, 3)):
        assert registers.queue_of(made(queue)).queue_id == 0


def test_what_was_settled_before_a_queues_last_reset_is_forgotten() -> None:
    for time in (0, 1, 2**23 - 1, 2**23, 2**40):
        reset = time << registers.OWNER_BITS
        number = registers.settled_number(0b101 << 37, reset)
        assert 0 <= number < 2**63, "a broker stores signed 64-bit numbers"
        assert registers.settled_bits(number, reset) == 0b101 << 37
        assert registers.settled_bits(number, time + 1 << registers.OWNER_BITS) == 0
    assert registers.settled_bits(0, 7) == 0
