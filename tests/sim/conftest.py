"""The simulation begins when the run does and takes what CPU the tests before it leave over: Spark is waited for more than it works."""

from __future__ import annotations

import pytest

from tests.sim.runs import Many

#: What two processes do in two minutes.
SEEDS = 10_000

_running: list[Many] = []


def _begun() -> Many:
    if not _running:
        _running.append(Many(range(SEEDS), nice=19))
    return _running[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and any("seeds" in getattr(item, "fixturenames", ()) for item in session.items):
        _begun()


def pytest_sessionfinish() -> None:
    for many in _running:
        many.close()


@pytest.fixture
def seeds() -> Many:
    """All seeds, which may have run by now."""
    return _begun()
