"""The column lock_token: the broker and the lock under which a row was read, as text, for code that processes the rows.

It says whether an account was used, but not the account's keys, because rows are shown, stored and sent elsewhere.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from orderedmq.broker import Broker
from orderedmq.conditions import LockCondition, OptionCondition
from orderedmq.connections import kept
from orderedmq.core.lock import LockToken
from orderedmq.core.parking import Ticket
from orderedmq.endpoint import Credentials, Endpoint, TlsOptions
from orderedmq.errors import LockError, OptionError
from orderedmq.model import MessageQueue

#: Fields of the JSON without a parking lot, with one or with a retry topic, and of a row from a parking lot.
_PLAIN, _WITH_LOT, _FROM_LOT = 7, 8, 9


class LotPlan(NamedTuple):
    """What is planned of a queue and its parking lot: the queue's ``q_begin``, the lot's [``begin``, ``end``), the lot's ``room``."""

    q_begin: int
    begin: int
    end: int
    room: int


class LotPlace(NamedTuple):
    """Where a row lies in the parking lot, and what its ticket says (`core.parking.Ticket`)."""

    place: int
    attempts: int
    puts: int
    due: int
    error: str


class Lock(NamedTuple):
    """What a lock_token says. ``token`` has the fields that the broker checks."""

    broker: Broker
    token: LockToken
    #: None: the rows were read without a parking lot.
    lot: LotPlan | None = None
    #: None: the row comes from the queue.
    ticket: LotPlace | None = None
    #: The topic of the queue where the row lies, if what fails is sent back to the group's retry topic; else None. The column
    #: topic of a message of the retry topic has the topic that it was sent to.
    stored_in: str | None = None


def encode(
    endpoint: Endpoint, identity: str, token: LockToken | None, lot: LotPlan | None = None, stored_in: str | None = None
) -> str | None:
    """Return a lock as JSON; None without a group.

    The JSON is ``[epoch, group, client id, identity, path or null, namesrvAddr or null, with account?]`` (with a namespace
    ``[namesrvAddr, namespace, namespaceV2]`` in place of namesrvAddr), and with a parking lot ``[q_begin, begin, end, room]``
    behind it, or with a retry topic the topic where the rows lie.
    """
    if token is None:
        return None
    account = endpoint.credentials is not None
    fields = [token.epoch, token.group, token.client_id, identity, endpoint.path, _cluster_of(endpoint), account]
    more = lot if lot is not None else stored_in
    return _dumps(fields if more is None else [*fields, more])


def of_row(text: str, place: int, ticket: Ticket) -> str:
    """Return the text for a row that lies at ``place`` of the parking lot; ``text`` is that of the queue's rows.

    Its last field is ``[place, attempts, puts, due, error]``.
    """
    return f"{text[:-1]},{_dumps([place, ticket.attempts, ticket.puts, ticket.due, ticket.error])}]"


def split(text: str) -> tuple[str, LotPlace | None]:
    """Return the text of the queue's rows, and where the row lies in the parking lot; None for a row of the queue.

    The inverse of `of_row`. A text that `encode` and `of_row` did not write comes back as it is, for `decode` to refuse.
    """
    try:
        fields = json.loads(text)
        if isinstance(fields, list) and len(fields) == _FROM_LOT:
            return _dumps(fields[:_WITH_LOT]), _place(fields[_WITH_LOT])
    except (ValueError, TypeError):
        pass
    return text, None


def stored_in(text: str) -> str | None:
    """Return the topic of the queue where a row lies, if it is in the text of a lock; see `Lock.stored_in`."""
    try:
        # All other texts end with a number, true, false, null or a bracket.
        fields = json.loads(text) if text.endswith('"]') else ()
    except ValueError:
        return None
    return fields[_PLAIN] if len(fields) == _WITH_LOT and isinstance(fields[_PLAIN], str) else None


def decode(
    text: str,
    queue: MessageQueue,
    credentials: Credentials | None = None,
    tls: TlsOptions | None = None,
    *,
    listener: str = "consume_orderly",
) -> Lock:
    """Return a connection to the broker, the token, and where the row lies. ``listener`` is the function to be named in an error.

    Raises LockError LOST for text that `encode` did not write, OptionError MISSING if the source used an account and
    ``credentials`` is None.
    """
    try:
        fields: list[Any] = json.loads(text)
        epoch, group, client_id, identity, path, cluster, account = fields[:_PLAIN]
        namesrv_addr, namespace, namespace_v2 = cluster if isinstance(cluster, list) else (cluster, None, None)
        written = isinstance(epoch, int) and all(
            isinstance(one, str) for one in (group, client_id, identity, path or namesrv_addr)
        )
        written &= all(isinstance(one, str | None) for one in (namespace, namespace_v2))
        more = fields[_PLAIN] if len(fields) > _PLAIN else None
        stored_in = more if isinstance(more, str) else None
        lot = None if more is None or stored_in is not None else LotPlan(*map(_whole, more))
        ticket = _place(fields[_WITH_LOT]) if len(fields) > _WITH_LOT else None
        written &= len(fields) <= _FROM_LOT
    except (ValueError, TypeError, KeyError):
        written = False
    if not written:
        raise LockError(
            LockCondition.LOST,
            f"lock_token {text!r} of queue {queue} was not written by the source; leave the column as it was read",
        )
    if account and credentials is None:
        raise OptionError(
            OptionCondition.MISSING,
            f"the source reads queue {queue} with an account (accessKey), but rows do not carry its keys: give them to the listener, too: "
            f"{listener}(..., credentials=orderedmq.Credentials(access_key, secret_key))",
        )
    endpoint = Endpoint(path) if path is not None else Endpoint(None, namesrv_addr, credentials, tls, namespace, namespace_v2)
    return Lock(kept(endpoint, identity), LockToken(group, queue, "", client_id, epoch, 0), lot, ticket, stored_in)


def _cluster_of(endpoint: Endpoint) -> str | list[str | None] | None:
    if endpoint.namespace is None and endpoint.namespace_v2 is None:
        return endpoint.namesrv_addr
    return [endpoint.namesrv_addr, endpoint.namespace, endpoint.namespace_v2]


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _dumps(fields: object) -> str:
    return _ENCODER.encode(fields)


def _place(fields: Any) -> LotPlace:
    place, attempts, puts, due, error = fields
    if not isinstance(error, str):
        raise TypeError("an error is a text")
    return LotPlace(_whole(place), _whole(attempts), _whole(puts), _whole(due), error)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError("not a whole number")
    return value
