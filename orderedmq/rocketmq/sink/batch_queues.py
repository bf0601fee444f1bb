"""The queues over which a batch's rows of one topic are spread, and the record of them that each broker stores. Pure.

A key's queue is chosen by its place in the list of the topic's queues. If two attempts of a batch had different lists, because a broker
died, became read-only or got queues in between, the rows of a key would be in two queues, and rows would be written twice. So the first
attempt fixes the list, and stores at each broker of the topic a `Record`: one number, because a broker stores nothing else
(`wire.registers`). It has the number of the batch's queues at this broker, and a digest of the whole list. From the records, later
attempts assemble the list again, and the digest proves that no part is missing or wrong. `agreement` says who writes the records, and
when.

Because the list is fixed before the first row is sent, its brokers must be there for every attempt that sends. A list in which a
broker has no record is *incomplete*, and nobody has sent rows by it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Final, NamedTuple

from orderedmq.conditions import SinkCondition
from orderedmq.errors import SinkError
from orderedmq.model import MessageQueue, java_order
from orderedmq.rocketmq.wire.route import Route

_BATCH_BITS: Final = 15
_SHARE_BITS: Final = 17
_DIGEST_BITS: Final = 31
#: Lists that are tried if brokers have no record, because they have none of the batch's queues, or have forgotten it, or an attempt died
#: before it stored all records.
_MOST_CANDIDATES: Final = 20_000


class Record(NamedTuple):
    """What one broker stores: the last bits of the batch's number, its share of the queues (perhaps 0), and the digest of the list."""

    batch: int
    share: int
    digest: int

    @classmethod
    def parse(cls, value: int) -> Record:
        return cls(
            value >> _SHARE_BITS + _DIGEST_BITS, value >> _DIGEST_BITS & (1 << _SHARE_BITS) - 1, value & (1 << _DIGEST_BITS) - 1
        )

    @property
    def value(self) -> int:
        return (self.batch << _SHARE_BITS | self.share) << _DIGEST_BITS | self.digest

    def is_of(self, batch: int) -> bool:
        return self.batch == batch & (1 << _BATCH_BITS) - 1 and self.value > 0


@dataclass(frozen=True)
class BatchQueues:
    """The list of a batch's queues in one topic, in the order of the indices that selectors compute."""

    batch: int
    queues: tuple[MessageQueue, ...]

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The number of queues of each broker."""
        return Counter(self._names)

    @cached_property
    def _names(self) -> list[str]:
        return [queue.broker_name for queue in self.queues]

    @cached_property
    def digest(self) -> int:
        # Each task computes this, so compare names only, which takes a fifth of the time.
        shares = (f"{name}/{len(list(equal))}" for name, equal in itertools.groupby(self._names))
        text = "\0".join([str(self.batch), *shares])
        return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") % (
            1 << _DIGEST_BITS
        )

    def record(self, broker_name: str) -> Record:
        return Record(self.batch & (1 << _BATCH_BITS) - 1, self.counts.get(broker_name, 0), self.digest)

    def required(self, route: Route) -> list[str]:
        """Return the brokers that must have the record before rows are sent.

        An order configuration also lists absent brokers, and the list is the same without them. Rows for their queues fail when they
        are sent.
        """
        return [name for name in self.counts if name in route.brokers or not route.order_conf]

    def lack(self, route: Route, *, sending: bool, recorded: bool) -> str | None:
        """Return what prevents rows from being sent to these queues, or only searched for, unless ``sending``; None if nothing does.

        ``recorded``: an attempt has recorded the list. A resize of the topic waits for this batch, and lets no other begin.
        """
        present = {data.broker_name: data for data in route.queues}
        for name in self.required(route):
            broker, data = route.brokers.get(name), present.get(name)
            if broker is None or data is None:
                return f"broker {name!r} is away or no longer has the topic"
            if broker.master is None:
                return f"broker {name!r} has no master"
            if sending and not (data.writable or (recorded and data.paused)):
                return f"the topic is read-only at broker {name!r}"
            if sending and data.write_queues < self.counts[name]:
                return f"broker {name!r} has only {data.write_queues} of its {self.counts[name]} queues"
        return None


def recorded(proposed: BatchQueues, records: Mapping[str, Record], route: Route, newest: int = -1) -> BatchQueues | None:
    """Return the list that an earlier attempt of the batch has fixed; None if there is none.

    ``proposed``: the list that this attempt would use. ``records``: of the brokers that have answered. ``newest``: the sink's newest
    committed batch. A record has only the last bits of a batch's number, so it may be that batch's. Raises SinkError QUEUES_AWAY if
    the records name a list that cannot be assembled, because one of its brokers is away.
    """
    of_batch = {name: record for name, record in records.items() if record.is_of(proposed.batch)}
    if not of_batch:
        return None
    if newest not in (-1, proposed.batch):
        earlier = {former.digest for former in _lists(replace(proposed, batch=newest), of_batch, route)}
        of_batch = {name: record for name, record in of_batch.items() if record.digest not in earlier}
        if not of_batch:
            return None
    lists = _lists(proposed, of_batch, route)
    # An attempt that died before it stored all records has left an incomplete list. If there is also a complete one, that one counts.
    complete = [queues for queues in lists if all(records.get(name) == queues.record(name) for name in queues.counts)]
    if len(complete or lists) == 1:
        return (complete or lists)[0]
    there = ", ".join(f"{data.write_queues} at {data.broker_name!r}" for data in route.queues) or "none"
    raise queues_away(proposed, f"a broker that has some of them is away (there are {there})")


def _lists(proposed: BatchQueues, records: Mapping[str, Record], route: Route) -> list[BatchQueues]:
    """Return the lists that can be assembled from records of the batch that ``proposed`` is for."""
    lists = []
    for digest in sorted({record.digest for record in records.values() if record.is_of(proposed.batch)}):
        queues = next((queues for queues in _candidates(proposed, digest, records, route) if queues.digest == digest), None)
        if queues is not None:
            lists.append(queues)
    return lists


def _candidates(proposed: BatchQueues, digest: int, records: Mapping[str, Record], route: Route) -> Iterator[BatchQueues]:
    """Yield the lists that may have the digest. A broker whose record has another digest is in none: that list is incomplete."""
    has = {name: record.share for name, record in records.items() if record.digest == digest}
    if all(name in has or name not in records for name in proposed.counts):
        yield proposed
    certain = {name: share for name, share in has.items() if share}
    unknown = [data for data in route.queues if data.broker_name not in records and data.write_queues]
    # A broker without a record has as many of the batch's queues as it has now, or none, or fewer, because it has got queues since.
    shares = itertools.product(*([data.write_queues, *range(data.write_queues)] for data in unknown))
    for some in itertools.islice(shares, _MOST_CANDIDATES):
        counts = {**certain, **{data.broker_name: share for data, share in zip(unknown, some) if share}}
        for names in _orders(counts, route):
            queues = tuple(MessageQueue(route.topic, name, number) for name in names for number in range(counts[name]))
            yield BatchQueues(proposed.batch, queues)


def _orders(names: Iterable[str], route: Route) -> Iterator[Sequence[str]]:
    """Yield the orders in which `Route.publish_list` may have these brokers."""
    by_name = sorted(names, key=java_order)
    yield by_name
    if route.order_conf:
        places = {name: place for place, (name, _) in enumerate(route.order_conf)}
        yield sorted(by_name, key=lambda name: places.get(name, len(places)))


def queues_away(queues: BatchQueues, why: str) -> SinkError:
    """Return the error of an attempt that must not send, because rows of the batch's earlier attempts are spread over other queues."""
    topic = queues.queues[0].topic if queues.queues else ""
    return SinkError(
        SinkCondition.QUEUES_AWAY,
        f"batch {queues.batch} cannot be written to topic {topic!r} now, and nothing is sent: {why}. All attempts of a batch use the same "
        "queues, because with others its rows would be written twice, and keys would be in two queues. Start the broker, or give the "
        "topic its queues and permission 6 there again, and start the query again. If they are gone for good, set option sinkGroup to a "
        "new name: the batch is then written to the present queues, and rows that it had written to others are there twice",
    )
