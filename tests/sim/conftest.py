"""Starts the seeds in background processes, which use the CPU time that the tests beside them leave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim.runs import Many

#: The rarest planted bug shows in seed 512, most before seed 100 (test_planted_bugs.py).
SEEDS = 1_500
_MANY_SEEDS = 10_000


@pytest.fixture(scope="session")
def seeds(pytestconfig: pytest.Config) -> Iterator[Many]:
    """All requested seeds, started in the background."""
    count = pytestconfig.getoption("--seeds") or (_MANY_SEEDS if pytestconfig.getoption("--slow") else SEEDS)
    many = Many(range(count), background=True)
    yield many
    many.close()
