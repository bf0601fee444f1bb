"""Parses options: from the texts that a user gave to a dataclass whose fields are options (`values`).

The value of an unknown option is never shown, because it may be a secret. Spark builds one DataSource object for reading and writing,
so its constructor only stores the mapping; `parse` runs when Spark asks for a reader or a writer.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, TypeVar

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.options.endpoint import BrokerOptions
from orderedmq.options.sink import SinkOptions
from orderedmq.options.source import SourceOptions
from orderedmq.options.values import DEFAULT_DIRECTORY, Option, conflict, invalid, names_of, only_for_cluster, options_of, shown

Options = TypeVar("Options", bound=BrokerOptions)

#: All options: those that name the broker and the connection to it, which the reader and the writer have, and the others of each.
OPTIONS: Final[Mapping[str, tuple[Option, ...]]] = {
    kind: tuple(
        option for name, option in options_of(role).items() if role is BrokerOptions or name not in options_of(BrokerOptions)
    )
    for kind, role in (("broker", BrokerOptions), ("source", SourceOptions), ("sink", SinkOptions))
}
#: Spark's own options, which Spark passes together with the writer's.
SINK_IGNORED: Final = ("checkpointLocation", "queryName")
#: Settings of RocketMQ's client that have no effect here, because clients choose their names themselves and use a broker's main port.
CLIENT_IGNORED: Final = ("instanceName", "unitName", "vipChannelEnabled")
#: Parameters of `orderedmq.read` that choose messages. All its other parameters are options of a connection.
READ_PARAMETERS: Final = ("columns", "order", "key", "tags", "since", "until", "queue", "offset", "first", "last")
#: Properties of every table in Spark's catalog, and the prefix of the user's options among a table's properties.
_TABLE: Final = frozenset(("provider", "owner"))
_TABLE_OPTION: Final = "option."
#: Minimum similarity of a name that an error suggests, and minimum length of a name that is suggested because it is part of another.
_ALIKE: Final = 0.75
_WORD: Final = 5

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
    (("assign",), "An exclusive query owns every queue. Use topic", "Use messageQueueSelector=queueId"),
    (("startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy"), "Use startingTimestamp", _KAFKA),
    (("endingOffsetsByTimestamp",), "Use endingTimestamp", _KAFKA),
    (("includeHeaders",), "Use includeProperties", "Write a column properties"),
    (("paths",), "A query reads one embedded broker. Give one path", "A query writes to one embedded broker. Give one path"),
    (("subExpression",), "Use tags, or filterSql", "A tag belongs to a message. Write a column tags"),
    (("tags", "filterSql"), "", "It selects the messages to read. To write a tag, write a column tags"),
    (
        ("enableMsgTrace", "customizedTraceTopic"),
        "RocketMQ's message trace is not written, but listeners make OpenTelemetry's spans. Use consume_orderly(..., trace_context=True)",
        "RocketMQ's message trace is not written, but rows carry OpenTelemetry's trace context. Keep it in the column properties",
    ),
    (
        ("onsChannel",),
        "It belongs to the client of a cloud provider. Use namespace, or drop it",
        "It belongs to the client of a cloud provider. Use namespace, or drop it",
    ),
)


class _Role(NamedTuple):
    """What errors say about the reader or the writer.

    ``ignored``: options of Spark that it ignores. ``parameters``: what it takes besides its options.
    """

    name: str
    other: type[BrokerOptions]
    ignored: Collection[str] = ()
    parameters: Collection[str] = ()


_ROLES: Final[Mapping[type[BrokerOptions], _Role]] = {
    SourceOptions: _Role("the reader (spark.readStream, spark.read)", SinkOptions),
    SinkOptions: _Role("the writer (df.writeStream, df.write)", SourceOptions, SINK_IGNORED),
    BrokerOptions: _Role("orderedmq.read", SourceOptions, parameters=READ_PARAMETERS),
}
_CLIENT_IGNORED: Final = frozenset(name.lower() for name in CLIENT_IGNORED)
_WHY_REFUSED: Final = {name.lower(): (name, source, sink) for names, source, sink in _REFUSED for name in names}


def parse(kind: type[Options], options: Mapping[str, str], *, streaming: bool | None = None) -> Options:
    """Return the checked options of the reader (`SourceOptions`), of the writer (`SinkOptions`), or of a connection (`BrokerOptions`).

    ``streaming`` None: not known yet, so checks that depend on it are skipped. Raises OptionError MISSING if there are no options,
    UNKNOWN, UNSUPPORTED, CONFLICT or INVALID, and TopicError or GroupError for a bad name.
    """
    texts = _by_name(kind, options)
    declared = options_of(kind)
    if "namesrvAddr" not in texts:
        for option in declared.values():
            if option.name in texts and option.only_cluster:
                raise only_for_cluster(option.name, option.only_cluster)
        texts.setdefault("path", DEFAULT_DIRECTORY)
    parsed = kind(**{field: option.value(texts) for field, option in declared.items()})
    parsed.check(texts.keys(), streaming)
    return parsed


def _by_name(kind: type[BrokerOptions], options: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the options under their names in camelCase."""
    if not options and kind is BrokerOptions:
        raise OptionError(OptionCondition.MISSING, "no broker was named. Set path, or namesrvAddr for a RocketMQ cluster")
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
    names, ignored = names_of(kind), _CLIENT_IGNORED | _ignored(kind).keys()
    texts: dict[str, str] = {}
    for key, value in options.items():
        name = names.get(key.lower())
        if name is None:
            if key.lower() in ignored:
                continue
            raise _not_an_option(key, kind)
        if name in texts:
            raise conflict(f"option {name} is given twice, in different case. Drop one")
        if not isinstance(value, str):
            raise invalid(name, f"the value is of type {type(value).__name__}. Write it as a string")
        texts[name] = value.strip()
    return texts


def _ignored(kind: type[BrokerOptions]) -> dict[str, str]:
    return {name.lower(): name for name in _ROLES[kind].ignored}


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


def _not_an_option(given: str, kind: type[BrokerOptions]) -> OptionError:
    key, role = given.lower(), _ROLES[kind]
    if key in _WHY_REFUSED:
        name, source, sink = _WHY_REFUSED[key]
        return OptionError(
            OptionCondition.UNSUPPORTED, f"option {name} is not supported. {sink if kind is SinkOptions else source}"
        )
    if key.startswith("kafka."):
        return OptionError(OptionCondition.UNSUPPORTED, f"option {shown(given)} is not supported. {_KAFKA}")
    others = names_of(role.other) | _ignored(role.other)
    if key in others:
        return OptionError(
            OptionCondition.UNKNOWN,
            f"option {others[key]} is unknown to {role.name}: it is an option of {_ROLES[role.other].name}. Move it there",
        )
    names = {name: name for name in role.parameters} | names_of(kind)
    near = _nearest(key, names)
    if near:
        return OptionError(
            OptionCondition.UNKNOWN, f"option {shown(given)} is unknown to {role.name}. Did you mean {names[near]}?"
        )
    return OptionError(
        OptionCondition.UNKNOWN, f"option {shown(given)} is unknown to {role.name}. Its options are {', '.join(names.values())}"
    )
