"""A thread that keeps queue locks and the membership alive while the query runs, and notices when a lock is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from orderedmq.broker import Groups
from orderedmq.errors import OrderedMQError
from orderedmq.lock import LockToken

#: Seconds after a renewal that failed, until the next try: between two of them in their time a lock's trust would be over.
RETRY: Final = 2.0


class Renewal:
    """Renews ``tokens`` and calls ``beat`` every ``interval`` seconds, and sooner after a failure.

    Until stopped, or until the parent process is gone: nobody would process what it holds.
    """

    def __init__(self, groups: Groups, beat: Callable[[], object], interval: float) -> None:
        self._groups = groups
        self._beat = beat
        self._interval = interval
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
        while not self._stopped.wait(self._interval if self.failed is None else min(RETRY, self._interval)):
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
