"""How a cluster is recognised while its servers fail and return."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orderedmq.errors import RocketMQError
from orderedmq.rocketmq.broker import RocketMQBroker
from tests.unit.rocketmq_peer import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


BOTH = {"0": "h:1", "1": "h:2"}


@pytest.mark.parametrize(
    ("planned", "found"),
    [
        pytest.param(BOTH, {"1": "h:2"}, id="the-master-has-failed"),
        pytest.param({"1": "h:2"}, BOTH, id="the-master-has-returned"),
        pytest.param(BOTH, {"0": "h:2", "1": "h:1"}, id="the-replica-has-become-the-master"),
        pytest.param(BOTH, {"0": "h:3", "1": "h:2"}, id="the-master-has-moved"),
    ],
)
def test_a_cluster_is_recognised_while_one_server_is_where_it_was(
    cluster: Cluster, planned: dict[str, str], found: dict[str, str]
) -> None:
    address = cluster.nameserver().address
    cluster.routes["T"] = {"a": planned}
    with RocketMQBroker(address) as driver:
        identity = driver.identity
    cluster.routes["T"] = {"a": found}
    with RocketMQBroker(address, identity=identity) as worker:
        assert worker.log
    cluster.routes["T"] = {"a": {"0": "h:4"}}
    with RocketMQBroker(address, identity=identity) as other, pytest.raises(RocketMQError, match="OTHER_CLUSTER.*a@h:4"):
        assert other.log
