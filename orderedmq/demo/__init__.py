"""The demo: a year of flights through ordered queues, with the job killed half-way. Only its Spark job imports Spark."""

from __future__ import annotations

from typing import Final

#: The topics that the job reads and writes. The second one is the name of its consumer group, too.
IN: Final = "flights"
OUT: Final = "turnarounds"
