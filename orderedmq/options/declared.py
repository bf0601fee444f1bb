"""The declaration of all options, and the part of parsing that the reader and the writer share.

Rules: options are checked as text, before any side effect. Names are case-insensitive (Spark passes them in lower case) and shown
in camelCase. An error is one line with the option, the wrong value and the remedy. The value of an unknown option is never shown,
because it may be a secret. Spark builds one DataSource object for reading and writing, so its constructor only stores the
mapping; ``SourceOptions.parse`` or ``SinkOptions.parse`` runs when Spark asks for a reader or a writer.
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
    """One option. ``default`` is the text that is parsed if the option is not given. Tables show ``shown`` instead, if it is set."""

    name: str
    default: str | None
    meaning: str
    shown: str = ""


class OptionRow(NamedTuple):
    """One row of a table of options, as text without markup."""

    name: str
    default: str
    meaning: str


#: Options that name the broker and the connection to it. The reader and the writer have them.
BROKER_OPTIONS: Final = (
    Option("path", None, "directory of the embedded broker, on a local disk", f"{DEFAULT_DIRECTORY} in the working directory"),
    Option(
        "namesrvAddr",
        None,
        "instead of path: the nameservers of a RocketMQ cluster, as host:port;host:port or http://host:port",
    ),
    Option("accessKey", None, "with namesrvAddr: the name of the account, if the cluster has access control"),
    Option("secretKey", None, "the account's secret key"),
    Option("securityToken", None, "the account's token, if it is a temporary account"),
    Option(
        "credentialsFile",
        None,
        "instead of accessKey: a private JSON file with accessKey, secretKey and perhaps securityToken, on each machine that runs "
        "Spark. It is read again before each connection and after a refusal, so the account may change while a query runs",
    ),
    Option("namespace", None, "with namesrvAddr: the namespace of topics and groups, which RocketMQ names namespace%topic"),
    Option("namespaceV2", None, "with namesrvAddr: the namespace that each request names, for servers that support this"),
    Option("useTLS", "false", "with namesrvAddr: encrypt the connections"),
    Option("tlsTrustCertPath", None, "PEM file of the certificate authorities to trust", "the system's"),
    Option("tlsCertPath", None, "PEM file of the client's certificate"),
    Option("tlsKeyPath", None, "PEM file of the client's key"),
    Option("tlsKeyPassword", None, "the password of the client's key"),
    Option("tlsVerify", "true", "false: do not verify servers' certificates"),
    Option(
        "tlsVerifyHostname",
        "true",
        "false: do not compare a server's name with its certificate (routes may contain IP addresses)",
    ),
)

SOURCE_OPTIONS: Final = (
    *BROKER_OPTIONS,
    Option("topic", None, "topic to read, or several topics: a,b", "this or topicPattern is required"),
    Option("topicPattern", None, "regular expression that the whole name of a topic must match", "this or topic is required"),
    Option(
        "tags",
        None,
        "read only messages with one of these tags: A || B, or * for all. Offsets, limits and lag also count the other messages",
        "all messages",
    ),
    Option(
        "filterSql",
        None,
        "with namesrvAddr, instead of tags: read only messages whose properties match this RocketMQ SQL: TAGS = 'A' AND amount > 5. The "
        "brokers need enablePropertyFilter=true",
        "all messages",
    ),
    Option(
        "consumerGroup",
        None,
        "consumer group whose locks and offsets the query uses",
        "required by a stream with messageModel=clustering",
    ),
    Option(
        "queryName",
        None,
        "name by which the command shows this query as owner and member, because Spark does not pass a query's name to its source",
        "on the embedded broker Spark's name of the query once a batch has run, else the beginning of an id",
    ),
    Option(
        "messageModel",
        "clustering",
        "clustering: use the group's locks and offsets; broadcasting: every query reads every message",
    ),
    Option(
        "assignment",
        "exclusive",
        "exclusive: the query owns all queues of its topics, or none; shared: the group's queries divide the queues",
    ),
    Option(
        "allocateMessageQueueStrategy",
        "AVG",
        "with assignment=shared: how queues are divided. All queries of the group need the same value: "
        "AVG|AVG_BY_CIRCLE|CONSISTENT_HASH|CONFIG|MACHINE_ROOM|MACHINE_ROOM_NEARBY",
    ),
    Option(
        "allocateQueues", None, 'with CONFIG: the queues of this query: {"orders": {"embedded": [0, 1]}}', "required by CONFIG"
    ),
    Option(
        "machineRooms",
        None,
        "with MACHINE_ROOM: rooms whose queues the group consumes: a,b for brokers a@... and b@... (the embedded broker is in no room)",
        "required by MACHINE_ROOM",
    ),
    Option(
        "machineRoom",
        None,
        "with MACHINE_ROOM_NEARBY: this query's room: a for brokers a@... (a room's queues go to the queries in that room, if any)",
        "required by MACHINE_ROOM_NEARBY",
    ),
    Option(
        "allocateInner",
        "AVG",
        "with MACHINE_ROOM_NEARBY: how each room's queues are divided: AVG|AVG_BY_CIRCLE|CONSISTENT_HASH",
    ),
    Option("lockTimeout", None, "how long to wait for queue locks that another client holds", "10s, 75s with namesrvAddr"),
    Option(
        "startingOffsets",
        None,
        'where a query without a checkpoint begins: committed, earliest, latest or JSON such as {"orders": {"embedded": {"0": 23, "1": -2}}}',
        "committed with a consumerGroup, else as consumeFromWhere says",
    ),
    Option("endingOffsets", None, "batch only: where to end (exclusive), latest or JSON", "latest"),
    Option(
        "startingTimestamp",
        None,
        "begin at the first message stored at this time or later: ISO-8601 (UTC without a zone) or ms since 1970",
    ),
    Option(
        "endingTimestamp", None, "batch only: end before the first message stored at this time or later, in the same formats"
    ),
    Option(
        "consumeFromWhere",
        "first",
        "where to begin if the group has never committed, or without a group: first|last|timestamp",
    ),
    Option("consumeTimestamp", None, "the time for consumeFromWhere=timestamp, in the formats of startingTimestamp"),
    Option(
        "failOnDataLoss",
        "true",
        "fail if unread messages were deleted; false: continue with a warning that counts them",
    ),
    Option(
        "maxOffsetsPerTrigger",
        None,
        "stream only: maximum messages per micro-batch, counted before filtering and without parked messages",
        "no limit",
    ),
    Option(
        "minOffsetsPerTrigger", None, "stream only: minimum messages per micro-batch, for which a trigger waits", "no waiting"
    ),
    Option("maxTriggerDelay", "15m", "stream only: maximum wait for minOffsetsPerTrigger"),
    Option(
        "maxBytesPerTrigger",
        None,
        "stream only: maximum bytes per micro-batch, such as 64m, without parked messages",
        "no limit",
    ),
    Option("pullBatchSize", "16384", f"maximum rows in a RecordBatch, 1 to {MAX_PULL_BATCH}"),
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
        "with namesrvAddr: verify the checksum that a broker stored with each body. A message whose body differs is unreadable",
    ),
    Option("includeProperties", "false", "add the column properties"),
    Option("includeLockToken", "false", "add the column lock_token, which `consume_orderly` needs"),
    Option(
        "parkingLot",
        "false",
        "stream only: also read, when due, messages that `consume_orderly` with OrderPerKey has parked. Adds the columns lock_token and ticket",
    ),
    Option(
        "parkingLotMaxMessages",
        "10000",
        "with parkingLot: number of parked messages per queue above which no more keys are parked",
    ),
    Option(
        "retryTopic",
        "false",
        "stream only, with namesrvAddr, instead of parkingLot: also read the group's retry topic, as its Java consumers do. "
        "`consume_concurrently` sends messages that it could not process back to this topic. Also adds the column lock_token",
    ),
)
SINK_OPTIONS: Final = (
    *BROKER_OPTIONS,
    Option("topic", None, "topic to write to; overrides the column topic", "the column topic"),
    Option(
        "shardingKey",
        "sharding_key",
        "column of the sharding key. Rows with the same key go to the same queue, in order. none: rows have no key and no order",
    ),
    Option(
        "shardingKeyType",
        "auto",
        "how the key is hashed: as a Java producer hashes text (a String), int (an Integer) or long (a Long). auto: by the column's type",
    ),
    Option(
        "messageQueueSelector",
        "hash",
        "how a row's queue is chosen: hash (as in Java), mod (key % queues), random, queueId (the column queue_id), machineRoom, or "
        "module:function",
    ),
    Option(
        "machineRooms",
        None,
        "with machineRoom and namesrvAddr: rooms to write to: a,b for brokers a@... and b@... (the key's hash chooses among their queues)",
        "required by machineRoom",
    ),
    Option(
        "topicQueueNums",
        None,
        f"create a missing topic with this number of queues, 1 to {MAX_QUEUES}. An existing topic must have the same number",
        "none",
    ),
    Option("orderBy", None, "columns by which each task sorts its rows, such as: created_at, id desc", "the rows' own order"),
    Option("orderBufferSize", "256m", "maximum bytes that each task holds in memory for orderBy, at most 2g"),
    Option(
        "onKeyConflict",
        None,
        "what to do if two tasks of a batch have rows of one key, whose order is then undefined: error|warn|ignore",
        "error, warn with namesrvAddr",
    ),
    Option(
        "onReplayDiffers",
        "error",
        "what to do if a repeated batch has other rows than the committed batch, but the same input: error|skip. Never skipped: other "
        "messages of a source on the same store",
    ),
    Option("compression", None, "compression of a topic that the sink creates on the embedded broker: none|lz4", "lz4"),
    Option(
        "sinkGroup",
        None,
        "with namesrvAddr: consumer group that stores the sink's bookmarks. Use another group for each query (or txnAppId) and topic",
        "OMQ_SINK_ and a hash of the query and the topic",
    ),
    Option(
        "enableMsgTrace",
        "false",
        "with namesrvAddr: write RocketMQ's message trace for each row that is sent, as Java producers do",
    ),
    Option("customizedTraceTopic", None, "with enableMsgTrace: the topic for traces", "RMQ_SYS_TRACE_TOPIC"),
    Option("txnAppId", None, "batch write only: together with txnVersion makes the write idempotent, as in Delta"),
    Option("txnVersion", None, "batch write only: a number that grows with each write of txnAppId, such as the batch id"),
)
#: Spark's own options, which Spark passes together with the writer's.
SINK_IGNORED: Final = ("checkpointLocation", "queryName")
#: Settings of RocketMQ's client that have no effect here, because clients choose their names themselves and use a broker's main port.
CLIENT_IGNORED: Final = ("instanceName", "unitName", "vipChannelEnabled")
#: Properties of every table in Spark's catalog, and the prefix of the user's options among a table's properties.
_TABLE: Final = frozenset(("provider", "owner"))
_TABLE_OPTION: Final = "option."
#: Minimum similarity of a name that an error suggests, and minimum length of a name that is suggested because it is part of another.
_ALIKE: Final = 0.75
_WORD: Final = 5
OPTIONS: Final[Mapping[Role, tuple[Option, ...]]] = {"source": SOURCE_OPTIONS, "sink": SINK_OPTIONS}

_KAFKA: Final = "It is an option of the Kafka connector. The options here are path, topic and, to read, consumerGroup"
#: Options of Spark or RocketMQ that are not supported here: (names, advice for a reader, advice for a writer), as sentences.
_REFUSED: Final[tuple[tuple[tuple[str, ...], str, str], ...]] = (
    (
        ("minPartitions", "maxPartitions", "numPartitions", "maxRecordsPerPartition"),
        "A queue is never split over Spark partitions. Give the topic more queues, or repartition the DataFrame after reading",
        "Rows go to queues, not to partitions. Set the number of queues of a new topic with topicQueueNums",
    ),
    (("groupIdPrefix",), "The name of a group is not generated. Use consumerGroup", _KAFKA),
    (("subscribe",), "Use topic", "Use topic"),
    (("subscribePattern",), "Use topicPattern", "Use topic"),
    (("assign",), "An exclusive query owns every queue. Use topic, or allocateQueues", "Use messageQueueSelector=queueId"),
    (("startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy"), "Use startingTimestamp", _KAFKA),
    (("endingOffsetsByTimestamp",), "Use endingTimestamp", _KAFKA),
    (("includeHeaders",), "Use includeProperties", "Write a column properties"),
    (("paths",), "A query reads one embedded broker. Give one path", "A query writes to one embedded broker. Give one path"),
    (("subExpression",), "Use tags, or filterSql", "A tag belongs to a message. Write a column tags"),
    (
        ("delayedRows",),
        "It belonged to the writer, which delays no rows",
        "A delayed message has no order. Write the rows when they are due, or send them with RocketMQ's own producer",
    ),
    (("tags", "filterSql"), "", "It selects the messages to read. To write a tag, write a column tags"),
    (
        ("enableMsgTrace", "customizedTraceTopic"),
        "Reads are not traced, but a listener's calls can be. Use consume_orderly(..., tracing=Tracing(enable_msg_trace=True))",
        "",
    ),
    (
        ("onsChannel",),
        "It belongs to the client of a cloud provider. Use namespace, or drop it",
        "It belongs to the client of a cloud provider. Use namespace, or drop it",
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
    """Return the rows of a table in the documents, in declared order: the broker options, or the other options of the reader or writer."""
    options = BROKER_OPTIONS if kind == "broker" else [option for option in OPTIONS[kind] if option not in BROKER_OPTIONS]
    return tuple(OptionRow(option.name, option.shown or option.default or "none", option.meaning) for option in options)


class Given:
    """The options that a user gave to one role, under their canonical names.

    Raises OptionError MISSING if there are no options, UNKNOWN, UNSUPPORTED, CONFLICT (a name given twice, or path with
    namesrvAddr), or INVALID (a value is not a string).
    """

    def __init__(self, options: Mapping[str, str], role: Role) -> None:
        self._declared = _BY_KEY[role]
        self._values: dict[str, str] = {}
        if not options:
            # A query without options could use the default directory, but an INSERT would write its rows where nobody looks for them.
            raise OptionError(
                OptionCondition.MISSING,
                "no option was given. Set path (or namesrvAddr) and topic. Spark does not pass on the options of a table in its catalog. "
                "Repeat them, as in SELECT * FROM t WITH (path = '/data/omq', topic = 'orders'), or use CREATE TEMPORARY VIEW ... USING "
                "orderedmq",
            )
        options = _of_a_table(options)
        keys = [name.lower() for name in options]
        if "path" in keys and "namesrvaddr" in keys:
            raise conflict(
                "options path and namesrvAddr exclude each other: path is an embedded broker, namesrvAddr a RocketMQ cluster. Drop one",
            )
        for given, value in options.items():
            key = given.lower()
            if key not in self._declared:
                if key in _CLIENT_IGNORED or (role == "sink" and key in _IGNORED):
                    continue
                raise _not_an_option(given, role)
            name = self._declared[key].name
            if name in self._values:
                raise conflict(f"option {name} is given twice, in different case. Drop one")
            if not isinstance(value, str):
                raise invalid(name, f"the value is of type {type(value).__name__}. Write it as a string")
            self._values[name] = value.strip()

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        """Return the given text, or the default text if the option is not given."""
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
    location and TBLPROPERTIES. The table's location is the option path.
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

    A name that contains ``key`` or is contained in it (apart from a plural s) is preferred to a name that is only similar.
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
            OptionCondition.UNSUPPORTED, f"option {name} is not supported. {source if role == 'source' else sink}"
        )
    if key.startswith("kafka."):
        return OptionError(OptionCondition.UNSUPPORTED, f"option {shown(given)} is not supported. {_KAFKA}")
    other: Role = "sink" if role == "source" else "source"
    others = {option_key: option.name for option_key, option in _BY_KEY[other].items()}
    if other == "sink":
        others.update(_IGNORED)
    if key in others:
        return OptionError(
            OptionCondition.UNKNOWN,
            f"option {others[key]} is unknown to {_ROLE[role]}: it is an option of {_ROLE[other]}. Move it there",
        )
    own = _BY_KEY[role]
    near = _nearest(key, own)
    if near:
        return OptionError(
            OptionCondition.UNKNOWN, f"option {shown(given)} is unknown to {_ROLE[role]}. Did you mean {own[near].name}?"
        )
    names = ", ".join(option.name for option in own.values())
    return OptionError(OptionCondition.UNKNOWN, f"option {shown(given)} is unknown to {_ROLE[role]}. Its options are {names}")
