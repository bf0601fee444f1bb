"""Allocation of queues: exactly the results of RocketMQ's own strategies, and the properties that must always hold.

java_allocations.json has the results of the classes of rocketmq-client 5.3.3. JavaAllocations.java, next to it, wrote the
results and describes the cases in its first comment. That program is run by hand when there is a newer client.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.errors import OptionError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.ownership.allocate import INNER_STRATEGIES, STRATEGIES, Allocation, allocate

CASES: list[list[Any]] = json.loads((Path(__file__).parent / "java_allocations.json").read_text())

CLIENTS = st.text(min_size=1, max_size=6)
ROOMS = st.sampled_from(["a", "b", "c"])
MEMBERS = st.dictionaries(CLIENTS, ROOMS, min_size=1, max_size=9)
BROKERS = ["a@x", "a@y", "b@x", "c", "x", "x@", "b@x@y"]
QUEUES = st.sets(
    st.builds(MessageQueue, st.just("orders"), st.sampled_from(BROKERS), st.integers(0, 11)), min_size=1, max_size=40
)
DIVIDING = [
    *map(Allocation, INNER_STRATEGIES),
    *(Allocation("MACHINE_ROOM_NEARBY", inner=inner) for inner in INNER_STRATEGIES),
]


def topic(n: int, broker: str = "embedded", name: str = "orders") -> list[MessageQueue]:
    return [MessageQueue(name, broker, queue_id) for queue_id in range(n)]


def nowhere(*clients: str) -> dict[str, str | None]:
    return dict.fromkeys(clients)


def shares(
    allocation: Allocation, queues: Sequence[MessageQueue], members: Mapping[str, str | None]
) -> dict[str, list[MessageQueue]]:
    return {client: allocate(allocation, client, queues, members) for client in members}


# -- compared with Java


def test_java_spoke_of_every_strategy() -> None:
    named = Counter(case[0] for case in CASES)
    assert set(named) == {Allocation(name, inner=inner).name() for name in STRATEGIES for inner in INNER_STRATEGIES}
    assert min(named.values()) >= 9
    assert any(isinstance(owned, str) for case in CASES for owned in case[5])


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_as_java(name: str) -> None:
    strategy, _, inner = name.partition("-")
    shuffle = random.Random(name)
    for number, (_, told, topic_name, brokers, members, owned) in enumerate(CASES):
        if CASES[number][0] != name:
            continue
        queues = [MessageQueue(topic_name, broker, queue_id) for broker, count in brokers.items() for queue_id in range(count)]
        allocation = Allocation(
            strategy,
            queues=tuple(queues[position] for position in told) if strategy == "CONFIG" else (),
            rooms=tuple(told) if strategy == "MACHINE_ROOM" else (),
            inner=inner or "AVG",
        )
        assert allocation.name() == name
        for client, expected in zip((*members, "stranger"), owned, strict=True):
            some = shuffle.sample(queues, len(queues))
            group = dict(shuffle.sample(list(members.items()), len(members)))
            try:
                positions: object = [queues.index(queue) for queue in allocate(allocation, client, some, group)]
            except (ValueError, OptionError):
                positions = "IllegalArgumentException"
            assert (number, client, positions) == (number, client, expected)


# -- properties


@pytest.mark.parametrize("allocation", DIVIDING, ids=Allocation.name)
@given(queues=QUEUES, members=MEMBERS)
def test_every_queue_has_one_owner(allocation: Allocation, queues: set[MessageQueue], members: dict[str, str | None]) -> None:
    owned = shares(allocation, list(queues), members)
    assert Counter(queue for mine in owned.values() for queue in mine) == Counter(queues)


@pytest.mark.parametrize("strategy", ["AVG", "AVG_BY_CIRCLE"])
@given(n_queues=st.integers(1, 40), members=MEMBERS)
def test_averages_are_even(strategy: str, n_queues: int, members: dict[str, str | None]) -> None:
    sizes = [len(mine) for mine in shares(Allocation(strategy), topic(n_queues), members).values()]
    assert max(sizes) - min(sizes) <= 1


@given(queues=QUEUES, members=MEMBERS)
def test_average_gives_neighbours(queues: set[MessageQueue], members: dict[str, str | None]) -> None:
    for mine in shares(Allocation(), list(queues), members).values():
        between = [queue for queue in sorted(queues) if mine and mine[0] <= queue <= mine[-1]]
        assert mine == between


@given(queues=QUEUES, members=MEMBERS, new=CLIENTS)
def test_a_new_member_of_the_ring_takes_from_the_others_and_moves_nothing_between_them(
    queues: set[MessageQueue], members: dict[str, str | None], new: str
) -> None:
    before = shares(Allocation("CONSISTENT_HASH"), list(queues), members)
    after = shares(Allocation("CONSISTENT_HASH"), list(queues), {**members, new: None})
    for client in before:
        if client != new:
            assert set(after[client]) <= set(before[client])


def test_a_ring_of_many_members_hands_over_a_fair_share() -> None:
    members = nowhere(*(f"10.0.0.{n}@7" for n in range(9)))
    queues = topic(5000)
    moved = len(allocate(Allocation("CONSISTENT_HASH"), "10.0.0.10@7", queues, {**members, "10.0.0.10@7": None}))
    assert 0 < moved < len(queues) / 3


@given(queues=QUEUES, members=MEMBERS)
def test_who_is_near_owns_a_room(queues: set[MessageQueue], members: dict[str, str | None]) -> None:
    for client, mine in shares(Allocation("MACHINE_ROOM_NEARBY"), list(queues), members).items():
        for queue in mine:
            assert queue.broker_name.partition("@")[0] in (members[client], *({"a", "b", "c", "x"} - set(members.values())))


@given(queues=QUEUES, members=MEMBERS, rooms=st.sets(ROOMS))
def test_machine_rooms_are_divided_evenly_and_nothing_else_is(
    queues: set[MessageQueue], members: dict[str, str | None], rooms: set[str]
) -> None:
    owned = shares(Allocation("MACHINE_ROOM", rooms=tuple(rooms)), list(queues), members)
    near = [queue for queue in queues if queue.broker_name in ("a@x", "a@y", "b@x") and queue.broker_name[0] in rooms]
    assert Counter(queue for mine in owned.values() for queue in mine) == Counter(near)
    sizes = [len(mine) for mine in owned.values()]
    assert max(sizes) - min(sizes) <= 1


# -- edge cases


def test_queues_sort_by_number_and_names_by_utf16_units() -> None:
    # U+1F600 is after U+F900, but its first UTF-16 unit is before it.
    queues = [MessageQueue("t", broker, n) for broker in ("豈", "😀") for n in (10, 9)]
    members = nowhere("豈", "😀")
    assert allocate(Allocation(), "😀", queues, members) == [MessageQueue("t", "😀", 9), MessageQueue("t", "😀", 10)]
    assert allocate(Allocation(), "豈", queues, members) == [MessageQueue("t", "豈", 9), MessageQueue("t", "豈", 10)]


def test_configured_queues_are_the_topics_in_their_order_whatever_members_there_are() -> None:
    orders, bills = topic(4), topic(2, name="bills")
    allocation = Allocation("CONFIG", queues=(orders[3], bills[1], orders[0]))
    assert allocate(allocation, "me", orders, {}) == [orders[3], orders[0]]
    assert allocate(allocation, "me", bills, nowhere("other")) == [bills[1]]
    assert allocate(allocation, "me", topic(1, name="another"), nowhere("me")) == []


def test_a_configured_queue_that_is_not_there_is_an_error() -> None:
    with pytest.raises(
        TopicError, match="allocateQueues names queue orders/embedded/3, which.* wait for the broker that is away"
    ) as caught:
        allocate(Allocation("CONFIG", queues=tuple(topic(4))), "me", topic(3), nowhere("me"))
    assert caught.value.sub == "NO_SUCH_QUEUE"


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"CONFIG"}))
def test_nothing_to_divide_and_nobody_to_divide_among_are_errors(strategy: str) -> None:
    allocation = Allocation(strategy)
    members: dict[str, str | None] = {"me": "a"}
    for client, queues, group in (("", topic(1), members), ("me", [], members), ("me", topic(1), {})):
        with pytest.raises(ValueError):
            allocate(allocation, client, queues, group)
    assert allocate(allocation, "stranger", topic(1), members) == []


def test_a_strategy_unknown_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no strategy 'MINE'"):
        allocate(Allocation("MINE"), "me", topic(1), nowhere("me"))


def test_a_member_or_a_broker_without_a_room_is_named() -> None:
    with pytest.raises(OptionError, match="member 'other' of the group reports no room. Set machineRoom") as caught:
        allocate(Allocation("MACHINE_ROOM_NEARBY"), "me", topic(1), {"me": "a", "other": None})
    assert caught.value.sub == "MISSING"
    with pytest.raises(OptionError, match="broker '@x' has no room") as caught:
        allocate(Allocation("MACHINE_ROOM_NEARBY"), "me", topic(1, "@x"), {"me": "a"})
    assert caught.value.sub == "UNSUPPORTED"


def test_the_embedded_broker_is_a_room_of_its_own_name() -> None:
    allocation = Allocation("MACHINE_ROOM_NEARBY")
    assert allocate(allocation, "there", topic(4), {"here": "a", "there": "embedded"}) == topic(4)
    assert allocate(allocation, "here", topic(4), {"here": "a", "there": "b"}) == topic(4)[:2]


def test_an_allocation_is_a_value() -> None:
    assert Allocation() == Allocation("AVG", (), (), None, "AVG")
    assert {Allocation("CONFIG", queues=tuple(topic(2)))} == {Allocation("CONFIG", queues=tuple(topic(2)))}
    assert [Allocation(name).name() for name in STRATEGIES][-3:] == ["CONFIG", "MACHINE_ROOM", "MACHINE_ROOM_NEARBY-AVG"]
