"""What tests of real RocketMQ servers do without RocketMQ's jars: they are skipped, but not in CI."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from orderedmq.conditions import ServersCondition
from orderedmq.errors import ServersError


@contextlib.contextmanager
def jars_required() -> Iterator[None]:
    """Skip the test if the body cannot get the jars. A server that does not come up is a failure everywhere."""
    try:
        yield
    except ServersError as error:
        if error.sub == ServersCondition.NO_JARS and os.environ.get("CI") != "true":
            pytest.skip(str(error))
        raise
