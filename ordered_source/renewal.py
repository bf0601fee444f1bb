"""A thread that renews queue locks and the group membership while a query runs, and detects lost locks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from orderedmq.broker import Groups
from orderedmq.errors import OrderedMQError
from orderedmq.ownership.lock import LockToken

#: Seconds from a failed renewal to the next attempt. If the thread waited for another whole interval instead, the holder would no longer
#: trust its lock.
RENEWAL_RETRY: Final = 2.0
#: Seconds between two checks whether the membership survived its connection, starting RENEWAL_RETRY seconds after each renewal.
LOOK: Final = 0.5


class Renewal:
    """Renews the tokens given to ``keep`` and calls ``beat`` every ``interval`` seconds, until it is stopped.

    After a failure, or when the client is ``cut_off``, the thread renews sooner, because tasks wait until their driver is a member again.
    The thread also ends with the parent process, because without that process nothing reads the queues whose locks it renews.
    """

    def __init__(
        self, groups: Groups, beat: Callable[[], object], interval: float, cut_off: Callable[[], bool] = lambda: False
    ) -> None:
        self._groups = groups
        self._beat = beat
        self._interval = interval
        self._cut_off = cut_off
        self._parent = os.getppid()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._tokens: tuple[LockToken, ...] = ()
        #: Tokens that a renewal reported as lost.
        self.lost: tuple[LockToken, ...] = ()
        #: Error of the last renewal, if it failed. The next renewal tries again, because one failure does not lose a lock.
        self.failed: OrderedMQError | None = None

    def keep(self, tokens: Sequence[LockToken]) -> None:
        """Renew exactly these tokens from now on."""
        self._tokens = tuple(tokens)
        self.lost = tuple(token for token in self.lost if token in self._tokens)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="orderedmq-renewal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._wait():
            if os.getppid() != self._parent:
                return
            try:
                lost = self._groups.renew(self._tokens)
                if lost:
                    # Set this before the heartbeat, which may fail, because a lost lock stays lost.
                    current = set(self._tokens)
                    self.lost = tuple(token for token in lost if token in current)
                self._beat()
            except OrderedMQError as error:
                self.failed = error
                continue
            self.failed = None

    def _wait(self) -> bool:
        """Wait until the next renewal is due. Return whether the thread was stopped instead."""
        began = time.monotonic()
        if self._stopped.wait(min(RENEWAL_RETRY, self._interval)):
            return True
        while self.failed is None and not self._cut_off() and (seconds := began + self._interval - time.monotonic()) > 0:
            if self._stopped.wait(min(LOOK, seconds)):
                return True
        return False
