"""The stamp that a sink writes on each message, so that a task recognises its rows in a queue. Pure.

A stamp is (sink, batch, run, partition, sequence, request). It is one short property, because each property of a message costs the
broker time.

- A *run* is one Spark job that writes the batch. Within a run, a partition has the same rows in every attempt. Another run may
  have the same rows in other partitions.
- The *sequence* numbers the messages of one partition and run in one queue from 0, whichever attempt sent them. It grows with the
  offset, so the first message has 0.
- The *request* is the sequence of the first message that was sent in the same request. A broker stores a request in one piece
  (``CommitLog.asyncPutMessages`` holds the queue's lock for a whole batch), so a reader can skip all of it.

The property's value is ``sink.batch.run.partition.`` and 16 digits: 12 for the sequence, and 4 for the message's place in its
request. The sink is written as a hash of 64 bits (`sink_digest`).

A message *may be* a task's row if it was sent by an attempt of the same partition and run, or by any task of another run of the
batch. The run is empty in messages of a writer whose Spark job is not known.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.model import SINK_STAMP, MessageQueue, is_reserved
from orderedmq.rocketmq.codec.encode import Stamp
from orderedmq.rocketmq.codec.gather import Int64s
from orderedmq.rows.message_rows import reserved

#: Prefix of sinks' consumer groups. These groups have no consumers. They hold a sink's bookmarks and the locks of its tasks.
GROUP_PREFIX: Final = "OMQ_SINK_"
#: The columns of a message that `find_messages` needs.
COLUMNS: Final = ("queue_offset", "body", "tags", "keys", "sharding_key", "properties")

_PLAIN = re.compile(r"[A-Za-z0-9_:.@/-]{1,100}")
_BOOKMARK_GROUP = re.compile(GROUP_PREFIX + "[0-9a-f]{24}")
#: The largest batch number. Some numbers of 19 digits are larger.
_LARGEST: Final = 2**63 - 1
#: The pattern of a stamp's value, for Python and for Arrow (RE2).
_STAMP: Final = (
    r"^(?P<sink>[A-Za-z0-9_-]{11})\.(?P<batch>[0-9]{1,19})\.(?P<run>[0-9a-f]*)\.(?P<partition>[0-9]{1,18})"
    r"\.(?P<sequence>[0-9]{12})(?P<place>[0-9]{4})$"
)
#: The beginning of a stamp in a record: sink, batch, run and partition.
_IN_RECORDS: Final = re.compile(SINK_STAMP.encode() + rb"\x01([A-Za-z0-9_-]{11})\.([0-9]{1,19})\.([0-9a-f]*)\.([0-9]{1,18})\.")
#: Up to this many messages are examined one by one, which takes 7 µs per message. Examining columns takes 1,000 µs, whether for one
#: message or for a hundred. A task usually looks at 32 messages (lookback.py).
_FEW: Final = 32


@dataclass(frozen=True)
class Writer:
    """A writing task: one partition of one batch of a sink, in one run.

    ``sink`` is the result of `sink_name`, ``run`` that of `run_name`. ``group`` is the sink's group if the user has named one.
    """

    sink: str
    batch: int
    partition: int
    run: str = ""
    group: str | None = None

    def stamp(self, sequence: int) -> Stamp:
        """Return the stamps of messages from ``sequence`` on, for `encode.encode`."""
        return Stamp(SINK_STAMP, f"{sink_digest(self.sink)}.{self.batch}.{self.run}.{self.partition}.", sequence)


class SinkMessage(NamedTuple):
    """A message of the sink. ``digest``: the digest of its content if the message may be the writer's, else empty."""

    offset: int
    batch: int
    partition: int
    sequence: int
    digest: bytes
    #: The sequence of the first message of its request, never above ``sequence``.
    request: int
    run: str = ""

    @property
    def begin(self) -> int:
        """The offset of the first message of its request."""
        return self.offset - (self.sequence - self.request)


def sink_name(sink_id: str) -> str:
    """Return the sink's id in a form that can be a property's value: unchanged, or hashed if it is long or has unusual characters."""
    if _PLAIN.fullmatch(sink_id):
        return sink_id
    return "#" + blake2b(sink_id.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


@lru_cache(maxsize=16)
def sink_digest(sink: str) -> str:
    """Return the hash of the sink in its stamps: 11 characters."""
    return base64.urlsafe_b64encode(blake2b(sink.encode("utf-8", "surrogatepass"), digest_size=8).digest()).decode().rstrip("=")


def run_name(job: str) -> str:
    """Return a short name for a job's run: 8 hexadecimal digits, not all 0; "" for no job."""
    if not job:
        return ""
    return f"{int.from_bytes(blake2b(job.encode(), digest_size=4).digest(), 'big') or 1:08x}"


def bookmark_group(sink: str, topic: str, named: str | None = None) -> str:
    """Return the consumer group of the sink's bookmarks in a topic: ``named`` if the user chose one, else derived from the sink."""
    return named or GROUP_PREFIX + _digest_of(sink, topic)


def is_bookmark_group(group: str) -> bool:
    """Return whether a group's name has the form that `bookmark_group` derives from a sink."""
    return _BOOKMARK_GROUP.fullmatch(group) is not None


def lock_key(sink: str, queue: MessageQueue, name: str, *, proxied: bool = False) -> MessageQueue:
    """Return the "queue" that an attempt locks at the queue's broker, in the sink's group, to hold the lock ``name``.

    Several tasks write to the queue at the same time, so each uses a different name. A broker grants a lock for any queue, even for
    one that does not exist. ``proxied``: whether the lock is requested through a Proxy. A Proxy finds the broker by the broker name,
    so the name is hashed to a queue id above all real ones. If two names have the same hash, one attempt waits for the other.
    """
    if proxied:
        digest = blake2b(f"{sink}\0{queue}\0{name}".encode("utf-8", "surrogatepass"), digest_size=4).digest()
        return queue._replace(queue_id=1 << 30 | int.from_bytes(digest, "big") >> 2)
    return queue._replace(broker_name=f"{queue.broker_name}/{_digest_of(sink, queue.topic)}/{name}")


def sink_mark(sink: str) -> int:
    """Return a number above 0 that identifies the sink and can be stored as a group's offset."""
    return 1 + int.from_bytes(blake2b(sink.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "big")


def _digest_of(sink: str, topic: str) -> str:
    return blake2b(f"{sink}\0{topic}".encode(), digest_size=12).hexdigest()


class _Stamps(NamedTuple):
    """The stamps of one sink in a batch of messages. ``rows``: the positions of their messages. ``requests``: see `SinkMessage`."""

    rows: Int64s
    batches: Int64s
    partitions: Int64s
    sequences: Int64s
    requests: Int64s
    runs: pa.Array


def find_messages(messages: pa.RecordBatch, writer: Writer) -> list[SinkMessage]:
    """Return the sink's messages among messages read with `COLUMNS`, sorted by offset.

    The result has all messages that may be the writer's, and of the sink's other messages at least the last one and the first one of
    each batch. A message with a malformed stamp is left out.
    """
    if messages.num_rows <= _FEW:
        return _find_one_by_one(messages, writer)
    rows, batches, partitions, sequences, requests, runs = _stamps(messages.column("properties"), writer)
    if not len(rows):
        return []
    messages = messages.take(pa.array(rows))
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
            int(requests[at]),
            runs[at].as_py(),
        )
        for at in chosen
    ]


def _stamps(properties: pa.Array, writer: Writer) -> _Stamps:
    parts = pc.extract_regex(pc.map_lookup(properties, SINK_STAMP, "last"), _STAMP)
    mine = pc.fill_null(pc.equal(pc.struct_field(parts, "sink"), sink_digest(writer.sink)), False)
    rows = np.flatnonzero(mine.to_numpy(zero_copy_only=False))
    parts = parts.take(pa.array(rows))
    sound = pc.struct_field(parts, "batch").cast(pa.uint64()).to_numpy() <= _LARGEST
    rows, parts = rows[sound], parts.filter(pa.array(sound))
    batches, partitions, sequences, places = (
        pc.struct_field(parts, name).cast(pa.int64()).to_numpy() for name in ("batch", "partition", "sequence", "place")
    )
    runs = pc.struct_field(parts, "run").cast(pa.string())
    return _Stamps(rows, batches, partitions, sequences, np.maximum(sequences - places, 0), runs)


def read_stamp(properties: Mapping[str, str], sink: str) -> SinkMessage | None:
    """Return the sink's stamp on a message, with offset 0 and no digest; None if the stamp is missing or malformed."""
    match = re.fullmatch(_STAMP, properties.get(SINK_STAMP, ""))
    if match is None or match["sink"] != sink_digest(sink) or int(match["batch"]) > _LARGEST:
        return None
    sequence = int(match["sequence"])
    request = max(sequence - int(match["place"]), 0)
    return SinkMessage(0, int(match["batch"]), int(match["partition"]), sequence, b"", request, match["run"])


def _find_one_by_one(messages: pa.RecordBatch, writer: Writer) -> list[SinkMessage]:
    out = []
    for at, pairs in enumerate(messages.column("properties").to_pylist()):
        named = {name: value or "" for name, value in pairs or ()}
        stamp = read_stamp(named, writer.sink)
        if stamp is not None:
            [digest] = digests(messages.slice(at, 1)) if may_be_of(writer, stamp) else [b""]
            out.append(stamp._replace(offset=messages.column("queue_offset")[at].as_py(), digest=digest))
    return out


def may_concern(writer: Writer, records: bytes, committed: int) -> bool:
    """Return whether messages, as a broker stores them, may be the writer's, or may show that its batch is committed.

    ``committed``: the number of their first bytes that belong to messages below the bookmark. False is certain, and much cheaper than
    `find_messages`. True is not certain, because a message's body may contain something that looks like a stamp.
    """
    for stamp in _IN_RECORDS.finditer(records):
        sink, batch, run, partition = stamp.groups()
        number = int(batch)
        if number < writer.batch or sink.decode() != sink_digest(writer.sink):
            continue
        is_own = run.decode() != writer.run or int(partition) == writer.partition
        if number > writer.batch or stamp.start() < committed or is_own:
            return True
    return False


def may_be_of(writer: Writer, message: SinkMessage) -> bool:
    """Return whether a message may be a row of the writer: from its partition and run, or from another run of the batch."""
    return message.batch == writer.batch and (message.run != writer.run or message.partition == writer.partition)


def digests(rows: pa.RecordBatch) -> list[bytes]:
    """Return a 16-byte digest of each row's or message's content: body, tags, keys, sharding key and the user's properties.

    A row and the message that was made from it have the same digest: an empty text counts as no text, the order of properties does
    not matter, and of two properties with the same name the last one counts.
    """
    names = [name for name in COLUMNS[1:] if name in rows.schema.names]
    if "properties" in names and not _has_user_properties(rows.column("properties")):
        # Usually no row has such properties, and reading them would take most of the time.
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
    """Return whether any row may have a property that the user set."""
    bounds = properties.offsets
    names = properties.keys.slice(bounds[0].as_py(), bounds[-1].as_py() - bounds[0].as_py())
    return not pc.all(reserved(names)).as_py()


def _user_properties(properties: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in properties.items() if value and not is_reserved(name)}
