"""The account of a client: the credentials that sign its requests, which may be renewed while the client is used.

Rules: credentials that come from a file or a callable are read again before each new connection, and after a server has refused them. A
request that was refused with credentials that have been renewed since has done nothing, so it may be sent again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from orderedmq.conditions import RocketMQCondition, UnavailableCondition
from orderedmq.endpoint import Credentials, CredentialsFile, CredentialsSource
from orderedmq.errors import OrderedMQError, RocketMQError, RocketMQUnavailableError
from orderedmq.secret_files import read_credentials

log = logging.getLogger("orderedmq")

#: Seconds for which credentials that were found unchanged are not read again. A refusal may be about a right of the account, and then
#: every further request is refused as well.
UNCHANGED: Final = 1.0


class Account:
    """The credentials of one client, if it has any. Thread-safe, and usable in a child after a fork, since it has no lock."""

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

        Raises what `renew` raises, if they have not been read before.
        """
        if self._current is None:
            self.renew()
        return self._current

    def renew(self) -> None:
        """Read the credentials again. If that fails, those that were read before stay in use.

        Raises OptionError, or what the callable raises, if there are none.
        """
        if self._read is None:
            return
        try:
            self._current = self._read()
        except Exception as error:
            if self._current is None:
                raise
            log.warning("an account could not be read again, so the former one stays in use: %s", error)

    def explain(self, error: OrderedMQError, used: Credentials | None) -> OrderedMQError:
        """Return ``error``, or instead of a refusal of credentials that are no longer the current ones, that the request can be repeated.

        ``used``: the credentials that signed the request. They are read again if they are still the current ones.
        """
        if self._read is None or not isinstance(error, RocketMQError) or error.sub != RocketMQCondition.NO_PERMISSION:
            return error
        if used == self._current and time.monotonic() >= self._unchanged_until:
            self.renew()
        if used == self._current:
            self._unchanged_until = time.monotonic() + UNCHANGED
            return error
        return RocketMQUnavailableError(
            UnavailableCondition.ACCOUNT_RENEWED,
            f"the account was renewed while the request was under way, so send it again: {error.message}",
        )


NO_ACCOUNT: Final = Account(None)
