"""The formats of each release, as files in tests/data/formats/<version>: what a later release must open, read and keep its names.

    store.tar.gz       a snapshot of a store, as a user's backup is made
    checkpoint/        the checkpoint of a query on it, in Spark's layout: it has read half of the topic, and logged one more batch
    expected.json      what a query that continues there has to find
    names.json         options, columns, conditions, and the fields of the command's JSON
    rocketmq.json      what is stored at RocketMQ's brokers and in messages: the same arguments have to give the same numbers and texts

``python -m tests.formats`` writes the folder of the version under development. The folder of a released version never changes.
tests/loop/test_formats.py opens them all.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from typer.testing import CliRunner

import orderedmq
from ordered_source import ConsumeOrderlyStatus, OrderPerKey, consume_orderly
from orderedmq import conditions
from orderedmq.broker import Broker
from orderedmq.cli import app
from orderedmq.model import SINK_STAMP, MessageQueue
from orderedmq.options.parse import OPTIONS
from orderedmq.ownership.lock import Instant, LockToken
from orderedmq.ownership.membership import Member, Subscription
from orderedmq.parking import Command, Parking, Ticket, parked_queue, parked_topic
from orderedmq.rocketmq.group import lock_rules, running_info
from orderedmq.rocketmq.group.dead_letters import key_of
from orderedmq.rocketmq.sink import commit_history
from orderedmq.rocketmq.sink.batch_queues import BatchQueues
from orderedmq.rocketmq.sink.bookmarks import WriterEntry
from orderedmq.rocketmq.sink.message_stamp import Writer, bookmark_group, lock_key, run_name, sink_digest, sink_mark, sink_name
from orderedmq.rocketmq.wire import registers
from orderedmq.rocketmq.wire.fastjson import loads_object
from orderedmq.rows.dead_letters import dead_letter_id, dead_letter_properties, replayed_once_more
from orderedmq.schema import MESSAGE_SCHEMA
from tests.contract.support import bodies
from tests.micro_batches import Checkpoint, MicroBatchLoop, end_workers

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "tests" / "data" / "formats"
#: The query that copies ``in`` to ``out``, and the group whose listener parks a key and makes a dead letter.
COPY: Final = {"topic": "in", "consumerGroup": "copy", "maxOffsetsPerTrigger": "4"}
OUT: Final = {"topic": "out", "topicQueueNums": "2"}
HEARD: Final = {"topic": "in", "consumerGroup": "work", "parkingLot": "true"}
PARKED, DEAD = "0:2", "1:1"
ROWS: Final = 16
#: Commands whose JSON programs read.
COMMANDS: Final = (
    "topic list",
    "topic describe in",
    "group list",
    "group describe copy",
    "group describe work",
    "lock list",
    "parked list work",
    "dlq list work",
    "peek in",
    "check",
)


# -- the store and the checkpoint ----------------------------------------------------------------------------------------------


def write(folder: Path) -> None:
    """Write the folder of the version under development."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as workplace:
        path, copy = Path(workplace) / "store", Path(workplace) / "copy"
        with orderedmq.connect(path) as broker:
            query = _fill(broker, str(path))
            # The query holds its locks and has published a batch that is not committed, as if its machine had failed now.
            orderedmq.snapshot(path, copy)
            query.kill()
        with tarfile.open(folder / "store.tar.gz", "w:gz") as archive:
            for file in sorted(copy.iterdir()):
                archive.add(file, file.name, filter=_anonymous)
        write_checkpoint(query.checkpoint, folder / "checkpoint")
        with orderedmq.connect(copy) as broker:
            _write_json(folder / "expected.json", expected(broker))
        _write_json(folder / "names.json", names(copy))
        end_workers()
    _write_json(folder / "rocketmq.json", at_rocketmq())


def _anonymous(file: tarfile.TarInfo) -> tarfile.TarInfo:
    file.uid = file.gid = 0
    file.uname = file.gname = ""
    return file


def _fill(broker: Broker, path: str) -> MicroBatchLoop:
    """Fill the store, and return the query that is to be continued: two batches are committed, and the third one is only published."""
    broker.admin.create_topic("in", 2)
    # A body that is too large for an entry, so that it is in a segment, and that is small in the archive.
    broker.admin.create_topic("large", 1, compression="none")
    broker.log.append({broker.log.queues("large")[0]: pa.record_batch({"body": pa.array([b"x" * 100_000], pa.binary())})})
    for numbers, failing, retries in ((range(2), DEAD, 0), (range(2, ROWS // 2), PARKED, 16)):
        for queue in broker.log.queues("in"):
            texts = pa.array([f"{queue.queue_id}:{number}".encode() for number in numbers], pa.binary())
            keys = [f"k{queue.queue_id}-{number % 3}" for number in numbers]
            broker.log.append({queue: pa.record_batch({"body": texts, "sharding_key": keys})})
        hear(path, failing, retries)
    query = MicroBatchLoop({"path": path, **COPY}, {"path": path, **OUT})
    for _ in range(2):
        query.advance("committed")
    query.advance("published")
    return query


def hear(path: str, failing: str | None = None, retries: int = 16) -> list[str]:
    """Run the listener of group ``work`` over what waits, which fails for one body. Return the bodies that it accepted."""
    with tempfile.NamedTemporaryFile("r") as accepted:
        heard = accepted.name

        def listener(messages: Any, context: Any) -> ConsumeOrderlyStatus | None:
            if messages[0].body.decode() == failing:
                return None
            with open(heard, "a") as file:
                file.write(messages[0].body.decode() + "\n")
            return ConsumeOrderlyStatus.SUCCESS

        settings = OrderPerKey(max_reconsume_times=retries, in_batch_attempts=1)
        MicroBatchLoop(
            {"path": path, **HEARD},
            lambda outcomes, batch: None,
            listener=lambda rows: consume_orderly(rows, listener, settings),
            available_now=True,
        ).process_all_available()
        return accepted.read().splitlines()


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint as Spark lays it out (OffsetSeqLog, CommitLog)."""
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True)
    (folder / "metadata").write_text(json.dumps({"id": checkpoint.query_id}))
    for batch, offset in enumerate(checkpoint.log):
        at = {"batchWatermarkMs": 0, "batchTimestampMs": 0, "conf": {}}
        (folder / "offsets" / str(batch)).write_text(f"v1\n{json.dumps(at)}\n{offset}")
    for batch in range(checkpoint.committed):
        (folder / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder of Spark's layout."""
    log = [file.read_text().splitlines()[2] for file in sorted((folder / "offsets").iterdir(), key=lambda file: int(file.name))]
    committed = len(list((folder / "commits").iterdir()))
    return Checkpoint(log, committed, query_id=json.loads((folder / "metadata").read_text())["id"])


def restore(version: Path, path: Path) -> Path:
    """Restore the store of a version from its snapshot, as the guide says: its files in a directory that the user owns."""
    path.mkdir(mode=0o700)
    with tarfile.open(version / "store.tar.gz") as archive:
        archive.extractall(path, filter="data")
    return path


def expected(broker: Broker) -> dict[str, Any]:
    """Return the state of a version's store."""
    return {
        "in": _bodies(broker, "in"),
        "large": len(_bodies(broker, "large")["0"][0]),
        "out": _bodies(broker, "out"),
        "offsets": {group: _offsets(broker, group) for group in ("copy", "work")},
        "owner": sorted({lock.owner for lock in broker.admin.locks("copy") if lock.held}),
        "dead": [text for texts in _bodies(broker, "%DLQ%work").values() for text in texts],
        "parked": [text for texts in _bodies(broker, parked_topic("work", "in")).values() for text in texts],
    }


def _bodies(broker: Broker, topic: str) -> dict[str, list[str]]:
    return {str(queue.queue_id): bodies(broker, queue) for queue in broker.log.queues(topic)}


def _offsets(broker: Broker, group: str) -> dict[str, int]:
    return {str(queue): offset for queue, offset in sorted(broker.admin.group_offsets(group).items())}


# -- names ---------------------------------------------------------------------------------------------------------------------


def names(store: Path) -> dict[str, Any]:
    """Return the names on which users' programs depend. ``store``: the store whose state the command shows."""
    kinds = [
        one for one in vars(conditions).values() if isinstance(one, type) and issubclass(one, StrEnum) and one is not StrEnum
    ]
    return {
        "options": {kind: sorted(option.name for option in options) for kind, options in OPTIONS.items()},
        "columns": [[field.name, str(field.type)] for field in MESSAGE_SCHEMA],
        "conditions": {kind.__name__: sorted(kind) for kind in kinds},
        "json": {command: fields(store, command) for command in COMMANDS},
    }


def fields(store: Path, command: str) -> list[str]:
    """Return the names of the fields in a command's JSON, those of nested objects with their path."""
    done = CliRunner().invoke(app, ["--path", str(store), "--json", *command.split()])
    assert done.exit_code == 0, done.output
    found: set[str] = set()
    for line in done.stdout.splitlines():
        found |= set(json.loads(line))
    return sorted(found)


# -- what RocketMQ's brokers store ---------------------------------------------------------------------------------------------


def at_rocketmq() -> dict[str, Any]:
    """Return examples of every number, name and text of this package that RocketMQ's brokers and messages keep."""
    queue = MessageQueue("orders", "broker-a", 3)
    sink = sink_name("01234567-89ab-cdef-0123-456789abcdef")
    writer = Writer(sink, 7, 2, run_name("job"))
    owner = "0123456789abcdef0123456789abcdef"
    client = f"{lock_rules.query_name(owner)}@host-4711-0123abcd"
    epoch = 1_800_000_000_000 << registers.OWNER_BITS | 24
    member = Member(
        owner, client, Subscription("shared", "orders", "AVG"), 1_800_000_000_000_000, Instant(running_info.WALL, 1.8e9)
    )
    token = LockToken("billing", queue, owner, client, epoch, epoch)
    ticket = Ticket(
        17, 3, 2, 1_800_000_010_000, "ValueError: no", "0A", 1_800_000_000_000_000, 1_800_000_000_000_001, alone=True
    )
    places = {name: getattr(registers, name)(queue).queue_id for name in _PLAIN_REGISTERS}
    stamp = writer.stamp(5)
    return {
        "registers": places | {"history 2": registers.history(queue, 2).queue_id},
        "epoch": {
            "fence": lock_rules.fence_of(epoch),
            "lingering": lock_rules.lingering(epoch),
            "last": lock_rules.last_epoch(epoch - 1),
        },
        "progress": registers.progress_of(17, epoch, "consume_orderly books.book"),
        "lock names": [lock_rules.query_name(owner), *lock_rules.lock_names(client)],
        "sink": {
            "group": bookmark_group(sink, "orders"),
            "mark": sink_mark(sink),
            "digest": sink_digest(sink),
            "lock": str(lock_key(sink, queue, "2")),
            "lock through a Proxy": lock_key(sink, queue, "2", proxied=True).queue_id,
            "entry": WriterEntry.of(writer).value,
            "record": BatchQueues(7, tuple(queue._replace(queue_id=number) for number in range(4))).record("broker-a").value,
            "history": commit_history.with_batch(commit_history.with_batch(0, 7), 9),
            "stamp": [stamp.name, [text.decode() for text in stamp.texts(0, [(0, 2)]).cast(pa.binary()).to_pylist()]],
        },
        "report": json.loads(
            loads_object(running_info.encode(member, [], [(token, 1.8e9)], 1))["properties"][running_info.OURS]
        ),
        "ticket": ticket.to_properties(),
        "parked from": [Parking(place, 4, ticket).place for place in (queue, parked_queue("billing", queue))],
        "order": Command("hold", "order-1").to_properties(),
        "lot": parked_topic("billing", "orders"),
        "dead letter": dead_letter_properties(
            queue, 17, message_id="0A", reconsume_times=3, error="ValueError: no", properties={"colour": "red"}
        ),
        "dead letter's id": dead_letter_id("billing", queue, 17),
        "dead letter's keys": [key_of("billing", queue, 17, reset) for reset in (0, epoch)],
        "replays": replayed_once_more(replayed_once_more({}, "billing"), "billing"),
        "stamp's property": SINK_STAMP,
    }


_PLAIN_REGISTERS: Final = ("fence", "tenure", "reset", "progress", "lot_progress", "mark", "writer", "queues", "committed")


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=asdict) + "\n")


if __name__ == "__main__":
    if f"## {orderedmq.__version__} (unreleased)" not in (ROOT / "CHANGELOG.md").read_text():
        sys.exit(f"{orderedmq.__version__} is released, and its formats never change. Set the next version first")
    write(FOLDER / orderedmq.__version__)
    # The tests expect the parked key to be due.
    time.sleep(10)
