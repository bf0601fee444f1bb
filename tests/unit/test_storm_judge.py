"""The judge of storms detects the faults that it looks for."""

from __future__ import annotations

from tests.clusters.storm_judge import Acknowledged, Handled, judge

QUEUES = {"q": ["a", "b", "c"]}
GOOD = [Handled(1, "Spark", "q", 0), Handled(2, "Java", "q", 1), Handled(3, "Java", "q", 2)]


def test_a_good_history_has_no_anomaly() -> None:
    assert judge(QUEUES, [Acknowledged("q", 1, "b")], reversed(GOOD)) == ([], [], [], {}, {"Spark": 1, "Java": 2})


def test_an_acknowledged_message_that_is_not_in_its_place_is_lost() -> None:
    gone, other = Acknowledged("q", 3, "d"), Acknowledged("q", 1, "x")
    assert judge(QUEUES, [gone, other, Acknowledged("r", 0, "a")], GOOD).lost == [gone, other, Acknowledged("r", 0, "a")]


def test_a_message_that_nobody_handled_is_named() -> None:
    assert judge(QUEUES, [], GOOD[:2]).unhandled == [("q", 2)]


def test_a_message_that_was_handled_before_its_predecessor_is_named() -> None:
    swapped = [Handled(1, "Spark", "q", 0), Handled(2, "Java", "q", 2), Handled(3, "Spark", "q", 1)]
    assert judge(QUEUES, [], swapped).skipped == [("q", 2), ("q", 1)]


def test_a_repeat_says_who_handled_it_before_and_does_not_count_as_out_of_order() -> None:
    again = [*GOOD, Handled(4, "Java", "q", 0), Handled(5, "Java", "q", 1)]
    verdict = judge(QUEUES, [], again)
    assert verdict.skipped == []
    assert verdict.repeats == {"Spark, then Java": 1, "Java, then Java": 1}
