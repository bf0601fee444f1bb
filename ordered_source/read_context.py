"""Describes how a task of the source read its rows: the broker, the lock, and the plan for the parking lot.

A listener needs this description to check the lock, to park messages and to write dead letters. The column lock_token contains it as
JSON, and only this module writes or parses that JSON. The JSON names the files of an account and of TLS, and says whether the source used
keys or a password. It never contains these secrets, because rows may be displayed, stored, or sent elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, NamedTuple

from orderedmq.broker import Broker
from orderedmq.conditions import LockCondition, OptionCondition
from orderedmq.connections import kept
from orderedmq.endpoint import Credentials, CredentialsFile, Endpoint, TlsOptions
from orderedmq.errors import LockError, OptionError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken

#: Version of the JSON. The driver and its executors may run different versions of this package, and a process must not call a
#: listener unless it knows all the fields.
VERSION: Final = 1
_VERSION: Final = "version"
_TEXTS: Final = (
    "group",
    "client_id",
    "identity",
    "path",
    "namesrv_addr",
    "namespace",
    "namespace_v2",
    "stored_in",
    "credentials_file",
)
#: The types of the fields in the JSON, except the version and the nested fields.
_TYPES: Final[dict[str, type]] = {
    **dict.fromkeys(_TEXTS, str),
    "epoch": int,
    **dict.fromkeys(("account", "key_password", "only_run"), bool),
}
_TLS_TYPES: Final[dict[str, type]] = {
    **dict.fromkeys(("ca_file", "cert_file", "key_file"), str),
    **dict.fromkeys(("verify", "verify_hostname"), bool),
}
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class LotPlan(NamedTuple):
    """What a micro-batch plans for a queue and its parking lot.

    ``q_begin``: the first offset that it reads in the queue. [``begin``, ``end``): the offsets that it reads in the parking lot.
    ``room``: no more keys are parked once the lot has this many messages.
    """

    q_begin: int
    begin: int
    end: int
    room: int


class TaskLock(NamedTuple):
    """The lock on a task's queue, with a connection to the broker that granted it.

    ``token``: the fields of the lock that the broker checks. ``lot``: None if the rows were read without a parking lot.
    """

    broker: Broker
    token: LockToken
    lot: LotPlan | None = None


@dataclass(frozen=True)
class ReadContext:
    """The lock under which a task reads a queue, and the address of its broker.

    ``account``: whether the source got an account's keys as options. ``credentials_file``: the file from which it reads them instead.
    ``tls``: None without TLS. ``key_password``: whether the source decrypts the key of ``tls`` with a password, which ``tls`` omits.
    ``only_run``: see `LockToken`. ``lot``: None without the option parkingLot.
    ``stored_in``: the topic that the rows were actually read from if the option retryTopic is set, otherwise None. It is needed because
    the column topic of a message in the retry topic holds the original topic.
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
    credentials_file: str | None = None
    tls: TlsOptions | None = None
    key_password: bool = False

    @classmethod
    def of(
        cls, endpoint: Endpoint, identity: str, token: LockToken, lot: LotPlan | None = None, stored_in: str | None = None
    ) -> ReadContext:
        """Return the context of a task that reads under ``token``."""
        credentials, tls = endpoint.credentials, endpoint.tls
        return cls(
            token.epoch,
            token.group,
            token.client_id,
            identity,
            endpoint.path,
            endpoint.namesrv_addr,
            endpoint.namespace,
            endpoint.namespace_v2,
            isinstance(credentials, Credentials),
            token.only_run,
            lot,
            stored_in,
            credentials.path if isinstance(credentials, CredentialsFile) else None,
            None if tls is None else replace(tls, key_password=None),
            tls is not None and tls.key_password is not None,
        )

    def to_text(self) -> str:
        """Return the context as JSON that `from_text` can read. Fields with their default value are omitted."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        given = {name: value for name, value in named.items() if value is not None and value is not False}
        if self.lot is not None:
            given["lot"] = self.lot._asdict()
        if self.tls is not None:
            given["tls"] = {name: value for name, value in asdict(self.tls).items() if value is not None}
        return _ENCODER.encode({_VERSION: VERSION, **given})

    @classmethod
    def from_text(cls, text: str) -> ReadContext:
        """Return the inverse of ``to_text``. Raises LockError MALFORMED for any other text."""
        try:
            given: dict[str, Any] = json.loads(text)
            version, lot, tls = given.pop(_VERSION), given.pop("lot", None), given.pop("tls", None)
            if type(version) is int and version != VERSION:
                raise _malformed(
                    text,
                    f"has version {version}, but this process reads {VERSION}. Use the same version of orderedmq everywhere",
                )
            sound = version == VERSION and all(type(value) is _TYPES[name] for name, value in given.items())
            sound &= lot is None or all(type(number) is int for number in lot.values())
            sound &= tls is None or all(type(value) is _TLS_TYPES[name] for name, value in tls.items())
            # Exactly one of these fields gives the address of the broker.
            sound &= ("path" in given) != ("namesrv_addr" in given)
            if sound:
                return cls(**given, lot=None if lot is None else LotPlan(**lot), tls=None if tls is None else TlsOptions(**tls))
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise _malformed(text, "was not written by the source. Leave the column as it was read")

    def lock(
        self,
        queue: MessageQueue,
        credentials: Credentials | None = None,
        tls: TlsOptions | None = None,
        *,
        listener: str = "consume_orderly",
    ) -> TaskLock:
        """Connect to the broker and return the lock that the source already holds on ``queue``.

        ``listener`` is the function name for error messages. ``credentials`` and ``tls`` are needed only if the source has secrets that
        rows do not contain: an account's keys as options, or a password of a TLS key. Raises OptionError MISSING without them.
        """
        for secret, needed, given, remedy in (
            ("an account (accessKey)", self.account, credentials, "credentials=orderedmq.Credentials(access_key, secret_key)"),
            (
                "a client key with a password (tlsKeyPassword)",
                self.key_password,
                tls,
                "tls=orderedmq.TlsOptions(..., key_password=...)",
            ),
        ):
            if needed and given is None:
                raise OptionError(
                    OptionCondition.MISSING,
                    f"the source reads queue {queue} with {secret}, but rows do not carry secrets. Also pass it to the listener, with "
                    f"{listener}(..., {remedy})",
                )
        if self.path is not None:
            endpoint = Endpoint(self.path)
        else:
            account: Credentials | CredentialsFile | None = credentials
            if account is None and self.credentials_file is not None:
                account = CredentialsFile(self.credentials_file)
            endpoint = Endpoint(None, self.namesrv_addr, account, tls or self.tls, self.namespace, self.namespace_v2)
        token = LockToken(self.group, queue, "", self.client_id, self.epoch, 0, only_run=self.only_run)
        return TaskLock(kept(endpoint, self.identity), token, self.lot)


def _malformed(text: str, why: str) -> LockError:
    return LockError(LockCondition.MALFORMED, f"lock_token {text!r} {why}")
