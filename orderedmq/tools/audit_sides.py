"""The sides that an audit can compare: a topic, a table in Parquet files, or rows in memory."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import xxhash

from orderedmq.broker import Log, QueueBounds
from orderedmq.conditions import OptionCondition, TopicCondition
from orderedmq.errors import OptionError, Remedy, TopicError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.pulls import pulls
from orderedmq.routing.key_hash import HashedKeys
from orderedmq.text import text_of, valid
from orderedmq.tools import json_field
from orderedmq.tools.audit import NO_KEY, ROW, Int64s, Location, Rows, Words
from orderedmq.tools.json_field import BadJson

#: Maximum messages and bytes of a pull.
PULL_ROWS: Final = 65536
PULL_BYTES: Final = 16 * 1024 * 1024
_COMPARED: Final = ("sharding_key", "body")
#: Identities longer than this many bytes are hashed one by one, which is faster per byte. The cost per call is negligible for them.
_LONG: Final = 512
_SHOWN: Final = 80


class TopicSide:
    """The messages that a topic has now, each queue in the order of its offsets.

    ``id_field``: the field of JSON bodies that identifies a message; None: the whole body identifies it. ``since``: only messages
    stored at this time or later (µs since 1970).
    """

    def __init__(self, log: Log, topic: str, id_field: str | None = None, since: int | None = None) -> None:
        self.name = topic
        self._log = log
        self._field = id_field
        bounds = log.bounds(log.queues(topic))
        if since is not None:
            begins = {queue: min(log.offset_at(queue, since), at.max_offset) for queue, at in bounds.items()}
            bounds = {queue: QueueBounds(max(begins[queue], at.min_offset), at.max_offset) for queue, at in bounds.items()}
        self._bounds = [(queue, at) for queue, at in bounds.items() if at.min_offset < at.max_offset]
        #: The number of each queue's first row.
        self._begins = np.cumsum([0, *(at.max_offset - at.min_offset for _, at in self._bounds)]).tolist()

    @property
    def messages(self) -> int:
        return int(self._begins[-1])

    def rows(self) -> Iterator[Rows]:
        """Yield all rows. Raises OptionError INVALID for a body without the field, DataLossError if messages were deleted."""
        for lane, ((queue, at), number) in enumerate(zip(self._bounds, self._begins[:-1], strict=True)):
            offset = at.min_offset
            for batch in pulls(self._log, queue, offset, at.max_offset, PULL_ROWS, PULL_BYTES, _COMPARED):
                ids = _field(batch["body"], self._field, f"queue {queue}", "offset", offset)
                yield _rows(batch["sharding_key"], ids, number + offset - at.min_offset, lane)
                offset += batch.num_rows

    def locate(self, rows: Sequence[int]) -> list[Location]:
        out = []
        for number in rows:
            index = bisect_right(self._begins, number) - 1
            queue, bounds = self._bounds[index]
            offset = bounds.min_offset + number - self._begins[index]
            batch = next(pulls(self._log, queue, offset, offset + 1, 1, PULL_BYTES, _COMPARED))
            ids = _field(batch["body"], self._field, f"queue {queue}", "offset", offset)
            out.append(
                Location(
                    f"queue {_short_name(queue)} offset {offset}",
                    batch["sharding_key"][0].as_py(),
                    shown(ids.cast(pa.binary())[0].as_py()),
                )
            )
        return out


class TableSide:
    """The rows of a Parquet file or directory. In a directory of Spark's file sink, only files that the sink committed count.

    ``id_column`` None: the identity is the column body, or its field ``id_field``. ``order_column`` None: rows are ordered by the
    column queue_offset if it exists, else in file order.
    """

    def __init__(
        self,
        path: Path,
        *,
        key_column: str = "sharding_key",
        id_column: str | None = None,
        order_column: str | None = None,
        id_field: str | None = None,
    ) -> None:
        self.name = str(path)
        self._data = _open(path)
        names = self._data.schema.names
        if order_column is None and "queue_offset" in names:
            order_column = "queue_offset"
        self._key, self._id, self._order = key_column, id_column or "body", order_column
        self._field = None if id_column else id_field
        self._columns = list(dict.fromkeys(name for name in (self._key, self._id, self._order) if name is not None))
        for name in self._columns:
            if name not in names:
                raise OptionError(
                    OptionCondition.INVALID,
                    f"{path} has no column {name!r}, only {', '.join(names)}",
                    Remedy(
                        "Name its columns with key_column, id_column and order_column",
                        "Give --key-column, --id-column and --order-column",
                    ),
                )
        #: The columns that identify a row's queue, and the numbers of brokers and queues.
        self._queue: list[str] = []
        if "queue_id" in names and pa.types.is_integer(self._data.schema.field("queue_id").type):
            self._queue = [name for name in ("broker_name", "queue_id") if name in names]
        self._brokers: dict[str | bytes, int] = {}
        self._lanes: dict[int, int] = {}
        self._columns += [name for name in self._queue if name not in self._columns]
        self.messages = int(self._data.count_rows())

    def rows(self) -> Iterator[Rows]:
        """Yield all rows.

        Raises OptionError INVALID for a null identity or order, a body without the field, or a column that cannot be compared.
        """
        at = 0
        for batch in self._data.scanner(columns=self._columns, batch_size=PULL_ROWS).to_batches():
            if not batch.num_rows:
                continue
            key = _text(batch, self._key, self.name)
            ids = _field(_text(batch, self._id, self.name), self._field, self.name, "row", at)
            rows = _rows(key, ids, at, self._lanes_of(batch))
            if self._order is not None:
                rows["order"] = self._numbers(batch[self._order])
            yield rows
            at += batch.num_rows

    def locate(self, rows: Sequence[int]) -> list[Location]:
        table = self._data.take(pa.array(rows), columns=list(dict.fromkeys((self._key, self._id))))
        batch = table.combine_chunks().to_batches()[0]
        keys = valid(_texts(_text(batch, self._key, self.name)))[0].to_pylist()
        ids = _field(_text(batch, self._id, self.name), self._field, self.name, "row", 0).cast(pa.binary()).to_pylist()
        return [Location(f"row {number}", key, shown(found)) for number, key, found in zip(rows, keys, ids, strict=True)]

    def _lanes_of(self, batch: pa.RecordBatch) -> int | Int64s:
        if not self._queue:
            return 0
        numbers: Int64s = batch["queue_id"].cast(pa.int64(), safe=False).fill_null(-1).to_numpy(zero_copy_only=False)
        if "broker_name" in self._queue:
            names = _text(batch, "broker_name", self.name).fill_null("").dictionary_encode()
            brokers = [self._brokers.setdefault(name, len(self._brokers)) for name in names.dictionary.to_pylist()]
            # The number of a queue has 31 bits.
            numbers = numbers ^ np.array(brokers, np.int64)[names.indices.to_numpy(zero_copy_only=False)] << 32
        queues = pa.array(numbers).dictionary_encode()
        lanes: Int64s = np.array(
            [self._lanes.setdefault(one, len(self._lanes)) for one in queues.dictionary.to_pylist()], np.int64
        )
        rows: Int64s = lanes[queues.indices.to_numpy()]
        return rows

    def _numbers(self, column: pa.Array) -> Any:
        kind = column.type
        if column.null_count:
            raise OptionError(
                OptionCondition.INVALID, f"column {self._order!r} of {self.name} has nulls, so it cannot order the rows"
            )
        if pa.types.is_date32(kind):
            column = column.cast(pa.int32())
        elif not (pa.types.is_integer(kind) or pa.types.is_timestamp(kind)):
            raise OptionError(
                OptionCondition.INVALID,
                f"column {self._order!r} of {self.name} is {kind}, which cannot order rows. Give a column of whole numbers or times",
            )
        if pa.types.is_uint64(kind):
            # Move the numbers into the range of int64, where they have the same order.
            return (column.to_numpy(zero_copy_only=False) ^ np.uint64(1 << 63)).view(np.int64)
        return column.cast(pa.int64()).to_numpy(zero_copy_only=False)


class RowsSide:
    """Rows in memory, in their order, with the columns body and, if the rows have keys, sharding_key.

    ``id_field``: the field of JSON bodies that identifies a message; None: the whole body identifies it.
    """

    def __init__(self, name: str, batches: Sequence[pa.RecordBatch], id_field: str | None = None) -> None:
        self.name = name
        self._field = id_field
        self._batches = [batch for batch in batches if batch.num_rows]
        #: The number of each batch's first row.
        self._begins = np.cumsum([0, *(batch.num_rows for batch in self._batches)]).tolist()

    @property
    def messages(self) -> int:
        return int(self._begins[-1])

    def rows(self) -> Iterator[Rows]:
        """Yield all rows. Raises OptionError INVALID for a body without the field, or a column that is missing or cannot be compared."""
        for batch, begin in zip(self._batches, self._begins[:-1], strict=True):
            yield _rows(self._keys(batch), self._ids(batch, begin), begin, lane=0)

    def locate(self, rows: Sequence[int]) -> list[Location]:
        out = []
        for number in rows:
            index = bisect_right(self._begins, number) - 1
            batch = self._batches[index].slice(number - self._begins[index], 1)
            found = self._ids(batch, number).cast(pa.binary())[0].as_py()
            out.append(Location(f"row {number}", valid(_texts(self._keys(batch)))[0][0].as_py(), shown(found)))
        return out

    def _keys(self, batch: pa.RecordBatch) -> pa.Array:
        if "sharding_key" not in batch.schema.names:
            return pa.nulls(batch.num_rows, pa.string())
        return _text(batch, "sharding_key", self.name)

    def _ids(self, batch: pa.RecordBatch, first: int) -> pa.Array:
        if "body" not in batch.schema.names:
            names = ", ".join(batch.schema.names)
            raise OptionError(
                OptionCondition.INVALID, f"{self.name} has no column 'body', only {names}. Rename the column of the bodies"
            )
        return _field(_text(batch, "body", self.name), self._field, self.name, "row", first)


def _text(batch: pa.RecordBatch, name: str, where: str) -> pa.Array:
    """Return a column as strings or binary values. Raises OptionError INVALID."""
    column = batch[name]
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        return column
    try:
        return column.cast(pa.binary() if pa.types.is_large_binary(column.type) else pa.string())
    except pa.ArrowException as error:
        raise OptionError(
            OptionCondition.INVALID, f"column {name!r} of {where} is {column.type}, which cannot be compared"
        ) from error


def _texts(keys: pa.Array) -> pa.Array:
    """Return keys as strings, which may contain bytes that are not UTF-8."""
    return keys.view(pa.string()) if pa.types.is_binary(keys.type) else keys


def shown(identity: bytes) -> str:
    """Return an identity as text of at most 80 characters."""
    text = text_of(identity)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def identities(values: pa.Array) -> Words:
    """Return a 64-bit hash of each value (string or binary, no nulls)."""
    lengths = pc.binary_length(values)
    long = np.flatnonzero(pc.greater(lengths, _LONG).to_numpy(zero_copy_only=False))
    plain = values.cast(pa.binary())
    if not len(long):
        return HashedKeys(plain.view(pa.string())).hash64
    out = np.empty(len(values), dtype=np.uint64)
    short = np.flatnonzero(pc.less_equal(lengths, _LONG).to_numpy(zero_copy_only=False))
    if len(short):
        out[short] = HashedKeys(plain.take(pa.array(short)).view(pa.string())).hash64
    out[long] = [xxhash.xxh3_64_intdigest(value) for value in plain.take(pa.array(long)).to_pylist()]
    return out


def _short_name(queue: MessageQueue) -> str:
    """Return the name of a queue of a known topic, without the name of the embedded broker, because it is always the same."""
    return str(queue.queue_id) if queue.broker_name == EMBEDDED_BROKER else f"{queue.broker_name}/{queue.queue_id}"


def _rows(keys: pa.Array, ids: pa.Array, at: int, lane: int | Int64s) -> Rows:
    rows = np.zeros(len(ids), ROW)
    # Replace malformed UTF-8 by U+FFFD before hashing, because the other side may store U+FFFD there.
    hashes = HashedKeys(valid(_texts(keys))[0]).hash64
    # A key whose hash happens to be NO_KEY gets another hash, so that the row does not count as a row without a key.
    rows["key"] = np.where((hashes == NO_KEY) & keys.is_valid().to_numpy(zero_copy_only=False), np.uint64(1), hashes)
    rows["id"] = identities(ids)
    rows["at"] = np.arange(at, at + len(ids))
    rows["lane"] = lane
    return rows


def _field(bodies: pa.Array, field: str | None, where: str, what: str, first: int) -> pa.Array:
    """Return the identity in each body: the field, or the whole body if ``field`` is None. Raises OptionError INVALID."""
    ids, why = bodies, "there is no value"
    if field is not None:
        try:
            ids, why = json_field.values(bodies, field), f"there is no field {field!r}"
        except BadJson as error:
            raise OptionError(
                OptionCondition.INVALID,
                f"{where} {what} {first + error.row}: {error.why}. Leave --id-field out to compare whole bodies",
            ) from error
    if ids.null_count:
        row = int(pc.index(ids.is_null(), True).as_py())
        raise OptionError(
            OptionCondition.INVALID,
            f"{where} {what} {first + row}: {why} to identify the message. Filter the row out, or give another --id-field or --id-column",
        )
    return ids


def _open(path: Path) -> Any:
    if not path.exists():
        raise TopicError(
            TopicCondition.MISSING,
            f"the Parquet file or directory {path} does not exist. To name a topic, leave out slashes and dots",
        )
    source: Any = str(path)
    committed = path / "_spark_metadata"
    if committed.is_dir():
        source = _committed(path, committed)
    try:
        return pyarrow.dataset.dataset(source, format="parquet")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise OptionError(OptionCondition.INVALID, f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def _committed(folder: Path, log: Path) -> list[str]:
    """Return the files in the log of Spark's streaming file sink. The folder may also have uncommitted files, of repeated batches."""
    compact = max((int(entry.stem) for entry in log.glob("*.compact")), default=-1)
    entries = [log / f"{compact}.compact"] if compact >= 0 else []
    entries += sorted(
        (entry for entry in log.iterdir() if entry.name.isdigit() and int(entry.name) > compact),
        key=lambda entry: int(entry.name),
    )
    out = []
    for entry in entries:
        for line in entry.read_text().splitlines()[1:]:
            file = Path(unquote(urlsplit(json.loads(line)["path"]).path))
            out.append(str(file if file.exists() else folder / file.name))
    return out
