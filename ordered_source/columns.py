"""The columns of the source: their types, the columns that a user's schema selects, and the three columns that only the source has.

`key_sequence` grows along the messages of a key, also when the topic was resized (`routing.generations`).

`ticket` has the ticket of a parked message (`LotPlace`). `lock_token` describes how a task of the source read a row: the broker, the lock,
and the plan for the parking lot (`ReadContext`). A listener needs this to check the lock, to park messages and to write dead letters. It is
JSON that only this module writes or parses. The JSON names the files of an account and of TLS, and says whether the source used keys or
a password. It never contains these secrets, because rows may be displayed, stored, or sent elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final, NamedTuple, get_args, get_type_hints

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from orderedmq.broker import Broker
from orderedmq.conditions import LockCondition, OptionCondition, SchemaCondition
from orderedmq.connections import cached
from orderedmq.endpoint import Credentials, CredentialsFile, Endpoint, TlsOptions
from orderedmq.errors import LockError, OptionError, SchemaError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken
from orderedmq.schema import DEFAULT_COLUMNS, MESSAGE_SCHEMA, unknown_column

#: The column that says how a row was read (`ReadContext.to_text`), or null without a group. Brokers do not have this column.
LOCK_TOKEN: Final = "lock_token"
#: The column with the ticket of a parked message, or null for a message of the queue itself. `LotPlace` describes the ticket's fields.
#: Brokers do not have this column.
TICKET: Final = "ticket"

#: The column with the key sequence of a message (`Generations.key_sequences`). Brokers do not have this column.
KEY_SEQUENCE: Final = "key_sequence"

#: Version of the JSON in lock_token. The driver and its executors may run different versions of this package, and a process must not call a
#: listener unless it knows all the fields.
VERSION: Final = 2
_VERSION: Final = "version"
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class LotPlace(NamedTuple):
    """A parked message's position in the parking lot, and the contents of its ticket (`parking.Ticket`).

    ``place``: the message's offset in the parking lot. ``attempts``: failed calls of the listener. ``parkings``: how often the message was
    parked after a failure. ``due``: a time in ms since 1970, or AT_ONCE, HELD, DROPPED or DEAD_LETTERED. ``offset``: that of the ticket,
    which differs from the message's offset if it was given back.
    """

    place: int
    attempts: int
    parkings: int
    due: int
    error: str
    offset: int


_TICKET_FIELDS: Final = get_type_hints(LotPlace)
TICKET_TYPE: Final = pa.struct([(name, pa.int64() if kind is int else pa.string()) for name, kind in _TICKET_FIELDS.items()])

#: The types of all columns that the source offers.
COLUMN_TYPES: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "broker_name": StringType(),
    "queue_id": IntegerType(),
    "queue_offset": LongType(),
    "body": BinaryType(),
    "tags": StringType(),
    "keys": StringType(),
    "sharding_key": StringType(),
    "message_id": StringType(),
    "born_timestamp": TimestampType(),
    "store_timestamp": TimestampType(),
    "reconsume_times": IntegerType(),
    "properties": MapType(StringType(), StringType()),
    KEY_SEQUENCE: LongType(),
    LOCK_TOKEN: StringType(),
    TICKET: StructType(
        [StructField(name, LongType() if kind is int else StringType()) for name, kind in _TICKET_FIELDS.items()]
    ),
}


def full_schema(*more: str) -> StructType:
    """Return the schema of a read without a user's schema: the default columns, and the columns ``more``."""
    return StructType([StructField(name, COLUMN_TYPES[name]) for name in (*DEFAULT_COLUMNS, *more)])


def chosen_columns(schema: StructType) -> tuple[str, ...]:
    """Return the columns named by a user's schema. Raises SchemaError UNKNOWN_COLUMN or WRONG_TYPE."""
    for field in schema.fields:
        expected = COLUMN_TYPES.get(field.name)
        if expected is None:
            raise unknown_column(field.name)
        if field.dataType != expected:
            raise SchemaError(
                SchemaCondition.WRONG_TYPE,
                f"column {field.name!r} is {expected.simpleString()}, but the schema asks for {field.dataType.simpleString()}. Cast it "
                "after reading",
            )
    return tuple(schema.names)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects of the rows of a read with a schema that `chosen_columns` accepts."""
    own = {KEY_SEQUENCE: pa.int64(), LOCK_TOKEN: pa.string(), TICKET: TICKET_TYPE}
    types = {field.name: own.get(field.name) or MESSAGE_SCHEMA.field(field.name).type for field in schema.fields}
    return pa.schema([pa.field(field.name, types[field.name], field.nullable) for field in schema.fields])


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with exactly Spark's schema, including nullability and the names of a map's inner fields."""
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# -- what lock_token contains ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LotPlan:
    """What a micro-batch plans for a queue and its parking lot. A reading task makes it for the listening task.

    ``q_begin``: the first offset that it reads in the queue. [``begin``, ``end``): the offsets that it reads in the parking lot.
    ``capacity``: no more keys are parked once the lot has this many messages.
    """

    q_begin: int
    begin: int
    end: int
    capacity: int


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

    ``endpoint`` has no secrets. ``account``: whether the source got an account's keys as options. ``key_password``: whether the source
    decrypts the key of TLS with a password. ``only_run``: see `LockToken`. ``lot``: None without the option parkingLot. ``attempt``: the id
    of Spark's attempt of the task that reads the queue. A listener in the same attempt gets all rows of the range.
    """

    epoch: int
    group: str
    client_id: str
    identity: str
    endpoint: Endpoint
    account: bool = False
    key_password: bool = False
    only_run: bool = False
    lot: LotPlan | None = None
    attempt: int | None = None

    @classmethod
    def of(
        cls, endpoint: Endpoint, identity: str, token: LockToken, lot: LotPlan | None = None, attempt: int | None = None
    ) -> ReadContext:
        """Return the context of a task that reads under ``token``."""
        credentials, tls = endpoint.credentials, endpoint.tls
        account = isinstance(credentials, Credentials)
        public = replace(
            endpoint, credentials=None if account else credentials, tls=None if tls is None else replace(tls, key_password=None)
        )
        password = tls is not None and tls.key_password is not None
        return cls(token.epoch, token.group, token.client_id, identity, public, account, password, token.only_run, lot, attempt)

    def to_text(self) -> str:
        """Return the context as JSON that `from_text` can read. Fields with their default value are omitted."""
        return _ENCODER.encode({_VERSION: VERSION, **_to_json(self)})

    @classmethod
    def from_text(cls, text: str) -> ReadContext:
        """Return the inverse of ``to_text``. Raises LockError MALFORMED for any other text."""
        try:
            fields_read: dict[str, Any] = json.loads(text)
            version = fields_read.pop(_VERSION)
            if type(version) is int and version != VERSION:
                raise _malformed(
                    text,
                    f"has version {version}, but this process reads {VERSION}. Use the same version of orderedmq everywhere",
                )
            context: ReadContext = _from_json(cls, fields_read)
            endpoint = context.endpoint
            secret = endpoint.tls is not None and endpoint.tls.key_password is not None
            if version == VERSION and (endpoint.path is None) != (endpoint.namesrv_addr is None) and not secret:
                return context
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
        for secret, needed, secret_given, remedy in (
            ("an account (accessKey)", self.account, credentials, "credentials=orderedmq.Credentials(access_key, secret_key)"),
            (
                "a client key with a password (tlsKeyPassword)",
                self.key_password,
                tls,
                "tls=orderedmq.TlsOptions(..., key_password=...)",
            ),
        ):
            if needed and secret_given is None:
                raise OptionError(
                    OptionCondition.MISSING,
                    f"the source reads queue {queue} with {secret}, but rows do not carry secrets. Also pass it to the listener, with "
                    f"{listener}(..., {remedy})",
                )
        endpoint = self.endpoint
        if not endpoint.embedded:
            endpoint = replace(endpoint, credentials=credentials or endpoint.credentials, tls=tls or endpoint.tls)
        token = LockToken(self.group, queue, "", self.client_id, self.epoch, 0, only_run=self.only_run)
        return TaskLock(cached(endpoint, self.identity), token, self.lot)


#: The fields that are objects in the JSON.
_OBJECTS: Final[Mapping[str, type[Any]]] = {
    "endpoint": Endpoint,
    "credentials": CredentialsFile,
    "tls": TlsOptions,
    "lot": LotPlan,
}
_CLASSES: Final[tuple[type[Any], ...]] = (ReadContext, *_OBJECTS.values())
#: The types of the fields of each class in the JSON.
_TYPES: Final = {kind: get_type_hints(kind) for kind in _CLASSES}


def _to_json(value: Any) -> Any:
    if not is_dataclass(value):
        return value
    named = {field.name: getattr(value, field.name) for field in fields(value) if getattr(value, field.name) != field.default}
    return {name: _to_json(inner) for name, inner in named.items()}


def _from_json(kind: type[Any], members: Mapping[str, Any]) -> Any:
    """Return the dataclass whose fields are in ``members``. Raises TypeError, KeyError or AttributeError if they do not fit."""
    values, types = {}, _TYPES[kind]
    for name, value in members.items():
        if name in _OBJECTS:
            values[name] = _from_json(_OBJECTS[name], value)
        elif value is not None and type(value) in (get_args(types[name]) or (types[name],)):
            values[name] = value
        else:
            raise TypeError(name)
    return kind(**values)


def _malformed(text: str, why: str) -> LockError:
    return LockError(LockCondition.MALFORMED, f"lock_token {text!r} {why}")
