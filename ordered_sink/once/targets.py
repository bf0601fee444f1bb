"""What a table must offer so that each message is in it once, and the loop that appends a micro-batch to it.

The loop reads the table's positions, appends the rows that the table lacks, and moves the positions, in one commit. The commit fails if a
position has changed since it was read. Then the loop reads the positions again, because another writer may have appended the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from ordered_sink.once.rule import Positions
from orderedmq.conditions import SchemaCondition, SinkCondition
from orderedmq.errors import SchemaError, SinkError
from orderedmq.model import MessageQueue

#: How often a micro-batch is tried while other writers commit to the table.
ATTEMPTS: Final = 20


class Conflict(Exception):
    """The table has changed since its positions were read, and nothing was appended."""


#: Appends the rows and sets the positions, in one commit. Raises Conflict if one of these positions has changed since `Target.read`.
Append = Callable[[pa.RecordBatchReader, Positions], None]


class Target(Protocol):
    """A table that can record positions. ``name``: the table, as errors name it."""

    name: str

    def prepare(self, schema: pa.Schema) -> None:
        """Check that the table accepts rows of this schema, and create what it lacks. Raises SchemaError, OptionError."""

    def read(self, queues: Sequence[MessageQueue]) -> tuple[Positions, Append]:
        """Return the table's positions in these queues, and how to append to the table. A table that does not exist yet has none."""


class Part(NamedTuple):
    """What a table lacks of a micro-batch. ``queues``: those of the whole micro-batch. ``moved``: the positions once the table has the rows."""

    rows: pa.RecordBatchReader
    moved: Positions
    queues: Set[MessageQueue]


class Batch(Protocol):
    """A micro-batch. ``schema``: the columns that the table gets."""

    @property
    def schema(self) -> pa.Schema: ...

    def missing(self, positions: Positions) -> Part:
        """Return what a table at ``positions`` lacks, in the form that the table gets. The rows are computed when they are read."""


def append(target: Target, batch: Batch, queues: Set[MessageQueue] = frozenset()) -> Set[MessageQueue]:
    """Append the rows that the table lacks, in one commit. Return ``queues``, those of earlier micro-batches, with those of this one.

    To know some queues beforehand saves a look at the rows. Raises SinkError TARGET_BUSY.
    """
    target.prepare(batch.schema)
    cause = None
    for _ in range(ATTEMPTS):
        positions, commit = target.read(sorted(queues))
        part = batch.missing(positions)
        if not queues >= part.queues:
            queues = queues | part.queues
            continue
        if not part.moved:
            return queues
        try:
            commit(part.rows, part.moved)
            return queues
        except Conflict as conflict:
            cause = conflict.__cause__
    raise SinkError(
        SinkCondition.TARGET_BUSY,
        f"{target.name} refused {ATTEMPTS} commits of one micro-batch, the last one because of: {first_line(cause)}. If other writers commit "
        "all the time, let them write less often. Nothing was appended; restart the query",
    ) from cause


def require_columns(table: str, names: Sequence[str], schema: pa.Schema) -> None:
    """Check that a table with columns ``names`` has those of the rows. Raises SchemaError UNKNOWN_COLUMN."""
    for name in schema.names:
        if name not in names:
            raise SchemaError(
                SchemaCondition.UNKNOWN_COLUMN,
                f"{table} has no column {name!r}, only {', '.join(names)}. Add it to the table, or drop it (columns=, shape=)",
            )


def refused(table: str, error: BaseException) -> SchemaError:
    """Return the error for rows whose types the table does not accept."""
    return SchemaError(SchemaCondition.WRONG_TYPE, f"{table} refuses the rows: {first_line(error)}. Cast the column (shape=)")


def first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
