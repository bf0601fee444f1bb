"""Frames of the remoting protocol: a stream gives the same commands however it is cut. Damage gives a ProtocolError in bounded
time and memory.

The flag says whether a frame is an answer. Each frame has its own type, because 5.x answers binary requests with JSON.
"""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orderedmq.errors import ProtocolError
from orderedmq.rocketmq.wire import frame
from orderedmq.rocketmq.wire.codes import VERSION
from orderedmq.rocketmq.wire.frame import MAX_SENT_FRAME, FrameDecoder, RemotingCommand, encode, encode_parts
from tests.examples import examples
from tests.unit.rocketmq_peer import feed

INT32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
COMMANDS = st.builds(
    RemotingCommand,
    code=INT32,
    opaque=INT32,
    flag=INT32,
    remark=st.none() | TEXT,
    ext=st.dictionaries(TEXT, TEXT, max_size=4),
    body=st.binary(max_size=300),
    version=INT32,
)
#: An answer to GET_MAX_OFFSET as 4.9.8 writes it, and as 5.3.3 writes it with serializeTypeConfig=ROCKETMQ.
JSON_ANSWER = b'{"code":0,"extFields":{"offset":"42"},"flag":1,"language":"JAVA","opaque":7,"serializeTypeCurrentRPC":"JSON","version":407}'


def binary(code: int, opaque: int, flag: int, remark: str, ext: dict[str, str], version: int = 479, language: int = 0) -> bytes:
    fields = b"".join(
        struct.pack(">h", len(k.encode())) + k.encode() + struct.pack(">i", len(v.encode())) + v.encode()
        for k, v in ext.items()
    )
    text = remark.encode()
    fixed = struct.pack(">hbhii", code, language, version, opaque, flag)
    return fixed + struct.pack(">i", len(text)) + text + struct.pack(">i", len(fields)) + fields


def framed(header: bytes, body: bytes = b"", kind: int = 0) -> bytes:
    return struct.pack(">II", 4 + len(header) + len(body), kind << 24 | len(header)) + header + body


def capacity(decoder: FrameDecoder) -> int:
    """The size of the buffer in bytes."""
    return len(decoder._view)


BINARY_ANSWER = binary(0, 7, 1, "FOUND", {"offset": "42", "ü": ""})
STREAM = framed(JSON_ANSWER) + framed(BINARY_ANSWER, b"bodies", 1) + framed(JSON_ANSWER, b"\0\xff" * 40)


@given(st.lists(COMMANDS, max_size=5), st.lists(st.integers(1, 200), min_size=1, max_size=20), st.integers(64, 400))
def test_a_stream_cut_anywhere_gives_the_same_commands(commands: list[RemotingCommand], cuts: list[int], size: int) -> None:
    stream = b"".join(encode(command) for command in commands)
    decoder, decoded, at, i = FrameDecoder(buffer_size=size), [], 0, 0
    while at < len(stream):
        decoded += feed(decoder, stream[at : at + cuts[i % len(cuts)]])
        at += cuts[i % len(cuts)]
        i += 1
    assert decoded == commands
    assert decoder.at_boundary


def test_truncated_at_every_length() -> None:
    ends = [end for end in range(len(STREAM) + 1) if feed(FrameDecoder(), STREAM[:end]) and _boundary(STREAM[:end])]
    assert len(ends) == 3
    for end in range(len(STREAM)):
        decoder = FrameDecoder()
        commands = feed(decoder, STREAM[:end])
        assert len(commands) == sum(1 for whole in ends if whole <= end)
        assert decoder.at_boundary == (end == 0 or end in ends)


def _boundary(data: bytes) -> bool:
    decoder = FrameDecoder()
    feed(decoder, data)
    return decoder.at_boundary


def test_trap_18_the_type_of_a_header_is_each_frames_own() -> None:
    first, second, _ = feed(FrameDecoder(), STREAM)
    assert (first.code, first.opaque, first.flag, first.ext, first.version) == (0, 7, 1, {"offset": "42"}, 407)
    assert (second.code, second.opaque, second.flag, second.ext, second.version) == (0, 7, 1, {"offset": "42", "ü": ""}, 479)
    assert second.remark == "FOUND"


def test_trap_1_flag_tells_an_answer_from_a_push() -> None:
    assert RemotingCommand(0, 1, 1).is_response
    push = RemotingCommand(40, 1, 2)
    assert not push.is_response
    assert push.is_oneway
    assert RemotingCommand(0, 1, 3).is_response


def test_a_request_is_framed_with_its_header_and_body() -> None:
    frame = encode(RemotingCommand(30, 5, ext={"topic": "T\x01ü"}, body=b"xy"))
    length, word = struct.unpack(">II", frame[:8])
    assert length == len(frame) - 4
    assert word >> 24 == 0
    header = json.loads(frame[8 : 8 + word])
    assert header == {
        "code": 30,
        "language": "PYTHON",
        "version": VERSION,
        "opaque": 5,
        "flag": 0,
        "extFields": {"topic": "T\x01ü"},
    }
    assert frame[8 + word :] == b"xy"


def test_a_body_is_not_copied_to_be_sent() -> None:
    body = bytearray(b"x" * 1000)
    assert encode_parts(RemotingCommand(310, body=body))[1] is body


def test_defaults_of_a_header() -> None:
    (command,) = feed(FrameDecoder(), framed(b'{"code":3,"opaque":9,"extFields":null,"remark":null}'))
    assert command == RemotingCommand(3, 9, 0, None, {}, b"", 0)


def test_fields_that_are_no_text_become_it() -> None:
    (command,) = feed(
        FrameDecoder(), framed(b'{"code":0,"opaque":1,"language":"KLINGON","extFields":{"a":1,"b":true,"c":null,"d":"e"}}')
    )
    assert command.ext == {"a": "1", "b": "true", "d": "e"}
    (command,) = feed(FrameDecoder(), framed(binary(0, 1, 1, "", {}, language=99), kind=1))
    assert command.remark is None


@given(
    st.dictionaries(
        st.sampled_from(["msgId", "queueOffset", '"msgId":"', "a"]), TEXT | st.sampled_from(['"msgId":"', "0A,1F", '\\"', "é"])
    ),
    TEXT,
    st.booleans(),
)
def test_ids_that_are_not_decoded_are_the_same(ext: dict[str, str], remark: str, escaped: bool) -> None:
    header = {"code": 0, "remark": remark, "extFields": ext, "opaque": 7, "flag": 1}
    given = framed(json.dumps(header, separators=(",", ":"), ensure_ascii=escaped).encode())
    [plain] = feed(FrameDecoder(), given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "_LONG_HEADER", 0)
        [command] = feed(FrameDecoder(), given)
    assert command == plain


def test_the_ids_in_the_answer_to_a_batch() -> None:
    ids = ",".join(f"7F00000100002A9F{number:016X}" for number in range(1000))
    header = {"code": 0, "extFields": {"queueId": "1", "msgId": ids, "queueOffset": "42"}, "opaque": 7, "flag": 1}
    [command] = feed(FrameDecoder(), framed(json.dumps(header, separators=(",", ":")).encode()))
    assert command.ext == {"queueId": "1", "msgId": ids, "queueOffset": "42"}
    for odd in (ids + '\\"', ids + "é"):
        header["extFields"] = {"msgId": odd}
        [command] = feed(FrameDecoder(), framed(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()))
        assert command.ext == {"msgId": odd}


BAD_HEADERS: list[Any] = [
    b"", b"x", b"[]", b"null", b"{}", b'{"code":1}', b'{"code":"1","opaque":1}', b'{"code":true,"opaque":1}', b'{"code":1.0,"opaque":1}',
    b'{"code":1,"opaque":4294967296}', b'{"code":1,"opaque":1,"flag":null}', b'{"code":1,"opaque":1,"flag":[]}',
    b'{"code":1,"opaque":1,"remark":5}', b'{"code":1,"opaque":1,"extFields":[]}', b'{"code":1,"opaque":1,"extFields":{"a":{}}}',
    b'{"code":1,"opaque":1,"extFields":{"a":1.5}}', b'\xff{"code":1,"opaque":1}', b"[" * 100_000, b'{"code":' + b"1" * 5000 + b"}",
    b'{"code":1,"opaque":1,"version":"x"}',
]  # fmt: skip


@pytest.mark.parametrize("header", BAD_HEADERS)
def test_invalid_json_headers_are_refused(header: bytes) -> None:
    refused(framed(header))


@pytest.mark.parametrize("cut", range(len(BINARY_ANSWER)))
def test_a_binary_header_that_ends_early(cut: int) -> None:
    refused(framed(BINARY_ANSWER[:cut], b"the body's bytes are no header", 1))


@pytest.mark.parametrize(
    "header",
    [
        BINARY_ANSWER + b"\0",
        struct.pack(">hbhiii", 0, 0, 0, 1, 1, -1) + bytes(4),
        struct.pack(">hbhiiii", 0, 0, 0, 1, 1, 0, -1),
        struct.pack(">hbhiiii", 0, 0, 0, 1, 1, 0, 2**31 - 1),
        struct.pack(">hbhiiiihh", 0, 0, 0, 1, 1, 0, 4, -1, 0),
        binary(0, 1, 1, "a", {}).replace(b"a", b"\xff"),
    ],
)
def test_a_binary_header_that_contradicts_itself(header: bytes) -> None:
    refused(framed(header, kind=1))


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (struct.pack(">II", 3, 0), "3 bytes"),
        (struct.pack(">I", 0), "0 bytes"),
        (struct.pack(">i", -1), "damaged"),
        (b"\x15\x03\x03\x00", "TLS"),
        (b"HTTP/1.1 400", "HTTP"),
        (struct.pack(">II", 10, 7), "header of 7 bytes does not fit in a frame of 10"),
        (struct.pack(">II", 10, 2 << 24), "type 2"),
        (struct.pack(">II", 10, 255 << 24 | 1), "type 255"),
    ],
)
def test_an_impossible_frame_is_refused_at_its_first_bytes(stream: bytes, says: str) -> None:
    assert says in refused(stream).message


def refused(stream: bytes) -> ProtocolError:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError) as caught:
        feed(decoder, stream)
    assert caught.value.family == "ORDEREDMQ_ROCKETMQ"
    assert "\n" not in str(caught.value)
    with pytest.raises(ProtocolError):
        decoder.next_command()
    return caught.value


def test_a_decoder_repeats_its_error() -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError):
        feed(decoder, framed(b"x") + framed(JSON_ANSWER))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="not JSON"):
            decoder.next_command()


def test_commands_before_damage_are_decoded() -> None:
    decoder = FrameDecoder()
    data = framed(JSON_ANSWER) + framed(b"x")
    decoder.buffer()[: len(data)] = data
    decoder.received(len(data))
    command = decoder.next_command()
    assert command is not None
    assert command.opaque == 7
    with pytest.raises(ProtocolError):
        decoder.next_command()


@given(st.lists(st.tuples(st.integers(0, len(STREAM) - 1), st.binary(max_size=4)), min_size=1, max_size=6), st.integers(1, 64))
def test_mutations_give_commands_or_a_protocol_error(changes: list[tuple[int, bytes]], step: int) -> None:
    data = bytearray(STREAM)
    for at, replacement in changes:
        data[at : at + len(replacement) + 1] = replacement
    decoder = FrameDecoder(buffer_size=64)
    try:
        for at in range(0, len(data), step):
            feed(decoder, data[at : at + step])
    except ProtocolError:
        pass
    assert capacity(decoder) <= 4 * len(data) + 256


@given(st.binary(max_size=80), st.sampled_from([0, 1]), st.binary(max_size=8))
@examples(4)
def test_any_header_gives_a_command_or_a_protocol_error(header: bytes, kind: int, body: bytes) -> None:
    try:
        (command,) = feed(FrameDecoder(), framed(header, body, kind))
    except ProtocolError:
        return
    assert command.body == body


def test_memory_grows_with_what_came_and_not_with_what_was_announced() -> None:
    tracemalloc.start()
    try:
        decoders = []
        for _ in range(20):
            decoder = FrameDecoder(buffer_size=4096)
            feed(decoder, struct.pack(">II", 150 * 1024 * 1024, 100) + b" " * 5000)
            decoders.append(decoder)
        assert tracemalloc.get_traced_memory()[1] < 2 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_a_buffer_that_a_large_answer_made_large_is_given_back() -> None:
    decoder = FrameDecoder()
    body = b"m" * (9 * 1024 * 1024)
    (command,) = feed(decoder, framed(JSON_ANSWER, body))
    assert command.body == body
    assert capacity(decoder) > len(body)
    decoder.buffer()
    assert capacity(decoder) < 1024 * 1024


def test_time_is_linear_in_small_slices_of_a_large_frame() -> None:
    frame = framed(JSON_ANSWER, bytes(8 * 1024 * 1024))
    decoder, begin = FrameDecoder(), time.thread_time()
    commands = [command for at in range(0, len(frame), 1024) for command in feed(decoder, frame[at : at + 1024])]
    assert len(commands) == 1
    assert time.thread_time() - begin < 5


def test_limits_of_what_is_sent_and_accepted() -> None:
    with pytest.raises(ProtocolError) as caught:
        encode_parts(RemotingCommand(310, body=bytes(MAX_SENT_FRAME)))
    assert caught.value.sub == "FRAME_TOO_LARGE"
    header, body = encode_parts(RemotingCommand(310))
    assert len(encode(RemotingCommand(310, body=bytes(MAX_SENT_FRAME - len(header) - len(body))))) == MAX_SENT_FRAME
    decoder = FrameDecoder(max_frame=100)
    assert len(feed(decoder, framed(b'{"code":0,"opaque":1}', bytes(75)))) == 1
    with pytest.raises(ProtocolError) as caught:
        feed(decoder, struct.pack(">I", 101))
    assert caught.value.sub == "FRAME_TOO_LARGE"


def test_a_text_that_is_no_unicode_cannot_be_sent() -> None:
    with pytest.raises(ProtocolError, match="Unicode"):
        encode(RemotingCommand(30, ext={"topic": "\ud800"}))


def test_more_bytes_than_the_buffer_has_cannot_be_received() -> None:
    decoder = FrameDecoder(buffer_size=64)
    with pytest.raises(ValueError, match="65 bytes"):
        decoder.received(65)
