"""Allocation of queues: exactly the results of RocketMQ's own strategies, and the properties that must always hold.

java_allocations.json has the results of the classes of rocketmq-client 5.3.3. JavaAllocations.java, next to it, wrote the
results and describes the cases in its first comment. That program is run by hand when there is a newer client.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.model import MessageQueue
from orderedmq.ownership.allocate import STRATEGIES, allocate

CASES: list[list[Any]] = json.loads((Path(__file__).parent / "java_allocations.json").read_text())

CLIENTS = st.text(min_size=1, max_size=6)
MEMBERS = st.sets(CLIENTS, min_size=1, max_size=9)
BROKERS = ["a@x", "a@y", "c", "x", "x@"]
QUEUES = st.sets(
    st.builds(MessageQueue, st.just("orders"), st.sampled_from(BROKERS), st.integers(0, 11)), min_size=1, max_size=40
)


def topic(n: int) -> list[MessageQueue]:
    return [MessageQueue("orders", "embedded", queue_id) for queue_id in range(n)]


def shares(strategy: str, queues: Sequence[MessageQueue], members: Collection[str]) -> dict[str, Sequence[MessageQueue]]:
    return {client: allocate(strategy, client, queues, members) for client in members}


# -- compared with Java


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_as_java(strategy: str) -> None:
    cases = [case for case in CASES if case[0] == strategy]
    assert len(cases) >= 9
    shuffle = random.Random(strategy)
    for number, (_, topic_name, brokers, members, owned) in enumerate(cases):
        queues = [MessageQueue(topic_name, broker, queue_id) for broker, count in brokers.items() for queue_id in range(count)]
        for client, expected in zip((*members, "stranger"), owned, strict=True):
            some = shuffle.sample(queues, len(queues))
            group = shuffle.sample(members, len(members))
            try:
                positions: object = [queues.index(queue) for queue in allocate(strategy, client, some, group)]
            except ValueError:
                positions = "IllegalArgumentException"
            assert (number, client, positions) == (number, client, expected)


# -- properties


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(queues=QUEUES, members=MEMBERS)
def test_every_queue_has_one_owner(strategy: str, queues: set[MessageQueue], members: set[str]) -> None:
    owned = shares(strategy, list(queues), members)
    assert Counter(queue for mine in owned.values() for queue in mine) == Counter(queues)


@given(queues=QUEUES, members=MEMBERS, new=CLIENTS)
def test_a_new_member_of_the_ring_takes_from_the_others_and_moves_nothing_between_them(
    queues: set[MessageQueue], members: set[str], new: str
) -> None:
    before = shares("CONSISTENT_HASH", list(queues), members)
    after = shares("CONSISTENT_HASH", list(queues), members | {new})
    for client in before:
        if client != new:
            assert set(after[client]) <= set(before[client])


# -- edge cases


def test_queues_sort_by_number_and_names_by_utf16_units() -> None:
    # U+1F600 is after U+F900, but its first UTF-16 unit is before it.
    queues = [MessageQueue("t", broker, n) for broker in ("豈", "😀") for n in (10, 9)]
    members = {"豈", "😀"}
    assert allocate("AVG", "😀", queues, members) == [MessageQueue("t", "😀", 9), MessageQueue("t", "😀", 10)]
    assert allocate("AVG", "豈", queues, members) == [MessageQueue("t", "豈", 9), MessageQueue("t", "豈", 10)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_to_divide_and_nobody_to_divide_among_are_errors(strategy: str) -> None:
    for client, queues, group in (("", topic(1), {"me"}), ("me", [], {"me"}), ("me", topic(1), set[str]())):
        with pytest.raises(ValueError):
            allocate(strategy, client, queues, group)
    assert allocate(strategy, "stranger", topic(1), {"me"}) == []
    with pytest.raises(ValueError):
        allocate("MINE", "me", topic(1), {"me"})
