"""The source: Spark's readers over a broker, and listeners.

``stream_reader`` and ``batch_reader`` run on the driver, ``partition_reader`` and ``listener`` on executors; the rules are in
orderedmq. The names below are loaded on first use, because Spark imports this package in many short-lived processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ordered_source.lag_listener import LagListener
    from ordered_source.listener.concurrently import consume_concurrently
    from ordered_source.listener.dead_letter import dead_letter
    from ordered_source.listener.shell import consume_orderly
    from orderedmq.core.concurrently import ConsumeConcurrentlyContext, ConsumeConcurrentlyStatus
    from orderedmq.core.listener import ConsumeOrderlyContext, ConsumeOrderlyStatus

__all__ = [
    "ConsumeConcurrentlyContext", "ConsumeConcurrentlyStatus", "ConsumeOrderlyContext", "ConsumeOrderlyStatus", "LagListener",
    "consume_concurrently", "consume_orderly", "dead_letter",
]  # fmt: skip

_HOMES = {
    "ConsumeConcurrentlyContext": "orderedmq.core.concurrently",
    "ConsumeConcurrentlyStatus": "orderedmq.core.concurrently",
    "ConsumeOrderlyContext": "orderedmq.core.listener",
    "ConsumeOrderlyStatus": "orderedmq.core.listener",
    "LagListener": "ordered_source.lag_listener",
    "consume_concurrently": "ordered_source.listener.concurrently",
    "consume_orderly": "ordered_source.listener.shell",
    "dead_letter": "ordered_source.listener.dead_letter",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
