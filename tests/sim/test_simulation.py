"""Simulated queries of a group, with the real reader, group session, Owner, offsets and listener engine, without Spark.

A seed determines the number of queries and queues, the sink and the faults. Broker, network, clocks and processes are simulated.
More seeds: ``make simulate SEEDS=100000``. One seed: ``python -m tests.sim --seed 7 --trace``.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests import evidence
from tests.sim.key_judge import REACHED
from tests.sim.runs import Many, Report, command, run, trace
from tests.sim.simulation import STEPS, Scenario

#: The number of seeds in the fast tier and in the long one. `make simulate` runs more.
SEEDS = 500
RESIZED_SEEDS = 150
MANY_SEEDS = 10_000
#: Events that happen in one of 500 seeds or less often, so the fast tier may miss them.
RARE = ("lot in another order",)


# 10,000 seeds took 507 s on a busy machine.
@pytest.mark.fault("all at random, simulated", "embedded")
@pytest.mark.holds("no overtaking", "order per key", "final dead letter")
@pytest.mark.timeout(1800)
def test_queries_of_a_group_process_every_queue_once_and_in_order_whatever_happens(pytestconfig, nightly: bool, capsys):
    count = pytestconfig.getoption("--seeds") or (MANY_SEEDS if nightly else SEEDS)
    total = simulate(range(count), capsys)
    missed = [name for name in REACHED if not total.reached[name] and (name not in RARE or count >= MANY_SEEDS)]
    assert not missed or count < SEEDS, f"these events never happened in listeners with order per key: {', '.join(missed)}"


@pytest.mark.fault("all at random, simulated", "embedded")
@pytest.mark.holds("resize", "order per key")
@pytest.mark.timeout(1800)
def test_keys_keep_their_order_whatever_happens_while_their_topic_is_resized(pytestconfig, nightly: bool, capsys):
    count = pytestconfig.getoption("--seeds") or (MANY_SEEDS if nightly else RESIZED_SEEDS)
    total = simulate(range(count), capsys, resizing=True)
    assert total.reached["resized"] >= 5 * count
    assert total.reached["read after a move"] >= 50 * count


def simulate(seeds: range, capsys: pytest.CaptureFixture[str], *, resizing: bool = False) -> Report:
    """Simulate seeds and return their report. Fail with the trace of the first seed that fails."""
    total = Report()
    # Use one process, because the test run's second process needs the other processor.
    running = Many(seeds, jobs=1, resizing=resizing)
    for part in running.reports():
        total.add(part)
        if len(total.failures) > 20:
            break
    running.close()
    evidence.note(runs=total.seeds, acknowledged=total.messages, wrong=len(total.failures))
    with capsys.disabled():
        print(f"\nsimulation: {total}\norder per key: {total.keys()}")
    if total.failures:
        seed = min(total.failures)
        lines = "\n".join(trace(seed, resizing=resizing)[-120:])
        others = ", ".join(map(str, sorted(total.failures)[:20]))
        pytest.fail(f"seed {seed}: {total.failures[seed]}\n{command(seed, resizing=resizing)}\nfailed: {others}\n{lines}")
    assert total.seeds == len(seeds)
    assert total.steps >= total.seeds * STEPS
    return total


def test_a_seed_is_one_run():
    assert [run(seed) for seed in range(20)] == [run(seed) for seed in range(20)]
    assert trace(3) == trace(3)


@pytest.mark.parametrize("seed", [102041, 102847, 202309])
def test_a_key_goes_on_after_a_dead_letter_or_a_drop_that_a_progress_covers(seed: int) -> None:
    """An earlier attempt has decided a message that is still in the parking lot."""
    assert run(seed).failures == {}


def test_a_shared_query_does_not_end_because_of_a_queue_that_a_commit_has_found_lost() -> None:
    """An operator's seek took the queue from the query, and the renewal went on with its token."""
    assert run(6209353).failures == {}


def test_seeds_are_of_all_kinds():
    scenarios = [Scenario.of(seed) for seed in range(500)]
    kinds = {(one.calm, one.kind.shared, one.kind.atomic, one.kind.listener) for one in scenarios}
    assert kinds == set(product((False, True), repeat=4))
    assert {one.kind.strategy for one in scenarios} == {"AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH"}
    assert {one.members for one in scenarios} == {2, 3, 4}
    assert {one.queues for one in scenarios} == set(range(3, 9))
    assert any(one.seeks for one in scenarios)
    assert any(one.stranger for one in scenarios)
    assert any(one.twin for one in scenarios)
    keys = [one for one in scenarios if one.kind.keys is not None]
    assert {(one.calm, one.kind.shared, one.kind.atomic) for one in keys} == set(product((False, True), repeat=3))
    assert {one.kind.keys.settings.on_exhausted for one in keys if one.kind.keys} == {"dead_letter", "hold"}
    assert any(one.twin for one in keys)
    assert any(one.stranger for one in keys)
