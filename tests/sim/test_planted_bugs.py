"""Deliberate bugs test the simulation itself: for each of them, a seed must fail with the bug and pass without it."""

from __future__ import annotations

import pytest

from tests.sim.planted import ALL, first_seed, known_seeds, run_for

#: The number of seeds within which a bug must show. The rarest bug shows in seed 1860, most bugs before seed 100.
ENOUGH = 2000


def test_a_seed_is_known_for_each_bug() -> None:
    assert sorted(known_seeds()) == sorted(bug.__name__ for bug in ALL)


@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught_in_its_known_seed(bug) -> None:
    seed = known_seeds()[bug.__name__]
    with bug():
        found = run_for(bug, seed).failures
    assert found, f"seed {seed} does not notice: {bug.__doc__} Look for another seed: python -m tests.sim --planted"
    assert not run_for(bug, seed).failures, f"seed {seed} also fails without the bug"


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", ALL, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught_in_the_first_seeds(bug) -> None:
    """Finds bugs that almost no seed notices any more, although one known seed still does."""
    seed = first_seed(bug, ENOUGH)
    assert seed is not None, f"{ENOUGH} seeds did not notice: {bug.__doc__}"
    assert not run_for(bug, seed).failures, f"seed {seed} also fails without the bug"
