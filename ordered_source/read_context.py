"""Describes how a task of the source read its rows: the broker, the lock, and the plan for the parking lot.

A listener needs this to check the lock, to park messages and to write dead letters. It travels as JSON in the column lock_token,
and only this module writes or parses that JSON. It records whether an account was used but never contains the account's keys,
because rows may be displayed, stored, or sent elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

from orderedmq.broker import Broker
from orderedmq.conditions import LockCondition, OptionCondition
from orderedmq.connections import kept
from orderedmq.endpoint import Credentials, Endpoint, TlsOptions
from orderedmq.errors import LockError, OptionError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken

#: Version of the JSON. The driver and its executors may run different versions of this package, and a process must not call a
#: listener unless it knows all the fields.
VERSION: Final = 1
_VERSION: Final = "version"
#: Of the fields in the JSON, except the version and the plan of the parking lot.
_TYPES: Final[dict[str, type]] = {
    **dict.fromkeys(("group", "client_id", "identity", "path", "namesrv_addr", "namespace", "namespace_v2", "stored_in"), str),
    "epoch": int,
    "account": bool,
    "only_run": bool,
}
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class LotPlan(NamedTuple):
    """What a micro-batch plans for a queue and its parking lot.

    ``q_begin``: the first offset that it reads in the queue. [``begin``, ``end``): the offsets that it reads in the parking lot.
    ``room``: the number of messages in the lot above which no more keys are parked.
    """

    q_begin: int
    begin: int
    end: int
    room: int


class TaskLock(NamedTuple):
    """A connection to the broker that holds the lock on a task's queue.

    ``token``: the fields of the lock that the broker checks. ``lot``: None if the rows were read without a parking lot.
    """

    broker: Broker
    token: LockToken
    lot: LotPlan | None = None


@dataclass(frozen=True)
class ReadContext:
    """The lock under which a task reads a queue, and where its broker is.

    ``account``: whether the source uses an account. ``only_run``: see `LockToken`. ``lot``: None without the option parkingLot.
    ``stored_in``: the topic that the rows were actually read from if the option retryTopic is set, otherwise None. It is needed because,
    for a message in the retry topic, the column topic holds the original topic.
    """

    epoch: int
    group: str
    client_id: str
    identity: str
    path: str | None = None
    namesrv_addr: str | None = None
    namespace: str | None = None
    namespace_v2: str | None = None
    account: bool = False
    only_run: bool = False
    lot: LotPlan | None = None
    stored_in: str | None = None

    @classmethod
    def of(
        cls, endpoint: Endpoint, identity: str, token: LockToken, lot: LotPlan | None = None, stored_in: str | None = None
    ) -> ReadContext:
        """Return the context of a task that reads under ``token``."""
        return cls(
            token.epoch,
            token.group,
            token.client_id,
            identity,
            endpoint.path,
            endpoint.namesrv_addr,
            endpoint.namespace,
            endpoint.namespace_v2,
            endpoint.credentials is not None,
            token.only_run,
            lot,
            stored_in,
        )

    def to_text(self) -> str:
        """Return the context as JSON that `from_text` can read. Fields with their default value are omitted."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        given = {name: value for name, value in named.items() if value is not None and value is not False}
        if self.lot is not None:
            given["lot"] = self.lot._asdict()
        return _ENCODER.encode({_VERSION: VERSION, **given})

    @classmethod
    def from_text(cls, text: str) -> ReadContext:
        """Return the inverse of ``to_text``. Raises LockError MALFORMED for any other text."""
        try:
            given: dict[str, Any] = json.loads(text)
            version, lot = given.pop(_VERSION), given.pop("lot", None)
            if type(version) is int and version != VERSION:
                raise _malformed(
                    text,
                    f"has version {version}, and this process reads {VERSION}; use the same version of orderedmq everywhere",
                )
            sound = version == VERSION and all(type(value) is _TYPES[name] for name, value in given.items())
            sound &= lot is None or all(type(number) is int for number in lot.values())
            # Exactly one of them says where the broker is.
            sound &= ("path" in given) != ("namesrv_addr" in given)
            if sound:
                return cls(**given, lot=None if lot is None else LotPlan(**lot))
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise _malformed(text, "was not written by the source; leave the column as it was read")

    def lock(
        self,
        queue: MessageQueue,
        credentials: Credentials | None = None,
        tls: TlsOptions | None = None,
        *,
        listener: str = "consume_orderly",
    ) -> TaskLock:
        """Connect to the broker and return the lock that the source already holds on ``queue``.

        ``listener`` is the function name for error messages.
        Raises OptionError MISSING if the source used an account and ``credentials`` is None.
        """
        if self.account and credentials is None:
            raise OptionError(
                OptionCondition.MISSING,
                f"the source reads queue {queue} with an account (accessKey), but rows do not carry its keys: give them to the listener, too: "
                f"{listener}(..., credentials=orderedmq.Credentials(access_key, secret_key))",
            )
        if self.path is not None:
            endpoint = Endpoint(self.path)
        else:
            endpoint = Endpoint(None, self.namesrv_addr, credentials, tls, self.namespace, self.namespace_v2)
        token = LockToken(self.group, queue, "", self.client_id, self.epoch, 0, only_run=self.only_run)
        return TaskLock(kept(endpoint, self.identity), token, self.lot)


def _malformed(text: str, why: str) -> LockError:
    return LockError(LockCondition.MALFORMED, f"lock_token {text!r} {why}")
