"""The sink: Spark's writers for a broker. ``writer`` runs in executors, ``commit`` on the driver; the logic below them is in orderedmq."""

from orderedmq.spark_support import require_pyspark

require_pyspark("ordered_sink")

from ordered_sink.route import route  # noqa: E402

__all__ = ["route"]
