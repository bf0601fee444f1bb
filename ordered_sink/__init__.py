"""The sink: Spark's writers for a broker. ``writer`` runs in executors, ``commit`` on the driver; the logic below them is in orderedmq."""

from ordered_sink.route import route

__all__ = ["route"]
