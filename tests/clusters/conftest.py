"""Real RocketMQ servers that only one module needs, which starts and stops them. Each module is a scope, since they share nothing."""

from __future__ import annotations

import pytest

#: Seconds. A first fetch of jars is part of the first test's time.
_TIMEOUT = 900


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.rocketmq)
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(_TIMEOUT))
