"""Skips tests of real RocketMQ servers where RocketMQ's jars are missing; in CI, they fail instead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from orderedmq.conditions import ServersCondition
from orderedmq.errors import ServersError


@contextlib.contextmanager
def jars_required() -> Iterator[None]:
    """Skip the test if the body raises ServersError NO_JARS. A server that does not start is a failure everywhere."""
    try:
        yield
    except ServersError as error:
        if error.sub == ServersCondition.NO_JARS and os.environ.get("CI") != "true":
            pytest.skip(str(error))
        raise
