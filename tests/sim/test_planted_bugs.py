"""Deliberate bugs test the simulation itself: it must catch each, with a seed that passes without the bug."""

from __future__ import annotations

import pytest

from tests.sim.bugs import BUGS
from tests.sim.key_bugs import KEY_BUGS
from tests.sim.runs import run
from tests.sim.simulation import Scenario

#: Number of seeds within which a bug must show.
ENOUGH = 1000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", [*BUGS, *KEY_BUGS], ids=[bug.__name__ for bug in (*BUGS, *KEY_BUGS)])
def test_a_planted_bug_is_caught(bug, capsys):
    # A bug in order per key cannot show where there is none.
    for seed in (one for one in range(ENOUGH) if bug in BUGS or Scenario.of(one).kind.keys is not None):
        with bug():
            found = run(seed).failures
        if found:
            break
    else:
        pytest.fail(f"{ENOUGH} seeds did not notice: {bug.__doc__}")
    with capsys.disabled():
        print(f"\n{bug.__name__}: seed {seed}: {found[seed]}")
    assert not run(seed).failures, "the seed fails without the bug, too"
