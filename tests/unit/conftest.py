"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.rocketmq_peer import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Nameservers and brokers of RocketMQ on loopback, which the test describes."""
    with Cluster() as servers:
        yield servers
