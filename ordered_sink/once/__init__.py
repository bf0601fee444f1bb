"""Functions for ``foreachBatch`` that append each message to a table once, whoever writes and whatever is killed, paused or taken over.

    from ordered_sink import once

    rows.writeStream.foreachBatch(once.delta("data/payments")).option("checkpointLocation", "ck").start()

The table holds its position in each queue, and moves it in the commit that adds the rows. `rule` says
which rows the table lacks, and `targets` has the loop.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ordered_sink.once.batch import Once
from ordered_sink.once.delta_table import DeltaTarget
from ordered_sink.once.iceberg_table import IcebergTarget
from ordered_sink.once.rule import POSITION_COLUMNS
from ordered_sink.once.sql_table import SqlTarget
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError, missing_package
from orderedmq.model import MessageQueue
from orderedmq.options.values import EARLIEST
from orderedmq.ownership.offsets import offsets_to_json

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyiceberg.catalog import Catalog
    from pyspark.sql import DataFrame

    Shape = Callable[[DataFrame], DataFrame]

__all__ = ["POSITION_COLUMNS", "delta", "iceberg", "positions", "sql"]


def delta(
    table: str | Path | DeltaTable,
    shape: Shape | None = None,
    *,
    columns: Sequence[str] = POSITION_COLUMNS,
    stream: str = "",
) -> Once:
    """Return a function for foreachBatch that appends each message to a Delta table once. The table is created if it does not exist.

    ``table``: its path, or an open table, as for storage that needs options. ``shape``: transforms the rows that the table lacks; it may
    drop, explode or aggregate them. ``columns``: which of the `POSITION_COLUMNS` the table has; the others are dropped at the end.
    ``stream``: streams that read the same queues, or equally named queues of two brokers, and write to one table need different names.

    Raises OptionError MISSING without the package deltalake, UNSUPPORTED for a folder with other files. When the query runs: SchemaError
    MISSING_COLUMN, UNKNOWN_COLUMN or WRONG_TYPE, SinkError TARGET_BUSY.
    """
    _require("once.delta", "deltalake", "delta")
    return Once(DeltaTarget(table, stream), shape, columns)


def iceberg(
    catalog: Catalog,
    table: str,
    shape: Shape | None = None,
    *,
    columns: Sequence[str] = POSITION_COLUMNS,
    stream: str = "",
) -> Once:
    """As `delta`, for a table of one of pyiceberg's catalogs. The table must exist."""
    _require("once.iceberg", "pyiceberg", "iceberg")
    return Once(IcebergTarget(catalog, table, stream), shape, columns)


def sql(
    connect: Callable[[], Any],
    table: str,
    shape: Shape | None = None,
    *,
    columns: Sequence[str] = POSITION_COLUMNS,
    stream: str = "",
) -> Once:
    """As `delta`, for a table of a SQL database. The table must exist.

    ``connect``: returns a new connection of a DB-API driver, without autocommit, such as ``lambda: psycopg.connect(address)``. ``table``:
    its name as in SQL. The positions are in the table orderedmq_positions of the same schema, which is created.

    When the query runs, also raises OptionError INVALID for a table that cannot be read or a connection that cannot be used.
    """
    return Once(SqlTarget(connect, table, stream), shape, columns)


def positions(write: Once, queues: Sequence[MessageQueue]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the next offset of each queue in a table, in the form of the source's option startingOffsets.

    ``write``: what `delta`, `iceberg` or `sql` returned. ``queues``: as from ``broker.log.queues(topic)``. A queue of which the table has
    no message has -2, which means its beginning.
    """
    recorded = write.target.read(queues)[0]
    return offsets_to_json({queue: recorded[queue].next if queue in recorded else EARLIEST for queue in queues})


def __dir__() -> list[str]:
    """Return the public names, for Tab."""
    return __all__


def __getattr__(name: str) -> NoReturn:
    if name in ("parquet", "kafka"):
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            f"once.{name} does not exist, because {name} cannot record positions in the commit that adds the rows. Write to once.delta, "
            "once.iceberg or once.sql, or to the format orderedmq",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _require(feature: str, package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise missing_package(feature, package, extra)
