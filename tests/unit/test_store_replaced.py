"""A store that is replaced, moved or deleted during use: its users get an error immediately, and users of other stores do not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orderedmq import connect, snapshot
from orderedmq.broker import Broker, SinkBatch
from orderedmq.connections import cached, reach
from orderedmq.embedded import index
from orderedmq.embedded.check import check
from orderedmq.embedded.index import topic_of
from orderedmq.embedded.log import append_rows
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.endpoint import Endpoint
from orderedmq.model import MessageQueue
from orderedmq.ownership.membership import Subscription
from orderedmq.rows.message_rows import normalise
from tests.contract.support import BIG, bodies, locked, refused, rows

QUEUE = MessageQueue("orders", "embedded", 0)


@pytest.fixture
def broker(path: Path) -> Iterator[Broker]:
    with connect(path) as broker:
        broker.admin.create_topic("orders", 1)
        broker.log.append({QUEUE: rows("ab")})
        yield broker


def away(path: Path) -> Path:
    """Move the store."""
    return path.rename(path.with_name("elsewhere"))


def deleted(path: Path) -> None:
    shutil.rmtree(path)


def anew(path: Path) -> None:
    """Put another store in its place."""
    away(path)
    with connect(path) as other:
        other.admin.create_topic("orders", 1)
        other.log.append({QUEUE: rows("xyz")})


def copied(path: Path) -> None:
    """Replace the store by a copy, as a restore from a backup does."""
    shutil.copytree(away(path), path)


def linked(path: Path) -> None:
    """Replace the path by a link to a copy."""
    shutil.copytree(away(path), path.with_name("copy"))
    path.symlink_to(path.with_name("copy"))


GONE: list[tuple[Callable[[Path], Any], str]] = [
    (away, "STORE.MISSING"),
    (deleted, "STORE.MISSING"),
    (anew, "STORE.REPLACED"),
    (copied, "STORE.REPLACED"),
    (linked, "STORE.REPLACED"),
]


@pytest.mark.holds("replaced store")
@pytest.mark.parametrize(("happen", "condition"), GONE)
def test_each_use_of_an_open_connection_is_refused(
    happen: Callable[[Path], Any], condition: str, path: Path, broker: Broker
) -> None:
    client = broker.groups.join("me")
    [token] = locked(broker, "g", client, [QUEUE])
    staging = broker.outbox.open(SinkBatch("sink", 1), 0)
    happen(path)
    uses: list[Callable[[], Any]] = [
        broker.log.change,
        lambda: broker.log.bounds([QUEUE]),
        lambda: broker.log.pull(QUEUE, 0, 10, 1 << 20, ("body",)),
        lambda: broker.log.append({QUEUE: rows("c")}),
        lambda: broker.groups.members("g"),
        lambda: broker.groups.heartbeat("g", client, Subscription("shared", "orders", "averagely")),
        lambda: broker.groups.renew([token]),
        lambda: broker.groups.check(token),
        lambda: broker.groups.commit({token: 1}),
        partial(staging.add, QUEUE, rows("c")),
        lambda: broker.outbox.publish(SinkBatch("sink", 2), []),
        lambda: broker.admin.create_topic("t", 1),
        broker.admin.groups,
    ]
    for use in uses:
        with refused(condition, path):
            use()
    # Leaving the group raises the same error, and closing raises none.
    with refused(condition, path):
        broker.groups.leave(client)
    broker.close()


def test_a_new_connection_has_the_new_store_and_the_old_one_still_none(path: Path, broker: Broker) -> None:
    copied(path)
    with connect(path) as after:
        after.log.append({QUEUE: rows("new")})
        with refused("STORE.REPLACED"):
            bodies(broker, QUEUE)
        assert bodies(after, QUEUE) == ["a", "b", "n", "e", "w"]
        broker.close()
        assert bodies(after, QUEUE) == ["a", "b", "n", "e", "w"]
        with connect(path) as third:
            assert third.identity == after.identity
    with connect(path.with_name("elsewhere")) as former:
        assert bodies(former, QUEUE) == ["a", "b"]


def test_a_store_that_is_moved_back_can_be_used_again(path: Path, broker: Broker) -> None:
    elsewhere = away(path)
    with refused("STORE.MISSING"):
        bodies(broker, QUEUE)
    elsewhere.rename(path)
    assert bodies(broker, QUEUE) == ["a", "b"]


def test_a_store_stays_open_under_its_other_paths(path: Path, broker: Broker) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with connect(link) as by_link:
        assert bodies(by_link, QUEUE) == ["a", "b"]
        link.unlink()
        link.symlink_to(path.with_name("nothing"))
        assert bodies(broker, QUEUE) == ["a", "b"]
    elsewhere = away(path)
    with connect(elsewhere) as moved:
        moved.log.append({QUEUE: rows("c")})
        client = moved.groups.join("me")
        assert [token.queue for token in locked(moved, "g", client, [QUEUE])] == [QUEUE]
        assert bodies(broker, QUEUE) == ["a", "b", "c"]


def test_does_not_report_a_store_in_a_closed_folder_as_missing(
    path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(place: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(place).endswith("index.db"):
            raise PermissionError(13, "Permission denied", place)
        return real(place, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    assert bodies(broker, QUEUE) == ["a", "b"]


# -- cached connections of tasks -----------------------------------------------------------------------------------------------------


def test_a_cached_connection_is_not_used_for_the_store_that_replaced_its_own(path: Path, broker: Broker) -> None:
    endpoint = Endpoint(path=str(path))
    before = broker.identity
    first = cached(endpoint, before)
    assert cached(endpoint, before) is first
    assert bodies(first, QUEUE) == ["a", "b"]
    copied(path)
    with reach(endpoint) as planning:
        after = planning.identity
    assert after != before
    second = cached(endpoint, after)
    second.log.append({QUEUE: rows("c")})
    assert bodies(second, QUEUE) == ["a", "b", "c"]
    # A task of the query that was planned before the store was replaced.
    with refused("STORE.REPLACED", path):
        bodies(cached(endpoint, before), QUEUE)
    assert bodies(cached(endpoint, after), QUEUE) == ["a", "b", "c"]


def test_a_process_keeps_the_16_stores_open_that_it_used_last(tmp_path: Path) -> None:
    """A worker in a session of tests eventually uses many stores, and each needs open files."""
    stores: list[tuple[Endpoint, str]] = []
    for number in range(20):
        with connect(tmp_path / str(number)) as broker:
            broker.admin.create_topic("orders", 1)
            stores.append((Endpoint(str(tmp_path / str(number))), broker.identity))
    open_before = len(Store._process().stores)
    first = cached(*stores[0])
    second = cached(*stores[1])
    for endpoint, identity in stores[2:]:
        assert bodies(cached(endpoint, identity), QUEUE) == []
        assert cached(*stores[0]) is first
    assert len(Store._process().stores) - open_before <= 16
    assert bodies(first, QUEUE) == []
    assert cached(*stores[1]) is not second
    assert bodies(cached(*stores[1]), QUEUE) == []


def test_a_cached_connection_to_a_missing_store_fails_at_each_use(path: Path, broker: Broker) -> None:
    endpoint, identity = Endpoint(path=str(path)), broker.identity
    bodies(cached(endpoint, identity), QUEUE)
    away(path)
    for _ in range(3):
        with refused("STORE.MISSING", path):
            bodies(cached(endpoint, identity), QUEUE)


@pytest.mark.parametrize("happen", [happen for happen, _ in GONE])
def test_a_connection_to_another_store_than_the_expected_one_is_refused(
    happen: Callable[[Path], Any], path: Path, broker: Broker
) -> None:
    identity = broker.identity
    broker.close()
    happen(path)
    with reach(Endpoint(path=str(path)), identity=identity) as again, refused("STORE.OTHER_MACHINE", path, "replaced"):
        again.outbox.publish(SinkBatch("sink", 1), [])


def test_a_write_to_a_replaced_store_is_not_acknowledged(path: Path, broker: Broker) -> None:
    """The store is replaced while the writer waits for its turn or writes."""
    opened = Store.open(path)
    with refused("STORE.REPLACED", path), opened.write() as txn:
        txn.take_number("test")
        copied(path)
    opened.close()


def retires(txn: Transaction) -> None:
    """Delete all messages, and therefore their segment."""
    index.retire(txn, QUEUE, before=BIG + 2)


def merges(txn: Transaction) -> None:
    """Append a message that is merged with the last chunk into a new segment."""
    append_rows(txn, topic_of(txn, "orders"), QUEUE, normalise(rows([os.urandom(70_000)]), ""), 0)


@pytest.mark.parametrize("first", ["work", "restore"])
@pytest.mark.parametrize("work", [retires, merges])
def test_a_restore_during_a_write_leaves_the_restored_store_and_the_former_one_sound(
    work: Callable[[Transaction], None], first: str, path: Path, broker: Broker
) -> None:
    broker.log.append({QUEUE: rows([os.urandom(10) for _ in range(BIG)])})
    if work is merges:
        broker.log.append({QUEUE: rows("c")})
    snapshot(path, path.with_name("copy"))
    opened = Store.open(path)
    with refused("STORE.REPLACED", path), opened.write() as txn:
        if first == "work":
            work(txn)
        former = away(path)
        path.with_name("copy").rename(path)
        if first == "restore":
            work(txn)
    opened.close()
    assert check(path) == check(former) == []
