"""The module that Spark discovers: the format ``orderedmq``.

Spark imports every top-level module named ``pyspark_*`` in each session that uses any Python data source, and if one import fails, all
Python data sources fail. So this module imports only Spark's own classes, and loads the rest when it is used.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import pyspark
from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType


_OLDEST: Final = (4, 2)


def require_spark(version: str = pyspark.__version__) -> None:
    """Raise RuntimeError if this release of PySpark is too old to run the source."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if found < _OLDEST:
        raise RuntimeError(
            f"orderedmq needs PySpark 4.2 or newer, but this is {version}: older releases do not pass a streaming source in Python the end of "
            "the last committed micro-batch and the limit of rows to read (latestOffset with start and limit). Upgrade Spark and PySpark"
        )


class DefaultSource(DataSource):
    """The format ``orderedmq``: ordered message queues as a source and a sink, for streams and batches.

    docs/reference/options.md lists the options and docs/reference/columns.md the columns. Mistakes in options and schemas are
    reported when the DataFrame is built or the write is planned, each with a condition from docs/reference/conditions.md.
    """

    def __init__(self, options: dict[str, str]) -> None:
        # Check here and not when Spark imports this module, where an error would break all other formats in Python.
        require_spark()
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "orderedmq"

    def schema(self) -> Any:
        from ordered_source.plan import planned_schema

        return planned_schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from ordered_source.pushed_filters import reader_class

        return reader_class()(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from ordered_source.stream_reader import StreamReader

        return StreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from ordered_sink.commit import BatchWriter

        return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from ordered_sink.commit import StreamWriter

        return StreamWriter(self.options, schema, overwrite)
