"""Spark Connect under kill -9: the client, its server, the source runner or workers are killed, and the query is restarted."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, cast

import psutil
import pytest

from orderedmq.rocketmq.local.probe import find_free_port
from tests.faults.conftest import World
from tests.faults.drivers import RUNNER, WORKER, Driver, send

#: The kinds of processes to kill, in this order.
KILLS: Final = ("workers", "runner", "client", "server") * 2


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_clients_servers_runners_and_workers_lose_and_repeat_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, cast(Any, None), 3)
    draw, seen = random.Random(11), Counter[str]()
    spec = world.spec(source={"maxOffsetsPerTrigger": 150})
    port = find_free_port()
    connect = {"spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin", "spark.connect.grpc.binding.port": str(port)}
    server = Driver(tmp_path / "server", "local[2]", connect)
    client = Driver(tmp_path / "client", f"sc://127.0.0.1:{port}")
    try:
        client.start(**spec)
        for number, kind in enumerate(KILLS):
            world.produce(150)
            before = world.count()
            seen["failed queries"] += client.go_on(lambda: world.count() > before, "the query continues", **spec)  # noqa: B023
            # Wait a random time, so that the kills hit different places of a micro-batch.
            time.sleep(draw.random() / 2)
            seen[f"kills of {kind}"] += 1
            if kind in ("workers", "runner"):
                for process in server.workers() if kind == "workers" else server.of_kind(RUNNER):
                    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                        send(process, WORKER if kind == "workers" else RUNNER, signal.SIGKILL)
                        seen[f"killed {kind}"] += 1
                if kind == "runner":
                    client.failure(timeout=120)
                    seen["failed queries"] += 1
                    client.start(**spec)
                continue
            client.kill_all()
            client.close()
            if kind == "client":
                # The server and its query continue without the client. When the next client starts its query, the new query
                # replaces the old one.
                world.produce(100)
                world.wait_for(3 * (150 * (number + 1) + 100 * seen["kills of client"]), timeout=300)
            else:
                server.kill_all()
                server.close()
                server = Driver(tmp_path / f"server-{number}", "local[2]", connect)
            client = Driver(tmp_path / f"client-{number}", f"sc://127.0.0.1:{port}")
            client.start(**spec)
        ends = {queue.queue_id: at.max_offset for queue, at in world.broker.log.bounds(world.queues).items()}
        seen["failed queries"] += client.go_on(lambda: world.group_at() == ends, "all messages are read", **spec)
        assert client.stop()["failure"] is None
        world.judge()
        print(f"\n{dict(seen)}: {world.count()} messages, 0 lost, 0 duplicated, 0 out of order")
        assert seen["failed queries"] >= seen["kills of runner"]
    finally:
        client.close()
        server.close()
        world.close()
