"""The demo: a year of flights through ordered queues, with the job killed half-way. Its Spark job is the package orderedmq_demo."""

from __future__ import annotations

from typing import Final

#: The topics that the job reads and writes. The second one is the name of its consumer group, too.
IN: Final = "flights"
OUT: Final = "turnarounds"
