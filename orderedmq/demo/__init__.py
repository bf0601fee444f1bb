"""The demo: sends a year of flights through ordered queues, and kills the job half-way. Only the module ``job`` imports Spark."""

from __future__ import annotations

from typing import Final

#: The topics that the job reads and writes. The name of the second topic is also the name of the job's consumer group.
IN: Final = "flights"
OUT: Final = "turnarounds"
