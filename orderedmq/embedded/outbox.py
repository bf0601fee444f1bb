"""The Outbox protocol on the store: each attempt of a task stages rows in its own segment, and one transaction publishes them.

A publish writes index entries, not messages (except small chunks, which it stores or merges). Its steps, in order:

1. If the batch number is already recorded, do nothing if the content is the same, and refuse the batch otherwise.
2. Refuse the batch if this run registered a source whose lock epoch is now stale. A source that was deleted after it was read is not.
3. Refuse the batch if another batch of the sink has published the same messages.
4. Refuse the batch if a segment is missing, or if a topic was resized after its rows were staged. `publish` then stages them again.
5. Make the rows visible in (partition, row) order, record the batch, and move the group offsets of the run's sources.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from orderedmq.broker import ChooseAgain, Outbox, Published, Receipt, SinkBatch
from orderedmq.conditions import SinkCondition, TopicCondition
from orderedmq.embedded import garbage, groups, runs
from orderedmq.embedded.clock import Clock
from orderedmq.embedded.index import incarnation_of, targets_of, topic_of
from orderedmq.embedded.runs import Registration
from orderedmq.embedded.staging import EmbeddedStaging, discard, make_visible, staged_rows
from orderedmq.embedded.store import schema
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.schema import BATCHES, BatchRow
from orderedmq.embedded.store.transaction import Transaction
from orderedmq.errors import NEWEST_CHECKPOINT, SinkError, TopicError
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.micro_batch import KEPT_BATCHES, SourceRun, is_repeat, require_same
from orderedmq.routing.selector import by_queue

#: How often the rows of a batch are routed, because their topics were resized in the meantime.
_CHOICES: Final = 5


class EmbeddedOutbox(Outbox):
    """The Outbox protocol. Thread-safe."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def register(self, run: SourceRun, queue: MessageQueue, offsets: OffsetRange, token: LockToken | None) -> None:
        with self._store.errors_mapped("register a source"):
            runs.register(self._store.path, run, Registration(queue, offsets, token), self._clock.instant())

    def open(self, batch: SinkBatch, partition: int) -> EmbeddedStaging:
        return EmbeddedStaging(self._store, self._clock, batch, partition)

    def publish(
        self,
        batch: SinkBatch,
        receipts: Sequence[Receipt],
        *,
        move_offsets: bool = True,
        skip_differing_replay: bool = False,
        again: Callable[[int], ChooseAgain] | None = None,
    ) -> Published:
        chosen: dict[int, Receipt] = {}
        for receipt in receipts:
            # Two attempts of one partition have the same rows, so only the first receipt counts.
            chosen.setdefault(receipt.partition, receipt)
        ordered = [chosen[partition] for partition in sorted(chosen)]
        with self._store.errors_mapped("publish"):
            sources = runs.registered(self._store.path, batch.run) if batch.run else []
        for choices_left in reversed(range(_CHOICES)):
            try:
                return self._publish(batch, sources, ordered, receipts, move_offsets, skip_differing_replay)
            except TopicError as error:
                if error.sub != TopicCondition.QUEUE_COUNT or again is None or not choices_left:
                    raise
                ordered = [self._stage_again(batch, receipt, again(receipt.partition)) for receipt in ordered]
                receipts = [*receipts, *ordered]
        raise AssertionError("the last choice returns or raises")

    def _stage_again(self, batch: SinkBatch, receipt: Receipt, choose: ChooseAgain) -> Receipt:
        """Stage the rows of a receipt again, in the queues that their topics have now. Rows of one queue keep their order."""
        staging = self.open(batch, receipt.partition)
        try:
            with self._store.read() as txn:
                topics = [topic_of(txn, name) for name in receipt.staged.spread]
            queues = {topic.name: staging.targets(topic.name, targets_of(topic)) for topic in topics}
            for queue, rows in staged_rows(self._store, receipt):
                numbers = pa.repeat(pa.scalar(queue.queue_id, pa.int32()), rows.num_rows)
                chosen = choose(rows.append_column("queue_id", numbers), len(queues[queue.topic]))
                for target, some in by_queue(rows, chosen, queues[queue.topic]):
                    staging.add(target, some)
            return staging.receipt()
        except BaseException:
            staging.abandon()
            raise

    def _publish(
        self,
        batch: SinkBatch,
        sources: Sequence[Registration],
        ordered: Sequence[Receipt],
        receipts: Sequence[Receipt],
        move_offsets: bool,
        skip_differing_replay: bool,
    ) -> Published:
        """Publish ``ordered``, the receipts that count among ``receipts``. Raises TopicError QUEUE_COUNT, and the errors of `publish`."""
        with self._store.write() as txn:
            record = _record(txn, sources, ordered)
            if batch.sink_id is not None and self._was_published(txn, batch, record, skip_differing_replay):
                discard(txn, receipts)
                return Published(True, {})
            locks = {
                source.token: groups.require_current(txn, source.token, f"batch {batch.batch_id} was published", deleted=True)
                for source in sources
                if source.token is not None
            }
            if batch.sink_id is not None:
                self._require_new(txn, batch, sources)
            ranges = make_visible(txn, ordered, self._clock, own_selector=batch.own_selector)
            if batch.sink_id is not None:
                self._remember(txn, batch, record)
            if move_offsets:
                for source in sources:
                    if source.token is not None:
                        groups.forward(txn, source.token, source.offsets.end, locks[source.token])
            # The remaining receipts are other attempts of partitions that were published.
            discard(txn, receipts)
        garbage.tidy(self._store, self._clock)
        return Published(False, ranges)

    def discard(self, receipts: Sequence[Receipt]) -> None:
        with self._store.write() as txn:
            discard(txn, receipts)

    # -- the steps of a publish ----------------------------------------------------------------------------------------------

    def _was_published(self, txn: Transaction, batch: SinkBatch, record: Mapping[str, Any], skip: bool) -> bool:
        """Whether the batch was published before.

        Raises SinkError OUT_OF_ORDER. Unless ``skip`` applies, also raises REPLAY_DIFFERS or BATCH_TOO_OLD.
        """
        assert batch.sink_id is not None
        sink = schema.sink_key(batch.sink_id)
        former, last = txn.get(BATCHES, sink, batch.batch_id), txn.last(BATCHES, sink)
        latest = None if last is None else last.batch_id
        ranges = bool(record["sources"])
        if not is_repeat(batch.sink_id, batch.batch_id, latest, former is not None, skip=skip, ranges=ranges):
            return False
        if former is not None:
            old = json.loads(former.record)
            require_same(batch.sink_id, batch.batch_id, latest, _other_ranges(old, record), skip=skip, ranges=True)
            require_same(batch.sink_id, batch.batch_id, latest, _other_rows(old, record), skip=skip)
        return True

    def _require_new(self, txn: Transaction, batch: SinkBatch, sources: Sequence[Registration]) -> None:
        """Refuse sources whose messages another batch of this sink has published. Raises SinkError REPLAY_DIFFERS.

        Only a range that begins below the group's offset can have such messages, so other ranges are not checked.
        """
        assert batch.sink_id is not None
        behind: dict[tuple[str, str, int], OffsetRange] = {}
        for source in sources:
            if source.token is not None:
                at = groups.offset_at(txn, source.token.group, source.queue)
                if at is not None and at > source.offsets.begin:
                    behind[source.token.group, source.queue.topic, source.queue.queue_id] = source.offsets
        if not behind:
            return
        for former in txn.scan(BATCHES, schema.sink_key(batch.sink_id)):
            for group, topic, queue_id, begin, end, incarnation in json.loads(former.record)["sources"]:
                again = behind.get((group, topic, queue_id))
                if again is not None and incarnation == incarnation_of(txn, topic) and again.begin < end and begin < again.end:
                    raise SinkError(
                        SinkCondition.REPLAY_DIFFERS,
                        f"batch {batch.batch_id} of this query has messages {again.begin} to {again.end - 1} of queue {topic}/{queue_id}, but "
                        f"batch {former.batch_id} has already published {begin} to {end - 1}: the checkpoint is an old copy that "
                        f"ran with other limits. {NEWEST_CHECKPOINT}, which resumes at the group's offset",
                    )

    def _remember(self, txn: Transaction, batch: SinkBatch, record: Mapping[str, Any]) -> None:
        assert batch.sink_id is not None
        sink = schema.sink_key(batch.sink_id)
        txn.put(BatchRow(sink, batch.batch_id, json.dumps(record)))
        kept_from = batch.batch_id - KEPT_BATCHES + 1
        for old in list(itertools.takewhile(lambda former: former.batch_id < kept_from, txn.scan(BATCHES, sink))):
            txn.delete(BATCHES, sink, old.batch_id)


def forget_topics(txn: Transaction, topics: Collection[str]) -> None:
    """Forget which batches wrote to deleted ``topics``, so that a repeat of such a batch writes its rows again.

    The record of a batch that also wrote to other topics stays, with 0 rows in each queue that is gone, and so does a record before one
    that stays, because a sink's batches are written in order.
    """
    kept: set[str] = set()
    for batch in reversed(list(txn.scan(BATCHES))):
        record = json.loads(batch.record)
        rows = [[topic, queue_id, 0 if topic in topics else count] for topic, queue_id, count in record["rows"]]
        if rows and batch.sink not in kept and not any(count for _, _, count in rows):
            txn.delete(BATCHES, batch.sink, batch.batch_id)
            continue
        kept.add(batch.sink)
        if rows != record["rows"]:
            spread = {topic: count for topic, count in record["spread"].items() if topic not in topics}
            txn.put(batch._replace(record=json.dumps(record | {"rows": rows, "spread": spread})))


def _record(txn: Transaction, sources: Iterable[Registration], receipts: Iterable[Receipt]) -> dict[str, Any]:
    """Return what identifies the batch: the ranges that it read and the incarnations of their topics, its rows per queue, and its content.

    The content is compared per topic, because rows without a key may be in other queues when their task gets them in another order.
    """
    rows: dict[MessageQueue, int] = {}
    content: dict[str, int] = {}
    spread: dict[str, int] = {}
    for receipt in receipts:
        spread |= receipt.staged.spread
        for queue, count in receipt.rows.items():
            rows[queue] = rows.get(queue, 0) + count
        for topic, total in receipt.staged.content.items():
            content[topic] = content.get(topic, 0) + total
    return {
        "sources": [
            [
                source.token.group if source.token else None,
                source.queue.topic,
                source.queue.queue_id,
                *source.offsets,
                incarnation_of(txn, source.queue.topic),
            ]
            for source in sources
        ],
        "rows": [[queue.topic, queue.queue_id, rows[queue]] for queue in sorted(rows) if rows[queue]],
        "content": {topic: f"{total % (1 << 64):016x}" for topic, total in sorted(content.items())},
        # A repeat of the batch must choose the same queues, also after the topic got more.
        "spread": spread,
    }


def _other_ranges(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return how the source ranges of a repeated batch differ from the recorded ones, or None if it is the same batch.

    A replay may lack whole queues (another owner took them over) and the first messages of a range (they aged out), but each range must
    end where the recorded range ends, because the next batch begins there. The query's consumer group may have changed.
    """
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {}
    incarnations: dict[str, str] = {}
    for _, topic, queue_id, begin, end, incarnation in old["sources"]:
        # A query may read a queue twice, in two groups or without one, so a queue may have several ranges.
        ranges.setdefault((topic, queue_id), []).append((begin, end))
        incarnations[topic] = incarnation
    for _, topic, queue_id, begin, end, incarnation in new["sources"]:
        queue = MessageQueue(topic, EMBEDDED_BROKER, queue_id)
        then = ranges.get((topic, queue_id))
        if then is None:
            return f"queue {queue} was not part of it"
        if incarnation != incarnations[topic]:
            return f"topic {topic!r} was deleted and created again since"
        if not any(first <= begin <= end == last for first, last in then):
            return f"queue {queue} was read from {then[0][0]} to {then[0][1]} then, and from {begin} to {end} now"
    return None


def _other_rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return how the rows of a repeated batch differ from the recorded ones, or None if no difference counts.

    The rows are compared only if neither has source ranges. A replay with rows in a topic that was deleted since
    differs: skipping it would lose these rows, and publishing it would write the others twice.
    """
    gone = {topic for topic, _, count in old["rows"] if not count}
    for topic, _, _ in new["rows"]:
        if topic in gone:
            return f"topic {topic!r} was deleted since, with rows of this batch"
    if new["sources"]:
        return None
    if old["sources"]:
        return "it had source ranges then and has none now" if new["rows"] else None
    if old["rows"] == new["rows"]:
        return None if old["content"] == new["content"] else "it has as many rows as then, but not the same ones"
    return f"it had {sum(row[2] for row in old['rows'])} rows then and has {sum(row[2] for row in new['rows'])} now, or in other queues"
