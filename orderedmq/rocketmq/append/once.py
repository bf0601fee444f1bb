"""The loop that stores messages in a queue only once: read the queue, send the missing messages, read again after a lost answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from enum import Enum
from typing import Protocol

from orderedmq.errors import OrderedMQError, RocketMQUnavailableError
from orderedmq.rocketmq.codec.encode import SendBody


class Port(Protocol):
    """One queue at its broker, as one appender uses it. A method raises OrderedMQError after it has tried for long enough."""

    def keep(self) -> bool:
        """Return whether this appender may send: every request that it gave up has settled, and it still holds the lock of `acquire`."""
        ...

    def acquire(self) -> None:
        """Wait until `keep` is true."""
        ...

    def require(self) -> None:
        """Raise an error if this appender needs a lock that another part of the program acquires and renews, and that lock is lost."""
        ...

    def send(self, body: SendBody) -> Callable[[], int]:
        """Send one request, and return a function that waits for the answer and returns the offset of the request's first message.

        Both raise RocketMQUnavailableError, with ``outcome_unknown`` if no answer came, or the broker's error.
        """
        ...

    def pause(self, error: RocketMQUnavailableError, failures: int) -> None:
        """Wait before the next attempt, after ``failures`` failures in a row. Raises ``error`` if sending has been failing for too long.

        After an error whose outcome is unknown, `keep` is false until the request has settled.
        """
        ...


class Outgoing(Protocol):
    """The messages that one appender wants to have in a queue, and which of them it has found there."""

    def look(self) -> bool:
        """Read the messages added to the queue since the last call. All requests have settled, so messages not found are not stored.

        Return whether it found wanted messages whose requests got no answer, so that sending makes progress although answers are lost.
        """
        ...

    def missing(self) -> Iterator[SendBody]:
        """Yield requests for the messages that are not in the queue, in order. The caller sends each before it takes the next one."""
        ...

    def record_sent(self, body: SendBody, offset: int) -> None:
        """Record that the broker has stored the messages of a request, from ``offset`` on."""
        ...

    def adapt(self, body: SendBody, error: OrderedMQError) -> bool:
        """Try to change the requests so that they avoid the broker's error. Return whether `missing` yields other requests now.

        It may raise a clearer error than ``error``.
        """
        ...


class AppendWait(Enum):
    """What an appender waits for."""

    #: The answer to a request.
    ANSWER = "answer"
    #: Something that may take seconds, such as a lock or a broker that is away.
    LONG = "long"


class Appender:
    """Appends the messages of ``outgoing`` that are missing from the queue. Used by one thread at a time."""

    def __init__(self, port: Port, outgoing: Outgoing) -> None:
        self._port = port
        self._outgoing = outgoing
        self._looked = False
        self._failures = 0
        #: Whether messages of a request without an answer may be stored, and `look` has not been called since.
        self.in_doubt = False

    def run(self) -> None:
        """Return when no message is missing. Raises the errors of the port and ``outgoing``, perhaps after storing some messages."""
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[AppendWait]:
        """Do what `run` does, and yield before each wait, so that one thread can run several appenders at the same time."""
        done = False
        while not done:
            yield from self._enter()
            done = yield from self._send()

    def look_again(self) -> None:
        """Make the next `run` read the queue first. Called when others may have appended messages since the last run."""
        self._looked = False

    def _enter(self) -> Iterator[AppendWait]:
        while not (self._port.keep() and self._looked):
            if not self._port.keep():
                yield AppendWait.LONG
                self._port.acquire()
            if self._outgoing.look():
                self._failures = 0
            self.in_doubt = False
            # If the lock was lost during a long search, others may have appended messages since.
            self._looked = self._port.keep()

    def _send(self) -> Generator[AppendWait, None, bool]:
        """Send the missing messages. Return False if the queue must be read again, or another attempt is needed."""
        for body in self._outgoing.missing():
            if not self._port.keep():
                self._looked = False
                return False
            self._port.require()
            try:
                answer = self._port.send(body)
                yield AppendWait.ANSWER
                offset = answer()
            except RocketMQUnavailableError as error:
                self._failures += 1
                if error.outcome_unknown:
                    self._looked, self.in_doubt = False, True
                yield AppendWait.LONG
                self._port.pause(error, self._failures)
                return False
            except OrderedMQError as error:
                if not self._outgoing.adapt(body, error):
                    raise
                return False
            self._failures = 0
            self._outgoing.record_sent(body, offset)
        return True
