"""Simulates many seeds in several processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Final

from orderedmq.errors import OrderedMQError
from tests.sim.simulation import STEPS, Scenario, Simulation

#: Seeds per job: enough to make the cost of distributing jobs negligible.
_CHUNK: Final = 50


@dataclass
class Report:
    """Counts of one or more seeds. ``repeats``: messages that an at-least-once sink got again. ``failures``: seed → error."""

    seeds: int = 0
    steps: int = 0
    messages: int = 0
    grants: int = 0
    repeats: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        for name in ("seeds", "steps", "messages", "grants", "repeats"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reached += other.reached
        self.failures |= other.failures

    def __str__(self) -> str:
        return (
            f"{self.seeds:,} seeds, {self.steps:,} steps: {self.messages:,} messages, {self.grants:,} locks granted, "
            f"{self.repeats:,} repeats in at-least-once sinks, {len(self.failures)} failures"
        )

    def keys(self) -> str:
        """Return counts of the events in listeners with order per key, as text."""
        return ", ".join(f"{name} {count:,}" for name, count in sorted(self.reached.items()))


def run(seed: int, steps: int = STEPS, *, resizing: bool = False) -> Report:
    """Simulate one seed. An error that the code under test raises is also a failure, because the simulation should handle it."""
    simulation = Simulation((Scenario.resizing if resizing else Scenario.of)(seed))
    failures = {}
    try:
        simulation.run(steps)
    except (AssertionError, OrderedMQError, LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        failures[seed] = f"{type(error).__name__}: {error}"
    world = simulation.world
    return Report(
        1, simulation.steps, sum(world.ends.values()), len(world.moves), world.ledger.repeats, world.reached, failures
    )


def trace(seed: int, steps: int = STEPS, *, resizing: bool = False) -> list[str]:
    """Return the events of a seed, one per line."""
    simulation = Simulation((Scenario.resizing if resizing else Scenario.of)(seed), trace=True)
    assert simulation.world.trace is not None
    try:
        simulation.run(steps)
    except Exception as error:
        simulation.world.note(f"{type(error).__name__}: {error}")
    return simulation.world.trace


def command(seed: int, *, resizing: bool = False) -> str:
    return f"python -m tests.sim --seed {seed} --trace{' --resizing' if resizing else ''}"


def _chunk(seeds: Sequence[int], steps: int, resizing: bool) -> Report:
    # A world is full of reference cycles and lives for milliseconds, so collect garbage once per chunk.
    gc.disable()
    total = Report()
    for seed in seeds:
        total.add(run(seed, steps, resizing=resizing))
    gc.collect()
    return total


class Many:
    """Simulates seeds in ``jobs`` parallel processes."""

    def __init__(self, seeds: range, steps: int = STEPS, jobs: int = 2, *, resizing: bool = False) -> None:
        self.count = len(seeds)
        # Do not fork, because PyArrow has threads.
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(jobs, spawn)
        parts = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
        self._futures = [self._pool.submit(_chunk, part, steps, resizing) for part in parts]

    def reports(self) -> Iterator[Report]:
        """Yield the report of each part of the seeds when it is done."""
        for done in as_completed(self._futures):
            yield done.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
