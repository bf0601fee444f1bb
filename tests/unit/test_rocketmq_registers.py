"""Registers: no two registers share a place, and none has the place of a queue."""

from __future__ import annotations

from itertools import product

from orderedmq.model import MAX_QUEUES, MessageQueue
from orderedmq.rocketmq.sink import commit_history
from orderedmq.rocketmq.wire import registers

_OF_QUEUES = (registers.fence, registers.tenure, registers.reset, registers.progress, registers.lot_progress)


def test_no_two_registers_of_a_group_share_a_place_even_if_a_sink_uses_the_group_of_a_source() -> None:
    queues = [MessageQueue(topic, broker, number) for topic, broker, number in product("ab", "xy", (0, 1, MAX_QUEUES - 1))]
    of_brokers = [queue for queue in queues if queue.queue_id == 0]
    places = [
        *queues,
        *(register(queue) for register in _OF_QUEUES for queue in queues),
        *(
            register(queue)
            for register in (registers.mark, registers.writer, registers.queues, registers.committed)
            for queue in of_brokers
        ),
        *(registers.history(queue, slot) for queue in of_brokers for slot in range(commit_history.SLOTS)),
    ]
    assert len(set(places)) == len(places)
    # A broker reads a queue's id as a signed 32-bit number.
    assert all(0 <= place.queue_id < 2**31 for place in places)


def test_the_queue_of_a_register_exists() -> None:
    queue = MessageQueue("a", "x", 7)
    for register in _OF_QUEUES:
        assert registers.queue_of(register(queue)) == queue
    for register in (registers.mark, registers.writer, registers.committed, lambda one: registers.history(one, 3)):
        assert registers.queue_of(register(queue)).queue_id == 0


def test_a_register_of_progress_names_the_offset_the_reset_and_the_listener() -> None:
    number = registers.progress_of(7, 5, "book")
    assert registers.offset_of(number) == 7
    assert number == registers.progress_of(7, 5, "book") != 0
    assert number not in {
        registers.progress_of(7, 6, "book"),
        registers.progress_of(7, 5, "mail"),
        registers.progress_of(8, 5, "book"),
    }
    most = registers.progress_of(2**63 - 1, 5, "book")
    assert registers.offset_of(most) == 2**44 - 1
    assert 0 < most < registers.NEWER
