"""Options: every refusal has its condition and one line that names the option, and every valid value is converted to its type.

The module is long because each option has rows of refused values.
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
from orderedmq.options.parse import parse
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
    """Options that are refused with a condition. ``streaming``: whether they are for a stream; None: not known yet."""

    options: Mapping[str, Any]
    condition: str
    streaming: bool | None = True


def without(options: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in names}


def starting(text: str) -> dict[str, str]:
    return {**STREAM, "startingOffsets": text}


def shared(strategy: str, **more: str) -> dict[str, str]:
    return {**STREAM, "assignment": "shared", "allocateMessageQueueStrategy": strategy, **more}


BAD_SOURCE = [
    # Names.
    Bad({**STREAM, "consumergruop": "b"}, "UNKNOWN"),
    Bad({**STREAM, "starting_offsets": "earliest"}, "UNKNOWN"),
    Bad({**STREAM, "xyzzy": SECRET}, "UNKNOWN"),
    Bad({**STREAM, "x\ny": "1"}, "UNKNOWN"),
    Bad({**STREAM, "shardingKey": "id"}, "UNKNOWN"),
    Bad({**STREAM, "checkpointLocation": "c"}, "UNKNOWN"),
    Bad({**STREAM, "PATH": "/b"}, "CONFLICT"),
    Bad({**STREAM, "pullBatchSize": 5}, "INVALID"),
    # Names that are refused with a specific reason.
    Bad({**STREAM, "minpartitions": "9"}, "UNSUPPORTED"),
    Bad({**STREAM, "groupIdPrefix": "x"}, "UNSUPPORTED"),
    Bad({**STREAM, "subscribe": "x"}, "UNSUPPORTED"),
    Bad({**STREAM, "enablemsgtrace": "true"}, "UNSUPPORTED"),
    Bad({**STREAM, "subscribepattern": "x"}, "UNSUPPORTED"),
    Bad({**STREAM, "assign": "{}"}, "UNSUPPORTED"),
    Bad({**STREAM, "kafka.bootstrap.servers": "h"}, "UNSUPPORTED"),
    Bad({**STREAM, "Kafka.sasl.jaas.config": SECRET}, "UNSUPPORTED"),
    Bad({**STREAM, "paths": "[]"}, "UNSUPPORTED"),
    Bad({**STREAM, "filtersql": "a > 1"}, "UNSUPPORTED"),
    Bad({**CLUSTER, "filterSql": "a > 1", "tags": "a"}, "CONFLICT"),
    Bad({**CLUSTER, "pullThresholdForQueue": "0"}, "INVALID"),
    Bad({**CLUSTER, "filterSql": " "}, "INVALID"),
    Bad({**STREAM, "subExpression": "a"}, "UNSUPPORTED"),
    *(
        Bad({**STREAM, "tags": text}, "INVALID")
        for text in ("", "a | b", "a ||", "|| a", "a || || b", "a || *", "a ||| b", "a,b", "a || b,c", "a*", "*a || b")
    ),
    Bad({**CLUSTER, "accesskey": "me"}, "MISSING"),
    Bad({**CLUSTER, "securityToken": SECRET}, "MISSING"),
    Bad({**CLUSTER, "tlsTrustCertPath": "ca.pem"}, "CONFLICT"),
    *(Bad({**CLUSTER, "namespace": text}, "INVALID") for text in ("", "acme%", "a b", "a" * 65)),
    Bad({**CLUSTER, "useTLS": "true", "tlsCertPath": "c"}, "MISSING"),
    Bad({**CLUSTER, "namesrvAddr": "h"}, "INVALID"),
    Bad({**CLUSTER, "namesrvAddr": "https://h:9876"}, "INVALID"),
    Bad({**CLUSTER, "namesrvAddr": " ; "}, "INVALID"),
    # The place of the broker.
    Bad({**STREAM, "namesrvaddr": "h:9876"}, "CONFLICT"),
    Bad({**STREAM, "path": f"s3://me:{SECRET}@b/x"}, "UNSUPPORTED"),
    Bad({**STREAM, "path": "HDFS:/x"}, "UNSUPPORTED"),
    *(Bad({**STREAM, "path": text}, "INVALID") for text in ("host:9876", "10.0.0.1:9876;h2:9876")),
    Bad({**STREAM, "path": "file://nas/x"}, "INVALID"),
    Bad({**STREAM, "path": " "}, "INVALID"),
    Bad({**STREAM, "path": "/a\x00b"}, "INVALID"),
    Bad({**STREAM, "path": "~/omq"}, "INVALID"),
    # Topics.
    Bad(without(STREAM, "topic"), "MISSING"),
    Bad({**STREAM, "topicPattern": "a"}, "CONFLICT"),
    Bad({**STREAM, "topic": "or ders"}, "TOPIC.BAD_NAME"),
    Bad({**STREAM, "topic": "a," + "x" * 128}, "TOPIC.BAD_NAME"),
    Bad({**STREAM, "topic": "a,,b"}, "INVALID"),
    Bad({**STREAM, "topic": "a, b,a"}, "INVALID"),
    Bad({**without(STREAM, "topic"), "topicPattern": "a("}, "INVALID"),
    Bad({**without(STREAM, "topic"), "topicPattern": "a{99999999999}"}, "INVALID"),
    # Groups.
    Bad(BATCH, "MISSING"),
    Bad({**STREAM, "consumerGroup": "x" * 123, "includeLockToken": "true"}, "GROUP.BAD_NAME"),
    Bad({**STREAM, "consumerGroup": "a b"}, "GROUP.BAD_NAME"),
    Bad({**STREAM, "messageModel": "broadcasting"}, "CONFLICT"),
    Bad({**STREAM, "messageModel": "both"}, "INVALID"),
    Bad({**STREAM, "assignment": "mine"}, "INVALID"),
    # Queries that share the queues of a group.
    Bad({**ALONE, "assignment": "Shared"}, "CONFLICT"),
    Bad({**STREAM, "assignment": "shared"}, "UNSUPPORTED", False),
    Bad({**BATCH, "assignment": "shared"}, "MISSING"),
    Bad({**STREAM, "allocateMessageQueueStrategy": "AVG"}, "CONFLICT"),
    *(Bad(shared(strategy), "INVALID") for strategy in ("CONFIG", "MACHINE_ROOM", "MACHINE_ROOM_NEARBY", "MINE")),
    # Durations, numbers, sizes, booleans.
    Bad({**STREAM, "lockTimeout": "10"}, "INVALID"),
    Bad({**STREAM, "lockTimeout": "1.5s"}, "INVALID"),
    Bad({**STREAM, "lockTimeout": "-1s"}, "INVALID"),
    Bad({**STREAM, "failOnDataLoss": "yes"}, "INVALID"),
    Bad({**STREAM, "pullBatchSize": "0"}, "INVALID"),
    Bad({**STREAM, "pullBatchSize": "1048577"}, "INVALID"),
    Bad({**STREAM, "maxOffsetsPerTrigger": "1 000"}, "INVALID"),
    Bad({**STREAM, "maxOffsetsPerTrigger": "٣"}, "INVALID"),
    Bad({**STREAM, "maxOffsetsPerTrigger": "9" * 19}, "INVALID"),
    Bad({**STREAM, "minOffsetsPerTrigger": "9" * 9999}, "INVALID"),
    Bad({**STREAM, "maxBytesPerTrigger": "64 MB"}, "INVALID"),
    Bad({**STREAM, "maxBytesPerTrigger": "0k"}, "INVALID"),
    # Admission.
    Bad({**STREAM, "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "CONFLICT"),
    Bad({**STREAM, "maxTriggerDelay": "1m"}, "MISSING"),
    Bad({**BATCH, "maxOffsetsPerTrigger": "1"}, "UNSUPPORTED", False),
    Bad({**BATCH, "minOffsetsPerTrigger": "1"}, "UNSUPPORTED", False),
    Bad({**BATCH, "maxTriggerDelay": "1m"}, "UNSUPPORTED", False),
    Bad({**BATCH, "maxBytesPerTrigger": "1m"}, "UNSUPPORTED", False),
    # Parked messages, and the name of the query.
    Bad({**STREAM, "parkingLot": "true"}, "UNSUPPORTED", False),
    Bad({**ALONE, "parkingLot": "true"}, "CONFLICT"),
    Bad({**STREAM, "parkingLotMaxMessages": "5"}, "CONFLICT"),
    Bad({**STREAM, "parkingLot": "true", "parkingLotMaxMessages": "0"}, "INVALID"),
    *(Bad({**STREAM, "queryName": text}, "INVALID") for text in (" ", "two\nlines", "x" * 128)),
    # Start and end of a read.
    Bad(starting("oldest"), "INVALID"),
    Bad({**starting("latest"), "startingTimestamp": "0"}, "CONFLICT"),
    Bad({**starting("latest"), "consumeFromWhere": "last"}, "CONFLICT"),
    Bad({**ALONE, "startingOffsets": "committed"}, "CONFLICT"),
    Bad({**BATCH, "startingOffsets": "committed"}, "MISSING", False),
    Bad({**BATCH, "startingOffsets": "latest"}, "CONFLICT", False),
    Bad({**BATCH, "consumeFromWhere": "last"}, "CONFLICT", False),
    Bad({**STREAM, "endingOffsets": "latest"}, "UNSUPPORTED"),
    Bad({**STREAM, "endingTimestamp": "0"}, "UNSUPPORTED"),
    Bad({**BATCH, "endingOffsets": "earliest"}, "INVALID", False),
    Bad({**BATCH, "endingOffsets": "latest", "endingTimestamp": "0"}, "CONFLICT", False),
    Bad({**BATCH, "startingTimestamp": "2", "endingTimestamp": "1"}, "CONFLICT", False),
    Bad({**BATCH, "consumeFromWhere": "timestamp", "consumeTimestamp": "2", "endingTimestamp": "1"}, "CONFLICT", False),
    Bad(
        {
            **BATCH,
            "startingOffsets": '{"orders": {"embedded": {"0": 7}}}',
            "endingOffsets": '{"orders": {"embedded": {"0": 6}}}',
        },
        "CONFLICT",
        False,
    ),
    Bad({**STREAM, "startingTimestamp": "today"}, "INVALID"),
    Bad({**STREAM, "startingTimestamp": "1969-12-31"}, "INVALID"),
    Bad({**STREAM, "startingTimestamp": "-5"}, "INVALID"),
    Bad({**STREAM, "startingTimestamp": "20260301120000"}, "INVALID"),
    Bad({**STREAM, "startingTimestamp": "20260301"}, "INVALID"),
    Bad({**STREAM, "consumeFromWhere": "max"}, "INVALID"),
    Bad({**STREAM, "consumeFromWhere": "timestamp"}, "MISSING"),
    Bad({**STREAM, "consumeTimestamp": "0"}, "CONFLICT"),
    # Offsets in JSON.
    Bad(starting('{"orders": '), "INVALID"),
    Bad(starting('{"x": {"embedded": {"0": 1}}}'), "CONFLICT"),
    Bad(starting('{"orders": {"broker-a": {"0": 1}}}'), "INVALID"),
    Bad({**starting('{"orders": {"embedded": {"0": 1}}}'), "topic": "orders,b"}, "INVALID"),
    Bad({**without(starting('{"orders2": {"embedded": {"0": 1}}}'), "topic"), "topicPattern": "orders"}, "CONFLICT"),
]

BAD_SINK = [
    Bad({**SINK, "shardKey": "id"}, "UNKNOWN"),
    Bad({**SINK, "consumergroup": "b"}, "UNKNOWN"),
    Bad({**SINK, "topicPattern": "b"}, "UNKNOWN"),
    Bad({**SINK, "includeProperties": "true"}, "UNKNOWN"),
    Bad({**SINK_CLUSTER, "onKeyConflict": "error"}, "UNSUPPORTED"),
    Bad({**SINK, "sinkGroup": "billing-out"}, "CONFLICT"),
    Bad({**SINK_CLUSTER, "compression": "lz4"}, "CONFLICT"),
    Bad({**SINK, "tags": "a"}, "UNSUPPORTED"),
    Bad({**SINK, "kafka.bootstrap.servers": "h"}, "UNSUPPORTED"),
    Bad({**SINK, "numPartitions": "8"}, "UNSUPPORTED"),
    Bad({**without(SINK, "path"), "namesrvAddr": "h"}, "INVALID"),
    Bad({**SINK, "namesrvAddr": "h"}, "CONFLICT"),
    Bad({**SINK, "path": "gs://b"}, "UNSUPPORTED"),
    Bad({**SINK, "topic": "a,b"}, "INVALID"),
    Bad({**SINK, "topic": "%DLQ%g"}, "TOPIC.RESERVED"),
    Bad({**SINK, "topic": ""}, "TOPIC.BAD_NAME"),
    Bad({**SINK, "shardingKey": ""}, "INVALID"),
    Bad({**SINK, "shardingKey": "none", "shardingKeyType": "long"}, "CONFLICT"),
    Bad({**SINK, "shardingKey": "none", "messageQueueSelector": "mod"}, "CONFLICT"),
    Bad({**SINK, "shardingKeyType": "uuid"}, "INVALID"),
    Bad({**SINK, "messageQueueSelector": "mod", "shardingKeyType": "text"}, "CONFLICT"),
    Bad({**SINK, "messageQueueSelector": "first"}, "INVALID"),
    Bad({**SINK, "messageQueueSelector": "my.rules:"}, "INVALID"),
    Bad({**SINK, "messageQueueSelector": "a.class:f"}, "INVALID"),
    Bad({**SINK_CLUSTER, "messageQueueSelector": "machineRoom"}, "INVALID"),
    Bad({**SINK, "topicQueueNums": "0"}, "INVALID"),
    Bad({**SINK, "topicQueueNums": str(MAX_QUEUES + 1)}, "INVALID"),
    Bad({**SINK, "orderBy": "id down"}, "INVALID"),
    Bad({**SINK, "orderBy": ""}, "INVALID"),
    Bad({**SINK, "orderBy": "a,,b"}, "INVALID"),
    Bad({**SINK, "orderBy": "a, a desc"}, "INVALID"),
    Bad({**SINK, "orderBufferSize": "lots"}, "INVALID"),
    Bad({**SINK, "orderBufferSize": "2049m"}, "INVALID"),
    Bad({**SINK_CLUSTER, "enableMsgTrace": "true"}, "UNSUPPORTED"),
    Bad({**SINK, "onKeyConflict": "fail"}, "INVALID"),
    Bad({**SINK, "onReplayDiffers": "warn"}, "INVALID"),
    Bad({**SINK, "compression": "zstd"}, "INVALID"),
    Bad({**SINK, "txnAppId": "a"}, "MISSING", False),
    Bad({**SINK, "txnVersion": "1"}, "MISSING", None),
    Bad({**SINK, "txnAppId": "a", "txnVersion": "-1"}, "INVALID", False),
    Bad({**SINK, "txnAppId": "a", "txnVersion": str(2**63 - 1)}, "INVALID", False),
    Bad({**SINK, "txnAppId": "", "txnVersion": "1"}, "INVALID", False),
    Bad({**SINK, "txnAppId": "a", "txnVersion": "1"}, "UNSUPPORTED"),
]


def check_refusal(error: OrderedMQError, condition: str) -> None:
    assert error.condition == f"ORDEREDMQ_{condition if '.' in condition else f'OPTION.{condition}'}", error
    assert len(str(error).splitlines()) == 1
    assert SECRET not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("role", "bad"), [*((SourceOptions, bad) for bad in BAD_SOURCE), *((SinkOptions, bad) for bad in BAD_SINK)]
)
def test_a_refused_option_has_its_condition_and_is_named(role: type[BrokerOptions], bad: Bad) -> None:
    with pytest.raises(OrderedMQError) as caught:
        parse(role, bad.options, streaming=bad.streaming)
    check_refusal(caught.value, bad.condition)
    if bad.condition in ("INVALID", "CONFLICT", "UNKNOWN", "UNSUPPORTED"):
        usual = {*STREAM.items(), *CLUSTER.items(), *SINK_CLUSTER.items()}
        names = [repr(name)[1:-1].lower() for name, value in bad.options.items() if (name, value) not in usual]
        assert any(name in caught.value.message.lower() for name in names)


@pytest.mark.parametrize(
    ("role", "name", "instead"),
    [
        (SourceOptions, "consumergruop", "Did you mean consumerGroup?"),
        (SourceOptions, "starting_offsets", "Did you mean startingOffsets?"),
        (SourceOptions, "shardingKey", "of the writer"),
        (SourceOptions, "groupIdPrefix", "Use consumerGroup"),
        (SourceOptions, "subscribe", "Use topic"),
        (SourceOptions, "subExpression", "Use tags"),
        (SinkOptions, "consumergroup", "of the reader"),
        (SinkOptions, "numPartitions", "topicQueueNums"),
        (SinkOptions, "tags", "column tags"),
    ],
)
def test_a_name_of_another_product_or_role_is_refused_with_the_name_to_use(
    role: type[BrokerOptions], name: str, instead: str
) -> None:
    with pytest.raises(OptionError) as caught:
        parse(role, {**BATCH, name: "1"})
    assert instead in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accessKey", "a"),
        ("secretKey", SECRET),
        ("securityToken", SECRET),
        ("useTLS", "true"),
        ("namespace", "acme"),
        ("verifyBodyCrc", "true"),
        ("pullThresholdForQueue", "9"),
        ("pullThresholdSizeForQueue", "9"),
    ],
)
def test_an_option_of_a_cluster_is_refused_with_a_store(name: str, value: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(SourceOptions, {**STREAM, name: value}, streaming=True)
    check_refusal(caught.value, "CONFLICT")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "1",
        "{}",
        "NaN",
        "[" * 100_000,
        '{"a": 1' + "0" * 5000 + "}",
        '{"a b": {"e": {"0": 1}}}',
        '{"a": null}',
        '{"a": {}}',
        '{"a": {"e": [1]}}',
        '{"a": {"e": {}}}',
        '{"a": {"e": {"x": 1}}}',
        '{"a": {"e": {"-1": 1}}}',
        '{"a": {"e": {"01": 1}}}',
        '{"a": {"e": {"65536": 1}}}',
        '{"a": {"e": {"0": -3}}}',
        '{"a": {"e": {"0": 1.0}}}',
        '{"a": {"e": {"0": "1"}}}',
        '{"a": {"e": {"0": true}}}',
        '{"a": {"e": {"0": null}}}',
        '{"a": {"e": {"0": {"x": 1}}}}',
        '{"a": {"e": {"0": 9223372036854775808}}}',
        '{"a": {"e": {"0": 1}}, "a": {"e": {"0": 2}}}',
        '{"a": {"e": {"0": 1}, "e": {"1": 1}}}',
        '{"a": {"e": {"0": 1, "0": 1}}}',
    ],
)
def test_offsets_in_malformed_json_are_refused(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_offsets_json(text, "startingOffsets")
    check_refusal(caught.value, "INVALID")


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
def test_proposes_no_name_that_differs_too_much(role: type[BrokerOptions], name: str) -> None:
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


def test_refuses_a_misspelt_option_of_a_table() -> None:
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
    ("options", "strategy"),
    [
        ({**STREAM, "assignment": "SHARED"}, "AVG"),
        (shared("avg_by_circle"), "AVG_BY_CIRCLE"),
        (shared("Consistent_Hash"), "CONSISTENT_HASH"),
    ],
)
@pytest.mark.parametrize("streaming", [True, None])
def test_how_queues_are_shared_arrives(options: Mapping[str, str], strategy: str, streaming: bool | None) -> None:
    parsed = parse(SourceOptions, options, streaming=streaming)
    assert (parsed.assignment, parsed.allocate_message_queue_strategy) == ("shared", strategy)
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
        topic_queue_nums=8,
        order_by=(SortColumn("created_at"), SortColumn("a, b", True), SortColumn("c d"), SortColumn("e")),
        order_buffer_size=1024**3,
        on_key_conflict="warn",
        on_replay_differs="skip",
        compression="lz4",
        sink_group=None,
        txn_app_id="billing-job",
        txn_version=0,
    )
    assert parse(SinkOptions, CaseInsensitiveDict(options), streaming=False) == parsed
    assert pickle.loads(pickle.dumps(parsed)) == parsed


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
    for options in ({**STREAM, "topic": text}, starting(text), {**STREAM, text or "x": "1"}, shared(text)):
        assert_value_or_one_line(partial(parse, SourceOptions, options, streaming=True))
    for options in ({**SINK, "orderBy": text}, {**SINK, "messageQueueSelector": text}):
        assert_value_or_one_line(partial(parse, SinkOptions, options, streaming=True))


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
    assert parse(SinkOptions, {**SINK_CLUSTER, "onKeyConflict": "ignore"}, streaming=True).on_key_conflict == "ignore"
    assert (reader.endpoint.capabilities.atomic_publish, Endpoint("/data/omq").capabilities.atomic_publish) == (False, True)


def test_how_a_cluster_is_pulled_from() -> None:
    assert parse(SourceOptions, CLUSTER, streaming=True).pull_settings == PullSettings("billing", 65_536, 100 * 1024 * 1024)
    given = {**CLUSTER, "pullThresholdForQueue": "1000", "pullThresholdSizeForQueue": "5m"}
    assert parse(SourceOptions, given, streaming=True).pull_settings == PullSettings("billing", 1000, 5 * 1024 * 1024)
    verified = parse(SourceOptions, {**CLUSTER, "verifyBodyCrc": "True"}, streaming=True).pull_settings
    assert verified == PullSettings("billing", verify_body_crc=True)


def test_a_clusters_brokers_have_any_name() -> None:
    offsets = '{"orders": {"broker-a": {"0": 5}}}'
    assert parse(SourceOptions, {**CLUSTER, "startingOffsets": offsets}, streaming=True).starting.offsets == {
        MessageQueue("orders", "broker-a", 0): 5
    }


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
