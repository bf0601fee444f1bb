"""An exhaustive model of the ownership rules: no interleaving breaks a promise. If a rule is left out, some interleaving does.

``python -m tests.sim.ownership_model QUEUES MESSAGES CRASHES PAUSES GIVES`` explores larger bounds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.sim.ownership_model import JAVA_RULES, RULES, Bounds, Model, Sink

SMALL = Bounds(queues=1, messages=1, crashes=2, pauses=1, gives=1)
#: A seek of one queue must not concern another one.
SOUGHT = Bounds(queues=2, messages=1, crashes=1, pauses=0, gives=0, seeks=1)
#: A query moves to another group and back.
MOVED = Bounds(queues=1, messages=2, crashes=2, pauses=0, gives=1, changes=2)


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    """Turn off the garbage collector, which takes a quarter of the time: a model makes 200,000 tuples and no reference cycles."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.holds("former run", "other sinks")
@pytest.mark.parametrize(
    ("fenced", "shared", "sink", "bounds"),
    [
        pytest.param(True, True, "atomic", SMALL, id="embedded-shared-atomic"),
        pytest.param(True, True, "foreign", SMALL, id="embedded-shared-foreign"),
        pytest.param(True, False, "atomic", SMALL, id="embedded-exclusive-atomic"),
        pytest.param(True, False, "foreign", SMALL, id="embedded-exclusive-foreign"),
        pytest.param(False, True, "foreign", SMALL, id="rocketmq-shared"),
        pytest.param(False, False, "foreign", SMALL, id="rocketmq-exclusive"),
        pytest.param(True, True, "atomic", SOUGHT, id="embedded-shared-atomic-seeks"),
        pytest.param(True, True, "numbering", SOUGHT, id="embedded-shared-numbering-seeks"),
        pytest.param(True, False, "numbering", SOUGHT, id="embedded-exclusive-numbering-seeks"),
        pytest.param(False, False, "numbering", SOUGHT, id="rocketmq-exclusive-numbering-seeks"),
        pytest.param(True, True, "atomic", MOVED, id="embedded-shared-atomic-moves"),
        pytest.param(True, False, "numbering", MOVED, id="embedded-exclusive-numbering-moves"),
        pytest.param(False, True, "foreign", MOVED, id="rocketmq-shared-moves"),
        pytest.param(False, False, "numbering", MOVED, id="rocketmq-exclusive-numbering-moves"),
    ],
)
def test_no_interleaving_loses_or_reorders_a_message(fenced: bool, shared: bool, sink: Sink, bounds: Bounds) -> None:
    result = Model(bounds, sink=sink, shared=shared, fenced=fenced).explore()
    assert result.wrong is None, result.trace
    assert result.complete
    assert result.states > 3_000


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_a_promise_is_broken(rule: str) -> None:
    bounds: Bounds
    sink: Sink
    bounds, sink = (SOUGHT, "numbering") if rule in ("seek", "scope") else (MOVED if rule == "group" else SMALL, "atomic")
    result = Model(bounds, sink=sink, without=rule).explore()
    assert result.wrong is not None, f"none of {result.states} states shows that {rule} is missing"


@pytest.mark.parametrize("rule", ["seek", "scope"])
def test_without_a_rule_a_promise_is_broken_on_a_broker_without_lineage(rule: str) -> None:
    result = Model(SOUGHT, sink="numbering", shared=False, fenced=False, without=rule).explore()
    assert result.wrong is not None, f"none of {result.states} states shows that {rule} is missing"


@pytest.mark.holds("shared other sinks")
def test_no_interleaving_with_a_java_consumer_loses_or_reorders_a_message() -> None:
    result = Model(SMALL, sink="foreign", fenced=False, java=True).explore()
    assert result.wrong is None, result.trace
    assert result.complete


@pytest.mark.parametrize("rule", JAVA_RULES)
def test_without_a_rule_of_brokers_without_lineage_a_promise_is_broken(rule: str) -> None:
    result = Model(SMALL, sink="foreign", fenced=False, java=rule != "tenure", without=rule).explore()
    assert result.wrong is not None, f"none of {result.states} states shows that {rule} is missing"


def test_without_the_tenures_in_the_former_group_a_promise_is_broken() -> None:
    """A batch was left out there because a former run held its queue."""
    result = Model(MOVED, sink="foreign", fenced=False, without="former").explore()
    assert result.wrong is not None


@pytest.mark.parametrize("sink", ["atomic", "foreign"])
def test_a_batch_whose_queue_a_former_run_of_the_query_holds_is_not_done_without_it(sink: Sink) -> None:
    result = Model(SMALL, sink=sink, without="own_run").explore()
    assert result.wrong is not None
    assert any("former run ends" in step for step in result.trace)
