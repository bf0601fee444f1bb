"""The judge of the storms that change queues and brokers: each kind of fault in a copy is noticed."""

from __future__ import annotations

from tests.live.clusters.topology_judge import Copied, judge

ORIGINALS = [("in/0", 0), ("in/0", 1)]
FIRST, SECOND = Copied("batch-0", "a", "in/0", 0), Copied("batch-0", "a", "in/0", 1)


def test_a_complete_copy_has_no_faults() -> None:
    assert judge(ORIGINALS, {"out/0": [FIRST, SECOND]}) == ([], [], [], [], [])


def test_a_key_may_change_its_queue_between_micro_batches() -> None:
    assert judge(ORIGINALS, {"out/0": [FIRST], "out/1": [SECOND._replace(batch="batch-1")]}) == ([], [], [], [], [])


def test_faults_have_their_kinds() -> None:
    assert judge(ORIGINALS, {"out/0": [FIRST]}).missing == [("in/0", 1)]
    assert judge(ORIGINALS, {"out/0": [FIRST, SECOND, SECOND]}).twice == [("in/0", 1)]
    assert judge(ORIGINALS[:1], {"out/0": [FIRST, SECOND]}).unsent == [("in/0", 1)]
    assert judge(ORIGINALS, {"out/0": [FIRST], "out/1": [SECOND]}).split == [("batch-0", "a")]
    assert judge(ORIGINALS, {"out/0": [SECOND, FIRST]}).disordered == [FIRST]
