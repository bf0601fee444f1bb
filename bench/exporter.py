"""Measures how much of a core the exporter uses for a group with many queues, all with lag and all moving, on both brokers."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psutil
import pyarrow as pa

import orderedmq
from bench.figures import Figure
from bench.measure import Bench, Skipped
from bench.web_page import started
from orderedmq.errors import JavaError, ServersError
from orderedmq.rocketmq.local.servers import Cluster

QUEUES: Final = 1000
#: The target, in percent of a core.
AIM: Final = 2.0
#: Seconds between two scrapes.
INTERVAL: Final = 15.0
#: Messages in each queue: enough that no queue reaches its end before the measurement ends.
MESSAGES: Final = 300
#: A query that owns all queues and commits one more message of each every second.
AT_WORK: Final = """
import json, sys, time, orderedmq
from orderedmq.ownership.membership import Subscription
with orderedmq.connect(**json.loads(sys.argv[1])) as broker:
    queues = broker.log.queues("orders")
    client = broker.groups.join("bench")
    broker.groups.heartbeat("billing", client, Subscription("shared", "orders", "AVG"))
    tokens = list(broker.groups.lock("billing", client, queues).values())
    print("ready", flush=True)
    for done in range(1, 10_000):
        broker.groups.commit(dict.fromkeys(tokens, done))
        if done % 10 == 0:
            broker.groups.renew(tokens)
            broker.groups.heartbeat("billing", client, Subscription("shared", "orders", "AVG"))
        time.sleep(1)
"""


def figures(bench: Bench) -> list[Figure]:
    found = []
    for kind, place in (("embedded broker", _store), ("RocketMQ, two brokers", _cluster)):
        with place(bench) as (to_connect, to_command):
            _fill(to_connect)
            share, looks = _share(to_connect, to_command, 2 if bench.quick else 6)
            what = f"{QUEUES:,} queues, all behind and moving, scraped every {INTERVAL:.0f} s, {kind}"
            found.append(Figure("exporter", what, share, "% of a core", None, share, AIM, low=True))
            found.append(
                Figure("exporter", f"the same, seconds between two looks, {kind}", looks, "s", None, looks, None, low=True)
            )
    return found


@contextmanager
def _store(bench: Bench) -> Iterator[tuple[dict[str, str], list[str]]]:
    path = str(bench.fresh("store"))
    yield {"path": path}, ["--path", path]


@contextmanager
def _cluster(bench: Bench) -> Iterator[tuple[dict[str, str], list[str]]]:
    folder = bench.fresh("servers")
    folder.mkdir()
    try:
        with Cluster(folder, brokers=2) as cluster:
            yield {"namesrv_addr": cluster.address}, ["--namesrv", cluster.address]
    except (ServersError, JavaError) as error:
        raise Skipped(str(error)) from None


def _fill(to_connect: dict[str, Any]) -> None:
    with orderedmq.connect(**to_connect) as broker:
        broker.admin.create_topic("orders", QUEUES)
        rows = pa.record_batch({"body": [b"x" * 100] * MESSAGES})
        broker.log.append(dict.fromkeys(broker.log.queues("orders"), rows))


def _share(to_connect: dict[str, Any], to_command: list[str], scrapes: int) -> tuple[float, float]:
    """Return the percentage of a core that the exporter uses, and the seconds from one look at the broker to the next."""
    command = [sys.executable, "-m", "orderedmq", "exporter", "--port", "0", "--json", *to_command]
    with started([sys.executable, "-c", AT_WORK, json.dumps(to_connect)]), started(command) as (process, line):
        url = json.loads(line)["url"]
        # Do not measure the loading of modules, nor the first look at the broker, which asks for the first message of every queue.
        for _ in range(2):
            _scrape(url)
            time.sleep(INTERVAL)
        exporter, looks = psutil.Process(process.pid), set()
        before, begun = exporter.cpu_times(), time.monotonic()
        for number in range(1, scrapes + 1):
            looks.add(_scrape(url))
            time.sleep(max(0.0, begun + number * INTERVAL - time.monotonic()))
        after, took = exporter.cpu_times(), time.monotonic() - begun
    return 100 * (after.user + after.system - before.user - before.system) / took, took / len(looks)


def _scrape(url: str) -> str:
    """Scrape, and return the line that says when the exporter looked at the broker."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    assert sum(line.startswith("orderedmq_group_lag_messages{") for line in lines) == QUEUES
    return next(line for line in lines if line.startswith("orderedmq_exporter_look_timestamp_seconds "))
