"""Options: every refusal names the option and the remedy in one line, and every valid value is converted to its type.

Each invalid case is a row of a table with its description, the options, the condition of the error, and words that the message
contains.

The module is long because each option has such rows.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import CaseInsensitiveDict

from orderedmq.broker import PullSettings
from orderedmq.endpoint import Endpoint
from orderedmq.errors import OptionError, OrderedMQError
from orderedmq.model import MAX_QUEUES, MessageQueue
from orderedmq.options.endpoint import BrokerOptions
from orderedmq.options.parse import OPTIONS, parse
from orderedmq.options.sink import SinkOptions, SortColumn
from orderedmq.options.source import EndingOffsets, SourceOptions, StartingOffsets
from orderedmq.options.values import (
    EARLIEST,
    LATEST,
    integer,
    parse_bool,
    parse_duration,
    parse_offsets_json,
    parse_path,
    parse_size,
    parse_timestamp,
)
from orderedmq.ownership.allocate import Allocation
from orderedmq.rows.filters import Filter

STREAM = {"path": "/data/omq", "topic": "orders", "consumerGroup": "billing"}
BATCH = {"path": "/data/omq", "topic": "orders"}
ALONE = {**BATCH, "messageModel": "broadcasting"}
SINK = {"path": "/data/omq", "topic": "invoices"}
CLUSTER = {"namesrvAddr": "h:9876", "topic": "orders", "consumerGroup": "billing"}
SINK_CLUSTER = {"namesrvAddr": "h:9876", "topic": "invoices"}
SECRET = "hunter2"
MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z


class Bad(NamedTuple):
    """An invalid case. ``streaming``: whether the options are for a stream; None: not known yet."""

    what: str
    options: Mapping[str, Any]
    condition: str
    words: tuple[str, ...]
    streaming: bool | None = True


def without(options: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in names}


def starting(text: str) -> dict[str, str]:
    return {**STREAM, "startingOffsets": text}


def shared(strategy: str, **more: str) -> dict[str, str]:
    return {**STREAM, "assignment": "shared", "allocateMessageQueueStrategy": strategy, **more}


def configured(text: str) -> dict[str, str]:
    return shared("CONFIG", allocateQueues=text)


BAD_SOURCE = [
    Bad("a retry topic", {**STREAM, "retryTopic": "true"}, "UNSUPPORTED", ("retryTopic", "parkingLot=true")),
    # Names.
    Bad("a misspelt name", {**STREAM, "consumergruop": "b"}, "UNKNOWN", ("consumergruop", "Did you mean consumerGroup?")),
    Bad("a part of a name", {**STREAM, "offsets": "earliest"}, "UNKNOWN", ("Did you mean endingOffsets?",)),
    Bad("a name in snake case", {**STREAM, "starting_offsets": "earliest"}, "UNKNOWN", ("Did you mean startingOffsets?",)),
    Bad("a name like no other", {**STREAM, "xyzzy": SECRET}, "UNKNOWN", ("'xyzzy'", "Its options are path, namesrvAddr")),
    Bad("a name with a line break", {**STREAM, "x\ny": "1"}, "UNKNOWN", ("x\\ny",)),
    Bad("an option of the writer", {**STREAM, "shardingKey": "id"}, "UNKNOWN", ("shardingKey", "of the writer", "Move it")),
    Bad("the writer's, lower case", {**STREAM, "topicqueuenums": "8"}, "UNKNOWN", ("topicQueueNums", "of the writer")),
    Bad("a checkpoint for a reader", {**STREAM, "checkpointLocation": "c"}, "UNKNOWN", ("checkpointLocation", "of the writer")),
    Bad("a name twice", {**STREAM, "PATH": "/b"}, "CONFLICT", ("option path", "twice", "Drop one")),
    Bad("a value that is no text", {**STREAM, "pullBatchSize": 5}, "INVALID", ("pullBatchSize", "int", "string")),
    # Names that are refused with a specific reason.
    Bad("minPartitions", {**STREAM, "minpartitions": "9"}, "UNSUPPORTED", ("minPartitions", "never split", "repartition")),
    Bad("maxPartitions", {**STREAM, "maxPartitions": "9"}, "UNSUPPORTED", ("maxPartitions", "never split", "more queues")),
    Bad("numPartitions", {**STREAM, "numPartitions": "9"}, "UNSUPPORTED", ("numPartitions", "never split")),
    Bad("groupIdPrefix", {**STREAM, "groupIdPrefix": "x"}, "UNSUPPORTED", ("groupIdPrefix", "Use consumerGroup")),
    Bad("subscribe", {**STREAM, "subscribe": "x"}, "UNSUPPORTED", ("subscribe", "Use topic")),
    Bad(
        "message trace",
        {**STREAM, "enablemsgtrace": "true"},
        "UNSUPPORTED",
        ("enableMsgTrace", "enable_msg_trace=True", "listener"),
    ),
    Bad("subscribePattern", {**STREAM, "subscribepattern": "x"}, "UNSUPPORTED", ("subscribePattern", "Use topicPattern")),
    Bad("assign", {**STREAM, "assign": "{}"}, "UNSUPPORTED", ("assign", "every queue", "Use topic")),
    Bad("Kafka's servers", {**STREAM, "kafka.bootstrap.servers": "h"}, "UNSUPPORTED", ("kafka.bootstrap.servers", "path")),
    Bad("any of Kafka's", {**STREAM, "Kafka.sasl.jaas.config": SECRET}, "UNSUPPORTED", ("Kafka.sasl.jaas.config", "topic")),
    Bad("several paths", {**STREAM, "paths": "[]"}, "UNSUPPORTED", ("paths", "one path")),
    Bad("SQL for a store", {**STREAM, "filtersql": "a > 1"}, "UNSUPPORTED", ("filterSql", "DataFrame.filter", "use tags")),
    Bad("a filter twice", {**CLUSTER, "filterSql": "a > 1", "tags": "a"}, "CONFLICT", ("tags", "filterSql", "Drop one")),
    Bad(
        "a cluster's threshold", {**STREAM, "pullThresholdForQueue": "9"}, "CONFLICT", ("pullThresholdForQueue", "namesrvAddr")
    ),
    Bad("another of a cluster's", {**STREAM, "pullThresholdSizeForQueue": "9"}, "CONFLICT", ("SizeForQueue", "pullBatchSize")),
    Bad("checksums of a store", {**STREAM, "verifyBodyCrc": "true"}, "CONFLICT", ("verifyBodyCrc", "always verifies")),
    Bad("checksums perhaps", {**CLUSTER, "verifyBodyCrc": "maybe"}, "INVALID", ("verifyBodyCrc", "neither true nor false")),
    Bad("no messages at all", {**CLUSTER, "pullThresholdForQueue": "0"}, "INVALID", ("pullThresholdForQueue", "65536")),
    Bad("no bytes at all", {**CLUSTER, "pullThresholdSizeForQueue": "0"}, "INVALID", ("pullThresholdSizeForQueue", "64m")),
    Bad("SQL without a word", {**CLUSTER, "filterSql": " "}, "INVALID", ("filterSql", "empty", "TAGS = 'a'")),
    Bad("Java's name of a filter", {**STREAM, "subExpression": "a"}, "UNSUPPORTED", ("subExpression", "Use tags")),
    *(
        Bad(f"tags like {text!r}", {**STREAM, "tags": text}, "INVALID", ("option tags", "A || B", "* for all"))
        for text in ("", "a | b", "a ||", "|| a", "a || || b", "a || *", "a ||| b", "a,b", "a || b,c", "a*", "*a || b")
    ),
    Bad("an access key", {**STREAM, "accesskey": SECRET}, "CONFLICT", ("accessKey", "RocketMQ", "namesrvAddr")),
    Bad("half an account", {**CLUSTER, "accesskey": "me"}, "MISSING", ("accessKey", "secretKey", "Set both")),
    Bad("a token without an account", {**CLUSTER, "securityToken": SECRET}, "MISSING", ("securityToken", "accessKey")),
    Bad("an empty key", {**CLUSTER, "accessKey": "me", "secretKey": ""}, "INVALID", ("secretKey", "empty")),
    Bad("a secret key", {**STREAM, "secretKey": SECRET}, "CONFLICT", ("secretKey", "RocketMQ", "namesrvAddr")),
    Bad("a security token", {**STREAM, "SECURITYTOKEN": SECRET}, "CONFLICT", ("securityToken", "RocketMQ", "namesrvAddr")),
    Bad("TLS files without TLS", {**CLUSTER, "tlsTrustCertPath": "ca.pem"}, "CONFLICT", ("tlsTrustCertPath", "useTLS=true")),
    Bad("TLS to a directory", {**STREAM, "useTLS": "true"}, "CONFLICT", ("useTLS", "namesrvAddr")),
    Bad("a namespace of a directory", {**STREAM, "namespace": "acme"}, "CONFLICT", ("namespace", "namesrvAddr")),
    *(
        Bad(f"namespace {text!r}", {**CLUSTER, "namespace": text}, "INVALID", ("option namespace", "Leave out the '%'"))
        for text in ("", "acme%", "a b", "a" * 65)
    ),
    Bad("half a certificate", {**CLUSTER, "useTLS": "true", "tlsCertPath": "c"}, "MISSING", ("tlsCertPath", "tlsKeyPath")),
    Bad("no port", {**CLUSTER, "namesrvAddr": "h"}, "INVALID", ("namesrvAddr", "'h'", "host:port")),
    Bad("HTTPS", {**CLUSTER, "namesrvAddr": "https://h:9876"}, "INVALID", ("namesrvAddr", "https://h:9876", "useTLS")),
    Bad("no address", {**CLUSTER, "namesrvAddr": " ; "}, "INVALID", ("namesrvAddr", "host:port")),
    # The place of the broker.
    Bad("two brokers", {**STREAM, "namesrvaddr": "h:9876"}, "CONFLICT", ("path", "namesrvAddr", "Drop one")),
    Bad(
        "a bucket", {**STREAM, "path": f"s3://me:{SECRET}@b/x"}, "UNSUPPORTED", ("path", "s3:", "local directory", "/data/omq")
    ),
    Bad("HDFS with one slash", {**STREAM, "path": "HDFS:/x"}, "UNSUPPORTED", ("path", "hdfs:", "local directory")),
    Bad("a file of another host", {**STREAM, "path": "file://nas/x"}, "INVALID", ("path", "'nas'", "local directory")),
    Bad("an empty path", {**STREAM, "path": " "}, "INVALID", ("path", "local", "/data/omq")),
    Bad("a file address of nothing", {**STREAM, "path": "file:"}, "INVALID", ("path", "local", "/data/omq")),
    Bad("a path with a zero byte", {**STREAM, "path": "/a\0b"}, "INVALID", ("path", "\\x00", "/data/omq")),
    Bad("a home directory", {**STREAM, "path": "~/omq"}, "INVALID", ("path", "'~/omq'", "Write the home directory out")),
    # Topics.
    Bad("no topic", without(STREAM, "topic"), "MISSING", ("topic", "Set topic", "topicPattern")),
    Bad("topic and pattern", {**STREAM, "topicPattern": "a"}, "CONFLICT", ("topic", "topicPattern", "Drop one")),
    Bad("a bad character", {**STREAM, "topic": "or ders"}, "TOPIC.BAD_NAME", ("option topic", "'or ders'", "only letters")),
    Bad("a long name", {**STREAM, "topic": "a," + "x" * 128}, "TOPIC.BAD_NAME", ("option topic", "at most 127")),
    Bad("an empty name", {**STREAM, "topic": "a,,b"}, "INVALID", ("topic", "'a,,b'", "orders,invoices")),
    Bad("a topic twice", {**STREAM, "topic": "a, b,a"}, "INVALID", ("topic", "'a'", "twice", "once")),
    Bad(
        "a broken pattern",
        {**without(STREAM, "topic"), "topicPattern": "a("},
        "INVALID",
        ("topicPattern", "'a('", "regular expression", "orders-.*"),
    ),
    Bad(
        "an empty pattern", {**without(STREAM, "topic"), "topicPattern": ""}, "INVALID", ("topicPattern", "empty", "orders-.*")
    ),
    Bad(
        "a pattern too large",
        {**without(STREAM, "topic"), "topicPattern": "a{99999999999}"},
        "INVALID",
        ("topicPattern", "too large", "orders-.*"),
    ),
    # Groups.
    Bad("a stream with no group", BATCH, "MISSING", ("Set consumerGroup", "messageModel=broadcasting")),
    Bad(
        "a group whose dead letters have no topic",
        {**STREAM, "consumerGroup": "x" * 123, "includeLockToken": "true"},
        "GROUP.BAD_NAME",
        ("123 characters", "at most 122", "%DLQ%"),
    ),
    Bad("a bad group", {**STREAM, "consumerGroup": "a b"}, "GROUP.BAD_NAME", ("consumerGroup", "'a b'", "billing")),
    Bad("a group nobody uses", {**STREAM, "messageModel": "broadcasting"}, "CONFLICT", ("Drop consumerGroup", "clustering")),
    Bad("a bad model", {**STREAM, "messageModel": "both"}, "INVALID", ("messageModel", "'both'", "clustering, broadcasting")),
    Bad("a bad assignment", {**STREAM, "assignment": "mine"}, "INVALID", ("assignment", "'mine'", "exclusive, shared")),
    # Queries that share the queues of a group.
    Bad(
        "sharing what everybody sees",
        {**ALONE, "assignment": "Shared"},
        "CONFLICT",
        ("assignment=shared", "broadcasting", "messageModel=clustering"),
    ),
    Bad(
        "sharing in a batch",
        {**STREAM, "assignment": "shared"},
        "UNSUPPORTED",
        ("assignment=shared", "spark.readStream"),
        False,
    ),
    Bad("sharing with no group", {**BATCH, "assignment": "shared"}, "MISSING", ("Set consumerGroup",)),
    *(
        Bad(f"{name} of an owner of all", {**STREAM, name: value}, "CONFLICT", (f"option {name}", "assignment=shared", "drop"))
        for name, value in (
            ("allocateMessageQueueStrategy", "AVG"),
            ("allocateQueues", '{"orders": {"embedded": [0]}}'),
            ("machineRooms", "a"),
            ("machineRoom", "a"),
            ("allocateInner", "AVG"),
        )
    ),
    *(
        Bad(
            f"{name} with {strategy}",
            shared(strategy, **{name: value}),
            "CONFLICT",
            (f"option {name}", f"={needed},", strategy),
        )
        for name, value, needed, strategy in (
            ("allocateQueues", '{"orders": {"embedded": [0]}}', "CONFIG", "AVG"),
            ("machineRooms", "a", "MACHINE_ROOM", "MACHINE_ROOM_NEARBY"),
            ("machineRoom", "a", "MACHINE_ROOM_NEARBY", "CONSISTENT_HASH"),
            ("allocateInner", "AVG", "MACHINE_ROOM_NEARBY", "AVG_BY_CIRCLE"),
        )
    ),
    *(
        Bad(f"{strategy} alone", shared(strategy), "MISSING", (f"allocateMessageQueueStrategy={strategy}", f"Set {name}"))
        for strategy, name in (
            ("CONFIG", "allocateQueues"),
            ("MACHINE_ROOM", "machineRooms"),
            ("MACHINE_ROOM_NEARBY", "machineRoom"),
        )
    ),
    Bad(
        "a bad strategy",
        shared("MACHINE_ROOM_NEARBY-AVG", machineRoom="a"),
        "INVALID",
        (
            "allocateMessageQueueStrategy",
            "'MACHINE_ROOM_NEARBY-AVG'",
            "AVG, AVG_BY_CIRCLE, CONSISTENT_HASH, CONFIG",
            "for example AVG",
        ),
    ),
    Bad(
        "a bad strategy inside",
        shared("MACHINE_ROOM_NEARBY", machineRoom="a", allocateInner="CONFIG"),
        "INVALID",
        ("allocateInner", "'CONFIG'", "AVG, AVG_BY_CIRCLE, CONSISTENT_HASH."),
    ),
    Bad(
        "rooms of the embedded broker",
        shared("machine_room", machineRooms="a, b"),
        "UNSUPPORTED",
        ("MACHINE_ROOM", "without an owner", "embedded", "Use AVG, or MACHINE_ROOM_NEARBY"),
    ),
    Bad("a room twice", shared("MACHINE_ROOM", machineRooms="a,b,a"), "INVALID", ("machineRooms", "'a'", "twice", "once")),
    Bad("a room of no name", shared("MACHINE_ROOM", machineRooms="a,,b"), "INVALID", ("machineRooms", "''", "room-a,room-b")),
    Bad("a broker as a room", shared("MACHINE_ROOM_NEARBY", machineRoom="a@b"), "INVALID", ("machineRoom", "'a@b'", "room-a")),
    Bad(
        "two rooms",
        shared("MACHINE_ROOM_NEARBY", machineRoom="a,b"),
        "INVALID",
        ("machineRoom", "'a,b'", "without @ and comma"),
    ),
    Bad("an empty room", shared("MACHINE_ROOM_NEARBY", machineRoom=" "), "INVALID", ("machineRoom", "''", "room-a")),
    Bad("half a list of queues", configured('{"orders": '), "INVALID", ("allocateQueues", "not JSON", '{"embedded": [0, 1]}')),
    Bad("no queues", configured("{}"), "INVALID", ("allocateQueues", "no topics", '{"embedded": [0, 1]}')),
    Bad("an empty list", configured('{"orders": {"embedded": []}}'), "INVALID", ("allocateQueues", "names no queues")),
    Bad(
        "offsets of queues", configured('{"orders": {"embedded": {"0": 1}}}'), "INVALID", ("an object is not a list of queues",)
    ),
    Bad("a queue that is no list", configured('{"orders": {"embedded": 0}}'), "INVALID", ("0 is not a list of queues",)),
    Bad("a queue in quotes", configured('{"orders": {"embedded": ["0"]}}'), "INVALID", ('"0" is not a queue id', "example 0")),
    Bad("a queue that is true", configured('{"orders": {"embedded": [true]}}'), "INVALID", ("true is not a queue id",)),
    Bad("a queue below all", configured('{"orders": {"embedded": [-1]}}'), "INVALID", ("-1 is not a queue id",)),
    Bad("a queue above all", configured('{"orders": {"embedded": [65536]}}'), "INVALID", ("65536 is not a queue id",)),
    Bad("a queue twice", configured('{"orders": {"embedded": [1, 0, 1]}}'), "INVALID", ("queue 1 is named twice", "once")),
    Bad(
        "a queue of another topic",
        configured('{"b": {"embedded": [0]}}'),
        "CONFLICT",
        ("allocateQueues", "'b'", "topic", "Drop"),
    ),
    Bad(
        "a queue elsewhere",
        configured('{"orders": {"broker-a": [0]}}'),
        "INVALID",
        ("allocateQueues", "'broker-a'", "is embedded"),
    ),
    # Durations, numbers, sizes, booleans.
    Bad("a bare number of time", {**STREAM, "lockTimeout": "10"}, "INVALID", ("lockTimeout", "'10'", "30s")),
    Bad("a fraction of time", {**STREAM, "lockTimeout": "1.5s"}, "INVALID", ("lockTimeout", "'1.5s'", "30s")),
    Bad("a negative time", {**STREAM, "lockTimeout": "-1s"}, "INVALID", ("lockTimeout", "'-1s'", "30s")),
    Bad("a yes", {**STREAM, "failOnDataLoss": "yes"}, "INVALID", ("failOnDataLoss", "'yes'", "true")),
    Bad("an empty boolean", {**STREAM, "includeProperties": ""}, "INVALID", ("includeProperties", "''", "true")),
    Bad("no rows", {**STREAM, "pullBatchSize": "0"}, "INVALID", ("pullBatchSize", "'0'", "1 to 1048576", "16384")),
    Bad("too many rows", {**STREAM, "pullBatchSize": "1048577"}, "INVALID", ("pullBatchSize", "1 to 1048576")),
    Bad(
        "a number with blanks",
        {**STREAM, "maxOffsetsPerTrigger": "1 000"},
        "INVALID",
        ("maxOffsetsPerTrigger", "'1 000'", "100000"),
    ),
    Bad("a number in another script", {**STREAM, "maxOffsetsPerTrigger": "٣"}, "INVALID", ("maxOffsetsPerTrigger", "100000")),
    Bad(
        "a number beyond a long", {**STREAM, "maxOffsetsPerTrigger": "9" * 19}, "INVALID", ("maxOffsetsPerTrigger", "1 or more")
    ),
    Bad("a number of many digits", {**STREAM, "minOffsetsPerTrigger": "9" * 9999}, "INVALID", ("minOffsetsPerTrigger", "...")),
    Bad("a bad size", {**STREAM, "maxBytesPerTrigger": "64 MB"}, "INVALID", ("maxBytesPerTrigger", "'64 MB'", "64m")),
    Bad("no bytes", {**STREAM, "maxBytesPerTrigger": "0k"}, "INVALID", ("maxBytesPerTrigger", "'0k'", "64m")),
    # Admission.
    Bad(
        "min above max",
        {**STREAM, "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
        "CONFLICT",
        ("minOffsetsPerTrigger (9)", "maxOffsetsPerTrigger (8)", "Lower it"),
    ),
    Bad("a delay of nothing", {**STREAM, "maxTriggerDelay": "1m"}, "MISSING", ("maxTriggerDelay", "Set minOffsetsPerTrigger")),
    *(
        Bad(f"{name} in a batch", {**BATCH, name: value}, "UNSUPPORTED", (name, "batch", "spark.readStream"), False)
        for name, value in (
            ("maxOffsetsPerTrigger", "1"),
            ("minOffsetsPerTrigger", "1"),
            ("maxTriggerDelay", "1m"),
            ("maxBytesPerTrigger", "1m"),
        )
    ),
    # Start and end of a read.
    Bad(
        "an unknown start",
        starting("oldest"),
        "INVALID",
        ("startingOffsets", "'oldest'", "committed, earliest, latest or JSON"),
    ),
    Bad(
        "two starts",
        {**starting("latest"), "startingTimestamp": "0"},
        "CONFLICT",
        ("startingTimestamp", "startingOffsets", "Drop one"),
    ),
    Bad("a start and a rule", {**starting("latest"), "consumeFromWhere": "last"}, "CONFLICT", ("consumeFromWhere", "Drop one")),
    Bad("broadcasting and committed", {**ALONE, "startingOffsets": "committed"}, "CONFLICT", ("startingOffsets", "earliest")),
    Bad(
        "a batch from no group",
        {**BATCH, "startingOffsets": "committed"},
        "MISSING",
        ("startingOffsets", "Set consumerGroup"),
        False,
    ),
    Bad("a batch from the end", {**BATCH, "startingOffsets": "latest"}, "CONFLICT", ("startingOffsets", "Use earliest"), False),
    Bad("a batch from last", {**BATCH, "consumeFromWhere": "last"}, "CONFLICT", ("consumeFromWhere", "Use earliest"), False),
    Bad("a stream that ends", {**STREAM, "endingOffsets": "latest"}, "UNSUPPORTED", ("endingOffsets", "Use spark.read")),
    Bad("a stream that ends in time", {**STREAM, "endingTimestamp": "0"}, "UNSUPPORTED", ("endingTimestamp", "Use spark.read")),
    Bad(
        "an unknown end",
        {**BATCH, "endingOffsets": "earliest"},
        "INVALID",
        ("endingOffsets", "'earliest'", "latest or JSON"),
        False,
    ),
    Bad(
        "two ends",
        {**BATCH, "endingOffsets": "latest", "endingTimestamp": "0"},
        "CONFLICT",
        ("endingOffsets", "endingTimestamp", "Drop one"),
        False,
    ),
    Bad(
        "a time backwards",
        {**BATCH, "startingTimestamp": "2", "endingTimestamp": "1"},
        "CONFLICT",
        ("startingTimestamp", "endingTimestamp", "Exchange"),
        False,
    ),
    Bad(
        "a time without a group after the end",
        {**BATCH, "consumeFromWhere": "timestamp", "consumeTimestamp": "2", "endingTimestamp": "1"},
        "CONFLICT",
        ("consumeTimestamp", "endingTimestamp", "Exchange"),
        False,
    ),
    Bad(
        "offsets backwards",
        {
            **BATCH,
            "startingOffsets": '{"orders": {"embedded": {"0": 7}}}',
            "endingOffsets": '{"orders": {"embedded": {"0": 6}}}',
        },
        "CONFLICT",
        ("startingOffsets", "orders/embedded/0 at 7", "endingOffsets at 6", "Lower it"),
        False,
    ),
    Bad(
        "no time", {**STREAM, "startingTimestamp": "today"}, "INVALID", ("startingTimestamp", "'today'", "2026-03-01T12:00:00Z")
    ),
    Bad("a time before 1970", {**STREAM, "startingTimestamp": "1969-12-31"}, "INVALID", ("startingTimestamp", "since 1970")),
    Bad("negative ms", {**STREAM, "startingTimestamp": "-5"}, "INVALID", ("startingTimestamp", "'-5'", "since 1970")),
    Bad("RocketMQ's time", {**STREAM, "startingTimestamp": "20260301120000"}, "INVALID", ("startingTimestamp", "ISO-8601")),
    Bad("a date of digits", {**STREAM, "startingTimestamp": "20260301"}, "INVALID", ("startingTimestamp", "ISO-8601")),
    Bad(
        "a rule unknown",
        {**STREAM, "consumeFromWhere": "max"},
        "INVALID",
        ("consumeFromWhere", "'max'", "first, last, timestamp"),
    ),
    Bad(
        "a rule with no time",
        {**STREAM, "consumeFromWhere": "timestamp"},
        "MISSING",
        ("consumeFromWhere", "Set consumeTimestamp"),
    ),
    Bad(
        "a time with no rule",
        {**STREAM, "consumeTimestamp": "0"},
        "CONFLICT",
        ("consumeTimestamp", "consumeFromWhere=timestamp"),
    ),
    # Offsets in JSON.
    Bad("half a JSON", starting('{"orders": '), "INVALID", ("startingOffsets", "not JSON", "at character 11", '"embedded"')),
    Bad(
        "JSON of a foreign topic",
        starting('{"x": {"embedded": {"0": 1}}}'),
        "CONFLICT",
        ("startingOffsets", "'x'", "topic", "Drop"),
    ),
    Bad("JSON of a foreign broker", starting('{"orders": {"broker-a": {"0": 1}}}'), "INVALID", ("'broker-a'", "is embedded")),
    Bad(
        "JSON without a topic",
        {**starting('{"orders": {"embedded": {"0": 1}}}'), "topic": "orders,b"},
        "INVALID",
        ("startingOffsets", "'b' is missing", "every queue"),
    ),
    Bad(
        "JSON that the pattern has not",
        {**without(starting('{"orders2": {"embedded": {"0": 1}}}'), "topic"), "topicPattern": "orders"},
        "CONFLICT",
        ("startingOffsets", "'orders2'", "topicPattern", "Drop"),
    ),
]

BAD_SINK = [
    Bad("a misspelt name", {**SINK, "shardKey": "id"}, "UNKNOWN", ("'shardKey'", "Did you mean shardingKey?")),
    Bad("an option of the reader", {**SINK, "consumergroup": "b"}, "UNKNOWN", ("consumerGroup", "of the reader", "Move it")),
    Bad("a pattern to write to", {**SINK, "topicPattern": "b"}, "UNKNOWN", ("topicPattern", "of the reader")),
    Bad("properties to write", {**SINK, "includeProperties": "true"}, "UNKNOWN", ("includeProperties", "of the reader")),
    Bad("a secret key", {**SINK, "secretKey": SECRET}, "CONFLICT", ("secretKey", "RocketMQ", "namesrvAddr")),
    Bad(
        "conflicts held back",
        {**SINK_CLUSTER, "onKeyConflict": "error"},
        "UNSUPPORTED",
        ("onKeyConflict", "as soon as they are sent", "warn"),
    ),
    Bad("a sink's group without a cluster", {**SINK, "sinkGroup": "billing-out"}, "CONFLICT", ("sinkGroup", "namesrvAddr")),
    Bad("delayed rows", {**SINK_CLUSTER, "delayedRows": "unordered"}, "UNSUPPORTED", ("delayedRows", "when they are due")),
    Bad("compression of a cluster", {**SINK_CLUSTER, "compression": "lz4"}, "CONFLICT", ("compression", "embedded")),
    Bad("a tag for all", {**SINK, "tags": "a"}, "UNSUPPORTED", ("tags", "selects the messages to read", "column tags")),
    Bad("a filter for the writer", {**SINK, "filterSql": "a"}, "UNSUPPORTED", ("filterSql", "selects the messages to read")),
    Bad("Kafka's servers", {**SINK, "kafka.bootstrap.servers": "h"}, "UNSUPPORTED", ("kafka.bootstrap.servers", "path")),
    Bad("partitions", {**SINK, "numPartitions": "8"}, "UNSUPPORTED", ("numPartitions", "topicQueueNums")),
    Bad("a cluster without a port", {**without(SINK, "path"), "namesrvAddr": "h"}, "INVALID", ("namesrvAddr", "host:port")),
    Bad("two brokers", {**SINK, "namesrvAddr": "h"}, "CONFLICT", ("path", "namesrvAddr", "Drop one")),
    Bad("a bucket", {**SINK, "path": "gs://b"}, "UNSUPPORTED", ("path", "gs:", "local directory")),
    Bad("two topics", {**SINK, "topic": "a,b"}, "INVALID", ("topic", "'a,b'", "write a column topic")),
    Bad("dead letters", {**SINK, "topic": "%DLQ%g"}, "TOPIC.RESERVED", ("option topic", "'%DLQ%g'", "Choose a name")),
    Bad("an empty topic", {**SINK, "topic": ""}, "TOPIC.BAD_NAME", ("option topic", "empty")),
    Bad("no key column", {**SINK, "shardingKey": ""}, "INVALID", ("shardingKey", "empty", "order_id")),
    Bad(
        "a type of no keys",
        {**SINK, "shardingKey": "none", "shardingKeyType": "long"},
        "CONFLICT",
        ("shardingKeyType", "shardingKey=none", "Drop one"),
    ),
    Bad(
        "a remainder of no keys",
        {**SINK, "shardingKey": "none", "messageQueueSelector": "mod"},
        "CONFLICT",
        ("messageQueueSelector=mod", "shardingKey=none", "random"),
    ),
    Bad("keys of no type", {**SINK, "shardingKeyType": "uuid"}, "INVALID", ("shardingKeyType", "'uuid'", "long")),
    Bad(
        "a remainder of text",
        {**SINK, "messageQueueSelector": "mod", "shardingKeyType": "text"},
        "CONFLICT",
        ("messageQueueSelector=mod", "shardingKeyType=text", "Use long, or hash"),
    ),
    Bad(
        "a selector unknown",
        {**SINK, "messageQueueSelector": "first"},
        "INVALID",
        ("messageQueueSelector", "'first'", "my.rules:choose"),
    ),
    Bad(
        "a selector half named",
        {**SINK, "messageQueueSelector": "my.rules:"},
        "INVALID",
        ("messageQueueSelector", "module:function"),
    ),
    Bad(
        "a selector not Python's",
        {**SINK, "messageQueueSelector": "a.class:f"},
        "INVALID",
        ("messageQueueSelector", "'a.class:f'"),
    ),
    Bad(
        "rooms of the embedded broker",
        {**SINK, "messageQueueSelector": "machineRoom", "machineRooms": "a"},
        "UNSUPPORTED",
        ("messageQueueSelector=machineRoom", "room@name", "embedded", "Use hash"),
    ),
    Bad(
        "no rooms",
        {**SINK_CLUSTER, "messageQueueSelector": "MachineRoom"},
        "MISSING",
        ("messageQueueSelector=machineRoom", "Set machineRooms"),
    ),
    Bad(
        "rooms that are not looked at",
        {**SINK_CLUSTER, "machineRooms": "a"},
        "CONFLICT",
        ("machineRooms", "messageQueueSelector=machineRoom", "not hash", "drop"),
    ),
    Bad(
        "a room twice",
        {**SINK_CLUSTER, "messageQueueSelector": "machineRoom", "machineRooms": "a,a"},
        "INVALID",
        ("machineRooms", "'a'", "twice"),
    ),
    Bad("no queues", {**SINK, "topicQueueNums": "0"}, "INVALID", ("topicQueueNums", "'0'", f"1 to {MAX_QUEUES}", "example 8")),
    Bad(
        "too many queues", {**SINK, "topicQueueNums": str(MAX_QUEUES + 1)}, "INVALID", ("topicQueueNums", f"1 to {MAX_QUEUES}")
    ),
    Bad("an order unknown", {**SINK, "orderBy": "id down"}, "INVALID", ("orderBy", "'id down'", "created_at, id desc")),
    Bad("an empty order", {**SINK, "orderBy": ""}, "INVALID", ("orderBy", "''", "created_at, id desc")),
    Bad("a hole in the order", {**SINK, "orderBy": "a,,b"}, "INVALID", ("orderBy", "asc or desc")),
    Bad("an order twice", {**SINK, "orderBy": "a, a desc"}, "INVALID", ("orderBy", "'a'", "once")),
    Bad("a bad buffer", {**SINK, "orderBufferSize": "lots"}, "INVALID", ("orderBufferSize", "'lots'", "64m")),
    Bad("a buffer above what Arrow holds", {**SINK, "orderBufferSize": "2049m"}, "INVALID", ("orderBufferSize", "at most 2g")),
    Bad(
        "trace without a cluster",
        {**SINK, "enableMsgTrace": "true"},
        "CONFLICT",
        ("enableMsgTrace", "namesrvAddr", "no message trace"),
    ),
    Bad(
        "trace topic alone",
        {**SINK_CLUSTER, "customizedTraceTopic": "t"},
        "CONFLICT",
        ("customizedTraceTopic", "enableMsgTrace=true"),
    ),
    Bad("bad trace", {**SINK_CLUSTER, "enableMsgTrace": "yes"}, "INVALID", ("enableMsgTrace", "'yes'", "true nor false")),
    Bad(
        "bad trace topic",
        {**SINK_CLUSTER, "enableMsgTrace": "true", "customizedTraceTopic": "a,b"},
        "INVALID",
        ("customizedTraceTopic", "'a,b' is a list"),
    ),
    Bad("a bad conflict", {**SINK, "onKeyConflict": "fail"}, "INVALID", ("onKeyConflict", "'fail'", "error, warn, ignore")),
    Bad("a bad replay", {**SINK, "onReplayDiffers": "warn"}, "INVALID", ("onReplayDiffers", "'warn'", "error, skip")),
    Bad("a bad compression", {**SINK, "compression": "zstd"}, "INVALID", ("compression", "'zstd'", "none, lz4")),
    Bad("an app alone", {**SINK, "txnAppId": "a"}, "MISSING", ("txnAppId", "txnVersion", "Set both"), False),
    Bad("a version alone", {**SINK, "txnVersion": "1"}, "MISSING", ("txnVersion", "txnAppId", "Set both"), None),
    Bad(
        "a negative version",
        {**SINK, "txnAppId": "a", "txnVersion": "-1"},
        "INVALID",
        ("txnVersion", "'-1'", "0 or more"),
        False,
    ),
    Bad(
        "a version that leaves no greater one",
        {**SINK, "txnAppId": "a", "txnVersion": str(2**63 - 1)},
        "INVALID",
        ("txnVersion", "no greater one", str(2**63 - 2)),
        False,
    ),
    Bad("an app with no name", {**SINK, "txnAppId": "", "txnVersion": "1"}, "INVALID", ("txnAppId", "billing-job"), False),
    Bad("an app on a stream", {**SINK, "txnAppId": "a", "txnVersion": "1"}, "UNSUPPORTED", ("txnAppId", "stream", "df.write")),
]


def check_refusal(error: OrderedMQError, bad: Bad) -> None:
    expected = bad.condition if "." in bad.condition else f"OPTION.{bad.condition}"
    assert error.condition == f"ORDEREDMQ_{expected}", error
    for word in bad.words:
        assert word in error.message
    assert len(str(error).splitlines()) == 1
    assert SECRET not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("bad", BAD_SOURCE, ids=lambda bad: bad.what)
def test_a_bad_option_of_the_reader_is_refused(bad: Bad) -> None:
    with pytest.raises(OrderedMQError) as caught:
        parse(SourceOptions, bad.options, streaming=bad.streaming)
    check_refusal(caught.value, bad)


@pytest.mark.parametrize("bad", BAD_SINK, ids=lambda bad: bad.what)
def test_a_bad_option_of_the_writer_is_refused(bad: Bad) -> None:
    with pytest.raises(OrderedMQError) as caught:
        parse(SinkOptions, bad.options, streaming=bad.streaming)
    check_refusal(caught.value, bad)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("not JSON", "character 1")),
        ("[]", ("the whole", "[]", "object of topics")),
        ("1", ("the whole", "1", "object of topics")),
        ("{}", ("the whole", "no topics")),
        ("NaN", ("not JSON",)),
        ("[" * 100_000, ("not JSON", "nesting")),
        ('{"a": 1' + "0" * 5000 + "}", ("not JSON", "number")),
        ('{"a b": {"e": {"0": 1}}}', ("'a b'", "only letters")),
        ('{"a": null}', ("topic 'a'", "null", "object of brokers")),
        ('{"a": {}}', ("topic 'a'", "no brokers")),
        ('{"a": {"e": [1]}}', ("topic 'a', broker 'e'", "[1]", "object of queues")),
        ('{"a": {"e": {}}}', ("broker 'e'", "no queues")),
        ('{"a": {"e": {"x": 1}}}', ("broker 'e'", "'x' is not a queue id")),
        ('{"a": {"e": {"-1": 1}}}', ("'-1' is not a queue id",)),
        ('{"a": {"e": {"01": 1}}}', ("'01' is not a queue id",)),
        ('{"a": {"e": {"65536": 1}}}', ("'65536' is not a queue id",)),
        ('{"a": {"e": {"0": -3}}}', ("queue 0", "-3 is not an offset", "-1 (latest)", "-2 (earliest)")),
        ('{"a": {"e": {"0": 1.0}}}', ("queue 0", "1.0 is not an offset")),
        ('{"a": {"e": {"0": "1"}}}', ("queue 0", '"1" is not an offset')),
        ('{"a": {"e": {"0": true}}}', ("queue 0", "true is not an offset")),
        ('{"a": {"e": {"0": null}}}', ("queue 0", "null is not an offset")),
        ('{"a": {"e": {"0": {"x": 1}}}}', ("queue 0", "an object is not an offset")),
        ('{"a": {"e": {"0": 9223372036854775808}}}', ("queue 0", "is not an offset")),
        ('{"a": {"e": {"0": 1}}, "a": {"e": {"0": 2}}}', ("the whole", "'a' is named twice")),
        ('{"a": {"e": {"0": 1}, "e": {"1": 1}}}', ("topic 'a'", "'e' is named twice")),
        ('{"a": {"e": {"0": 1, "0": 1}}}', ("broker 'e'", "'0' is named twice")),
    ],
)
def test_bad_offsets_say_what_is_wrong_and_where(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        parse_offsets_json(text, "startingOffsets")
    check_refusal(caught.value, Bad("", {}, "INVALID", ("startingOffsets", *words)))


def test_good_offsets_keep_their_queues_and_special_numbers() -> None:
    text = '{"orders": {"broker-a": {"0": 23, "1": -2}, "b": {"0": -1}}, "%DLQ%g": {"b": {"7": 0}}}'
    assert parse_offsets_json(text, "startingOffsets") == {
        MessageQueue("orders", "broker-a", 0): 23,
        MessageQueue("orders", "broker-a", 1): EARLIEST,
        MessageQueue("orders", "b", 0): LATEST,
        MessageQueue("%DLQ%g", "b", 7): 0,
    }


@pytest.mark.parametrize("name", ["location", "user", "header", "bootstrap.servers", "timestamp_ntz", "x" * 40])
@pytest.mark.parametrize("role", [SourceOptions, SinkOptions])
def test_nothing_is_proposed_that_does_not_resemble_what_was_typed(role: type[BrokerOptions], name: str) -> None:
    with pytest.raises(OptionError, match="Its options are") as caught:
        parse(role, {**BATCH, name: "1"})
    assert "Did you mean" not in str(caught.value)


#: The options that Spark 4.3 passes for CREATE TABLE t USING orderedmq OPTIONS (path '/data/omq', topic 'orders', tags 'A')
#: COMMENT 'all' TBLPROPERTIES ('team' = 'sales'), and for the same table on a cluster.
TABLE = {
    "path": "file:/data/omq", "location": "file:/data/omq", "provider": "orderedmq", "owner": "root", "comment": "all", "team": "sales",
    "topic": "orders", "option.topic": "orders", "tags": "A", "option.tags": "A",
}  # fmt: skip


def test_a_tables_own_properties_are_passed_over() -> None:
    parsed = parse(SourceOptions, TABLE, streaming=None)
    assert (parsed.endpoint.path, parsed.topics, parsed.matching) == ("/data/omq", ("orders",), Filter(tags=("A",)))
    # spark.catalog.createTable adds more properties, and future releases may add others.
    more = {"external": "true", "is_managed_location": "true", "collation": "UTF8_BINARY", "table_type": "EXTERNAL"}
    assert parse(SourceOptions, {**TABLE, **more, "option.path": "/data/omq"}, streaming=None) == parsed
    cluster = {**without(TABLE, "path"), "location": "file:/wh/t", "namesrvaddr": "h:9876", "option.namesrvaddr": "h:9876"}
    assert parse(SourceOptions, cluster, streaming=None).endpoint.namesrv_addr == "h:9876"
    sink = {**without(TABLE, "tags", "option.tags"), "option.shardingkey": "id"}
    assert parse(SinkOptions, sink, streaming=None).key_column == "id"


def test_a_tables_misspelt_option_is_refused_all_the_same() -> None:
    with pytest.raises(OptionError, match="'topics' is unknown.*Did you mean topic") as caught:
        parse(SourceOptions, {**TABLE, "topics": "a", "option.topics": "a"}, streaming=None)
    assert caught.value.sub == "UNKNOWN"
    # Without a table, these properties are not ignored.
    with pytest.raises(OptionError, match="'owner' is unknown"):
        parse(SourceOptions, {**BATCH, "owner": "root"}, streaming=None)


@pytest.mark.parametrize("role", [SourceOptions, SinkOptions])
def test_no_option_at_all_says_how_a_table_is_read(role: type[BrokerOptions]) -> None:
    with pytest.raises(OptionError, match=r"Set path .*WITH \(path = .*CREATE TEMPORARY VIEW") as caught:
        parse(role, {}, streaming=False)
    assert caught.value.sub == "MISSING"


def test_the_readers_defaults() -> None:
    parsed = parse(SourceOptions, STREAM, streaming=True)
    assert parsed == SourceOptions(
        path="/data/omq",
        topics=("orders",),
        topic_pattern=None,
        tags=None,
        filter_sql=None,
        consumer_group="billing",
        query_name=None,
        message_model="clustering",
        assignment="exclusive",
        lock_timeout=10.0,
        starting_offsets=None,
        starting_timestamp=None,
        consume_from_where="first",
        consume_timestamp=None,
        fail_on_data_loss=True,
        max_offsets_per_trigger=None,
        min_offsets_per_trigger=None,
        max_trigger_delay=900.0,
        max_bytes_per_trigger=None,
        pull_batch_size=16384,
        include_properties=False,
        include_lock_token=False,
        parking_lot=False,
        parking_lot_max_messages=10_000,
    )
    assert parsed.endpoint == Endpoint("/data/omq")
    assert (parsed.starting, parsed.ending) == (StartingOffsets("committed"), EndingOffsets("latest"))
    assert (parsed.matching, parsed.allocation) == (None, Allocation())
    assert parsed.pull_settings == PullSettings("billing")


def test_every_option_of_the_reader_arrives() -> None:
    options = {
        "path": "data/../omq",
        "topicPattern": "orders-.*",
        "tags": " b c||a || a",
        "consumerGroup": "billing",
        "messageModel": "CLUSTERING",
        "assignment": "Exclusive",
        "lockTimeout": "500ms",
        "startingOffsets": '{"orders-eu": {"embedded": {"0": 5}}}',
        "failOnDataLoss": "False",
        "maxOffsetsPerTrigger": "9",
        "minOffsetsPerTrigger": "9",
        "maxTriggerDelay": "2m",
        "maxBytesPerTrigger": "64m",
        "pullBatchSize": "1048576",
        "includeProperties": "TRUE",
    }
    parsed = parse(SourceOptions, options, streaming=True)
    assert parsed == SourceOptions(
        path=os.path.abspath("omq"),
        topic_pattern="orders-.*",
        tags=Filter(tags=("a", "b c")),
        consumer_group="billing",
        message_model="clustering",
        assignment="exclusive",
        lock_timeout=0.5,
        starting_offsets=StartingOffsets("json", offsets={MessageQueue("orders-eu", "embedded", 0): 5}, explicit=True),
        fail_on_data_loss=False,
        max_offsets_per_trigger=9,
        min_offsets_per_trigger=9,
        max_trigger_delay=120.0,
        max_bytes_per_trigger=64 * 1024 * 1024,
        pull_batch_size=1048576,
        include_properties=True,
    )
    assert parsed.endpoint == Endpoint(os.path.abspath("omq"))
    assert parse(SourceOptions, CaseInsensitiveDict(options), streaming=True) == parsed
    assert parse(SourceOptions, {name.upper(): value for name, value in options.items()}, streaming=True) == parsed
    assert pickle.loads(pickle.dumps(parsed)) == parsed
    assert [topic for topic in ("orders-eu", "orders-", "my-orders-eu", "orders") if parsed.reads(topic)] == [
        "orders-eu",
        "orders-",
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({**STREAM, "assignment": "SHARED"}, Allocation()),
        (shared("avg_by_circle"), Allocation("AVG_BY_CIRCLE")),
        (shared("Consistent_Hash"), Allocation("CONSISTENT_HASH")),
        (
            {**configured('{"b": {"embedded": [7]}, "orders": {"embedded": [1, 0]}}'), "topic": "orders,b"},
            Allocation(
                "CONFIG",
                queues=(
                    MessageQueue("b", "embedded", 7),
                    MessageQueue("orders", "embedded", 1),
                    MessageQueue("orders", "embedded", 0),
                ),
            ),
        ),
        (shared("machine_room_nearby", machineRoom="Süd 1"), Allocation("MACHINE_ROOM_NEARBY", room="Süd 1")),
        (
            shared("MACHINE_ROOM_NEARBY", machineRoom="a", allocateInner="consistent_hash"),
            Allocation("MACHINE_ROOM_NEARBY", room="a", inner="CONSISTENT_HASH"),
        ),
    ],
)
@pytest.mark.parametrize("streaming", [True, None])
def test_how_queues_are_shared_arrives(options: Mapping[str, str], expected: Allocation, streaming: bool | None) -> None:
    parsed = parse(SourceOptions, options, streaming=streaming)
    assert (parsed.assignment, parsed.allocation) == ("shared", expected)
    assert parse(SourceOptions, {name.lower(): value for name, value in options.items()}, streaming=streaming) == parsed


@pytest.mark.parametrize(
    ("options", "streaming", "expected"),
    [
        (STREAM, False, StartingOffsets("committed")),
        (STREAM, None, StartingOffsets("committed")),
        (BATCH, False, StartingOffsets("earliest")),
        (BATCH, None, StartingOffsets("earliest")),
        (ALONE, True, StartingOffsets("earliest")),
        ({**ALONE, "consumeFromWhere": "last"}, True, StartingOffsets("latest")),
        (
            {**ALONE, "consumeFromWhere": "timestamp", "consumeTimestamp": "7"},
            True,
            StartingOffsets("timestamp", timestamp=7000),
        ),
        ({**STREAM, "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET"}, True, StartingOffsets("committed")),
        (starting("Committed"), True, StartingOffsets("committed", explicit=True)),
        (starting("EARLIEST"), True, StartingOffsets("earliest", explicit=True)),
        (starting("latest"), True, StartingOffsets("latest", explicit=True)),
        ({**ALONE, "startingOffsets": "latest"}, True, StartingOffsets("latest", explicit=True)),
        (starting("committed"), False, StartingOffsets("committed", explicit=True)),
        ({**BATCH, "startingOffsets": "committed"}, None, StartingOffsets("committed", explicit=True)),
        (
            {**STREAM, "startingTimestamp": "2026-01-01T01:00:00.5+01:00"},
            True,
            StartingOffsets("timestamp", timestamp=MS * 1000 + 500_000, explicit=True),
        ),
    ],
)
def test_where_a_query_begins(options: Mapping[str, str], streaming: bool | None, expected: StartingOffsets) -> None:
    assert parse(SourceOptions, options, streaming=streaming).starting == expected


def test_consume_from_where_takes_rocketmqs_names() -> None:
    for name, expected in (("FIRST_OFFSET", "first"), ("LAST_OFFSET", "last")):
        options = {**STREAM, "consumeFromWhere": f"CONSUME_FROM_{name}", "startingOffsets": "committed"}
        assert parse(SourceOptions, options, streaming=True).consume_from_where == expected
    options = {**STREAM, "consumeFromWhere": "CONSUME_FROM_TIMESTAMP", "consumeTimestamp": str(MS)}
    parsed = parse(SourceOptions, options, streaming=True)
    assert (parsed.consume_from_where, parsed.consume_timestamp) == ("timestamp", MS * 1000)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, EndingOffsets("latest")),
        ({"endingOffsets": "Latest"}, EndingOffsets("latest")),
        ({"endingTimestamp": "3"}, EndingOffsets("timestamp", timestamp=3000)),
        (
            {"endingOffsets": '{"orders": {"embedded": {"0": 9, "1": -1}}}'},
            EndingOffsets("json", {MessageQueue("orders", "embedded", 0): 9, MessageQueue("orders", "embedded", 1): LATEST}),
        ),
    ],
)
def test_where_a_batch_ends(options: Mapping[str, str], expected: EndingOffsets) -> None:
    assert parse(SourceOptions, {**BATCH, **options}, streaming=False).ending == expected


def test_stream_or_batch_is_checked_only_when_it_is_known() -> None:
    assert parse(SourceOptions, {**BATCH, "endingOffsets": "latest", "maxOffsetsPerTrigger": "1"}, streaming=None)
    assert parse(SinkOptions, {**SINK, "txnAppId": "a", "txnVersion": "1"}, streaming=None)


def test_the_writers_defaults() -> None:
    assert parse(SinkOptions, {"path": "/data/omq"}, streaming=True) == SinkOptions(
        path="/data/omq",
        topic=None,
        sharding_key=None,
        sharding_key_type="auto",
        selector="hash",
        machine_rooms=(),
        topic_queue_nums=None,
        order_by=(),
        order_buffer_size=256 * 1024 * 1024,
        on_key_conflict="error",
        on_replay_differs="error",
        compression=None,
        sink_group=None,
        enable_msg_trace=False,
        customized_trace_topic=None,
        txn_app_id=None,
        txn_version=None,
    )


def test_every_option_of_the_writer_arrives() -> None:
    options = {
        "path": "file:///data/omq/",
        "topic": "invoices",
        "shardingKey": "order_id",
        "shardingKeyType": "Long",
        "messageQueueSelector": "QUEUEID",
        "topicQueueNums": "8",
        "orderBy": "created_at ASC, `a, b` desc,`c d`, e",
        "orderBufferSize": "1g",
        "onKeyConflict": "Warn",
        "onReplayDiffers": "skip",
        "compression": "LZ4",
        "txnAppId": "billing-job",
        "txnVersion": "0",
        "checkpointLocation": "ck",
        "queryName": "q",
    }
    parsed = parse(SinkOptions, options, streaming=False)
    assert parsed == SinkOptions(
        path="/data/omq",
        topic="invoices",
        sharding_key="order_id",
        sharding_key_type="long",
        selector="queueId",
        machine_rooms=(),
        topic_queue_nums=8,
        order_by=(SortColumn("created_at"), SortColumn("a, b", True), SortColumn("c d"), SortColumn("e")),
        order_buffer_size=1024**3,
        on_key_conflict="warn",
        on_replay_differs="skip",
        compression="lz4",
        sink_group=None,
        enable_msg_trace=False,
        customized_trace_topic=None,
        txn_app_id="billing-job",
        txn_version=0,
    )
    assert parse(SinkOptions, CaseInsensitiveDict(options), streaming=False) == parsed
    assert pickle.loads(pickle.dumps(parsed)) == parsed


@pytest.mark.parametrize("selector", ["hash", "mod", "random", "queueId", "rules:choose", "my.rules:choose"])
def test_selectors_keep_their_name(selector: str) -> None:
    parsed = parse(SinkOptions, {**SINK, "messageQueueSelector": selector}, streaming=True)
    assert parsed.needs_key is (selector in ("hash", "mod"))
    without_key = {**SINK, "messageQueueSelector": selector.replace("mod", "hash"), "shardingKey": "none"}
    assert not parse(SinkOptions, without_key, streaming=True).needs_key
    assert parse(SinkOptions, without_key, streaming=True).key_column is None
    assert parse(SinkOptions, {**SINK, "messageQueueSelector": selector}, streaming=True).selector == selector


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/omq", "/data/omq"),
        ("/data//omq/./x/..", "/data/omq"),
        ("file:/data/omq", "/data/omq"),
        ("FILE:///data/omq", "/data/omq"),
        ("file://localhost/data/omq", "/data/omq"),
        ("/data/a:b", "/data/a:b"),
    ],
)
def test_absolute_paths(text: str, expected: str) -> None:
    assert parse_path(text, "path") == expected


def test_relative_paths_are_made_absolute_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    monkeypatch.chdir(tmp_path)
    here = os.getcwd()
    assert parse(SourceOptions, without(STREAM, "path"), streaming=True).endpoint.path == os.path.join(here, "orderedmq-data")
    assert parse(SinkOptions, {"topic": "t"}, streaming=True).endpoint.path == os.path.join(here, "orderedmq-data")
    assert parse_path("omq", "path") == parse_path("file:omq", "path") == os.path.join(here, "omq")


def test_a_relative_path_in_a_folder_of_a_connect_session_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    session = os.path.join(tmp_path, "b5cb0264")
    os.mkdir(session)
    monkeypatch.chdir(session)
    assert parse_path("data/omq", "path") == os.path.join(session, "data/omq")
    monkeypatch.setenv("SPARK_JOB_ARTIFACT_UUID", "b5cb0264")
    for options in ({**BATCH, "path": "data/omq"}, without(BATCH, "path")):
        with pytest.raises(OptionError, match=r"option path: .*relative.*absolute path on the server, for example /data/omq"):
            parse(SourceOptions, options, streaming=False)
    assert parse(SourceOptions, BATCH, streaming=False).endpoint.path == "/data/omq"
    monkeypatch.chdir(tmp_path)
    assert parse_path("data/omq", "path") == os.path.join(tmp_path, "data/omq")


def test_a_working_directory_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", gone)
    with pytest.raises(OptionError, match=r"option path.*absolute") as caught:
        parse(SinkOptions, {"topic": "t"}, streaming=True)
    assert caught.value.sub == "INVALID"
    assert parse(SinkOptions, SINK, streaming=True).endpoint.path == "/data/omq"


@given(st.integers(0, 10**12 - 1), st.sampled_from([("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)]), st.booleans())
def test_durations_round_trip(number: int, unit: tuple[str, int], upper: bool) -> None:
    name, millis = unit
    assert parse_duration(f"{number}{name.upper() if upper else name}", "lockTimeout") == number * millis / 1000


def test_a_bare_zero_is_a_duration() -> None:
    assert parse(SourceOptions, {**STREAM, "lockTimeout": "0"}, streaming=True).lock_timeout == 0.0


@given(st.integers(1, 2**33), st.sampled_from([("", 0), ("k", 10), ("m", 20), ("g", 30)]), st.booleans())
def test_sizes_round_trip(number: int, unit: tuple[str, int], upper: bool) -> None:
    name, shift = unit
    text = f"{number}{name.upper() if upper else name}"
    if number << shift < 2**63:
        assert parse_size(text, "maxBytesPerTrigger") == number << shift
    else:
        with pytest.raises(OptionError, match="maxBytesPerTrigger"):
            parse_size(text, "maxBytesPerTrigger")


@given(st.datetimes(datetime(1970, 1, 3), datetime(9999, 12, 30)), st.integers(-14 * 60, 14 * 60))
def test_times_round_trip(when: datetime, offset: int) -> None:
    micros = (when - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    zone = timezone(timedelta(minutes=offset))
    assert parse_timestamp(when.isoformat(), "startingTimestamp") == micros
    assert parse_timestamp(when.replace(tzinfo=UTC).astimezone(zone).isoformat(), "startingTimestamp") == micros


@given(st.integers(0, 8 * 10**12))
def test_ms_since_1970_round_trip(ms: int) -> None:
    if len(str(ms)) != 8:  # eight digits may be a date, which is refused
        assert parse_timestamp(str(ms), "startingTimestamp") == ms * 1000
    assert integer(0)(str(ms), "txnVersion") == ms


def test_eight_digits_that_are_no_date_are_ms() -> None:
    assert parse_timestamp("86400000", "startingTimestamp") == 86_400_000_000


def assert_value_or_one_line(parse: Callable[[], object]) -> None:
    message = ""
    try:
        parse()
    except OrderedMQError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1


@given(st.text())
def test_any_text_is_a_value_or_one_line(text: str) -> None:
    for parser in (parse_bool, parse_duration, parse_size, parse_timestamp, parse_path, integer(0)):
        assert_value_or_one_line(partial(parser, text, "x"))
    allocations = (
        configured(text),
        shared("MACHINE_ROOM", machineRooms=text),
        shared("MACHINE_ROOM_NEARBY", machineRoom=text),
        shared(text),
    )
    for options in ({**STREAM, "topic": text}, starting(text), {**STREAM, text or "x": "1"}, *allocations):
        assert_value_or_one_line(partial(parse, SourceOptions, options, streaming=True))
    for options in ({**SINK, "orderBy": text}, {**SINK, "messageQueueSelector": text}):
        assert_value_or_one_line(partial(parse, SinkOptions, options, streaming=True))


@pytest.mark.parametrize("kind", ["source", "sink"])
def test_the_table_shows_every_option_once(kind: str) -> None:
    options = (*OPTIONS["broker"], *OPTIONS[kind])
    assert len({option.name.lower() for option in options}) == len(options)
    for option in options:
        assert option.shown
        assert option.meaning
        assert "\n" not in option.shown + option.meaning
    assert ("pullBatchSize", "16384") in [(option.name, option.shown) for option in OPTIONS["source"]]
    assert ("topicQueueNums", "none") in [(option.name, option.shown) for option in OPTIONS["sink"]]


# -- a cluster -----------------------------------------------------------------------------------------------------------------


def test_a_cluster_is_named_by_its_nameservers_with_defaults_of_its_own() -> None:
    reader = parse(SourceOptions, {**CLUSTER, "namesrvAddr": " a:1 ;b:2; a:1"}, streaming=True)
    assert reader.endpoint == Endpoint(None, "a:1;b:2")
    assert (reader.lock_timeout, parse(SourceOptions, STREAM, streaming=True).lock_timeout) == (75.0, 10.0)
    assert parse(SourceOptions, {**CLUSTER, "lockTimeout": "2s"}, streaming=True).lock_timeout == 2.0
    writer = parse(SinkOptions, SINK_CLUSTER, streaming=True)
    assert (writer.endpoint.namesrv_addr, writer.on_key_conflict, writer.compression) == ("h:9876", "warn", None)
    assert writer.sink_group is None
    assert parse(SinkOptions, {**SINK_CLUSTER, "sinkGroup": "billing-out"}, streaming=True).sink_group == "billing-out"
    assert writer.trace_topic is None
    traced = {**SINK_CLUSTER, "enableMsgTrace": "true"}
    assert parse(SinkOptions, traced, streaming=True).trace_topic == "RMQ_SYS_TRACE_TOPIC"
    assert parse(SinkOptions, {**traced, "customizedTraceTopic": "traces"}, streaming=True).trace_topic == "traces"
    assert parse(SinkOptions, {**SINK_CLUSTER, "onKeyConflict": "ignore"}, streaming=True).on_key_conflict == "ignore"
    assert (reader.endpoint.capabilities.atomic_publish, Endpoint("/data/omq").capabilities.atomic_publish) == (False, True)


def test_how_a_cluster_is_pulled_from() -> None:
    assert parse(SourceOptions, CLUSTER, streaming=True).pull_settings == PullSettings("billing", 65_536, 100 * 1024 * 1024)
    given = {**CLUSTER, "pullThresholdForQueue": "1000", "pullThresholdSizeForQueue": "5m"}
    assert parse(SourceOptions, given, streaming=True).pull_settings == PullSettings("billing", 1000, 5 * 1024 * 1024)
    verified = parse(SourceOptions, {**CLUSTER, "verifyBodyCrc": "True"}, streaming=True).pull_settings
    assert verified == PullSettings("billing", verify_body_crc=True)


def test_a_clusters_brokers_have_any_name_and_rooms() -> None:
    offsets = '{"orders": {"broker-a": {"0": 5}}}'
    assert parse(SourceOptions, {**CLUSTER, "startingOffsets": offsets}, streaming=True).starting.offsets == {
        MessageQueue("orders", "broker-a", 0): 5
    }
    rooms = {"assignment": "shared", "allocateMessageQueueStrategy": "MACHINE_ROOM", "machineRooms": "a,b"}
    assert parse(SourceOptions, {**CLUSTER, **rooms}, streaming=True).allocation.rooms == ("a", "b")


def test_a_writer_to_machine_rooms_names_them() -> None:
    rooms = {"messageQueueSelector": "machineroom", "machineRooms": "b, a"}
    parsed = parse(SinkOptions, {**SINK_CLUSTER, **rooms}, streaming=True)
    assert (parsed.selector, parsed.machine_rooms) == ("machineRoom", ("b", "a"))


def test_an_accounts_keys_are_in_no_repr_and_travel_in_a_pickle() -> None:
    account = {"accessKey": "me", "secretKey": SECRET, "securityToken": SECRET}
    encrypted = {"useTLS": "true", "tlsCertPath": "/c", "tlsKeyPath": "/k", "tlsKeyPassword": SECRET, "tlsVerify": "false"}
    parsed = parse(SourceOptions, {**CLUSTER, **account, **encrypted}, streaming=True)
    assert SECRET not in repr(parsed)
    assert SECRET not in str(parsed.endpoint)
    again = pickle.loads(pickle.dumps(parsed.endpoint))
    assert again == parsed.endpoint
    assert (again.credentials.secret_key, again.tls.key_password, again.tls.verify) == (SECRET, SECRET, False)


def test_a_namespace_is_part_of_the_address() -> None:
    endpoint = parse(SourceOptions, {**CLUSTER, "namespace": "acme", "namespaceV2": "v2"}, streaming=True).endpoint
    assert (endpoint.namespace, endpoint.namespace_v2) == ("acme", "v2")


@pytest.mark.parametrize("name", ["instanceName", "unitName", "vipChannelEnabled"])
def test_settings_of_the_java_client_without_effect_are_taken(name: str) -> None:
    assert parse(SourceOptions, {**CLUSTER, name: "x"}, streaming=True) == parse(SourceOptions, CLUSTER, streaming=True)
    assert parse(SinkOptions, {**SINK_CLUSTER, name: "x"}, streaming=True) == parse(SinkOptions, SINK_CLUSTER, streaming=True)
