"""A thread that keeps queue locks and the membership alive while the query runs, and notices when a lock is lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from orderedmq.broker import Groups
from orderedmq.core.lock import LockToken
from orderedmq.errors import OrderedMQError

#: Seconds after a renewal that failed, until the next try: between two of them in their time a lock's trust would be over.
RETRY: Final = 2.0
#: Seconds between two looks whether the membership went with its connection, once that is as old as RETRY.
LOOK: Final = 0.5


class Renewal:
    """Renews ``tokens`` and calls ``beat`` every ``interval`` seconds, and sooner after a failure or when the client is ``cut_off``:
    tasks look whether their driver is a member, and wait for it.

    Until stopped, or until the parent process is gone: nobody would process what it holds.
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
        #: Tokens that were found lost.
        self.lost: tuple[LockToken, ...] = ()
        #: Why the last renewal failed; the next one tries again, and the broker's expiry decides.
        self.failed: OrderedMQError | None = None

    def keep(self, tokens: Sequence[LockToken]) -> None:
        """From now on keep exactly these."""
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
                    # Before the heartbeat: it may fail, and what is lost stays lost.
                    current = set(self._tokens)
                    self.lost = tuple(token for token in lost if token in current)
                self._beat()
            except OrderedMQError as error:
                self.failed = error
                continue
            self.failed = None

    def _wait(self) -> bool:
        """Until the next renewal; whether it is stopped instead."""
        began = time.monotonic()
        if self._stopped.wait(min(RETRY, self._interval)):
            return True
        while self.failed is None and not self._cut_off() and (left := began + self._interval - time.monotonic()) > 0:
            if self._stopped.wait(min(LOOK, left)):
                return True
        return False
