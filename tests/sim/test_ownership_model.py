"""An exhaustive model of the ownership rules: no interleaving breaks a promise. If a rule is left out, some interleaving does.

``python -m tests.sim.ownership_model QUEUES MESSAGES CRASHES PAUSES GIVES`` explores larger bounds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.sim.ownership_model import RULES, Bounds, Model

SMALL = Bounds(queues=1, messages=1, crashes=2, pauses=1, gives=1)


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """Turn off the garbage collector, which takes a quarter of the time: a model makes 200,000 tuples and no reference cycles."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.holds("former run")
@pytest.mark.parametrize(
    ("fenced", "shared", "atomic"),
    [
        pytest.param(True, True, True, id="embedded-shared-atomic"),
        pytest.param(True, True, False, id="embedded-shared-foreign"),
        pytest.param(True, False, True, id="embedded-exclusive-atomic"),
        pytest.param(True, False, False, id="embedded-exclusive-foreign"),
        pytest.param(False, True, False, id="rocketmq-shared"),
        pytest.param(False, False, False, id="rocketmq-exclusive"),
    ],
)
def test_no_interleaving_loses_or_reorders_a_message(fenced: bool, shared: bool, atomic: bool) -> None:
    result = Model(SMALL, atomic=atomic, shared=shared, fenced=fenced).explore()
    assert result.wrong is None, result.trace
    assert result.complete
    assert result.states > 10_000


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_a_promise_is_broken(rule: str) -> None:
    result = Model(SMALL, atomic=True, without=rule).explore()
    assert result.wrong is not None, f"none of {result.states} states shows that {rule} is missing"


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "foreign"])
def test_a_batch_whose_queue_a_former_run_of_the_query_holds_is_not_done_without_it(atomic: bool) -> None:
    result = Model(SMALL, atomic=atomic, without="own_run").explore()
    assert result.wrong is not None
    assert any("former run ends" in step for step in result.trace)
