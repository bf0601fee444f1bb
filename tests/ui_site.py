"""A store with everything that the web page shows, the served page, and a client that makes a browser's requests."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa

import orderedmq
from orderedmq.broker import Broker
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import ClientIdentity, LockToken
from orderedmq.ownership.membership import Subscription
from orderedmq.parking import Parking, Ticket
from orderedmq.rows.dead_letters import REPLAYS, dead_letter_properties
from orderedmq.schema import PRODUCER_SCHEMA
from orderedmq.ui.app import make_app
from orderedmq.ui.guard import Rules
from orderedmq.ui.server import listen, server
from tests.waits import until

GROUP = "billing"


def rows(bodies: list[bytes], *keys: str | None) -> pa.RecordBatch:
    return pa.record_batch({"body": bodies, "sharding_key": pa.array(keys, pa.string())})


class Shop:
    """A store with topic orders, whose four queues a query of group billing owns. A key is parked, and one message is a dead letter."""

    def __init__(self, path: Path) -> None:
        self.store = path
        self.broker = orderedmq.connect(path)
        self.broker.admin.create_topic("orders", 4, retention_seconds=7 * 86400)
        self.queues = self.broker.log.queues("orders")
        for queue in self.queues:
            bodies = [f"{queue.queue_id}-{number}".encode() for number in range(6)]
            self.broker.log.append({queue: rows(bodies, "x", "y", None, "x", "y/<b>&", None)})
        self.tokens = self.own("query-1", self.queues)
        self.broker.groups.commit({self.token(0): 2})

    def own(self, owner: str, queues: list[MessageQueue]) -> dict[MessageQueue, LockToken]:
        client = self.broker.groups.join(owner)
        self.broker.groups.heartbeat(GROUP, client, Subscription("shared", "orders", "averagely"))
        found = self.broker.groups.lock(GROUP, client, queues)
        return {queue: token for queue, token in found.items() if isinstance(token, LockToken)}

    def token(self, number: int) -> LockToken:
        return self.tokens[self.queues[number]]

    def leave(self) -> None:
        self.broker.groups.unlock(list(self.tokens.values()))
        self.broker.groups.leave(ClientIdentity("query-1", self.token(0).client_id))

    def park(self, number: int, offset: int, error: str = "no stock") -> None:
        due = int(time.time() * 1000) + 60_000
        assert self.broker.groups.park(
            self.token(number), [Parking(self.queues[number], offset, Ticket(offset, 2, 1, due, error))]
        )

    def give_up(self, number: int, offset: int, key: str, error: str = "ValueError: <bad>", replays: int = 0) -> None:
        own = {"colour": "red"} | ({REPLAYS: f"{GROUP}={replays}"} if replays else {})
        found = dead_letter_properties(
            self.queues[number], offset, message_id="m", reconsume_times=3, error=error, properties=own
        )
        letter = {"body": b"given up", "sharding_key": key, "properties": list(found.items())}
        letters = pa.RecordBatch.from_pylist([letter], schema=PRODUCER_SCHEMA)
        self.broker.groups.dead_letter(self.token(number), letters, [offset])

    def offsets(self) -> dict[MessageQueue, int]:
        return self.broker.groups.offsets(GROUP, self.queues)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def words(self) -> str:
        """The text that a reader sees: without tags, and with a single space for each run of white space."""
        return " ".join(unescape(re.sub(r"<[^>]+>", " ", self.text)).split())


@dataclass
class Served:
    """A page that is being served. ``told``: the changes that the command reports."""

    host: str
    port: int
    rules: Rules
    told: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, fields: Sequence[tuple[str, str]], *, mark: bool = True, **headers: str) -> Answer:
        """Send a form as one of our pages does."""
        every = [*fields, *([("mark", self.rules.mark)] if mark else [])]
        given = {"content-type": "application/x-www-form-urlencoded", "origin": self.url, **headers}
        return self.ask("POST", path, urlencode(every), given)

    def follow(self, answer: Answer) -> Answer:
        assert answer.status == 303, answer.words
        return self.get(answer.headers["location"])

    def ask(self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            given = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
            connection.request(method, path, body, {"host": f"127.0.0.1:{self.port}", **given})
            found = connection.getresponse()
            return Answer(found.status, {name.lower(): value for name, value in found.getheaders()}, found.read().decode())
        finally:
            connection.close()


@contextmanager
def served(broker: Broker, host: str = "127.0.0.1", **rules: Any) -> Iterator[Served]:
    """Serve the pages of a broker on a free port."""
    with listen(host, 0) as listening:
        site = Served("127.0.0.1", listening.getsockname()[1], Rules(**rules))
        running = server(make_app(broker, "data/omq", site.rules, site.told.append))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: running.started, "the server has started")
        try:
            yield site
        finally:
            running.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
