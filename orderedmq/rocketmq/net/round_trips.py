"""Says which requests a server has dropped, judged by round trips of later requests instead of seconds. Pure.

A server answers requests in any order, so one answer to a later request proves little. A request counts as dropped when ``PASSED``
later requests were sent and answered, each after the answer to the one before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

#: Round trips of later requests after which a request is sent again. With 2 of them, a Proxy that dropped nothing was sent 10 % of its
#: requests twice, with 4 nearly none.
PASSED: Final = 4


class RoundTrips:
    """Counts the round trips of requests, which are given by number."""

    def __init__(self) -> None:
        #: Round trips that were made one after the other.
        self._made = 0
        #: Requests without an answer, in the order in which they were sent, and the round trips made before.
        self._sent: dict[int, int] = {}

    def sent(self, numbers: Iterable[int]) -> None:
        """Requests were sent."""
        self._sent.update(dict.fromkeys(numbers, self._made))

    def answered(self, numbers: Collection[int]) -> list[int]:
        """Requests were answered. Return those to send again: each at most once, and no more of them than were answered."""
        before = self._made
        for number in numbers:
            if self._sent.pop(number, None) == before:
                self._made = before + 1
        again: list[int] = []
        for number, made in self._sent.items():
            if self._made - made < PASSED or len(again) == len(numbers):
                break
            again.append(number)
        for number in again:
            del self._sent[number]
        return again

    def doubt(self) -> None:
        """The server was silent for a long time: at the next answers, all requests without one are sent again."""
        self._sent = dict.fromkeys(self._sent, self._made - PASSED)
