"""The declaration of all options, and the part of parsing that the reader and the writer share.

Rules: everything is checked from text alone, before any side effect; names are case-insensitive (Spark hands them over in lower
case) and shown in camelCase; an error is one line with the option, the offending value and the remedy. The value of an unknown
option is never shown: it may be a secret. Spark builds one DataSource object for reading and writing, so its constructor only
keeps the mapping; ``SourceOptions.parse`` or ``SinkOptions.parse`` runs when Spark asks for a reader or a writer.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import MAX_QUEUES
from orderedmq.options.values import Parser, conflict, invalid, shown

Role = Literal["source", "sink"]
T = TypeVar("T")

DEFAULT_DIRECTORY: Final = "orderedmq-data"
MAX_PULL_BATCH: Final = 1024 * 1024


@dataclass(frozen=True)
class Option:
    """One option. ``default`` is the text that is parsed if the option is not given; ``shown`` replaces it in tables."""

    name: str
    default: str | None
    meaning: str
    shown: str = ""


class OptionRow(NamedTuple):
    """One row of a table of options, as text without markup."""

    name: str
    default: str
    meaning: str


#: Options that name the broker. Both roles have them.
BROKER_OPTIONS: Final = (
    Option("path", None, "directory of the embedded broker, on a local disk", f"{DEFAULT_DIRECTORY} in the working directory"),
    Option("namesrvAddr", None, "instead of path: nameservers of a RocketMQ cluster, host:port;host:port"),
    Option("accessKey", None, "with namesrvAddr: the account, where the cluster has access control"),
    Option("secretKey", None, "its secret key"),
    Option("securityToken", None, "its token, if it is a temporary one"),
    Option(
        "credentialsFile",
        None,
        "instead of accessKey: a private JSON file with accessKey, secretKey and perhaps securityToken, on each machine that runs "
        "Spark; it is read again before each connection and after a refusal, so the account may change while a query runs",
    ),
    Option("namespace", None, "with namesrvAddr: the namespace of topics and groups, which RocketMQ has as namespace%topic"),
    Option("namespaceV2", None, "with namesrvAddr: the namespace that each request names, for servers that know one"),
    Option("useTLS", "false", "with namesrvAddr: encrypt the connections"),
    Option("tlsTrustCertPath", None, "PEM file of the authorities to trust", "the system's"),
    Option("tlsCertPath", None, "PEM file of the client's certificate"),
    Option("tlsKeyPath", None, "PEM file of the client's key"),
    Option("tlsKeyPassword", None, "the key's password"),
    Option("tlsVerify", "true", "false: trust every server"),
    Option("tlsVerifyHostname", "true", "false: a server may have a certificate of another name (routes have addresses)"),
)

SOURCE_OPTIONS: Final = (
    *BROKER_OPTIONS,
    Option("topic", None, "topic to read, or several: a,b", "this or topicPattern is required"),
    Option("topicPattern", None, "regular expression that the whole name of a topic must match", "this or topic is required"),
    Option(
        "tags",
        None,
        "only messages with one of these tags: A || B; * is all. Offsets, limits and lag count the others too",
        "all messages",
    ),
    Option(
        "filterSql",
        None,
        "with namesrvAddr, instead of tags: only messages whose properties match this RocketMQ SQL: TAGS = 'A' AND amount > 5; the "
        "brokers need enablePropertyFilter=true",
        "all messages",
    ),
    Option("consumerGroup", None, "group whose locks and offsets the query uses", "required by a stream in clustering"),
    Option(
        "queryName",
        None,
        "name by which the command shows this query as owner and member; Spark does not tell a source the name of its query",
        "over the embedded broker Spark's name, once a batch has run; else the beginning of an id",
    ),
    Option(
        "messageModel", "clustering", "clustering: locks and offsets of the group; broadcasting: every query sees everything"
    ),
    Option(
        "assignment",
        "exclusive",
        "exclusive: the query owns all queues of its topics, or none; shared: the group's queries divide them",
    ),
    Option(
        "allocateMessageQueueStrategy",
        "AVG",
        "shared: how queues are divided, the same in all queries of the group: AVG|AVG_BY_CIRCLE|CONSISTENT_HASH|CONFIG|MACHINE_ROOM|"
        "MACHINE_ROOM_NEARBY",
    ),
    Option("allocateQueues", None, 'CONFIG: the queues of this query: {"orders": {"embedded": [0, 1]}}', "required by CONFIG"),
    Option(
        "machineRooms",
        None,
        "MACHINE_ROOM: a,b for brokers a@... and b@..., whose queues the group consumes; the embedded broker is in no room",
        "required by MACHINE_ROOM",
    ),
    Option(
        "machineRoom",
        None,
        "MACHINE_ROOM_NEARBY: this query's room: a for brokers a@...; a room's queues go to the queries in it, if there are any",
        "required by MACHINE_ROOM_NEARBY",
    ),
    Option(
        "allocateInner", "AVG", "MACHINE_ROOM_NEARBY: how each room's queues are divided: AVG|AVG_BY_CIRCLE|CONSISTENT_HASH"
    ),
    Option("lockTimeout", None, "how long to try for queue locks that another client holds", "10s, 75s with namesrvAddr"),
    Option(
        "startingOffsets",
        None,
        'where a fresh query begins: committed, earliest, latest or JSON such as {"orders": {"embedded": {"0": 23, "1": -2}}}',
        "committed with a consumerGroup, else as consumeFromWhere says",
    ),
    Option("endingOffsets", None, "batch only: where to end (exclusive), latest or JSON", "latest"),
    Option(
        "startingTimestamp",
        None,
        "begin at the first message stored at this time or later: ISO-8601 (UTC without a zone) or ms since 1970",
    ),
    Option("endingTimestamp", None, "batch only: end before the first message stored at this time or later; same forms"),
    Option(
        "consumeFromWhere",
        "first",
        "where to begin if the group never committed, or there is no group: first|last|timestamp",
    ),
    Option("consumeTimestamp", None, "the time of consumeFromWhere=timestamp; same forms as startingTimestamp"),
    Option("failOnDataLoss", "true", "fail if unread messages are gone; false: continue with a warning that counts them"),
    Option("maxOffsetsPerTrigger", None, "stream only: maximum messages per micro-batch, counted before filtering", "no limit"),
    Option("minOffsetsPerTrigger", None, "stream only: minimum messages per micro-batch; it waits for them", "no waiting"),
    Option("maxTriggerDelay", "15m", "stream only: maximum wait for minOffsetsPerTrigger"),
    Option("maxBytesPerTrigger", None, "stream only: maximum bytes per micro-batch, such as 64m", "no limit"),
    Option("pullBatchSize", "16384", f"the most rows in a RecordBatch, 1 to {MAX_PULL_BATCH}"),
    Option(
        "pullThresholdForQueue",
        "65536",
        "with namesrvAddr: maximum messages that a task prefetches per queue",
    ),
    Option(
        "pullThresholdSizeForQueue", "100m", "with namesrvAddr: maximum bytes that a task prefetches per queue, approximately"
    ),
    Option(
        "verifyBodyCrc",
        "false",
        "with namesrvAddr: verify the checksum that a broker stored with each body; a body that differs is an unreadable message",
    ),
    Option("includeProperties", "false", "add the column properties"),
    Option("includeLockToken", "false", "add the column lock_token, which `consume_orderly` needs"),
    Option(
        "parkingLot",
        "false",
        "stream only: read what `consume_orderly` with OrderPerKey has parked, when it is due; adds the columns lock_token and ticket",
    ),
    Option("parkingLotMaxMessages", "10000", "with parkingLot: parked messages per queue above which no more keys are parked"),
    Option(
        "retryTopic",
        "false",
        "stream only, with namesrvAddr, instead of parkingLot: read the group's retry topic, too, as its Java consumers do; what "
        "`consume_concurrently` could not process is sent back to it; adds the column lock_token, too",
    ),
)
SINK_OPTIONS: Final = (
    *BROKER_OPTIONS,
    Option("topic", None, "topic to write to; overrides the column topic", "the column topic"),
    Option(
        "shardingKey",
        "sharding_key",
        "column of the sharding key; rows with the same key go to the same queue, in order. none: rows have no key and no order",
    ),
    Option(
        "shardingKeyType",
        "auto",
        "how a Java producer would hash the key: as text (a String), int (an Integer) or long (a Long); auto: by the column's type",
    ),
    Option(
        "messageQueueSelector",
        "hash",
        "how a key chooses its queue: hash (Java's), mod (id % queues), random, queueId (the column queue_id), machineRoom, or "
        "module:function",
    ),
    Option(
        "machineRooms",
        None,
        "machineRoom, with namesrvAddr: a,b for brokers a@... and b@...; the key's hash chooses among their queues",
        "required by machineRoom",
    ),
    Option(
        "topicQueueNums",
        None,
        f"create a missing topic with this number of queues, 1 to {MAX_QUEUES}; an existing topic must have the same number",
        "none",
    ),
    Option("orderBy", None, "columns that order the rows of a task, such as: created_at, id desc", "the rows' own order"),
    Option("orderBufferSize", "256m", "bytes that orderBy may hold in memory, per task"),
    Option(
        "onKeyConflict",
        None,
        "if a key is in two tasks of a batch, so that its order is not defined: error|warn|ignore",
        "error, warn with namesrvAddr",
    ),
    Option("onReplayDiffers", "error", "if a repeated batch differs from the committed one: error|skip"),
    Option(
        "delayedRows",
        "error",
        "with namesrvAddr: rows with a key or orderBy that have delay_time_level or deliver_timestamp: error|unordered",
    ),
    Option("compression", None, "of a topic that the sink creates: none|lz4", "lz4"),
    Option(
        "sinkGroup",
        None,
        "with namesrvAddr: consumer group that keeps the sink's bookmarks, one for each query (or txnAppId) and topic",
        "OMQ_SINK_ and a hash of the query and the topic",
    ),
    Option(
        "enableMsgTrace",
        "false",
        "with namesrvAddr: write RocketMQ's message trace of each row that is sent, as Java producers do",
    ),
    Option("customizedTraceTopic", None, "with enableMsgTrace: the topic of traces", "RMQ_SYS_TRACE_TOPIC"),
    Option("txnAppId", None, "batch write only: with txnVersion makes it idempotent, as in Delta"),
    Option("txnVersion", None, "batch write only: a number that grows with each write of txnAppId, such as the batch id"),
)
#: Spark's own options, which it passes along with the writer's.
SINK_IGNORED: Final = ("checkpointLocation", "queryName")
#: Settings of RocketMQ's client that have no effect here: clients have names of their own, and use a broker's main port.
CLIENT_IGNORED: Final = ("instanceName", "unitName", "vipChannelEnabled")
#: Properties that every table of Spark's catalog has, and the prefix of the user's options among a table's properties.
_TABLE: Final = frozenset(("provider", "owner"))
_TABLE_OPTION: Final = "option."
#: Minimum similarity of a name that an error suggests, and minimum length of a name that is part of another.
_ALIKE: Final = 0.75
_WORD: Final = 5
OPTIONS: Final[Mapping[Role, tuple[Option, ...]]] = {"source": SOURCE_OPTIONS, "sink": SINK_OPTIONS}

_KAFKA: Final = "it is the Kafka connector's; the options here are path, topic and, to read, consumerGroup"
#: Options known from Spark or RocketMQ that are not supported: (names, advice for a reader, advice for a writer).
_REFUSED: Final[tuple[tuple[tuple[str, ...], str, str], ...]] = (
    (
        ("minPartitions", "maxPartitions", "numPartitions", "maxRecordsPerPartition"),
        "a queue is never split over Spark partitions; give the topic more queues, or repartition the DataFrame after reading",
        "rows go to queues, not to partitions; topicQueueNums says how many queues a new topic has",
    ),
    (("groupIdPrefix",), "a group's name is not generated; use consumerGroup", _KAFKA),
    (("subscribe",), "use topic", "use topic"),
    (("subscribePattern",), "use topicPattern", "use topic"),
    (("assign",), "an exclusive query owns every queue; use topic, or allocateQueues", "use messageQueueSelector=queueId"),
    (("startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy"), "use startingTimestamp", _KAFKA),
    (("endingOffsetsByTimestamp",), "use endingTimestamp", _KAFKA),
    (("includeHeaders",), "use includeProperties", "write a column properties"),
    (("paths",), "a query reads one embedded broker; give one path", "a query writes to one embedded broker; give one path"),
    (("subExpression",), "use tags, or filterSql", "a tag belongs to a message; write a column tags"),
    (("tags", "filterSql"), "", "it chooses what is read; a message's tag is in the column tags"),
    (
        ("enableMsgTrace", "customizedTraceTopic"),
        "a read is not traced, a listener's calls are; give it to the listener: consume_orderly(..., tracing=Tracing(enable_msg_trace=True))",
        "",
    ),
    (
        ("onsChannel",),
        "it is of a cloud's client; use namespace, or drop it",
        "it is of a cloud's client; use namespace, or drop it",
    ),
)
_ROLE: Final[Mapping[Role, str]] = {
    "source": "the reader (spark.readStream, spark.read)",
    "sink": "the writer (df.writeStream, df.write)",
}
_BY_KEY: Final[Mapping[Role, Mapping[str, Option]]] = {
    role: {option.name.lower(): option for option in options} for role, options in OPTIONS.items()
}
_IGNORED: Final = {name.lower(): name for name in SINK_IGNORED}
_CLIENT_IGNORED: Final = frozenset(name.lower() for name in CLIENT_IGNORED)
_WHY_REFUSED: Final = {name.lower(): (name, source, sink) for names, source, sink in _REFUSED for name in names}


def option_table(kind: Role | Literal["broker"]) -> tuple[OptionRow, ...]:
    """Return the rows of the documents' table: options that name the broker, or the reader's or writer's other options, as declared."""
    options = BROKER_OPTIONS if kind == "broker" else [option for option in OPTIONS[kind] if option not in BROKER_OPTIONS]
    return tuple(OptionRow(option.name, option.shown or option.default or "none", option.meaning) for option in options)


class Given:
    """The options that a user gave to one role, under their canonical names.

    Raises OptionError MISSING (no option at all), UNKNOWN, UNSUPPORTED, CONFLICT (a name twice, or path with namesrvAddr) or
    INVALID (a value is not a string).
    """

    def __init__(self, options: Mapping[str, str], role: Role) -> None:
        self._declared = _BY_KEY[role]
        self._values: dict[str, str] = {}
        if not options:
            # The default directory would suit a query without options, but an INSERT would write to a place where nobody looks.
            raise OptionError(
                OptionCondition.MISSING,
                "no option was given: set path (or namesrvAddr) and topic. Spark does not pass on the options of a table in its catalog: "
                "repeat them, as in SELECT * FROM t WITH (path = '/data/omq', topic = 'orders'), or use CREATE TEMPORARY VIEW ... USING "
                "orderedmq",
            )
        options = _of_a_table(options)
        keys = [name.lower() for name in options]
        if "path" in keys and "namesrvaddr" in keys:
            raise conflict(
                "options path and namesrvAddr exclude each other: path is an embedded broker, namesrvAddr a RocketMQ cluster; drop one",
            )
        for given, value in options.items():
            key = given.lower()
            if key not in self._declared:
                if key in _CLIENT_IGNORED or (role == "sink" and key in _IGNORED):
                    continue
                raise _not_an_option(given, role)
            name = self._declared[key].name
            if name in self._values:
                raise conflict(f"option {name} is given twice, in different case; drop one")
            if not isinstance(value, str):
                raise invalid(name, f"the value is of type {type(value).__name__}; write it as a string")
            self._values[name] = value.strip()

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        """Return the text that was given, else the default's."""
        return self._values.get(name, self._declared[name.lower()].default)

    def optional(self, name: str, parse: Parser[T]) -> T | None:
        """Return the parsed value of an option; None if it is not given and has no default."""
        text = self.text(name)
        return None if text is None else parse(text, name)

    def value(self, name: str, parse: Parser[T]) -> T:
        """Return the parsed value of an option that has a default."""
        text = self.text(name)
        if text is None:
            raise AssertionError(f"option {name} has no default")
        return parse(text, name)


def _of_a_table(options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the user's options among the properties of a table of Spark's catalog. Other options are returned unchanged.

    Spark passes each entry of OPTIONS (…) twice, without and with a prefix, together with the table's owner, provider, comment,
    location and TBLPROPERTIES. A path is always the location.
    """
    properties = {name.lower(): value for name, value in options.items()}
    if not properties.keys() >= _TABLE:
        return options
    own = {name.removeprefix(_TABLE_OPTION): value for name, value in properties.items() if name.startswith(_TABLE_OPTION)}
    if "namesrvaddr" not in own and "path" not in own and "location" in properties:
        own["path"] = properties["location"]
    return own


def _nearest(key: str, names: Collection[str]) -> str | None:
    """Return the name that a user who typed ``key`` may have meant; None if there is none.

    One that contains ``key`` or is contained in it (without a plural's s) comes first, then a similar one.
    """
    word = key.rstrip("s")
    parts = [name for name in names if min(len(word), len(name)) >= _WORD and (word in name or name in word)]
    near = difflib.get_close_matches(key, parts, n=1, cutoff=0) or difflib.get_close_matches(key, names, n=1, cutoff=_ALIKE)
    return near[0] if near else None


def _not_an_option(given: str, role: Role) -> OptionError:
    key = given.lower()
    if key in _WHY_REFUSED:
        name, source, sink = _WHY_REFUSED[key]
        return OptionError(
            OptionCondition.UNSUPPORTED, f"option {name} is not supported: {source if role == 'source' else sink}"
        )
    if key.startswith("kafka."):
        return OptionError(OptionCondition.UNSUPPORTED, f"option {shown(given)} is not supported: {_KAFKA}")
    other: Role = "sink" if role == "source" else "source"
    others = {option_key: option.name for option_key, option in _BY_KEY[other].items()}
    if other == "sink":
        others.update(_IGNORED)
    if key in others:
        return OptionError(
            OptionCondition.UNKNOWN,
            f"option {others[key]} is unknown to {_ROLE[role]}: it is an option of {_ROLE[other]}; move it there",
        )
    own = _BY_KEY[role]
    near = _nearest(key, own)
    if near:
        return OptionError(
            OptionCondition.UNKNOWN, f"option {shown(given)} is unknown to {_ROLE[role]}; did you mean {own[near].name}?"
        )
    names = ", ".join(option.name for option in own.values())
    return OptionError(OptionCondition.UNKNOWN, f"option {shown(given)} is unknown to {_ROLE[role]}; its options are {names}")
