"""The exporter over a cluster, as a separate process: its metrics, while servers are killed and restarted."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orderedmq.rocketmq.local.servers import Cluster
from tests.command import COMMAND, ENVIRONMENT
from tests.rocketmq.group_world import World
from tests.waits import until


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    with World(cluster) as world:
        yield world


def test_the_exporter_continues_after_servers_are_killed(world: World, cluster: Cluster) -> None:
    client = replace(world.broker.groups.join("query"), name="billing")
    world.broker.groups.heartbeat(world.group, client, world.shared())
    tokens = world.lock(world.broker, client)
    for queue in world.queues[:2]:
        world.send(queue, 3)
    world.broker.groups.commit({tokens[0]: 3, tokens[1]: 1})
    command = [*COMMAND, "exporter", "--port", "0", "--namesrv", cluster.address, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]

            def scraped() -> dict[str, dict[str, float]]:
                """Return the samples of the group and of the exporter itself: name, then queue or condition, then value."""
                found: dict[str, dict[str, float]] = {}
                with urllib.request.urlopen(url, timeout=60) as answer:
                    for family in text_string_to_metric_families(answer.read().decode()):
                        for sample in family.samples:
                            if sample.labels.get("group", world.group) == world.group:
                                label = sample.labels.get("queue") or sample.labels.get("condition", "")
                                found.setdefault(sample.name.removeprefix("orderedmq_"), {})[label] = sample.value
                return found

            def seen() -> dict[str, dict[str, float]]:
                return until(lambda: (found := scraped()) and found["up"][""] and "group_lag_messages" in found and found)

            found = seen()
            assert found["group_lag_messages"] == {"0": 0, "1": 2, "2": 0, "3": 0}
            assert found["group_next_offset"] == {"0": 3, "1": 1}
            assert found["group_lag_seconds"]["0"] == 0
            assert 0 < found["group_lag_seconds"]["1"] < 600
            assert 0 < 72 * 3600 - found["group_retention_horizon_seconds"]["1"] < 600
            assert found["group_members"] == {"": 1}
            assert sorted(found["group_lock_remaining_seconds"]) == ["0", "1", "2", "3"]
            cluster.broker.kill()
            away = until(lambda: (found := scraped()) and not found["up"][""] and found)
            assert "group_lag_messages" not in away
            assert sum(away["exporter_failures_total"].values()) >= 1
            cluster.broker.start()
            # The broker has lost its locks, its members and the latest offsets, so the test checks nothing about the group.
            until(lambda: scraped()["up"][""])
            assert process.poll() is None
        finally:
            process.kill()
