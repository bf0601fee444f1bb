"""The module that Spark discovers: the format ``orderedmq``.

Spark imports every top-level module named ``pyspark_*`` in each session that uses any Python data source, and if one import fails, all
Python data sources fail. So this module imports only Spark's own classes, and loads the rest when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """The format ``orderedmq``: ordered message queues as a source and a sink, for streams and batches.

    docs/reference/options.md lists the options and docs/reference/columns.md the columns. Mistakes in options and schemas are
    reported when the DataFrame is built or the write is planned, each with a condition from docs/reference/conditions.md.
    """

    def __init__(self, options: dict[str, str]) -> None:
        # Check here and not when Spark imports this module, where an error would break all other formats in Python.
        from orderedmq.spark_support import require_release

        require_release()
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "orderedmq"

    def schema(self) -> Any:
        from ordered_source.plan import planned_schema

        return planned_schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from ordered_source.batch_reader import BatchReader

        return BatchReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from ordered_source.stream_reader import StreamReader

        return StreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from ordered_sink.commit import BatchWriter

        return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from ordered_sink.commit import StreamWriter

        return StreamWriter(self.options, schema, overwrite)
