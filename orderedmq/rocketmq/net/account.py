"""The account of a client: the credentials that sign its requests. They may be renewed while the client is used.

Rules: credentials from a file or a callable are read again before each new connection, and after a server has refused them. If the
credentials have been renewed since a refused request was signed, the request may be sent again, because a refused request has done nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from orderedmq.conditions import RocketMQCondition, UnavailableCondition
from orderedmq.endpoint import Credentials, CredentialsFile, CredentialsSource
from orderedmq.errors import OrderedMQError, RocketMQError, RocketMQUnavailableError
from orderedmq.rocketmq.wire import rights
from orderedmq.secret_files import read_credentials

logger = logging.getLogger("orderedmq")

#: Seconds for which unchanged credentials are not read again because of a missing right. Every further request that needs the right is
#: also refused and would otherwise cause a read. Another refusal, as of an account that has expired, always causes one.
UNCHANGED: Final = 1.0


class Account:
    """The credentials of one client, if it has any. Thread-safe."""

    def __init__(self, source: CredentialsSource | None) -> None:
        self._read: Callable[[], Credentials] | None = None
        self._current: Credentials | None = None
        match source:
            case None | Credentials():
                self._current = source
            case CredentialsFile(path):
                self._read = lambda: read_credentials(path)
            case _:
                self._read = source
        self._unchanged_until = 0.0

    @property
    def current(self) -> Credentials | None:
        """The credentials for the next request; None without an account.

        Raises the errors of `renew` if the credentials have not been read before.
        """
        if self._current is None:
            self.renew()
        return self._current

    def renew(self) -> None:
        """Read the credentials again. If that fails, the previous ones stay in use.

        If there are no previous ones, raises OptionError or the error of the callable.
        """
        if self._read is None:
            return
        try:
            self._current = self._read()
        except Exception as error:
            if self._current is None:
                raise
            logger.warning("the credentials of an account could not be read again, so the previous ones stay in use: %s", error)

    def explain(self, error: OrderedMQError, used: Credentials | None) -> OrderedMQError:
        """Return ``error``. If it is a refusal of credentials that are no longer current, return a retriable error instead.

        ``used`` are the credentials that signed the request. If they are still current, this first reads the credentials again.
        """
        if self._read is None or not isinstance(error, RocketMQError) or error.sub != RocketMQCondition.NO_PERMISSION:
            return error
        if used == self._current and (time.monotonic() >= self._unchanged_until or not rights.is_missing_right(error.message)):
            self.renew()
        if used == self._current:
            self._unchanged_until = time.monotonic() + UNCHANGED
            return error
        return RocketMQUnavailableError(
            UnavailableCondition.ACCOUNT_RENEWED,
            f"the account was renewed while the request was under way, so the request can be sent again: {error.message}",
        )


NO_ACCOUNT: Final = Account(None)
