"""An Iceberg table, by the package pyiceberg. Positions are properties of the table, one for each queue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from ordered_sink.once.rule import Position, Positions
from ordered_sink.once.targets import Append, Conflict, refused, require_columns
from orderedmq.model import MessageQueue

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table


class IcebergTarget:
    """A table of a catalog. It must exist."""

    def __init__(self, catalog: Catalog, table: str, stream: str) -> None:
        self._catalog, self._identifier, self._stream = catalog, table, stream
        self.name = f"Iceberg table {table}"

    def prepare(self, schema: pa.Schema) -> None:
        require_columns(self.name, self._catalog.load_table(self._identifier).schema().column_names, schema)

    def read(self, queues: Sequence[MessageQueue]) -> tuple[Positions, Append]:
        table = self._catalog.load_table(self._identifier)
        texts = {queue: table.properties.get(self._property(queue)) for queue in queues}
        positions = {queue: Position(*map(int, text.split())) for queue, text in texts.items() if text is not None}
        return positions, partial(self._append, table)

    def _append(self, table: Table, rows: pa.RecordBatchReader, moved: Positions) -> None:
        from pyiceberg.exceptions import CommitFailedException

        # After a conflict, pyiceberg would append the same files without a look at the positions. How often it does so, it reads in
        # the properties of this object; the stored table keeps its own.
        properties = {**table.metadata.properties, "commit.retry.num-retries": "0"}
        table.metadata = table.metadata.model_copy(update={"properties": properties})
        try:
            with table.transaction() as transaction:
                # This makes a snapshot also without rows, and only a snapshot conflicts with other commits. pyiceberg cannot write a
                # partitioned table in pieces.
                transaction.append(rows if table.spec().is_unpartitioned() else rows.read_all())
                transaction.set_properties({self._property(queue): f"{at.next} {at.stored}" for queue, at in moved.items()})
        except CommitFailedException as error:
            raise Conflict from error
        except (ValueError, pa.ArrowInvalid) as error:
            raise refused(self.name, error) from error

    def _property(self, queue: MessageQueue) -> str:
        return f"orderedmq/{self._stream}/{queue}"
