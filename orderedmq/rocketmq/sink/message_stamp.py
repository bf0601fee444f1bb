"""The stamp that a sink writes on each message, by which a task recognises its rows in a queue. Pure.

A stamp is (sink, batch, run, partition, sequence, request), in six properties.

- A *run* is one Spark job that writes the batch. Within a run, a partition has the same rows in every attempt. Another run may
  have the same rows in other partitions.
- The *sequence* numbers from 0 the messages of one partition of one run in one queue, whichever attempt sent them. It grows
  with the offset, so 0 is the first message.
- The *request* is the sequence of the first message that was sent in the same request. A broker stores a request in one piece
  (``CommitLog.asyncPutMessages`` holds the queue's lock for a whole batch), so a reader can skip all of it.

A message *may be* a task's row if an attempt of the same partition of its run sent it, or any task of another run of the batch.
Messages without a run were sent by a release that did not stamp it, or for a writer without one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.core.message_rows import reserved
from orderedmq.model import (
    SINK_BATCH,
    SINK_ID,
    SINK_PARTITION,
    SINK_REQUEST,
    SINK_RUN,
    SINK_SEQUENCE,
    MessageQueue,
    is_reserved,
)

#: Prefix of sinks' consumer groups. They have no consumers: they hold a sink's bookmarks and the locks of its tasks.
GROUP_PREFIX: Final = "OMQ_SINK_"
#: The columns of a message that `find_messages` needs.
COLUMNS: Final = ("queue_offset", "body", "tags", "keys", "sharding_key", "properties")

_PLAIN = re.compile(r"[A-Za-z0-9_:.@/-]{1,100}")
_BOOKMARK_GROUP = re.compile(GROUP_PREFIX + "[0-9a-f]{24}")
_NUMBER: Final = "^[0-9]{1,18}$"
#: Up to this many messages are examined one by one: examining columns takes as long for one message as for hundreds.
_FEW: Final = 8


@dataclass(frozen=True)
class Writer:
    """A writing task: one partition of one batch of a sink, in one run.

    ``sink`` comes from `sink_name`, ``run`` from `run_name`. ``group`` is the sink's group if the user names one.
    """

    sink: str
    batch: int
    partition: int
    run: str = ""
    group: str | None = None

    def properties(self, sequence: int, count: int) -> dict[str, pa.Array | str]:
        """Return the stamps of ``count`` messages from ``sequence`` on for `encode.encode`, which adds SINK_REQUEST."""
        return {
            SINK_ID: self.sink,
            SINK_BATCH: str(self.batch),
            **({SINK_RUN: self.run} if self.run else {}),
            SINK_PARTITION: str(self.partition),
            SINK_SEQUENCE: pa.array(np.arange(sequence, sequence + count)).cast(pa.string()),
        }


class SinkMessage(NamedTuple):
    """A message of the sink. ``digest``: of its content if the message may be the writer's, else empty."""

    offset: int
    batch: int
    partition: int
    sequence: int
    digest: bytes
    #: The sequence of the first message of its request, never above its own.
    request: int
    run: str = ""

    @property
    def begin(self) -> int:
        """The offset of the first message of its request."""
        return self.offset - (self.sequence - self.request)


def sink_name(sink_id: str) -> str:
    """Return the sink's id as a property's value: itself, or its hash if it is long or has unusual characters."""
    if _PLAIN.fullmatch(sink_id):
        return sink_id
    return "#" + blake2b(sink_id.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def run_name(job: str) -> str:
    """Return a short name for a job's run: 8 hexadecimal digits, not all 0; "" for no job."""
    if not job:
        return ""
    return f"{int.from_bytes(blake2b(job.encode(), digest_size=4).digest(), 'big') or 1:08x}"


def bookmark_group(sink: str, topic: str, named: str | None = None) -> str:
    """Return the consumer group of the sink's bookmarks in a topic: ``named`` by the user, else derived from the sink."""
    return named or GROUP_PREFIX + _digest_of(sink, topic)


def is_bookmark_group(group: str) -> bool:
    """Whether a group's name is one that `bookmark_group` derives from a sink."""
    return _BOOKMARK_GROUP.fullmatch(group) is not None


def lock_key(sink: str, queue: MessageQueue, name: str, *, proxied: bool = False) -> MessageQueue:
    """Return what an attempt locks at a queue's broker in the sink's group, under the given name.

    Several tasks write to the queue at the same time, so they use several names. A broker grants the lock of any queue, whether
    it has such a queue or not. ``proxied``: for a lock through a Proxy, which finds the broker by its name, so the name becomes
    a number above all queues' ids. Two names may have the same number: then one waits for the other.
    """
    if proxied:
        digest = blake2b(f"{sink}\0{queue}\0{name}".encode("utf-8", "surrogatepass"), digest_size=4).digest()
        return queue._replace(queue_id=1 << 30 | int.from_bytes(digest, "big") >> 2)
    return queue._replace(broker_name=f"{queue.broker_name}/{_digest_of(sink, queue.topic)}/{name}")


def sink_mark(sink: str) -> int:
    """Return a number above 0 that stands for the sink and can be stored as a group's offset."""
    return 1 + int.from_bytes(blake2b(sink.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "big")


def _digest_of(sink: str, topic: str) -> str:
    return blake2b(f"{sink}\0{topic}".encode(), digest_size=12).hexdigest()


def find_messages(messages: pa.RecordBatch, writer: Writer) -> list[SinkMessage]:
    """Return the sink's messages among those read with `COLUMNS`, by offset.

    These are all that may be the writer's, and of the others at least the last one and the first of each batch. A message with
    a malformed stamp is left out.
    """
    if messages.num_rows <= _FEW:
        return _find_one_by_one(messages, writer)
    properties = messages.column("properties")
    ours = pc.equal(pc.map_lookup(properties, SINK_ID, "last"), writer.sink)
    if not pc.any(ours).as_py():
        return []
    messages = messages.filter(ours)
    stamps = [
        pc.map_lookup(messages.column("properties"), name, "last")
        for name in (SINK_BATCH, SINK_PARTITION, SINK_SEQUENCE, SINK_REQUEST)
    ]
    for stamp in stamps:
        sound = pc.fill_null(pc.match_substring_regex(stamp, _NUMBER), False)
        if not pc.all(sound).as_py():
            return find_messages(messages.filter(sound), writer)
    batches, partitions, sequences, requests = (stamp.cast(pa.int64()).to_numpy() for stamp in stamps)
    runs = pc.fill_null(pc.map_lookup(messages.column("properties"), SINK_RUN, "last"), "")
    same_run = pc.equal(runs, writer.run).to_numpy(zero_copy_only=False)
    offsets = messages.column("queue_offset").to_numpy()
    own = (batches == writer.batch) & (~same_run | (partitions == writer.partition))
    others = np.flatnonzero(~own)
    _, first = np.unique(batches[others], return_index=True)
    chosen = np.union1d(np.flatnonzero(own), np.union1d(others[first], others[-1:]))
    contents = iter(digests(messages.filter(pa.array(own))))
    return [
        SinkMessage(
            int(offsets[at]),
            int(batches[at]),
            int(partitions[at]),
            int(sequences[at]),
            next(contents) if own[at] else b"",
            int(min(requests[at], sequences[at])),
            runs[at].as_py(),
        )
        for at in chosen
    ]


def _find_one_by_one(messages: pa.RecordBatch, writer: Writer) -> list[SinkMessage]:
    out = []
    for at, properties in enumerate(messages.column("properties").to_pylist()):
        named = dict(properties or ())
        numbers = [named.get(name) or "" for name in (SINK_BATCH, SINK_PARTITION, SINK_SEQUENCE, SINK_REQUEST)]
        if named.get(SINK_ID) != writer.sink or not all(re.fullmatch(_NUMBER, number) for number in numbers):
            continue
        batch, partition, sequence, request = map(int, numbers)
        run = named.get(SINK_RUN) or ""
        own = batch == writer.batch and (run != writer.run or partition == writer.partition)
        [said] = digests(messages.slice(at, 1)) if own else [b""]
        offset = messages.column("queue_offset")[at].as_py()
        out.append(SinkMessage(offset, batch, partition, sequence, said, min(request, sequence), run))
    return out


def digests(rows: pa.RecordBatch) -> list[bytes]:
    """Return a 16-byte digest of each row's or message's content: body, tags, keys, sharding key and the user's properties.

    A row and the message that was made of it have the same digest: an empty text counts as none, properties have no order, and
    of two properties with one name the last one counts.
    """
    names = [name for name in COLUMNS[1:] if name in rows.schema.names]
    if "properties" in names and not _has_user_properties(rows.column("properties")):
        # The usual case, and properties take most of the time.
        names.remove("properties")
    columns = {name: rows.column(name).to_pylist() for name in names}
    nothing: list[None] = [None] * rows.num_rows
    parts = zip(*(columns.get(name, nothing) for name in COLUMNS[1:]))
    return [_digest(*part) for part in parts]


def _digest(
    body: bytes, tags: str | None, keys: str | None, sharding_key: str | None, properties: Sequence[tuple[str, str]] | None
) -> bytes:
    texts = [tags or "", keys or "", sharding_key or ""]
    for name, value in sorted(_user_properties(dict(properties or ())).items()):
        texts += (name, value)
    sizes = ",".join(str(len(text)) for text in texts)
    hashed = blake2b(sizes.encode(), digest_size=16)
    hashed.update("\0".join(["", *texts, ""]).encode("utf-8", "surrogatepass"))
    hashed.update(body)
    return hashed.digest()


def _has_user_properties(properties: pa.Array) -> bool:
    """Whether any row may have a property that the user set."""
    bounds = properties.offsets
    names = properties.keys.slice(bounds[0].as_py(), bounds[-1].as_py() - bounds[0].as_py())
    return not pc.all(reserved(names)).as_py()


def _user_properties(properties: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in properties.items() if value and not is_reserved(name)}
