"""The seeds that notice each planted bug, stored in `planted_seeds.json`, and the search for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from tests.sim.bugs import BUGS
from tests.sim.key_bugs import KEY_BUGS
from tests.sim.resize_bugs import RESIZE_BUGS
from tests.sim.runs import Report, run
from tests.sim.simulation import Scenario

Bug = Callable[[], AbstractContextManager[object]]

ALL: Final[tuple[Bug, ...]] = (*BUGS, *KEY_BUGS, *RESIZE_BUGS)
_FILE: Final = Path(__file__).with_name("planted_seeds.json")


def known_seeds() -> dict[str, int]:
    """The seed that notices each bug, by the bug's name."""
    seeds: dict[str, int] = json.loads(_FILE.read_text())
    return seeds


def run_for(bug: Bug, seed: int) -> Report:
    """Simulate a seed, in which the topic is resized if the bug is one of the barrier."""
    return run(seed, resizing=bug in RESIZE_BUGS)


def first_seed(bug: Bug, seeds: int) -> int | None:
    """The first of ``seeds`` seeds that notices the bug, or None."""
    for seed in range(seeds):
        # A bug in order per key cannot show in a seed without order per key.
        if bug in KEY_BUGS and Scenario.of(seed).kind.keys is None:
            continue
        with bug():
            if run_for(bug, seed).failures:
                return seed
    return None


def write_seeds(seeds: int) -> list[str]:
    """Find a seed for each bug and store the table. Return the names of bugs that no seed notices; the table lacks them."""
    found = {bug.__name__: first_seed(bug, seeds) for bug in ALL}
    _FILE.write_text(json.dumps({name: seed for name, seed in found.items() if seed is not None}, indent=1) + "\n")
    return [name for name, seed in found.items() if seed is None]
