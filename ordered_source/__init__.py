"""The source: readers with which Spark reads queues of a broker, listeners, and state per key.

``stream_reader`` and ``batch_reader`` run on the driver, ``partition_reader`` and ``listener`` on executors. The rules that they
follow are in the package orderedmq. The names below are loaded on first use, because Spark imports this package in many short-lived
processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from orderedmq.spark_support import require_pyspark

if TYPE_CHECKING:
    from ordered_source.in_order import KeyState, process_in_order
    from ordered_source.listener.consume import consume_concurrently, consume_orderly
    from ordered_source.listener.dead_letter import dead_letter
    from ordered_source.stopping import stop_at_boundary, stop_on_sigterm
    from orderedmq.listening.concurrent_engine import ConcurrentSettings
    from orderedmq.listening.key_engine import OrderPerKey
    from orderedmq.listening.listener import (
        ConsumeConcurrentlyContext,
        ConsumeConcurrentlyStatus,
        ConsumeOrderlyContext,
        ConsumeOrderlyStatus,
    )
    from orderedmq.listening.queue_engine import OrderPerQueue

__all__ = [
    "ConcurrentSettings", "ConsumeConcurrentlyContext", "ConsumeConcurrentlyStatus", "ConsumeOrderlyContext", "ConsumeOrderlyStatus",
    "KeyState", "OrderPerKey", "OrderPerQueue", "consume_concurrently", "consume_orderly", "dead_letter", "process_in_order",
    "stop_at_boundary", "stop_on_sigterm",
]  # fmt: skip

_HOMES = {
    "ConcurrentSettings": "orderedmq.listening.concurrent_engine",
    "ConsumeConcurrentlyContext": "orderedmq.listening.listener",
    "ConsumeConcurrentlyStatus": "orderedmq.listening.listener",
    "ConsumeOrderlyContext": "orderedmq.listening.listener",
    "ConsumeOrderlyStatus": "orderedmq.listening.listener",
    "KeyState": "ordered_source.in_order",
    "OrderPerKey": "orderedmq.listening.key_engine",
    "OrderPerQueue": "orderedmq.listening.queue_engine",
    "consume_concurrently": "ordered_source.listener.consume",
    "consume_orderly": "ordered_source.listener.consume",
    "dead_letter": "ordered_source.listener.dead_letter",
    "process_in_order": "ordered_source.in_order",
    "stop_at_boundary": "ordered_source.stopping",
    "stop_on_sigterm": "ordered_source.stopping",
}


def __dir__() -> list[str]:
    """Return the public names, for Tab."""
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if home.startswith("ordered_source."):
        require_pyspark(f"ordered_source.{name}")
    return getattr(import_module(home), name)
