"""Listeners with order per key: what ``consume_orderly(order="key")`` gives to its shell."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from ordered_source.listener.key_shell import Answer, Kind
from ordered_source.listener.lying import Lying
from ordered_source.listener.messages import Message
from ordered_source.listener.tracing import NO_TRACING, Tracing
from orderedmq.core import key_order
from orderedmq.core.key_lanes import KeyLanes
from orderedmq.core.key_order import Batch, KeySettings, Outcome
from orderedmq.core.listener import ConsumeMessageHook, ConsumeOrderlyContext, ConsumeOrderlyStatus, Listener, call_listener
from orderedmq.endpoint import Credentials, TlsOptions
from orderedmq.model import MessageQueue

log = logging.getLogger("orderedmq")

NAME: Final = 'consume_orderly(order="key")'


class ByKey(Kind[KeyLanes]):
    """``consume_orderly(order="key")``."""

    def __init__(
        self,
        listener: Listener | type,
        settings: KeySettings,
        hooks: Sequence[ConsumeMessageHook] = (),
        credentials: Credentials | None = None,
        tls: TlsOptions | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        super().__init__(NAME, listener, settings.concurrency, credentials, tls, alone=False, tracing=tracing)
        self._settings, self._hooks = settings, hooks

    def engine(self, queue: MessageQueue, now: float, room: int, lot: Sequence[key_order.Message], lying: Lying) -> KeyLanes:
        settings = replace(self._settings, parking_lot_max_messages=room)
        return KeyLanes(queue, settings, now, lot, lying.waiting, lying.attempted)

    def call(self, listener: Any, messages: Sequence[Message], queue: MessageQueue) -> Answer:
        context = ConsumeOrderlyContext(queue)
        status, error = call_listener(listener, messages, context, self._hooks, log.warning)
        if status is ConsumeOrderlyStatus.SUCCESS and not context.auto_commit:
            status, error = (
                None,
                'context.auto_commit=False belongs to order="queue": with order="key" every batch commits itself',
            )
        return status, error, context

    def consumed(self, engine: KeyLanes, batch: Batch, answer: Answer, now: float) -> list[Outcome]:
        status, error, context = answer
        return engine.consumed(batch, status, error, now, context.suspend_current_queue_time_millis)
