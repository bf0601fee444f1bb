"""The embedded Broker: the four protocols on one store, which is opened on first use."""

from __future__ import annotations

import os
import threading
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from orderedmq.broker import Broker
from orderedmq.conditions import StoreCondition
from orderedmq.embedded import garbage
from orderedmq.embedded.admin import EmbeddedAdmin
from orderedmq.embedded.clock import Clock, SystemClock
from orderedmq.embedded.groups import EmbeddedGroups
from orderedmq.embedded.log import EmbeddedLog
from orderedmq.embedded.outbox import EmbeddedOutbox
from orderedmq.embedded.store.database import Store
from orderedmq.endpoint import EMBEDDED, Capabilities
from orderedmq.errors import StoreError, stays_here


class EmbeddedBroker(Broker):
    """A connection to the store in one directory. Several connections, in one process or many, may share the store."""

    def __init__(
        self,
        path: Path,
        *,
        identity: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``identity``: the expected store's identity."""
        self.path = Path(os.path.abspath(path))
        self._expected = identity
        self._clock: Clock = clock or SystemClock()
        self._opened: Store | None = None
        self._groups: EmbeddedGroups | None = None
        # Several threads may be the first to use a connection. Each `Store.open` needs one `close`, and members belong to one object.
        self._opening = threading.RLock()

    def __repr__(self) -> str:
        return f"<EmbeddedBroker {str(self.path)!r} {'open' if self._opened else 'not open'}>"

    def __reduce__(self) -> NoReturn:
        raise stays_here(self.path)

    def _open(self, create: bool) -> Store:
        with self._opening:
            if self._opened is None:
                try:
                    store = Store.open(self.path, create=create)
                except StoreError as error:
                    if self._expected is None or error.sub != StoreCondition.MISSING:
                        raise
                    raise self._unexpected("there is no store") from error
                if self._expected is not None and store.identity != self._expected:
                    store.close()
                    raise self._unexpected("there is another store")
                self._opened = store
                garbage.collect(store, self._clock)
            return self._opened

    def _unexpected(self, what: str) -> StoreError:
        return StoreError(
            StoreCondition.OTHER_MACHINE,
            f"the query was planned with a store at {self.path}, but {what} at this path on this machine: the embedded broker serves only "
            "one machine. Use namesrvAddr for a cluster, or a local master. If the store was replaced or moved since then, start the "
            "query again",
        )

    @property
    def capabilities(self) -> Capabilities:
        return EMBEDDED

    @property
    def identity(self) -> str:
        return self._open(False).identity

    @cached_property
    def log(self) -> EmbeddedLog:
        return EmbeddedLog(self._open(False), self._clock)

    @property
    def groups(self) -> EmbeddedGroups:
        with self._opening:
            if self._groups is None:
                self._groups = EmbeddedGroups(self._open(False), self._clock)
            return self._groups

    @cached_property
    def outbox(self) -> EmbeddedOutbox:
        return EmbeddedOutbox(self._open(False), self._clock)

    @cached_property
    def admin(self) -> EmbeddedAdmin:
        return EmbeddedAdmin(self._open, self._clock, lambda: self.groups)

    def close(self) -> None:
        """Close the connection. In a child after a fork this does nothing, because the connection belongs to the parent."""
        if self._opened is not None and self._opened.is_own:
            if self._groups is not None:
                self._groups.close()
                self._groups = None
            self._opened.close()
            self._opened = None
        for name in ("log", "outbox", "admin"):
            self.__dict__.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
