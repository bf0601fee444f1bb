"""Measures how much of a core the web page's server uses while viewers look at a group of many queues that is at work."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

import orderedmq
from bench.figures import Figure
from bench.measure import Bench

QUEUES: Final = 1000
#: The target, in percent of a core.
AIM: Final = 2.0
#: A query that owns all queues: every 50 ms it appends to one queue and commits the offsets of 20.
AT_WORK: Final = """
import sys, time, orderedmq, pyarrow as pa
from orderedmq.ownership.membership import Subscription
with orderedmq.connect(sys.argv[1]) as broker:
    queues = broker.log.queues("orders")
    client = broker.groups.join("bench")
    rows = pa.record_batch({"body": [b"x" * 100] * 20})
    turn, renewed = 0, 0.0
    while True:
        if time.monotonic() > renewed + 20:
            broker.groups.heartbeat("billing", client, Subscription("shared", "orders", "averagely"))
            tokens = broker.groups.lock("billing", client, queues)
            renewed = time.monotonic()
            print("ready", flush=True)
        broker.log.append({queues[turn % len(queues)]: rows})
        some = [queues[(turn * 20 + place) % len(queues)] for place in range(20)]
        ends = broker.log.bounds(some)
        broker.groups.commit({tokens[queue]: ends[queue].max_offset for queue in some})
        turn += 1
        time.sleep(0.05)
"""


def figures(bench: Bench) -> list[Figure]:
    path = bench.fresh("store")
    with orderedmq.connect(path) as broker:
        broker.admin.create_topic("orders", QUEUES)
    seconds = 8.0 if bench.quick else 40.0
    with started([sys.executable, "-c", AT_WORK, str(path)]):
        return [
            Figure("web page", f"{QUEUES:,} queues at work, {what}", share, "% of a core", None, share, aim, low=True)
            for what, page, viewers, aim in (
                ("one viewer of the group", "/live/groups/billing", 1, AIM),
                ("one viewer of all groups", "/live/", 1, AIM),
                ("ten viewers of the group", "/live/groups/billing", 10, None),
            )
            for share in (_share(path, page, viewers, seconds),)
        ]


def _share(path: Path, page: str, viewers: int, seconds: float) -> float:
    """Return the percentage of a core that the server uses while ``viewers`` fetch a page as its script does."""
    command = [sys.executable, "-m", "orderedmq", "ui", "--no-open", "--port", "0", "--path", str(path), "--json"]
    with started(command) as (process, line):
        port = int(json.loads(line)["url"].rstrip("/").rpartition(":")[2])
        stop = threading.Event()
        looking = [threading.Thread(target=_look, args=(port, page, stop), daemon=True) for _ in range(viewers)]
        for one in looking:
            one.start()
        # Do not measure the loading of modules and the compiling of templates.
        time.sleep(5)
        server = psutil.Process(process.pid)
        before, begun = server.cpu_times(), time.monotonic()
        time.sleep(seconds)
        after, took = server.cpu_times(), time.monotonic() - begun
        stop.set()
        for one in looking:
            one.join(30)
    return 100 * (after.user + after.system - before.user - before.system) / took


def _look(port: int, page: str, stop: threading.Event) -> None:
    tag = ""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    while not stop.is_set():
        connection.request("GET", page, headers={"if-none-match": tag})
        answer = connection.getresponse()
        answer.read()
        assert answer.status in (200, 304), answer.status
        tag = answer.headers["etag"]
        stop.wait(max(0.2, int(answer.headers["x-next"]) / 1000 + 0.02))
    connection.close()


@contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a program, wait for its first line of output, and yield both."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()
