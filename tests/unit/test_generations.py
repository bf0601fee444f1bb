"""How far a group may read the queues of a topic that was resized."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from random import Random

import numpy as np
import pytest

from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.routing.generations import ONE_GENERATION, Generations, Parent, Resize, Wait, generation_of, waits
from orderedmq.routing.selector import select_by_hash

HASHES = np.array([*range(-500, 500), -(2**31), 2**31 - 1, 2**31 - 2, 2**31 - 720720], dtype=np.int32)


def queues(count: int, topic: str = "orders") -> tuple[MessageQueue, ...]:
    return tuple(MessageQueue(topic, EMBEDDED_BROKER, number) for number in range(count))


def resize(former: int, count: int, *ends: int, by_key: bool = True) -> Resize:
    return Resize(queues(former), queues(count), dict(zip(queues(max(former, count)), ends)), by_key)


def offsets(*processed: int) -> dict[MessageQueue, int]:
    return dict(zip(queues(len(processed)), processed))


def numbers(found: dict[MessageQueue, Wait]) -> dict[int, tuple[int, list[int]]]:
    """Return for each queue that waits the offset of its barrier, and its parents."""
    return {queue.queue_id: (wait.offset, [parent.queue.queue_id for parent in wait.parents]) for queue, wait in found.items()}


@pytest.mark.holds("resize")
@pytest.mark.parametrize(("former", "count"), list(product(range(1, 17), repeat=2)))
def test_parents_are_the_queues_that_javas_rule_chose_for_the_same_keys(former: int, count: int) -> None:
    before, after = select_by_hash(HASHES, former).tolist(), select_by_hash(HASHES, count).tolist()
    parents = defaultdict(set)
    for old, new in zip(before, after):
        parents[new].add(old)
    change = resize(former, count)
    assert {
        number: {parent.queue_id for parent in change.parents(queue)} for number, queue in enumerate(queues(count))
    } == parents


@pytest.mark.parametrize(("former", "count"), list(product(range(1, 17), repeat=2)))
def test_every_queue_is_a_parent_under_a_selector_of_the_users_own(former: int, count: int) -> None:
    change = resize(former, count, by_key=False)
    assert all(change.parents(queue) == list(queues(former)) for queue in queues(count))


def test_a_queue_waits_for_its_parents_and_for_no_other_queue() -> None:
    grown = resize(4, 8, 10, 10, 10, 10)
    assert numbers(waits([grown], offsets(10, 3, 10, 0), {})) == {5: (0, [1]), 7: (0, [3])}
    assert waits([grown], offsets(10, 10, 10, 10), {}) == {}
    shrunk = resize(8, 4, *[10] * 8)
    assert numbers(waits([shrunk], offsets(10, 10, 9, 10, 10, 9, 10, 10), {})) == {1: (10, [5])}
    coprime = resize(3, 7, 10, 10, 10)
    waiting = numbers(waits([coprime], offsets(10, 9, 10), {}))
    assert waiting == {0: (10, [1]), 2: (10, [1]), **{number: (0, [1]) for number in range(3, 7)}}


def test_places_in_the_lists_count_not_the_numbers_of_queues() -> None:
    """Two brokers with four queues each, which get four more each."""
    names = [[MessageQueue("orders", broker, number) for number in range(8)] for broker in ("a", "b")]
    grown = Resize((*names[0][:4], *names[1][:4]), (*names[0], *names[1]), {})
    assert grown.parents(MessageQueue("orders", "b", 0)) == [MessageQueue("orders", "a", 0)]
    assert grown.parents(MessageQueue("orders", "b", 5)) == [MessageQueue("orders", "b", 1)]


def test_a_queue_that_got_no_message_of_a_generation_still_waits_for_the_generation_before() -> None:
    """Key 7 was in queue 1 of 2, would have been in queue 3 of 4, and is in queue 7 of 8."""
    history = [resize(2, 4, 5, 5), resize(4, 8, 5, 5, 0, 0)]
    assert numbers(waits(history, offsets(5, 4, 0, 0), {})) == {3: (0, [1]), 5: (0, [1]), 7: (0, [3])}
    assert waits(history, offsets(5, 5, 0, 0), {}) == {}


def test_the_oldest_resize_that_is_not_passed_stops_a_queue() -> None:
    history = [resize(2, 3, 5, 5), resize(3, 2, 8, 9, 4)]
    assert numbers(waits(history, offsets(5, 4, 0), {})) == {0: (5, [1]), 2: (0, [1]), 1: (9, [0, 2])}
    assert numbers(waits(history, offsets(8, 9, 3), {})) == {0: (8, [2]), 1: (9, [2])}


def test_a_parked_key_of_a_parent_stops_a_queue_until_it_is_settled() -> None:
    grown, done = resize(1, 2, 5), offsets(5, 0)
    [one, two] = queues(2)
    assert waits([grown], done, {one: (4, "k")}) == {two: Wait(0, (Parent(one, 5, 5, "k"),))}
    assert waits([grown], done, {one: (5, "k")}) == {}
    assert "key 'k' is parked" in str(Parent(one, 5, 5, "k"))


def test_topics_do_not_wait_for_each_other() -> None:
    other = Resize(queues(1, "other"), queues(2, "other"), {queues(1, "other")[0]: 5})
    assert list(waits([resize(1, 2, 5), other], offsets(5), {})) == [queues(2, "other")[1]]


@pytest.mark.holds("resize")
@pytest.mark.parametrize("seed", range(200))
def test_keys_keep_their_order_and_every_message_is_read_over_several_generations(seed: int) -> None:
    random = Random(seed)
    count, history = random.randint(1, 8), list[Resize]()
    ends: dict[MessageQueue, int] = defaultdict(int)
    written: dict[int, list[tuple[MessageQueue, int]]] = defaultdict(list)
    keys: dict[tuple[MessageQueue, int], int] = {}
    processed: dict[MessageQueue, int] = defaultdict(int)

    def read() -> bool:
        """Process a batch: some messages of each queue, as far as the group may read when it is planned."""
        found = waits(history, processed, {})
        caps = {queue: max(processed[queue], found[queue].offset) if queue in found else end for queue, end in ends.items()}
        batch = {queue: (processed[queue], random.randint(processed[queue], cap)) for queue, cap in caps.items()}
        if not any(begin < end for begin, end in batch.values()):
            batch = {queue: (processed[queue], cap) for queue, cap in caps.items()}
        for queue, (begin, end) in batch.items():
            for offset in range(begin, end):
                for older in written[keys[queue, offset]]:
                    if older == (queue, offset):
                        break
                    assert older[0] == queue or older[1] < processed[older[0]], (queue, offset, older)
        processed.update({queue: end for queue, (_, end) in batch.items()})
        return any(begin < end for begin, end in batch.values())

    for _ in range(60):
        match random.randrange(4):
            case 0:
                former, count = count, random.randint(1, 8)
                if former != count:
                    history.append(Resize(queues(former), queues(count), dict(ends)))
            case 1:
                read()
            case _:
                for key in random.choices(range(24), k=random.randint(1, 6)):
                    queue = queues(count)[key % count]
                    keys[queue, ends[queue]] = key
                    written[key].append((queue, ends[queue]))
                    ends[queue] += 1
    while read():
        pass
    assert dict(processed) == dict(ends)


@pytest.mark.holds("resize")
@pytest.mark.parametrize("seed", range(100))
def test_key_sequences_grow_along_the_messages_of_each_key(seed: int) -> None:
    random = Random(seed)
    count, history, ends = random.randint(1, 8), list[Resize](), defaultdict[MessageQueue, int](int)
    places: dict[int, list[tuple[MessageQueue, int]]] = defaultdict(list)
    for number in range(random.randint(0, 6)):
        for key in random.choices(range(24), k=random.randint(0, 30)):
            queue = queues(count)[key % count]
            places[key].append((queue, ends[queue]))
            ends[queue] += 1
        former, count = count, random.randint(1, 8)
        history.append(Resize(queues(former), queues(count), dict(ends), number=number))
    # A store forgets resizes of which no message is left.
    forgotten = random.randint(0, max(0, len(history) - 1))
    left = history[forgotten:]
    for key, messages in places.items():
        kept = [
            (queue, offset)
            for queue, offset in messages
            if all(offset >= resize.begin(queue) for resize in history[:forgotten])
        ]
        sequences = [int(Generations.of(queue, left).key_sequences(np.array([offset], np.int64))[0]) for queue, offset in kept]
        assert sequences == sorted(set(sequences)), key
        whole = [int(Generations.of(queue, history).key_sequences(np.array([offset]))[0]) for queue, offset in kept]
        assert sequences == whole, "the sequences do not depend on what was forgotten"


def test_the_key_sequence_of_a_topic_that_was_never_resized_is_the_offset() -> None:
    offsets = np.arange(5, dtype=np.int64)
    assert Generations.of(queues(1)[0], []) is ONE_GENERATION
    assert ONE_GENERATION.key_sequences(offsets).tolist() == offsets.tolist()
    later = Generations.of(queues(2)[1], [resize(1, 2, 7)]).key_sequences(offsets)
    assert [generation_of(int(sequence)) for sequence in later] == [1] * 5
