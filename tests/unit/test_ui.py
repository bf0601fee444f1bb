"""The web page: what each page shows of an embedded store, which changes are possible and for whom, and the CPU time that a page costs.

The module is long because all pages are tested on the same shop.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import orderedmq
from orderedmq.broker import LockInfo, Progress, TopicInfo
from orderedmq.cli import app
from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.parking import AT_ONCE
from orderedmq.schema import PRODUCER_SCHEMA
from orderedmq.tools.parked import parked_keys, parked_row
from orderedmq.ui import guard, repairs, server
from orderedmq.ui.server import url_of
from orderedmq.ui.shared_look import LEAST, SHARE, UNCHANGED, SharedLook
from orderedmq.ui.watches import Watches
from tests.command import COMMAND, ENVIRONMENT
from tests.ui_site import GROUP, Served, Shop, rows, served
from tests.waits import until


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path / "store")
    with made.broker:
        yield made


@pytest.fixture
def site(shop: Shop) -> Iterator[Served]:
    """The page with its defaults: on loopback, without a token, read-only."""
    with served(shop.broker) as site:
        yield site


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page for tests that change nothing."""
    made = Shop(tmp_path_factory.mktemp("still") / "store")
    with made.broker, served(made.broker) as site:
        yield site


@pytest.fixture
def mending(shop: Shop) -> Iterator[Served]:
    """The page with --allow-changes."""
    with served(shop.broker, allow_changes=True) as site:
        yield site


# Contents of the pages.


def test_the_first_page_has_lag_owners_parked_messages_and_dead_letters(shop: Shop, site: Served) -> None:
    shop.park(0, 3)
    shop.give_up(0, 1, "y")
    page = site.get("/")
    assert re.findall(r'<li id="(\w+)-billing" class="(\w+)">', page.text) == [("dead", "warn"), ("parked", "warn")]
    said = page.words
    assert "billing : 1 dead letter waiting" in said
    assert "billing : 1 parked message of 1 key" in said
    assert "billing 22 orders/1 (6) orders 4 1 owns 4 1 1 of 1" in said
    assert "dlq-replay" not in said


def test_the_progress_of_a_long_micro_batch_is_shown_with_the_lag(shop: Shop, site: Served) -> None:
    shop.broker.groups.record_progress(shop.token(0), Progress(5), "consume_orderly books.book")
    assert "4 3 done" in site.get("/groups/billing").words


def test_a_queue_without_an_owner_and_messages_that_retention_deleted_are_named(shop: Shop, site: Served) -> None:
    assert "has a running owner. There are no parked messages" in site.get("/").words
    shop.leave()
    shop.broker.admin.trim("orders", {shop.queues[0]: 6})
    said = until(lambda: (words := site.get("/").words) and "no running owner" in words and words)
    assert "billing : 3 queues with unprocessed messages and no running owner" in said
    assert "billing : retention has deleted 4 unprocessed messages" in said


def test_shows_the_queues_with_the_greatest_lag_first(tmp_path: Path) -> None:
    with orderedmq.connect(tmp_path) as broker:
        broker.admin.create_topic("wide", 120)
        queues = broker.log.queues("wide")
        broker.log.append({queues[117]: rows([b"a", b"b"], None, None)})
        client = broker.groups.join("q")
        broker.groups.lock("g", client, queues)
        with served(broker) as site:
            said = site.get("/groups/g").words
            assert "wide/117 2" in said
            assert "wide/60 " not in said
            assert "The 50 queues with the greatest lag, of 120" in said
            assert "wide/60 0" in site.get("/groups/g?first=50").words
            assert "101 to 120 of 120" in site.get("/topics/wide?first=100").words


def test_a_hand_over_is_named_with_both_owners(shop: Shop, site: Served) -> None:
    assert "None since" in site.get(f"/groups/{GROUP}").words
    shop.leave()
    shop.own("query-2", shop.queues)
    change = r"orders/0, orders/1, orders/2, orders/3: query-1@\S+ → query-2@\S+"
    said = until(lambda: (words := site.get(f"/live/groups/{GROUP}").words) and re.search(change, words) and words)
    # All requests for pages share one history.
    assert "22 messages 10 minutes ago" in said


def test_a_topic_that_is_deleted_while_the_topics_are_read_is_left_out(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.broker.admin.create_topic("brief", 1)
    listed = shop.broker.log.topics

    def listed_before_deletion() -> list[TopicInfo]:
        found = listed()
        shop.broker.admin.delete_topic("brief")
        return found

    monkeypatch.setattr(shop.broker.log, "topics", listed_before_deletion)
    assert [(one.topic.name, one.messages) for one in Watches(shop.broker).topics().get()] == [("orders", 24)]


# Messages.


def test_messages_are_found_by_queue_offset_and_time(still: Served) -> None:
    said = still.get("/topics/orders/messages?of=embedded/1&offset=4").words
    assert re.search(r"orders/1 4 \S+ \S+ y/<b>& 1-4 orders/1 5 \S+ \S+ none 1-5 Earlier", said), said
    assert "1-3" not in said
    assert "No messages here" in still.get("/topics/orders/messages?of=embedded/1&time=2100-01-01").words
    assert "0-0" in still.get("/topics/orders/messages?time=2020-01-01").words
    assert "3-5" in still.get("/topics/orders/messages").words


def test_a_long_history_has_several_pages(shop: Shop, site: Served) -> None:
    for part in range(15):
        for queue in shop.queues:
            shop.broker.log.append({queue: rows([b"n%d.%d" % (part, queue.queue_id)], "long")})
    found: list[str] = []
    path: str | None = "/topics/orders/messages?key=long"
    pages = 0
    while path is not None:
        page = site.get(path)
        found += re.findall(r"\bn\d+\.\d\b", page.words)
        later = re.search(r'href="([^"]+)">Later<', page.text)
        path = later and later[1].replace("&amp;", "&")
        pages += 1
    assert found == [f"n{part}.{number}" for part in range(15) for number in range(4)]
    assert pages == 2


def test_a_message_has_a_page_with_its_whole_body_and_its_properties(shop: Shop, site: Served) -> None:
    message = {"body": b"\x1b[31m<script>" + b"z" * 5000, "sharding_key": "k", "properties": [("colour", "<red>")]}
    shop.broker.log.append({shop.queues[0]: pa.RecordBatch.from_pylist([message], schema=PRODUCER_SCHEMA)})
    shop.broker.log.append({shop.queues[0]: rows([b"\xff\x00"], None)})
    path = "/topics/orders/message?queue=0&offset=6"
    page = site.get(path)
    assert site.get(path.replace("/message?", "/body?")).text.startswith("\x1b[31m<script>zzz")
    assert "\\x1b[31m&lt;script&gt;zzz" in page.text
    assert page.text.count("z") >= 5000
    assert "colour <red>" in page.words
    assert "0xff00" in site.get("/topics/orders/message?queue=0&offset=7").words
    assert "script>z" not in site.get("/topics/orders/messages").text.replace("&gt;", "")


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/groups/none", 404, "consumer group 'none' does not exist"),
        ("/topics/none", 404, "topic 'none' does not exist"),
        ("/groups/a b", 404, "may contain only letters"),
        ("/topics/orders/messages?of=embedded/9", 404, "has no queue embedded/9"),
        ("/topics/orders/messages?offset=many", 409, "not a whole number"),
        ("/topics/orders/messages?time=yesterday", 409, "is not a time"),
        ("/topics/orders/message?queue=0&offset=99", 409, "so it has no message 99"),
        (f"/groups/{GROUP}/seek?to=soon", 409, "is not earliest, latest"),
        ("/nowhere", 404, "Not Found"),
    ],
)
def test_a_page_explains_a_missing_object_or_a_wrong_field(still: Served, path: str, status: int, said: str) -> None:
    answer = still.get(path.replace(" ", "%20"))
    assert (answer.status, said in answer.words) == (status, True), answer.words


# Repairs.


def test_dead_letters_are_shown_and_replayed_by_condition_and_quarantine(
    shop: Shop, mending: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.give_up(0, 1, "y")
    shop.give_up(2, 4, "z", "Timeout <x>")
    shop.give_up(1, 4, "y", replays=3)
    dead = f"/groups/{GROUP}/dead"
    said = mending.get(dead).words
    assert re.search(r"2 orders/1 at 4 y ValueError: <bad> 3 3 \S+ \S+ quarantined given up", said), said
    said = mending.get(f"{dead}?error=Timeout+%3C").words
    assert "1 orders/2 at 4 z Timeout <x>" in said
    assert "orders/0 at 1" not in said
    assert "No dead letters meet these conditions." in mending.get(f"{dead}?key=none").words
    assert "orders/0 at 1" in mending.get(f"{dead}?key=y&since=2020-01-01").words
    assert "No dead letters meet these conditions." in mending.get(f"{dead}?since=2100-01-01").words
    with monkeypatch.context() as patch:
        patch.setattr(repairs, "_AT_ONCE", 1)
        answer = mending.post(f"{dead}/replay?error=Timeout+%3C", [("all", "yes")])
    assert "error=Timeout" in answer.headers["location"]
    assert "Replayed 1 dead letter: 1 to orders. There may be more matches" in mending.follow(answer).words
    done = mending.follow(mending.post(f"{dead}/replay", [("all", "yes")])).words
    assert "Replayed 2 dead letters: 2 to orders. Left out 1 in quarantine." in done
    refused = mending.post(f"{dead}/replay", [("offset", "2")])
    assert (refused.status, "dead letter 2 is in quarantine" in refused.words) == (409, True)
    assert "orders/0 at 1" not in mending.get(f"{dead}?quarantined=yes").words
    done = mending.follow(mending.post(f"{dead}/replay?quarantined=yes", [("offset", "2")])).words
    assert "Replayed 1 dead letter: 1 to orders." in done
    done = mending.follow(mending.post(f"{dead}/replay?quarantined=yes", [("all", "yes")])).words
    assert "Replayed 1 dead letter: 1 to orders." in done
    assert sum(at.max_offset for at in shop.broker.log.bounds(shop.queues).values()) == 24 + 5
    assert [line.partition(" ")[2] for line in mending.told[-2:]] == ["replayed 1 dead letters of group billing"] * 2


def test_a_letter_is_given_back_to_its_group_alone(shop: Shop, mending: Served) -> None:
    shop.give_up(0, 1, "x")
    form = [("offset", "0"), ("group", "yes")]
    refused = mending.post(f"/groups/{GROUP}/dead/replay", form)
    assert (refused.status, "has no parking lot" in refused.words) == (409, True)
    shop.park(0, 3)
    ends = shop.broker.log.bounds(shop.queues)
    done = mending.follow(mending.post(f"/groups/{GROUP}/dead/replay", form)).words
    assert "Replayed 1 dead letter: 1 to orders for this group only." in done
    assert shop.broker.log.bounds(shop.queues) == ends
    assert [key.messages for key in parked_keys(shop.broker, GROUP)] == [2]


def test_letters_that_meet_conditions_are_found_in_pages(shop: Shop, site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "_SEARCHED", 5)
    monkeypatch.setattr(repairs, "ROWS", 2)
    for offset in range(6):
        shop.give_up(0, offset, "y")
        shop.give_up(1, offset, "odd" if offset % 2 else "x")
    path: str | None = f"/groups/{GROUP}/dead?key=y"
    found = list[str]()
    while path is not None:
        page = site.get(path)
        found += re.findall(r"orders/0 at (\d)", page.words)
        later = re.search(r'href="([^"]+)">Later<', page.text)
        path = later and later[1].replace("&amp;", "&")
    assert found == list("012345")


def test_parked_keys_show_when_they_are_due_and_are_retried_and_dropped(shop: Shop, mending: Served) -> None:
    shop.park(0, 3)
    shop.park(0, 4)
    shop.park(1, 5)
    said = mending.get(f"/groups/{GROUP}/parked").words
    assert re.search(r"x orders/0 1 in (60|59)\.\d s 2 ", said) or "x orders/0 1 in 1 m 2 " in said, said
    assert "none, offset 5 orders/1" in said
    retry = [("action", "retry"), ("key", "orders/embedded/0/k/x"), ("key", "orders/embedded/1/o/5")]
    done = mending.follow(mending.post(f"/groups/{GROUP}/parked/order", retry)).words
    assert "Ordered to retry 2 parked messages of 2 keys: the owner does so in its next micro-batch." in done
    drop = [("action", "drop_all"), ("key", "orders/embedded/0/k/y%2F%3Cb%3E%26")]
    asked = mending.post(f"/groups/{GROUP}/parked/order", drop)
    assert "Drop 1 parked message of key 'y/<b>&'?" in asked.words
    assert "dropped" not in mending.get(f"/groups/{GROUP}/parked").words
    done = mending.follow(mending.post(f"/groups/{GROUP}/parked/order", [*drop, ("sure", "yes")])).words
    assert "Ordered to drop 1 parked message of key 'y/<b>&'" in done
    said = until(lambda: (words := mending.get(f"/groups/{GROUP}/parked").words) and "dropped" in words and words)
    assert "x orders/0 1 now 2 " in said
    again = mending.post(f"/groups/{GROUP}/parked/order", [*drop, ("sure", "yes")])
    assert (again.status, "not parked any more" in again.words) == (409, True)


@pytest.mark.parametrize("action", ["drop", "dead_letter", "replace"])
def test_the_first_message_of_a_parked_key_is_decided_after_a_question_that_shows_it(
    shop: Shop, mending: Served, action: str
) -> None:
    shop.park(2, 0)
    shop.park(2, 3)
    order = f"/groups/{GROUP}/parked/order"
    fields = [("action", action), ("key", "orders/embedded/2/k/x")]
    asked = mending.post(order, fields)
    assert "message 0 of key 'x'?" in asked.words
    assert ("2-0" in asked.text) == (action == "replace"), "the former body can be edited"
    assert re.findall(r'name="(action|offset)" value="(\w+)"', asked.text) == [("action", action), ("offset", "0")]
    sure = [*fields, ("sure", "yes"), ("offset", "0"), *([("body", "right\r\nnow")] if action == "replace" else [])]
    done = mending.follow(mending.post(order, sure)).words
    assert "message 0 of key 'x': the owner does so in its next micro-batch." in done
    [key] = parked_keys(shop.broker, GROUP)
    assert (key.offset, key.ticket.due, key.messages) == ((0, AT_ONCE, 2) if action == "replace" else (3, AT_ONCE, 1))
    if action == "replace":
        assert parked_row(shop.broker, GROUP, [key])["body"] == b"right\nnow"
    else:
        again = mending.post(order, sure)
        assert (again.status, "offset 0" in again.words) == (409, True), "not the message that is the first one now"


def test_an_order_is_not_given_if_the_owners_cannot_be_asked(
    shop: Shop, mending: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.park(0, 3)

    def away(_: str) -> list[LockInfo]:
        raise RocketMQUnavailableError(UnavailableCondition.NO_BROKER, "broker-b does not answer")

    monkeypatch.setattr(shop.broker.admin, "locks", away)
    before = shop.broker.log.change()
    drop = [("action", "drop"), ("sure", "yes"), ("key", "orders/embedded/0/k/x")]
    answer = mending.post(f"/groups/{GROUP}/parked/order", drop)
    assert (answer.status, "broker-b does not answer" in answer.words) == (503, True)
    assert (shop.broker.log.change(), mending.told) == (before, [])


def test_a_seek_is_shown_first_and_sets_what_was_shown(shop: Shop, mending: Served) -> None:
    refused = mending.get(f"/groups/{GROUP}/seek?to=earliest")
    assert (refused.status, "is in use" in refused.words) == (409, True)
    shop.leave()
    shown = mending.get(f"/groups/{GROUP}/seek?to=latest&topic=orders")
    assert "orders/0 2 6 4 skipped" in shown.words
    assert shop.offsets() == {shop.queues[0]: 2}
    form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', shown.text))
    for queue in shop.queues:
        shop.broker.log.append({queue: rows([b"came since"], None)})
    fields = [(name, form[name].replace("&#34;", '"')) for name in ("to", "parked", "force")]
    done = mending.follow(mending.post(f"/groups/{GROUP}/seek", fields)).words
    assert "Set the offsets of 4 queues of group billing." in done
    assert set(shop.offsets().values()) == {6}


def test_a_copy_is_shown_first_and_gives_another_group_what_was_shown(shop: Shop, mending: Served) -> None:
    shown = mending.get(f"/groups/{GROUP}/copy?target=canary")
    assert "orders/0 - 2 -" in shown.words
    assert "canary" not in shop.broker.admin.groups()
    form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', shown.text))
    shop.broker.groups.commit({shop.token(0): 5})
    fields = [(name, form[name].replace("&#34;", '"')) for name in ("target", "to", "parked", "force")]
    done = mending.follow(mending.post(f"/groups/{GROUP}/copy", fields)).words
    assert "Set the offsets of 1 queue of group canary." in done
    assert shop.broker.groups.offsets("canary", shop.queues) == {shop.queues[0]: 2}
    assert shop.offsets() == {shop.queues[0]: 5}
    shop.park(0, 5)
    for path, said in (
        (f"{GROUP}/copy?target=canary", "--leave-parked"),
        (f"{GROUP}/copy?target={GROUP}", "cannot be copied to itself"),
        (f"canary/copy?target={GROUP}", "is in use"),
    ):
        refused = mending.get(f"/groups/{path}")
        assert (refused.status, said in refused.words) == (409, True), refused.words
    assert "orders/0 2 5" in mending.get(f"/groups/{GROUP}/copy?target=canary&leave_parked=yes").words
    again = mending.post(f"/groups/{GROUP}/copy", [("target", GROUP), ("to", form["to"].replace("&#34;", '"'))])
    assert again.status == 409


# Who may see the pages, and who may change something.


def test_more_connections_than_the_limit_are_refused(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    with served(shop.broker) as site:
        silent = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(2)]
        assert site.get("/").status == 503
        for connection in silent:
            connection.close()
        until(lambda: site.get("/").status == 200)


def test_the_head_of_a_request_has_a_maximum_size(still: Served) -> None:
    with socket.create_connection(("127.0.0.1", still.port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * (32 << 10))
        assert b" 400 " in connection.recv(4096)


def test_a_form_that_comes_too_slowly_is_given_up(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "FORM_SECONDS", 0.3)
    with (
        served(shop.broker, token="a-secret-of-this-test", hosts=None) as site,
        socket.create_connection(("127.0.0.1", site.port), timeout=60) as connection,
    ):
        connection.sendall(b"POST /login HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\ntoken=")
        assert b" 408 " in connection.recv(4096)


@pytest.mark.holds("web page guarded")
def test_refuses_changes_by_default_and_hides_their_buttons(shop: Shop, site: Served) -> None:
    shop.park(0, 3)
    shop.give_up(0, 1, "y")
    tries = {
        "dead/replay": [("all", "yes")],
        "parked/order": [("action", "retry"), ("key", "orders/embedded/0/k/x")],
        "seek": [("to", "latest"), ("force", "yes"), ("parked", "keep")],
        "copy": [("target", "canary"), ("to", '{"orders": {"embedded": {"0": 1}}}')],
    }
    before = shop.broker.log.change()
    for path, fields in tries.items():
        answer = site.post(f"/groups/{GROUP}/{path}", fields)
        assert (answer.status, "read-only. Start orderedmq ui with --allow-changes" in answer.words) == (403, True)
    assert shop.broker.log.change() == before
    assert site.told == []
    for path in ("dead", "parked", "seek?to=latest&force=yes&parked=keep", "copy?target=canary&leave_parked=yes"):
        page = site.get(f"/groups/{GROUP}/{path}")
        assert 'method="post"' not in page.text
        assert "--allow-changes" in page.words


@pytest.mark.holds("web page guarded")
@pytest.mark.parametrize(
    ("headers", "mark", "said"),
    [
        ({"origin": "http://evil.example"}, True, "a page of another site"),
        ({"origin": "null"}, True, "a page of another site"),
        ({"origin": "http://127.0.0.1:1"}, True, "a page of another site"),
        ({"origin": "http://["}, True, "a page of another site"),
        ({}, False, "was restarted after it made this form"),
    ],
)
def test_a_form_of_another_site_changes_nothing(
    shop: Shop, mending: Served, headers: dict[str, str], mark: bool, said: str
) -> None:
    shop.give_up(0, 1, "y")
    before = shop.broker.log.change()
    answer = mending.post(f"/groups/{GROUP}/dead/replay", [("all", "yes")], mark=mark, **headers)
    assert (answer.status, said in answer.words) == (403, True), answer.words
    assert shop.broker.log.change() == before


@pytest.mark.holds("web page guarded")
@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 303)])
def test_a_form_without_an_origin_is_refused_if_its_browser_names_another_site(mending: Served, site: str, status: int) -> None:
    body = f"all=yes&mark={mending.rules.mark}"
    assert mending.ask("POST", f"/groups/{GROUP}/dead/replay", body, {"sec-fetch-site": site}).status == status


@pytest.mark.holds("web page guarded")
def test_another_name_of_this_machine_is_refused_on_loopback(still: Served) -> None:
    for host in ("evil.example", f"evil.example:{still.port}", "", "127.0.0.1.evil.example", "[::1"):
        assert still.ask("GET", "/", None, {"host": host}).status == 421, host
    for host in ("localhost", f"LOCALHOST:{still.port}", "[::1]:1", "127.0.0.1"):
        assert still.ask("GET", "/", None, {"host": host}).status == 200, host


def test_every_answer_has_the_headers_that_keep_pages_to_themselves(still: Served) -> None:
    for path in ("/", "/static/live.js", "/nowhere", f"/live/groups/{GROUP}"):
        headers = still.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; style-src 'self'; script-src 'self'; ")
        assert "'unsafe" not in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == ("no-cache" if path.startswith("/static") else "no-store")
        assert "server" not in headers


@pytest.mark.holds("web page guarded")
def test_with_a_token_nothing_is_shown_before_the_login(shop: Shop) -> None:
    token = "a-secret-of-this-test"
    with served(shop.broker, token=token, hosts=None, allow_changes=True) as site:
        assert site.get("/").headers["location"] == "/login"
        assert site.get(f"/live/groups/{GROUP}").status == 401
        assert site.post(f"/groups/{GROUP}/dead/replay", [("all", "yes")]).status == 401
        assert site.get("/topics", cookie="orderedmq-ui=guess").status == 303
        assert site.get("/healthz").text == "ok\n"
        assert "orders" not in site.get("/login").text
        wrong = site.post("/login", [("token", "another")], mark=False)
        assert (wrong.status, "That is not the token" in wrong.words, "set-cookie" in wrong.headers) == (403, True, False)
        assert site.post("/login", [("token", token)], mark=False, origin="http://evil.example").status == 403
        for near in (f"{token} ", f" {token}", f"{token}\n", token.upper()):
            assert site.post("/login", [("token", near)], mark=False).status == 403
        right = site.post("/login", [("token", token)], mark=False)
        cookie = right.headers["set-cookie"]
        assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
        assert token not in cookie
        assert right.headers["location"] == "/"
        assert site.get("/", cookie=cookie.partition(";")[0]).status == 200


def test_a_form_that_is_too_large_is_refused(mending: Served) -> None:
    answer = mending.post(f"/groups/{GROUP}/seek", [("to", "x" * (5 << 20))])
    assert answer.status == 413


@pytest.mark.holds("web page guarded")
def test_another_address_needs_a_token_that_is_long_enough(tmp_path: Path) -> None:
    def error(*arguments: str, **environment: str) -> str:
        done = CliRunner().invoke(app, ["ui", "--no-open", "--path", str(tmp_path), *arguments], env=environment)
        assert done.exit_code == 2, done.output
        return done.stderr

    assert "Set ORDEREDMQ_UI_TOKEN to a secret" in error("--host", "0.0.0.0")
    assert "too short" in error("--host", "0.0.0.0", ORDEREDMQ_UI_TOKEN="short")
    for blanks in (" " * 16, "\t" * 20, "\u00a0" * 16, "\u3000" * 16):
        assert "the token consists of blanks" in error("--token", blanks)
        assert "the token consists of blanks" in error(ORDEREDMQ_UI_TOKEN=blanks)
    for token in ("a-secret-of-this-test ", " a-secret-of-this-test", "a-secret-of-this-test\n"):
        assert "begins or ends with blanks or line ends" in error("--host", "0.0.0.0", ORDEREDMQ_UI_TOKEN=token)
    for token in ("a secret\nof this test", "a secret of \u202e this test", "a secret of \udcff this test"):
        assert "cannot be typed" in error("--token", token)
    assert "is too short to be a secret. Set ORDEREDMQ_METRICS_TOKEN" in error("--metrics-token", "short")
    for host in ("192.0.2.1", "a" * 70, ".a"):
        assert f"the server cannot listen at {host} port 0" in error("--host", host, "--port", "0", "--token", "x" * 16)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "Give another --port" in error("--port", str(taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:1/"), ("::1", "http://[::1]:1/"), ("[::1]", "http://[::1]:1/"), ("a.b", "http://a.b:1/")],
)
def test_the_address_that_is_printed_can_be_opened(host: str, url: str) -> None:
    assert url_of(host, 1) == url


def test_the_command_serves_until_ctrl_c_and_tells_of_changes_but_of_no_address(shop: Shop, tmp_path: Path) -> None:
    shop.give_up(0, 1, "y")
    command = [*COMMAND, "ui", "--no-open", "--port", "0", "--allow-changes", "--path", str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        with urllib.request.urlopen(f"{url}groups/{GROUP}/dead?first=0") as page:
            mark = re.search(r'name="mark" value="([^"]+)"', page.read().decode())
        assert mark is not None
        with urllib.request.urlopen(f"{url}groups/{GROUP}/dead/replay", f"all=yes&mark={mark[1]}".encode()) as page:
            assert "Replayed 1 dead letter" in page.read().decode()
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert out == ""
    assert re.fullmatch(r"\S+Z replayed 1 dead letters of group billing\n", said), said


# The cost of looking.


def test_viewers_share_one_look_and_one_rendering(shop: Shop, site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    describe = shop.broker.admin.group_offsets

    def noted(group: str) -> dict[MessageQueue, int]:
        looks.append(group)
        return describe(group)

    monkeypatch.setattr(shop.broker.admin, "group_offsets", noted)
    begun = time.monotonic()
    answers = [site.get(f"/live/groups/{GROUP}") for _ in range(20)]
    assert len({answer.headers["etag"] for answer in answers}) <= 1 + (time.monotonic() - begun) / LEAST
    assert len(looks) <= 2 + (time.monotonic() - begun) / LEAST
    again = site.get(f"/live/groups/{GROUP}", **{"if-none-match": answers[-1].headers["etag"]})
    assert (again.status, again.text) in ((304, ""), (200, again.text))
    assert 0 <= int(again.headers["x-age"]) < 1000 * (time.monotonic() - begun)


class Hands:
    """Clocks that the test sets."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.cpu = 0.0

    def spend(self, seconds: float) -> None:
        self.time += seconds
        self.cpu += seconds

    def shared(self, look: Callable[[], int], change: Callable[[], int | None]) -> SharedLook[int]:
        return SharedLook(look, change, lambda: self.time, lambda: self.cpu)


def test_a_look_that_is_costly_is_repeated_late() -> None:
    hands, looks, changes = Hands(), [], [7]

    def look() -> int:
        looks.append(1)
        hands.spend(0.04)
        return len(looks)

    shared = hands.shared(look, lambda: changes[0])
    assert shared.get() == 1
    changes[0] += 1
    # The first look loads modules and is therefore not representative, so the second one comes soon.
    hands.time += LEAST - 0.1
    assert shared.get() == 1
    hands.time += 0.1
    assert shared.get() == 2
    # 40 ms of CPU are 1/75 of one core over 3 s.
    assert shared.due_in == pytest.approx(0.04 / SHARE - 0.04)
    assert 2.9 < shared.due_in < 3
    changes[0] += 1
    hands.time += shared.due_in - 0.01
    assert shared.get() == 2
    hands.time += 0.02
    assert shared.get() == 3


def test_reads_an_unchanged_broker_again_only_after_a_while() -> None:
    hands, looks = Hands(), []

    def look() -> int:
        looks.append(1)
        return len(looks)

    quiet = hands.shared(look, lambda: 1)
    assert quiet.get() == 1
    hands.time += LEAST + 0.1
    assert quiet.age == pytest.approx(LEAST + 0.1)
    assert quiet.get() == 1
    assert quiet.due_in == pytest.approx(LEAST)
    assert quiet.age == 0
    hands.time += UNCHANGED - LEAST - 0.2
    assert quiet.get() == 1
    hands.time += LEAST + 0.1
    assert quiet.get() == 2
