"""What the Spark driver of the fault tests reports about its queries."""

from __future__ import annotations

from typing import Any, cast

from tests.faults.job import state


class FailsAtTheSecondLook:
    """A query that fails between two of the calls into the JVM that read its state."""

    id = "q"

    def __init__(self) -> None:
        self._looks = 0

    def _failed(self) -> bool:
        self._looks += 1
        return self._looks > 1

    @property
    def isActive(self) -> bool:
        return not self._failed()

    def exception(self) -> Exception | None:
        return ValueError("lost") if self._failed() else None


def test_a_query_that_is_said_to_have_ended_is_said_to_have_failed() -> None:
    query = cast(Any, FailsAtTheSecondLook())
    first, second = state(query), state(query)
    for answer in (first, second):
        assert answer["active"] or answer["failure"] == "lost"
    assert not second["active"]
