"""Real RocketMQ servers, each used by a single module, which starts and stops them. Modules share no servers, so each module is a scope."""

from __future__ import annotations

import pytest

#: Seconds. A first fetch of jars is part of the first test's time.
_TIMEOUT = 900


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.rocketmq)
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(_TIMEOUT))
