"""Whatever is typed into a page's address or fields is answered with a page, and a message's text never reaches a page unescaped.

The routes are those of the application, and the fields are those that its handlers read, so a new route or field is tested
without being named here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

import pyarrow as pa
import pytest
from starlette.datastructures import QueryParams
from starlette.routing import Route

from orderedmq.schema import PRODUCER_SCHEMA
from orderedmq.ui.app import make_app
from orderedmq.ui.guard import FormFields, Guard, Rules
from tests.ui_site import GROUP, Answer, Shop

#: Characters that a browser or terminal interprets instead of showing them.
OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
#: One character of each kind.
FOREIGN = "\x00\x1b[2J\u202egnp\u2066\u200f\x85"
#: More digits than Python's int accepts.
DIGITS = "9" * 5000
#: The statuses of answers to typed fields and to typed addresses.
ANSWERS = {200, 303, 404, 409}
#: Values of fields without which a handler does not read other fields.
SENSIBLE = {"action": "drop", "key": "orders/embedded/0/k/x", "of": "embedded/0", "to": "latest", "parked": "keep"}
#: Fields that cannot be guessed: a wrong value is answered with 403.
SECRET = {"mark", "token"}


class Pages:
    """The application, called without a server."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.rules = Rules(allow_changes=True)
        guard = make_app(shop.broker, "data/omq", self.rules)
        assert isinstance(guard, Guard)
        self.guard = guard
        self.loop = asyncio.new_event_loop()
        #: The fields of each method and path that were found so far.
        self.fields: dict[tuple[str, str], set[str]] = {}

    @property
    def routes(self) -> list[tuple[str, str]]:
        """The method and the path of each address, without static files."""
        app: Any = self.guard.app
        found = [(method, route.path) for route in app.routes if isinstance(route, Route) for method in route.methods or ()]
        return [(method, path) for method, path in found if method != "HEAD"]

    def ask(self, method: str, path: str, fields: Sequence[tuple[str, str]] = ()) -> Answer:
        """Send fields in the address of a GET, or as the form of a POST with the form's mark."""
        fields = [(name, value) for name, value in fields if name]
        if method == "POST" and not any(name == "mark" for name, _ in fields):
            fields = [*fields, ("mark", self.rules.mark)]
        sent = urlencode(fields).encode()
        raw_path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "root_path": "",
            "path": unquote(raw_path), "raw_path": raw_path.encode(), "query_string": query.encode() if method == "POST" else sent or
            query.encode(), "headers": [(b"host", b"127.0.0.1"), (b"origin", b"http://127.0.0.1")], "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80), "state": {},
        }  # fmt: skip
        answered: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": sent if method == "POST" else b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            answered.append(message)

        self.loop.run_until_complete(self.guard(scope, receive, send))  # type: ignore[arg-type]
        headers = {name.decode(): value.decode() for name, value in answered[0]["headers"]}
        return Answer(answered[0]["status"], headers, b"".join(part.get("body", b"") for part in answered[1:]).decode())


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Collect the names of the fields that handlers read."""
    names = set[str]()
    item, every = QueryParams.__getitem__, FormFields.all

    def one_of_query(self: QueryParams, name: str) -> str:
        names.add(name)
        return item(self, name)

    def all_of_form(self: FormFields, name: str) -> list[str]:
        names.add(name)
        return every(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(QueryParams, "__getitem__", one_of_query)
        patch.setattr(FormFields, "all", all_of_form)
        yield names


def here(path: str) -> str:
    return path.replace("{group}", GROUP).replace("{topic}", "orders")


def fields_of(pages: Pages, method: str, path: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The fields that the handler of an address reads. It reads some only if others have a value."""
    if (method, path) not in pages.fields:
        pages.fields[method, path] = _asked_for(pages, method, path, monkeypatch)
    return pages.fields[method, path]


def _asked_for(pages: Pages, method: str, path: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    known: set[str] = set()
    with recorded(monkeypatch) as names:
        while True:
            for value in ("", "1"):
                pages.ask(method, here(path), [(name, value) for name in known - {"mark"}])
                pages.ask(method, here(path), [(name, SENSIBLE.get(name, value)) for name in known - {"mark"}])
            if names <= known:
                return known - SECRET
            known |= names


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """A store with parked keys and dead letters, so that changes can succeed."""
    shop = Shop(tmp_path_factory.mktemp("fields") / "store")
    with shop.broker:
        shop.park(0, 3)
        shop.park(1, 5)
        shop.give_up(0, 1, "y")
        made = Pages(shop)
        yield made
        made.loop.close()


def test_every_field_is_found(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    """If fields were missing, the tests below would test less than they claim."""
    found = {(method, path): fields_of(pages, method, path, monkeypatch) for method, path in pages.routes}
    assert found["GET", "/topics/{topic}/messages"] >= {
        "of", "broker", "queue", "offset", "time", "key", "exact", "after", "at_broker", "at_queue", "at_offset",
    }  # fmt: skip
    assert found["GET", "/groups/{group}/seek"] >= {"to", "topic", "parked", "force"}
    assert found["POST", "/groups/{group}/seek"] >= {"to", "parked", "force"}
    assert found["GET", "/groups/{group}/copy"] >= {"target", "topic", "parked", "force", "leave_parked"}
    assert found["POST", "/groups/{group}/copy"] >= {"target", "to"}
    assert found["GET", "/groups/{group}/dead"] >= {"first", "key", "error", "since", "quarantined"}
    assert found["POST", "/groups/{group}/parked/order"] >= {"action", "key", "sure"}
    assert found["POST", "/groups/{group}/dead/replay"] >= {"all", "offset", "keying", "to", "group"}
    assert found["GET", "/live/groups/{group}"] >= {"first"}


TYPED = (
    DIGITS, "0" * 5000 + "1", str(2**63 - 1), str(2**64), "-1", "٣", FOREIGN, "////o/" + DIGITS, "orders/embedded/0/o/" + DIGITS,
    "orders/embedded/0/k/" + FOREIGN, "embedded/" + DIGITS, f"orders/embedded/{DIGITS}/k/x", "[" * 5000, f"[{DIGITS}]",
    f'{{"orders": {{"embedded": {{"0": {DIGITS}}}}}}}', f'{{"orders": {{"embedded": {{"{DIGITS}": 1}}}}}}', '{"\\ud800": 1}',
    "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", DIGITS + "-01-01", "latest", "drop", "%ff", "x" * 70000,
)  # fmt: skip


def test_a_number_of_5000_digits_and_other_odd_texts_are_answered_in_every_field(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method, path in pages.routes:
        for name in sorted(fields_of(pages, method, path, monkeypatch)):
            for text in TYPED:
                # The fields that handlers read first.
                asked = SENSIBLE | {"action": "hold", "key": "orders/embedded/0/k/x", name: text}
                if name.startswith("at_"):
                    asked |= {"after": "1", "of": ""}
                if name == "after":
                    asked |= {"of": "", "key": ""}
                answer = pages.ask(method, here(path), list(asked.items()))
                assert answer.status in ANSWERS, (method, path, name, text[:60], answer.words)
                assert not OBEYED.search(answer.text), (method, path, name, text[:60])


def values(text: str, name: str) -> list[str]:
    """The values of the form's fields with this name, as a browser sends them."""
    return [unescape(found) for found in re.findall(rf'name="{name}" value="([^"]*)"', text)]


@pytest.mark.holds("web page robust")
def test_pages_escape_control_characters_and_their_forms_keep_the_values(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "store")
    key, queue = f"key {FOREIGN} %41/\\", shop.queues[0]
    message = {
        "body": FOREIGN.encode(), "sharding_key": key, "tags": FOREIGN, "keys": FOREIGN, "properties": [(f"p{FOREIGN}", FOREIGN)],
    }  # fmt: skip
    with shop.broker:
        shop.broker.log.append({queue: pa.RecordBatch.from_pylist([message], schema=PRODUCER_SCHEMA)})
        shop.park(0, 6, f"error {FOREIGN}")
        shop.give_up(0, 1, key, f"error {FOREIGN}")
        pages = Pages(shop)
        last = {"of": "embedded/0", "offset": "6", "queue": "0"}
        shown = {
            (path, asked): pages.ask("GET", here(path), list(fields.items()))
            for method, path in pages.routes
            if method == "GET"
            for asked, fields in {"last": last, "key": {"key": key}, "nothing": {"to": FOREIGN, "time": FOREIGN}}.items()
        }
        parked = shown["/groups/{group}/parked", "last"]
        [name] = values(parked.text, "key")
        drop = [("action", "drop"), ("key", name)]
        shown["sure", ""] = sure = pages.ask("POST", f"/groups/{GROUP}/parked/order", drop)
        wrong = [("action", "drop"), ("key", FOREIGN)]
        shown["wrong", ""] = pages.ask("POST", f"/groups/{GROUP}/parked/order", wrong)
        for place, answer in shown.items():
            # A browser stores an attachment, and does not show it.
            stored = answer.headers.get("content-disposition", "").startswith("attachment; ")
            assert stored or not OBEYED.search(answer.text), place
            assert not stored or place[0].endswith("/body")
        # Wherever one of the texts is shown, a reader sees its characters as escapes.
        for path in ("/groups/{group}/parked", "/groups/{group}/dead", "/topics/{topic}/messages", "/topics/{topic}/message"):
            for said in (r"\x00\x1b[2J\u202egnp\u2066\u200f\x85", r"key \x00\x1b[2J"):
                assert said in shown[path, "last"].words, (path, said)
        # The search form finds the key that it shows, even with another time.
        search = shown["/topics/{topic}/messages", "key"]
        assert search.text.count('id="r-') == 1
        typed = {field: values(search.text, field)[0] for field in ("key", "exact")}
        assert (
            pages.ask("GET", here("/topics/{topic}/messages"), [*typed.items(), ("time", "2020-01-01")]).text.count('id="r-')
            == 1
        )
        # A key that is typed over the shown one is used.
        other = [("key", "x"), ("exact", typed["exact"])]
        assert pages.ask("GET", here("/topics/{topic}/messages"), other).text.count('id="r-') == 8
        # The question and the answer to it name the parked key that was chosen.
        assert values(sure.text, "key") == [name]
        done = pages.ask("POST", f"/groups/{GROUP}/parked/order", [*drop, ("sure", "yes")])
        assert "Ordered to drop message 6 of key" in pages.ask("GET", done.headers["location"]).words
        pages.loop.close()
