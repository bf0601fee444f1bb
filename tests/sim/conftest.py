"""Many seeds, in processes that take what CPU the tests beside them leave over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sim.runs import Many

#: What two processes do in two minutes.
SEEDS = 10_000


@pytest.fixture(scope="session")
def seeds() -> Iterator[Many]:
    """All seeds, which have begun."""
    many = Many(range(SEEDS), background=True)
    yield many
    many.close()
