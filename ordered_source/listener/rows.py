"""The messages that a listener gets: rows of Arrow batches, with fields named like the columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ordered_source.columns import LotPlace
from orderedmq.text import valid


class Columns:
    """The columns of one batch as Python values. A column is converted when a listener first uses it."""

    __slots__ = ("_batch", "_values")

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self._values: dict[str, list[Any]] = {}

    @property
    def names(self) -> list[str]:
        names: list[str] = self._batch.schema.names
        return names

    def get(self, name: str) -> list[Any]:
        values = self._values.get(name)
        if values is None:
            if name not in self.names:
                raise AttributeError(f"a message has no field {name!r}, because the DataFrame only has {', '.join(self.names)}")
            values = self._values[name] = valid(self._batch.column(name))[0].to_pylist()
        return values

    def keys(self) -> Sequence[str | None]:
        """Return the column sharding_key, or None for each row if the column is missing."""
        return self.get("sharding_key") if "sharding_key" in self.names else [None] * self._batch.num_rows

    def retried(self) -> Sequence[int | None]:
        """Return the column reconsume_times, or an empty sequence if no message was retried."""
        if "reconsume_times" not in self.names or not pc.max(self._batch.column("reconsume_times")).as_py():
            return ()
        return self.get("reconsume_times")


class Rows(NamedTuple):
    """Rows of messages. ``first``: the first row's number. ``places``: their places in the parking lot; empty for rows of the queue."""

    columns: Columns
    first: int
    places: Sequence[LotPlace] = ()
