"""A Delta table, by the package deltalake. Positions are versions of transactions in the table's log, two for each queue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from ordered_sink.once.rule import Position, Positions
from ordered_sink.once.targets import Append, Conflict, refused, require_columns
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import MessageQueue

if TYPE_CHECKING:
    from deltalake import DeltaTable


class DeltaTarget:
    """The Delta table at a path, or an open table, as for storage that needs options."""

    def __init__(self, table: str | Path | DeltaTable, stream: str) -> None:
        self._given = table
        self._stream = stream
        path = str(getattr(table, "table_uri", table))
        self.name = f"Delta table {path}"
        folder = Path(path)
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "_delta_log").is_dir():
            raise OptionError(
                OptionCondition.UNSUPPORTED,
                f"{path} has files, but no log of Delta. Plain files, such as Parquet, cannot record positions together with rows. Name a "
                "Delta table, or a folder that does not exist",
            )

    def prepare(self, schema: pa.Schema) -> None:
        from deltalake import DeltaTable

        table = self._open()
        if table is not None:
            require_columns(self.name, [field.name for field in table.schema().fields], schema)
        else:
            # A write that creates the table would not conflict with another one.
            DeltaTable.create(str(self._given), schema, mode="ignore")

    def read(self, queues: Sequence[MessageQueue]) -> tuple[Positions, Append]:
        table = self._open()
        positions: dict[MessageQueue, Position] = {}
        if table is not None:
            for queue in queues:
                offset, stored = map(table.transaction_version, self._apps(queue))
                if offset is not None:
                    positions[queue] = Position(offset, stored or 0)
        return positions, partial(self._append, table)

    def _append(self, table: DeltaTable | None, rows: pa.RecordBatchReader, moved: Positions) -> None:
        from deltalake import CommitProperties, Transaction, write_deltalake
        from deltalake.exceptions import CommitFailedError, SchemaMismatchError

        assert table is not None
        versions = [
            Transaction(app, version) for queue, at in moved.items() for app, version in zip(self._apps(queue), at, strict=True)
        ]
        try:
            # If another writer has committed, deltalake commits after it, unless that one has set one of these versions too.
            write_deltalake(table, rows, mode="append", commit_properties=CommitProperties(app_transactions=versions))
        except CommitFailedError as error:
            raise Conflict from error
        except SchemaMismatchError as error:
            raise refused(self.name, error) from error

    def _open(self) -> DeltaTable | None:
        from deltalake import DeltaTable

        if isinstance(self._given, DeltaTable):
            self._given.update_incremental()
            return self._given
        return DeltaTable(self._given) if DeltaTable.is_deltatable(str(self._given)) else None

    def _apps(self, queue: MessageQueue) -> tuple[str, str]:
        """The names of a queue's versions: its next offset, and its latest store timestamp."""
        name = f"orderedmq/{self._stream}/{queue}"
        return name, f"{name}/stored"
