"""Order per key over a real broker under kill -9: workers, drivers and the broker are killed, and keys fail at random or always."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import orderedmq
from orderedmq.broker import Broker
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.local.servers import Cluster
from tests.live.faults.key_storm import Storm
from tests.waits import until

pytestmark = pytest.mark.spark


class World:
    """A topic and a group on a cluster."""

    def __init__(self, cluster: Cluster, folder: Path, queues: int = 3) -> None:
        self.cluster, self.folder = cluster, folder
        self.broker: Broker = orderedmq.connect(namesrv_addr=cluster.address)
        self.topic = f"storm-{uuid.uuid4().hex[:8]}"
        self.group = f"{self.topic}-g"
        self.broker.admin.create_topic(self.topic, queues)
        self.queues: list[MessageQueue] = until(lambda: self.broker.log.queues(self.topic), "the topic is known")

    def spec(self, checkpoint: str, **more: Any) -> dict[str, Any]:
        source = {"consumeFromWhere": "first", **more.pop("source", {})}
        place = {"servers": self.cluster.address, "topic": self.topic, "group": self.group}
        return {**place, "checkpoint": str(self.folder / checkpoint), "source": source, **more}

    def restart_broker(self) -> None:
        """Kill the broker with kill -9. It keeps acknowledged messages, but loses its locks and the group's offsets of the last 5 s."""
        self.cluster.broker.restart()


@pytest.fixture
def world(cluster: Cluster, tmp_path: Path) -> Iterator[World]:
    world = World(cluster, tmp_path)
    yield world
    world.broker.close()


@pytest.mark.fault("killed process")
@pytest.mark.holds("order per key")
@pytest.mark.nightly
def test_killed_drivers_and_a_killed_broker_lose_and_reorder_nothing_of_any_key(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storm = Storm(world, tmp_path / "calls", monkeypatch, keys=200, members=1)
    storm.run(messages=2000, poison=2, kills=3, interrupts=[world.restart_broker])
