"""The sink: Spark's writers over a broker. ``writer`` runs in executors, ``commit`` on the driver; the rules are in orderedmq."""

from ordered_sink.route import route

__all__ = ["route"]
