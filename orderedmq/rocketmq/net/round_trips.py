"""Says which requests have no answer although later ones have one, counted in round trips instead of seconds. Pure.

A server answers requests in any order, so one answer to a later request proves little. A request counts as unanswered when, after
it was sent, other requests have made ``PASSED`` round trips one after the other.
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
        """Requests were answered. Return those to send again, each once in its life, and no more than were answered."""
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
        """The server was silent for long: with the next answers, all requests that have none are due."""
        self._sent = dict.fromkeys(self._sent, self._made - PASSED)
