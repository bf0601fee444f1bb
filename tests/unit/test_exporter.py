"""A broker's metrics: the samples of one reading, who may scrape them, and a broker that disappears and returns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orderedmq.broker import LockInfo, MemberInfo, Progress
from orderedmq.connections import reach
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.endpoint import Endpoint
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.ownership.lock import Instant, LockToken
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.parking import HELD, KeyInLot, Lot
from orderedmq.tools.dead_letters import LetterCount
from orderedmq.tools.group_state import GroupQueue, group_queues
from orderedmq.ui import metrics, watches
from orderedmq.ui.guard import Rules
from orderedmq.ui.metrics import BrokerCollector, Reached, exporter_app, samples
from orderedmq.ui.server import listen, server
from orderedmq.ui.shared_look import SharedLook
from orderedmq.ui.watches import BrokerNow, GroupNow, QueueNow, StoreTimes, Watches
from tests.contract.support import FakeClock, locked
from tests.ui_site import GROUP, Served, Shop, rows, served
from tests.waits import until

A, B, C = (MessageQueue("orders", EMBEDDED_BROKER, number) for number in range(3))
NOW = 1_800_000_000.0
Found = dict[str, dict[tuple[str, ...], float]]


def told(look: BrokerNow, now: float) -> Found:
    """The values of the samples, by metric and by the values of its labels."""
    return {
        kind.name: {tuple(one.labels[label] for label in kind.labels): one.value for one in some}
        for kind, some in samples(look, now).items()
    }


def lock(queue: MessageQueue, *, alive: bool | None = True, name: str | None = "billing") -> LockInfo:
    return LockInfo("g", queue, "query-1", "query-1@host-1-00000000", 3, 3, True, alive, 5.0, 55.0, name)


def state(queue: MessageQueue, offset: int | None, begin: int, end: int, owner: LockInfo | None = None) -> GroupQueue:
    return GroupQueue("g", queue, offset, begin, end, end - max(offset or 0, begin), owner)


def group(*queues: GroupQueue, **more: object) -> GroupNow:
    return replace(GroupNow("g", NOW, [QueueNow(one, None, None) for one in queues], None), **more)  # type: ignore[arg-type]


# -- samples ----------------------------------------------------------------------------------------------------------------------


def test_samples_have_the_lag_and_the_retention_horizon_of_each_queue() -> None:
    look = BrokerNow(
        NOW,
        [group(state(A, 4, 0, 10), state(B, 7, 0, 7), state(C, 2, 5, 9), committed={A: NOW - 30, B: NOW - 900, C: NOW})],
        {("g", A): NOW - 100},
        {"orders": 600.0},
        {},
    )
    found = told(look, NOW + 10)
    a, b, c = (("g", "orders", "embedded", number) for number in "012")
    assert found["orderedmq_group_lag_messages"] == {a: 6, b: 0, c: 4}
    # The time of the third queue's first message is not known, so these metrics have no sample for that queue.
    assert found["orderedmq_group_lag_seconds"] == {a: 110, b: 0}
    assert found["orderedmq_group_retention_horizon_seconds"] == {a: 490}
    assert found["orderedmq_group_next_offset"] == {a: 4, b: 7, c: 2}
    assert found["orderedmq_group_last_commit_age_seconds"] == {a: 40, b: 910, c: 10}
    assert found["orderedmq_group_deleted_messages"] == {a: 0, b: 0, c: 3}
    assert told(look, NOW + 1000)["orderedmq_group_retention_horizon_seconds"] == {a: -500}
    # With a broker whose clock is ahead, the lag is 0, not negative.
    assert told(look, NOW - 200)["orderedmq_group_lag_seconds"][a] == 0


def test_progress_counts_until_the_group_has_passed_it(path: Path) -> None:
    with EmbeddedBroker(path, clock=FakeClock()) as broker:
        broker.admin.create_topic("orders", 1)
        broker.log.append({A: rows([b"x"] * 10, *[None] * 10)})
        [token] = locked(broker, "g", broker.groups.join("q"), [A])
        broker.groups.record_progress(token, Progress(7), "consume_orderly books.book")
        counts = []
        for offset in (0, 4, 7, 9):
            broker.groups.commit({token: offset})
            look = BrokerNow(NOW, [group(*group_queues(broker, "g"))], {}, {}, {})
            metrics = told(look, NOW)
            figures = (metrics[f"orderedmq_group_{name}_messages"] for name in ("lag", "progress"))
            counts.append([value for figure in figures for value in figure.values()])
        assert counts == [[10, 7], [6, 3], [3, 0], [1, 0]]


def test_members_hand_overs_letters_and_parked_keys_are_counted() -> None:
    lot = Lot(0)
    lot.keys = {"x": KeyInLot(5, 0, [1, 2]), "y": KeyInLot(HELD, 1, [3])}
    lot.places = {1: 0, 2: 1, 3: 2}
    lot.oldest = int((NOW - 50) * 1e6)
    member = MemberInfo(Member("q", "c", Subscription("shared", "orders"), 1, Instant("", 0.0), 60.0), 1.0)
    now = group(state(A, 4, 0, 4), members=[member], handed_over=3, letters=LetterCount(2, 1, 9))
    found = told(BrokerNow(NOW, [replace(now, queues=[replace(now.queues[0], lot=lot)])], {}, {}, {}), NOW)
    each = {name.removeprefix("orderedmq_group_"): list(values.values()) for name, values in found.items()}
    assert (each["members"], each["handovers_total"]) == ([1], [3])
    assert (each["dead_letters_total"], each["dead_letters_waiting"]) == ([9], [1])
    assert (each["parked_messages"], each["parked_keys"], each["held_keys"]) == ([3], [2], [1])
    assert each["parked_oldest_age_seconds"] == [pytest.approx(50)]
    denied = told(BrokerNow(NOW, [group(state(A, 4, 0, 4))], {}, {}, {}), NOW)
    assert denied["orderedmq_group_dead_letters_total"] == {}, "without the right to see dead letters, there must be no sample"
    assert denied["orderedmq_group_parked_oldest_age_seconds"] == {}


# -- when messages were stored ----------------------------------------------------------------------------------------------------


def test_a_look_asks_for_few_messages_and_until_its_turn_a_queue_has_the_time_of_its_former_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "MOST_LOOKED", 2)
    clock = FakeClock()
    with EmbeddedBroker(path, clock=clock) as broker:
        broker.admin.create_topic("orders", 3)
        queues = broker.log.queues("orders")
        begun = clock.micros / 1e6
        for _ in range(4):
            broker.log.append(dict.fromkeys(queues, rows([b"x"], "k")))
            clock.pass_(100)
        found = broker.groups.lock("g", broker.groups.join("me"), queues)
        tokens = {queue: token for queue, token in found.items() if isinstance(token, LockToken)}
        broker.groups.commit(dict.fromkeys(tokens.values(), 0))
        times = StoreTimes(broker)

        def look(now: float) -> list[float | None]:
            stored = times.look(now, group_queues(broker, "g"))
            return [None if ("g", queue) not in stored else stored["g", queue] - begun for queue in queues]

        assert look(0) == [0, 0, None]
        assert look(1) == [0, 0, 0]
        broker.groups.commit(dict.fromkeys(tokens.values(), 1))
        assert look(2) == [100, 100, 0]
        assert look(3) == [100, 100, 100]
        broker.groups.commit({tokens[queues[0]]: 2})
        assert look(4) == [200, 100, 100]
        broker.groups.commit({tokens[queue]: 3 - bool(queue.queue_id) for queue in queues})
        assert look(5) == [200, 200, 200], "queues whose messages were read longest ago must come first"
        assert look(6) == [300, 200, 200]
        broker.groups.commit({tokens[queues[0]]: 4})
        assert look(7) == [None, 200, 200], "a queue without messages to process must have no time"


# -- serving ----------------------------------------------------------------------------------------------------------------------


def _by_name(text: str) -> Found:
    found: Found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def scraped(site: Served, **headers: str) -> Found:
    answer = site.get("/metrics", **headers)
    assert answer.status == 200, answer.text
    return _by_name(answer.text)


def up(site: Served) -> float:
    return scraped(site)["orderedmq_up"][()]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path / "store")
    with made.broker:
        yield made


@contextmanager
def exporting(path: Path, told: list[str] | None = None, **rules: object) -> Iterator[Served]:
    """The exporter of the store at ``path``, as the command serves it."""
    with (
        listen("127.0.0.1", 0) as listening,
        closing(Reached(lambda: reach(Endpoint(str(path))))) as reached,
    ):
        site = Served("127.0.0.1", listening.getsockname()[1], Rules(**rules))  # type: ignore[arg-type]
        collector = BrokerCollector(reached.watches, reached.close, ([] if told is None else told).append)
        running = server(exporter_app(collector, site.rules))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: running.started)
        try:
            yield site
        finally:
            running.should_exit = True
            thread.join(30)


def test_page_and_exporter_serve_what_the_broker_has(shop: Shop) -> None:
    shop.park(0, 3)
    shop.give_up(0, 1, "y")
    with served(shop.broker) as page, exporting(shop.store) as exporter:
        of_page, of_exporter = scraped(page), scraped(exporter)
        assert page.get("/metrics").headers["content-type"].startswith("text/plain; version=")
        assert "/metrics" in exporter.get("/").text
        assert exporter.get("/groups/billing").status == 404
        assert [(one.status, one.text) for one in (page.get("/healthz"), exporter.get("/healthz"))] == [(200, "ok\n")] * 2
    for found in (of_page, of_exporter):
        assert found["orderedmq_up"] == {(): 1}
        assert sum(found["orderedmq_group_lag_messages"].values()) == 22
        assert found["orderedmq_group_members"] == {(GROUP,): 1}
        assert found["orderedmq_group_dead_letters_waiting"] == {(GROUP,): 1}
        assert found["orderedmq_group_parked_keys"] == {(GROUP, "orders"): 1}
        assert len(found["orderedmq_group_lock_remaining_seconds"]) == 4
        assert all(0 < value <= 60 for value in found["orderedmq_group_lock_remaining_seconds"].values())
        assert all(0 <= value < 60 for value in found["orderedmq_group_lag_seconds"].values())
        assert all(7 * 86400 - 60 < value <= 7 * 86400 for value in found["orderedmq_group_retention_horizon_seconds"].values())
        assert list(found["orderedmq_group_handovers_total"]) == [(GROUP,)], "the group of the replays must not be shown"


def test_reports_a_broker_that_disappears_and_returns(shop: Shop) -> None:
    told: list[str] = []
    with exporting(shop.store, told) as site:
        assert up(site) == 1
        away = shop.store.rename(shop.store.with_name("away"))
        gone = until(lambda: (found := scraped(site))["orderedmq_up"][()] == 0 and found)
        assert "orderedmq_group_lag_messages" not in gone, "with old values, the broker would look idle"
        assert gone["orderedmq_exporter_failures_total"][("ORDEREDMQ_STORE.MISSING",)] >= 1
        health = site.get("/healthz")
        assert (health.status, health.text) == (503, "the broker cannot be read: ORDEREDMQ_STORE.MISSING\n")
        assert len(told) == 1
        assert "the broker cannot be reached" in told[0]
        away.rename(shop.store)
        back = until(lambda: (found := scraped(site))["orderedmq_up"][()] == 1 and found)
        assert sum(back["orderedmq_group_lag_messages"].values()) == 22
        assert site.get("/healthz").status == 200
        assert told[1:] == ["the broker can be reached again"]


def test_a_scrape_does_not_wait_for_a_look_that_takes_long(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    everything = Watches.everything

    def takes_long(watches: Watches) -> SharedLook[BrokerNow]:
        assert may_end.wait(60)
        return everything(watches)

    monkeypatch.setattr(Watches, "everything", takes_long)
    monkeypatch.setattr(metrics, "PATIENCE", 0.0)
    with exporting(shop.store) as site:
        assert up(site) == 0, "the first reading has not ended yet"
        assert site.get("/healthz").status == 503
        may_end.set()
        until(lambda: up(site))
        monkeypatch.setattr(metrics, "STALE", -1.0)
        assert up(site) == 0, "values that are too old must not be shown"


# -- who may scrape ---------------------------------------------------------------------------------------------------------------

TOKEN, SCRAPER = "a-secret-of-this-test", "another-secret-of-it"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_scrapers_token_opens_the_metrics_and_no_page(shop: Shop) -> None:
    with served(shop.broker, token=TOKEN, scrape_token=SCRAPER, hosts=None) as site:
        refused = site.get("/metrics")
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        for wrong in (TOKEN, SCRAPER[:-1], f"{SCRAPER}x", "", "é" * 20):
            assert site.get("/metrics", **bearer(wrong)).status == 401
        assert site.get("/metrics", authorization=f"Basic {SCRAPER}").status == 401
        assert scraped(site, **bearer(SCRAPER))["orderedmq_up"] == {(): 1}
        assert site.get("/groups/billing", **bearer(SCRAPER)).status == 303
        assert site.get("/live/groups/billing", **bearer(SCRAPER)).status == 401
        assert site.post("/login", [("token", SCRAPER)], mark=False).status == 403
        cookie = site.post("/login", [("token", TOKEN)], mark=False).headers["set-cookie"].partition(";")[0]
        assert scraped(site, cookie=cookie)["orderedmq_up"] == {(): 1}, "whoever may see the page may see its metrics"


def test_without_a_token_the_metrics_are_for_this_machine(shop: Shop) -> None:
    with exporting(shop.store) as site:
        assert site.get("/metrics", host="evil.example").status == 421
    with exporting(shop.store, scrape_token=SCRAPER, hosts=None) as site:
        assert site.get("/metrics").status == 401
        assert site.get("/healthz").status == 200
        assert scraped(site, host="metrics.example", **bearer(SCRAPER))["orderedmq_up"] == {(): 1}
