"""A pull ends, in bounded memory, with a clear error if a few bytes decompress to very many, or if a broker never ends its answers."""

from __future__ import annotations

import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ordered_source import partition_reader
from orderedmq.conditions import UnavailableCondition
from orderedmq.errors import DataLossError, RocketMQUnavailableError, aged_out, unreadable
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.messages.puller import Puller
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.lane import Lane
from orderedmq.rows.filters import Filter
from tests.stored_messages import Stored, text
from tests.unit.rocketmq_peer import Cluster, Link

QUEUE = MessageQueue("T", "a", 0)
COLUMNS = ("queue_offset", "body")
ROOT = Path(__file__).parents[3]
CODECS = {"zlib": 0, "lz4": 1, "zstd": 2}
A = Filter(tags=("a",))
#: Creates a stored message of QUEUE.
message = partial(Stored, topic=b"T", queue_id=0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def serve(cluster: Cluster, messages: list[bytes]) -> Puller:
    """Return a puller of a queue with these records, over real sockets."""

    def script(link: Link) -> None:
        for request in link.requests():
            begin = int(request.ext["queueOffset"])
            end = min(len(messages), begin + min(32, int(request.ext["maxMsgNums"])))
            bounds = {"minOffset": "0", "maxOffset": str(len(messages)), "suggestWhichBrokerId": "0"}
            code = 0 if begin < end else 19
            link.reply(request, code, b"".join(messages[begin:end]), nextBeginOffset=str(end), **bounds)

    cluster.scripted("a", script)
    return Puller(Client(cluster.nameserver().address), patience=20.0)


# -- bodies


#: A program that creates a bomb, reads it, and prints the largest growth of its memory.
CHILD = """
import resource, sys
import tests.live.processes.test_rocketmq_bombs as bombs

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

given = getattr(bombs, sys.argv[1])(*sys.argv[2:])
cluster = bombs.Cluster()
puller = bombs.serve(cluster, given)
puller.pull(bombs.QUEUE, 0, 1, 1, ("queue_offset",))
before = peak()
said, at = "", 0
try:
    while (got := puller.pull(bombs.QUEUE, at, 16384, 16 << 20, bombs.COLUMNS).num_rows):
        at += got
except bombs.DataLossError as error:
    said = error.condition
print(at, peak() - before, said)
"""


def bomb(codec: str, megabytes: str) -> list[bytes]:
    """A message whose body decompresses to this many megabytes."""
    return [message(sys_flag=1 | CODECS[codec] << 8, packed=_bomb(codec, int(megabytes))).pack()]


def large(count: str) -> list[bytes]:
    """Messages whose bodies decompress to 16 MiB each."""
    packed = _bomb("zstd", 16)
    return [message(offset=n, sys_flag=0x201, packed=packed).pack() for n in range(int(count))]


def _bomb(codec: str, megabytes: int) -> bytes:
    """Compress zeros piece by piece, so that this needs little memory."""
    if codec == "zlib":
        deflate = zlib.compressobj(1)
        return b"".join(deflate.compress(bytes(2**20)) for _ in range(megabytes)) + deflate.flush()
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        for _ in range(megabytes):
            stream.write(bytes(2**20))
    compressed: bytes = sink.getvalue().to_pybytes()
    return compressed


def run(*arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_is_refused_in_no_more_memory_than_the_largest_body_takes(codec: str) -> None:
    rows, megabytes, said = run("bomb", codec, "512")
    assert (rows, said) == ("0", "ORDEREDMQ_DATA_LOSS.UNREADABLE")
    assert int(megabytes) < 100


def test_many_bodies_of_the_largest_size_come_out_in_several_pulls_in_bounded_memory() -> None:
    """The broker's answer has 20 kB. Decompressed, its bodies have 640 MiB."""
    rows, megabytes = run("large", "40")
    assert rows == "40"
    assert int(megabytes) < 200


def test_rows_end_before_a_message_that_cannot_be_read_and_it_is_named_when_it_is_the_next(cluster: Cluster) -> None:
    packed = _bomb("zstd", 32)
    messages = [message(offset=n, body=b"%d" % n, properties=text(("TAGS", "ab"[n % 2]))) for n in range(10)]
    messages[5] = replace(messages[5], sys_flag=0x201, packed=packed)
    messages[8] = replace(messages[8], sys_flag=0x101, packed=b"nothing of lz4")
    puller = serve(cluster, [stored.pack() for stored in messages])

    def rows(offset: int, columns: tuple[str, ...] = COLUMNS) -> list[int]:
        offsets: list[int] = puller.pull(QUEUE, offset, 100, 1 << 24, columns).column(0).to_pylist()
        return offsets

    assert rows(0) == [0, 1, 2, 3, 4]
    with pytest.raises(DataLossError) as caught:
        rows(5)
    assert caught.value.condition == "ORDEREDMQ_DATA_LOSS.UNREADABLE"
    assert caught.value.message == (
        f"message 5 of queue T/a/0 cannot be read: its body of {len(packed)} bytes of zstd expands to more than the limit of "
        "16777216 bytes. Its producer sent it like this, or the broker's commit log is damaged. Set failOnDataLoss=false to skip it with "
        "a warning"
    )
    assert (caught.value.resume_at, rows(6)) == (6, [6, 7])
    with pytest.raises(DataLossError, match="message 8 of queue T/a/0 cannot be read: its body of 14 bytes is not lz4"):
        rows(8)
    assert rows(9) == [9]
    # A pull without the body gets the row, and a pull with another tag skips it.
    assert rows(0, ("queue_offset",)) == list(range(10))
    batch, end = puller.pull_matching(QUEUE, 0, 8, 1 << 24, COLUMNS, A)
    assert (batch.column(0).to_pylist(), end) == ([0, 2, 4, 6], 8)
    with pytest.raises(DataLossError, match="message 8 of"):
        puller.pull_matching(QUEUE, 8, 2, 1 << 24, COLUMNS, A)
    batch, end = puller.pull_matching(QUEUE, 1, 9, 1 << 24, COLUMNS, Filter(tags=("b",)))
    assert (batch.column(0).to_pylist(), end) == ([1, 3], 5)


def test_a_task_continues_after_messages_that_are_unreadable_or_missing(caplog: pytest.LogCaptureFixture) -> None:
    """A queue's minimum offset may be far below the missing messages. A task that continued there would never end."""
    bounds = {QUEUE: SimpleNamespace(min_offset=2, max_offset=90)}
    broker: Any = SimpleNamespace(log=SimpleNamespace(bounds=lambda queues: bounds))
    partition: Any = SimpleNamespace(queue=QUEUE, end=80)
    assert partition_reader._skip_loss(broker, partition, False, 5, unreadable(QUEUE, 5, "why")) == 6
    assert "1 messages of queue T/a/0 are lost, from 5 to 5" in caplog.text
    assert partition_reader._skip_loss(broker, partition, False, 10, aged_out(QUEUE, 10, 30)) == 30
    assert partition_reader._skip_loss(broker, partition, False, 10, aged_out(QUEUE, 10, 85)) == 80
    bounds[QUEUE].min_offset = 40
    assert partition_reader._skip_loss(broker, partition, False, 10, aged_out(QUEUE, 10, 30)) == 40


# -- brokers that never end their answers


def test_retries_of_a_pull_end_within_its_patience(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of pulls are outstanding when a broker is cut off. No retry waits longer for a connection than the pull may take."""

    def script(link: Link) -> None:
        for request in link.requests():
            begin = int(request.ext["queueOffset"])
            if begin >= 32:
                return
            body = b"".join(message(offset=n, body=b"b").pack() for n in range(begin, begin + 32))
            link.reply(
                request, 0, body, nextBeginOffset=str(begin + 32), minOffset="0", maxOffset="9999", suggestWhichBrokerId="0"
            )

    cluster.scripted("a", script)
    client = Client(cluster.nameserver().address)
    puller = Puller(client, patience=1.0)
    # The broker answers once. The connection then ends with dozens of pulls outstanding, and no later connection succeeds.
    connect = client.lane
    asked: list[tuple[float, float]] = []

    def lane(address: str, deadline: float) -> Lane:
        asked.append((time.monotonic(), deadline))
        if len(asked) > 1:
            raise RocketMQUnavailableError(UnavailableCondition.UNREACHABLE, "nobody is there")
        return connect(address, deadline)

    monkeypatch.setattr(client, "lane", lane)
    with pytest.raises(RocketMQUnavailableError, match=r"TIMEOUT.*offset 32 for 1 s: .*nobody is there"):
        puller.pull(QUEUE, 0, 4000, 1 << 24, COLUMNS)
    assert len(asked) > 2
    assert max(deadline for _, deadline in asked) <= asked[1][0] + 1.0
