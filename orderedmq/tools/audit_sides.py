"""The sides that an audit can compare: a topic, or a table in Parquet files or in memory."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from orderedmq.broker import Log
from orderedmq.conditions import OptionCondition, TopicCondition
from orderedmq.errors import OptionError, TopicError, missing_package
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange
from orderedmq.text import repaired, text_of
from orderedmq.tools import json_field
from orderedmq.tools.json_field import BadJson
from orderedmq.tools.reader import PULL_ROWS, Ranges, Selection, batches, ranges

_POSITION: Final = ("broker_name", "queue_id", "queue_offset")
_COMPARED: Final = Selection((*_POSITION, "sharding_key", "body"), order="queue")
_SHOWN: Final = 80


class Location(NamedTuple):
    """An example row as shown to users: its location, key and identity."""

    where: str
    key: str | None
    id: str


class Side(Protocol):
    """One of the two histories."""

    @property
    def name(self) -> str: ...
    @property
    def messages(self) -> int:
        """The number of rows."""
        ...

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows.

        The columns: key (string), id (binary, the identity), sort (whole numbers) and number (int64, the row's number on its side), which
        order the rows together, and queue (string).
        """
        ...

    def locate(self, rows: Sequence[int]) -> list[Location]:
        """Return the locations of the rows with these numbers."""
        ...


class TopicSide:
    """The messages that a topic has now, each queue in the order of its offsets.

    ``id_field``: the field of JSON bodies that identifies a message; None: the whole body identifies it. ``since``: only messages
    stored at this time or later (µs since 1970).
    """

    def __init__(self, log: Log, topic: str, id_field: str | None = None, since: int | None = None) -> None:
        self.name = topic
        self._log = log
        self._field = id_field
        spans = ranges(log, topic, since=since)
        self._spans = {queue: span for queue, span in spans.items() if span.messages}
        #: The number of each queue's first row.
        self._begins = np.cumsum([0, *(span.messages for span in self._spans.values())]).tolist()

    @property
    def messages(self) -> int:
        return int(self._begins[-1])

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows. Raises OptionError INVALID for a body without the field, DataLossError if messages were deleted."""
        number = 0
        for queue, keys, ids in self._read(self._spans):
            yield _rows(keys, ids, number, pa.repeat(_short_name(queue), len(keys)))
            number += len(keys)

    def locate(self, rows: Sequence[int]) -> list[Location]:
        locations = []
        for number in rows:
            index = bisect_right(self._begins, number) - 1
            queue, span = list(self._spans.items())[index]
            offset = span.begin + number - self._begins[index]
            for _, keys, ids in self._read({queue: OffsetRange(offset, offset + 1)}):
                locations.append(_location(f"queue {_short_name(queue)} offset {offset}", keys, ids, 0))
        return locations

    def _read(self, spans: Ranges) -> Iterator[tuple[MessageQueue, pa.Array, pa.Array]]:
        """Yield the queue of each batch, its keys and its identities."""
        for batch in batches(self._log, spans, _COMPARED):
            *queue, offset = (batch[name][0].as_py() for name in _POSITION)
            named = MessageQueue(self.name, *queue)
            yield named, batch["sharding_key"], _field(batch["body"], self._field, f"queue {named}", "offset", offset)


class TableSide:
    """The rows of a table. ``name``: what the report calls it.

    ``id_column`` None: the identity is the column body, or its field ``id_field``. ``order_column`` None: rows are ordered by the
    column queue_offset if it exists, else in the order of the table.
    """

    def __init__(
        self,
        name: str,
        data: pyarrow.dataset.Dataset,
        *,
        key_column: str = "sharding_key",
        id_column: str | None = None,
        order_column: str | None = None,
        id_field: str | None = None,
    ) -> None:
        self.name = name
        self._data = data
        names = data.schema.names
        if order_column is None and "queue_offset" in names:
            order_column = "queue_offset"
        self._key, self._id, self._order = key_column, id_column or "body", order_column
        self._field = None if id_column else id_field
        for column in (self._key, self._id, self._order):
            if column is not None and column not in names:
                raise OptionError(
                    OptionCondition.INVALID,
                    f"{name} has no column {column!r}, only {', '.join(names)}. Name its columns with key_column, id_column and "
                    "order_column (--key-column, --id-column and --order-column)",
                )
        #: The columns that identify a row's queue.
        self._queue: list[str] = []
        if "queue_id" in names and pa.types.is_integer(data.schema.field("queue_id").type):
            self._queue = [column for column in ("broker_name", "queue_id") if column in names]
        self.messages = int(data.count_rows())

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows.

        Raises OptionError INVALID for a null identity or order, a body without the field, or a column that cannot be compared.
        """
        number = 0
        columns = [column for column in (self._key, self._id, self._order, *self._queue) if column is not None]
        for batch in self._data.scanner(columns=list(dict.fromkeys(columns)), batch_size=PULL_ROWS).to_batches():
            if not batch.num_rows:
                continue
            queue = [_text(batch, column, self.name).fill_null("") for column in self._queue]
            yield _rows(
                _text(batch, self._key, self.name),
                _field(_text(batch, self._id, self.name), self._field, self.name, "row", number),
                number,
                pc.binary_join_element_wise(*queue, "/") if queue else pa.repeat("", batch.num_rows),
                None if self._order is None else self._sort(batch[self._order]),
            )
            number += batch.num_rows

    def locate(self, rows: Sequence[int]) -> list[Location]:
        table = self._data.take(pa.array(rows), columns=list(dict.fromkeys((self._key, self._id))))
        batch = table.combine_chunks().to_batches()[0]
        keys = _text(batch, self._key, self.name)
        ids = _field(_text(batch, self._id, self.name), self._field, self.name, "row", 0)
        return [_location(f"row {number}", keys, ids, index) for index, number in enumerate(rows)]

    def _sort(self, column: pa.Array) -> pa.Array:
        kind = column.type
        if column.null_count:
            raise OptionError(
                OptionCondition.INVALID, f"column {self._order!r} of {self.name} has nulls, so it cannot order the rows"
            )
        if pa.types.is_integer(kind):
            return column
        if pa.types.is_date32(kind):
            return column.cast(pa.int32())
        if pa.types.is_timestamp(kind):
            return column.cast(pa.int64())
        raise OptionError(
            OptionCondition.INVALID,
            f"column {self._order!r} of {self.name} is {kind}, which cannot order rows. Give a column of whole numbers or times",
        )


def open_table(path: Path) -> pyarrow.dataset.Dataset:
    """Return the table in a Parquet file or directory, a Delta table, or an Iceberg table whose metadata file this is.

    Only what was committed counts, also in a directory of Spark's file sink. Raises TopicError MISSING, OptionError INVALID, or MISSING
    without the package that reads the table.
    """
    if not path.exists():
        raise TopicError(
            TopicCondition.MISSING,
            f"the Parquet file or directory {path} does not exist. To name a topic, leave out slashes and dots",
        )
    try:
        if (path / "_delta_log").is_dir():
            from deltalake import DeltaTable

            return DeltaTable(path).to_pyarrow_dataset()
        if path.name.endswith(".metadata.json"):
            from pyiceberg.table import StaticTable

            files = [task.file.file_path for task in StaticTable.from_metadata(str(path)).scan().plan_files()]
            return pyarrow.dataset.dataset([file.removeprefix("file://") for file in files], format="parquet")
    except ModuleNotFoundError as error:
        extra = "delta" if error.name == "deltalake" else "iceberg"
        raise missing_package(f"the audit of table {path}", str(error.name), extra) from error
    committed = path / "_spark_metadata"
    try:
        return pyarrow.dataset.dataset(_committed(path, committed) if committed.is_dir() else str(path), format="parquet")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise OptionError(OptionCondition.INVALID, f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def in_memory(name: str, batches: Sequence[pa.RecordBatch]) -> pyarrow.dataset.Dataset:
    """Return rows with the columns body and, if they have keys, sharding_key as one table.

    ``name``: what errors call it. Raises OptionError INVALID for a column that is missing or cannot be compared.
    """
    schema = pa.schema({"sharding_key": pa.string(), "body": pa.binary()})
    table = [schema.empty_table()]
    for batch in batches:
        names = batch.schema.names
        if "body" not in names:
            raise OptionError(
                OptionCondition.INVALID,
                f"{name} has no column 'body', only {', '.join(names)}. Rename the column of the bodies",
            )
        key = _text(batch, "sharding_key", name) if "sharding_key" in names else pa.nulls(batch.num_rows, pa.string())
        table.append(pa.table([_texts(key), _text(batch, "body", name).cast(pa.binary())], schema))
    return pyarrow.dataset.dataset(pa.concat_tables(table))


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


def _short_name(queue: MessageQueue) -> str:
    """Return the name of a queue of a known topic, without the name of the embedded broker, because it is always the same."""
    return str(queue.queue_id) if queue.broker_name == EMBEDDED_BROKER else f"{queue.broker_name}/{queue.queue_id}"


def _rows(keys: pa.Array, ids: pa.Array, number: int, queue: pa.Array, sort: pa.Array | None = None) -> pa.RecordBatch:
    rows = len(ids)
    return pa.record_batch(
        {
            # Replace malformed UTF-8 by U+FFFD, because the other side may store U+FFFD there.
            "key": repaired(_texts(keys))[0],
            "id": ids.cast(pa.binary()),
            "sort": pa.repeat(0, rows) if sort is None else sort,
            "number": np.arange(number, number + rows),
            "queue": queue,
        }
    )


def _location(where: str, keys: pa.Array, ids: pa.Array, index: int) -> Location:
    return Location(where, repaired(_texts(keys))[0][index].as_py(), shown(ids.cast(pa.binary())[index].as_py()))


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
