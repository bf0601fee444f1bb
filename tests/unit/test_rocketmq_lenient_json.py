"""JSON as fastjson writes it, and arbitrary other text: the result is a value or a ProtocolError, in bounded time.

Some answers are never standard JSON.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.errors import ProtocolError
from orderedmq.rocketmq.wire.fastjson import field, loads, loads_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
#: The form of the answers to GET_BROKER_CLUSTER_INFO and GET_CONSUME_STATS in 4.9 to 5.5.
CLUSTER = '{"brokerAddrTable":{"a":{"brokerAddrs":{0:"127.0.0.1:10911",1:"127.0.0.1:10921"},"brokerName":"a","cluster":"C"}}}'
STATS = '{"consumeTps":0.0,"offsetTable":{{"brokerName":"a","queueId":1,"topic":"T"}:{"brokerOffset":7,"consumerOffset":3}}}'


@given(VALUES)
def test_standard_json_is_read_as_json_does(value: Any) -> None:
    assert loads(json.dumps(value)) == json.loads(json.dumps(value))
    assert loads(json.dumps(value, ensure_ascii=False, indent=1).encode()) == value


@given(VALUES)
def test_what_surrounds_a_bare_key_is_read_as_json_does(value: Any) -> None:
    assert loads('{"v":' + json.dumps(value, indent=1) + " , 7 : null }") == {"v": value, "7": None}
    assert loads("{-3:[" + json.dumps(value) + ", [ ] , { } ]}") == {"-3": [value, [], {}]}


def test_trap_2_keys_without_quotes_and_keys_that_are_objects() -> None:
    assert loads(CLUSTER)["brokerAddrTable"]["a"]["brokerAddrs"] == {"0": "127.0.0.1:10911", "1": "127.0.0.1:10921"}
    assert loads(CLUSTER.replace("{0:", '{"0":').replace(",1:", ',"1":')) == loads(CLUSTER)
    (key,) = loads(STATS)["offsetTable"]
    assert loads(key) == {"brokerName": "a", "queueId": 1, "topic": "T"}
    quoted = STATS.replace('{{"brokerName":"a","queueId":1,"topic":"T"}:', "{" + json.dumps(key) + ":")
    assert loads(quoted) == loads(STATS)


@given(st.text(alphabet='{}[]":,01\\ a'))
def test_what_looks_like_a_key_in_a_string_stays_as_it_is(topic: str) -> None:
    text = json.dumps(topic)
    queue = f'{{"queueId":1 , "topic":{text}}}'
    assert loads(f"{{{text}:{text}, 0 : [{text}],{queue} :{text}}}") == {topic: topic} | {"0": [topic], queue: topic}


@pytest.mark.parametrize(
    "text",
    ["", " ", "{", "[", '{"a"', '{"a":', '{"a":1', '{"a":1,', "[1", "[1,", "[1,]", "{1}", "{1:2,}", "{:1}", "{a:1}", "{'a':1}", "nul", "NaN",
     "-", "01", "1 2", "{} x", "[Infinity]", "{1.5:2}", "{true:1}", '"\n"', '"\\x"', '"', "{[1]:2}", "{0:NaN}", "1" * 5000, b"\xff",
     "{1:" + "1" * 5000 + "}", "{{1:2:3}", "{{a}:1}", "{{1:2 3}:4}",
     '{"a":1 2:3}', "[1,2:3]", "[{1:2}:3]"],
)  # fmt: skip
def test_invalid_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        loads(text)
    assert caught.value.condition == "ORDEREDMQ_ROCKETMQ.PROTOCOL"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [CLUSTER, STATS])
def test_every_prefix_is_refused(text: str) -> None:
    for length in range(len(text)):
        with pytest.raises(ProtocolError):
            loads(text[:length])


@given(
    st.sampled_from([CLUSTER, STATS]), st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=3)), min_size=1, max_size=4)
)
def test_mutations_give_a_value_or_a_protocol_error(text: str, changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(text.encode())
    for at, replacement in changes:
        data[at : at + 1] = replacement
    try:
        loads(data)
    except ProtocolError:
        pass


@given(st.text(alphabet='{}[]":,0-1eE.\\u tnal', max_size=60))
def test_any_text_gives_a_value_or_a_protocol_error(text: str) -> None:
    try:
        loads(text)
    except ProtocolError:
        pass


@pytest.mark.parametrize("begin", ["[", '{"a":', "{1:", "{{1:1}:", "{", "[{0:"])
def test_depth_is_bounded(begin: str) -> None:
    with pytest.raises(ProtocolError):
        loads(begin * 100_000)


def test_time_is_linear() -> None:
    begin = time.thread_time()
    loads("{" + ",".join(f"{i}:[{i},{{}}]" for i in range(20_000)) + "}")
    for broken in (
        '{0:"' + "\\" * 400_000,
        '{0:"' + '\\"' * 200_000,
        '{{"' + '\\"' * 200_000 + '"',
        "{0:" + " " * 400_000,
        "{" + "1" * 400_000,
        "{1" + " " * 400_000,
        "{" + ",{x" * 100_000,
        "{{" + '"a",' * 50_000,
        "[" + "1," * 100_000,
    ):
        with pytest.raises(ProtocolError):
            loads(broken)
    assert time.thread_time() - begin < 10


def test_an_object_and_its_fields() -> None:
    fields = loads_object('{"n":1,"t":"x","b":true,"none":null}')
    assert field(fields, "n", int) == 1
    assert field(fields, "none", str, "else") == "else"
    assert field(fields, "absent", list, []) == []
    for name, kind in (("n", str), ("b", int), ("none", str), ("absent", int)):
        with pytest.raises(ProtocolError, match=name):
            field(fields, name, kind)
    with pytest.raises(ProtocolError, match="list"):
        loads_object("[]")
