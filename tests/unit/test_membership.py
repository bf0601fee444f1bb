"""Members of a group: which clients count as members, in which order, and which are refused because of another subscription."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orderedmq.errors import GroupError
from orderedmq.ownership.lock import ClientIdentity, Instant
from orderedmq.ownership.membership import Member, Subscription, refuse

SHARED = Subscription("shared", "orders", "averagely")
EXCLUSIVE = Subscription("exclusive", "orders")


def at(seconds: float, boot: str = "boot") -> Instant:
    return Instant(boot, seconds)


def member(name: str, joined: int = 1, subscription: Subscription = SHARED, seconds: float = 0.0) -> Member:
    """A member whose client id is ``name``. ``a@1`` is a client of owner ``a``."""
    return Member(name.partition("@")[0], name, subscription, joined, at(seconds))


def client(name: str) -> ClientIdentity:
    return ClientIdentity(name.partition("@")[0], name)


@pytest.mark.parametrize(("seconds", "expired"), [(0.0, False), (59.9, False), (60.0, False), (60.001, True)])
def test_a_member_is_expired_once_its_heartbeat_is_older_than_its_life(seconds: float, expired: bool):
    one = member("a@1", seconds=100.0)
    assert one.age(at(100.0 + seconds)) == pytest.approx(seconds)
    assert one.expired(at(100.0 + seconds)) is expired


# -- subscriptions ---------------------------------------------------------------------------------------------------------------


def test_agrees_without_another_member_and_ignores_a_client_that_is_none():
    refuse("g", client("a@1"), [member("a@1")])
    refuse("g", client("b@1"), [member("a@1")])
    refuse("g", client("b@1"), [])


def test_refuses_the_later_of_two_members_and_names_the_differences():
    other = Subscription("shared", "invoices", "averagely by circle", "red")
    members = [member("b@1", 2, other), member("a@1", 1)]
    refuse("billing", client("a@1"), members)
    with pytest.raises(GroupError) as caught:
        refuse("billing", client("b@1"), members)
    error = caught.value
    assert error.condition == "ORDEREDMQ_GROUP.DISAGREES"
    for word in (
        "'billing'",
        "query a (a@1)",
        "topics 'invoices', not 'orders'",
        "strategy 'averagely by circle', not 'averagely'",
        "filter 'red', not '*'",
        "consumerGroup",
    ):
        assert word in error.message
    assert "assignment '" not in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize("field", ["topics", "strategy", "filter", "filter_type"])
def test_one_difference_is_enough_and_only_it_is_named(field: str):
    change: Any = {field: "other"}
    other = replace(SHARED, **change)
    assert other.differences(SHARED) == [f"{field} 'other', not {getattr(SHARED, field)!r}"]
    with pytest.raises(GroupError, match="this query has " + field):
        refuse("g", client("b@1"), [member("a@1", 1), member("b@1", 2, other)])
    assert SHARED.differences(SHARED) == []


@pytest.mark.parametrize(("first", "second"), [(SHARED, EXCLUSIVE), (EXCLUSIVE, SHARED)])
def test_exclusive_and_shared_members_do_not_mix_in_either_order(first: Subscription, second: Subscription):
    members = [member("a@1", 1, first), member("b@1", 2, second)]
    refuse("g", client("a@1"), members)
    with pytest.raises(GroupError, match=f"assignment '{second.assignment}', not '{first.assignment}'"):
        refuse("g", client("b@1"), members)


def test_two_exclusive_members_agree_on_any_topics():
    refuse("g", client("b@1"), [member("a@1", 1, EXCLUSIVE), member("b@1", 2, Subscription("exclusive", "invoices"))])


def test_an_earlier_run_of_the_same_query_is_ignored_and_those_behind_it_are_not():
    other = replace(SHARED, topics="invoices")
    refuse("g", client("a@2"), [member("a@1", 1), member("a@2", 2, other)])
    with pytest.raises(GroupError, match="query b"):
        refuse("g", client("a@2"), [member("a@1", 1), member("b@1", 2), member("a@2", 3, other)])
