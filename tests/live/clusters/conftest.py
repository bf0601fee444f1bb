"""Tests with real RocketMQ servers. Each module starts and stops its own servers, so modules may run in different processes."""

from __future__ import annotations

import pytest

#: Seconds. The first test's time may include the download of the jars.
_TIMEOUT = 900


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.rocketmq)
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(_TIMEOUT))
