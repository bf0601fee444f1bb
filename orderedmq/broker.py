"""The interface of a broker to the source, the sink and the command: four protocols.

Rules: source and sink use only this interface, and never branch on the kind of broker (``Capabilities`` says what differs by
nature). Every mutation of a group carries the lock token under which it is made. The token of a parking lot is guarded by the
lock of its queue (`parking.rules.guarding`): a broker compares that lock's epochs. tests/contract checks each broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from orderedmq.capabilities import Capabilities
from orderedmq.model import DEFAULT_COMPRESSION, MessageQueue, OffsetRange
from orderedmq.ownership.lock import ClientIdentity, LockToken, Refusal
from orderedmq.ownership.micro_batch import SourceRun
from orderedmq.rows.message_trace import TRACE_TOPIC, TracedCall

if TYPE_CHECKING:
    import pyarrow as pa

    from orderedmq.ownership.membership import Member, Subscription
    from orderedmq.parking.rules import AtSeek, Order, Put
    from orderedmq.rows.filters import Filter
    from orderedmq.rows.pull_settings import PullSettings


@dataclass(frozen=True)
class QueueBounds:
    """Offsets of the first stored message and of the next message to come."""

    min_offset: int
    max_offset: int


@dataclass(frozen=True)
class TopicInfo:
    """A topic and its settings. ``retention_*`` None: kept for ever. ``incarnation`` (embedded): tells it from an earlier one of its name."""

    name: str
    queues: int
    incarnation: str
    retention_seconds: float | None = None
    retention_bytes: int | None = None
    compression: str = "none"


class Keep(Enum):
    """Stands for a setting that stays as it is, because None is a value itself."""

    KEEP = "keep"


@dataclass(frozen=True)
class QueueInfo:
    """One queue as ``topic describe`` shows it. Sizes in bytes as stored, times in µs since the epoch (None: empty)."""

    queue: MessageQueue
    bounds: QueueBounds
    chunks: int
    stored_bytes: int
    first_timestamp: int | None
    last_timestamp: int | None


@dataclass(frozen=True)
class LockInfo:
    """A queue lock as ``lock list`` shows it; durations in seconds. ``held`` is false for a lock that was given back.

    ``name``: the owner's name for people, if known.
    """

    group: str
    queue: MessageQueue
    owner: str
    client_id: str
    epoch: int
    tenure: int
    held: bool
    alive: bool | None
    age: float
    remaining: float
    name: str | None = None


@dataclass(frozen=True)
class MemberInfo:
    """A member as ``group describe`` shows it; ``age`` is the seconds since its last heartbeat."""

    member: Member
    age: float


@dataclass(frozen=True)
class SinkBatch:
    """A sink's batch: (sink_id, batch_id) is published once; without a sink_id it has no identity.

    ``run`` is the Spark run that writes the batch, if any: a publish requires the locks under which its tasks registered their
    source ranges. ``group`` is the consumer group that keeps the sink's bookmarks, if the user names one and the broker needs one. ``job``
    names the Spark job that writes the batch: within a job a partition has the same rows in each attempt; another job may have
    them in other partitions. Without a job, all attempts have the same partitions. ``topic`` is the topic of all rows, if there
    is only one.
    """

    sink_id: str | None
    batch_id: int = 0
    run: SourceRun | None = None
    group: str | None = None
    job: str = ""
    topic: str | None = None


@dataclass(frozen=True)
class Receipt:
    """The result of one writing task, for the commit: the token of its rows, and their number per queue.

    ``staged``: what the broker itself needs to publish them.
    """

    token: str
    partition: int
    rows: Mapping[MessageQueue, int]
    staged: Any = None


@dataclass(frozen=True)
class Published:
    """The outcome of a publish: the new rows' offsets per queue. ``replayed``: the batch had been published before, so nothing was done."""

    replayed: bool
    ranges: Mapping[MessageQueue, OffsetRange]


class Log(Protocol):
    """The messages of topics and queues: where they are, reading and appending them."""

    @property
    def tail_loss(self) -> str:
        """Why a queue of such a broker may end before an offset that it once had, for error messages."""

    def reading(self, how: PullSettings) -> Log:
        """The same log with a reader's settings, as far as the broker has them."""

    def topics(self) -> list[TopicInfo]:
        """Return every topic, sorted by name."""

    def topic(self, name: str) -> TopicInfo:
        """Return the topic of that name. Raises TopicError MISSING."""

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic that can be read, in order. Raises TopicError MISSING."""

    def targets(self, topic: str) -> list[MessageQueue]:
        """Return the queues that messages may be sent to, in the order that selectors index. Raises TopicError MISSING."""

    def anchor(self, topic: str, offsets: Mapping[MessageQueue, int]) -> str:
        """Return a text to keep with the queues' next offsets, by which `is_another` recognises the topic.

        It is "" while nothing identifies the topic. Raises TopicError MISSING.
        """

    def is_another(self, topic: str, anchor: str) -> bool:
        """Whether the topic was deleted and created again since it had this anchor, as far as can be seen; false for "".

        It may be called often: a broker that must read something may repeat its answer for some seconds. Raises TopicError MISSING.
        """

    def bounds(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        """Return current bounds; a queue that does not exist is left out."""

    def change(self) -> int | None:
        """Return a number that differs from an earlier one if anything changed since; None if the broker cannot tell."""

    def offset_at(self, queue: MessageQueue, timestamp: int) -> int:
        """Return the offset of the first message stored at or after ``timestamp`` (µs since the epoch), else the queue's end."""

    def stored_at(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """Return when the message at each queue's offset was stored, in µs since the epoch; a message that is not there is left out."""

    def advance(self, queue: MessageQueue, begin: int, end: int, max_bytes: int) -> int:
        """Return the largest offset in [begin, end] such that the bodies of [begin, offset) take at most ``max_bytes`` bytes."""

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        max_bytes: int,
        columns: tuple[str, ...],
        anchor: str | None = None,
        until: int | None = None,
    ) -> pa.RecordBatch:
        """Rows from ``offset`` on, without a gap, with ``columns`` in their order. Empty only at the queue's end.

        ``until``: how far later pulls will go on, so a broker may read ahead. Raises TopicError MISSING; DataLossError AGED_OUT below
        the first message, BEYOND_END, TOPIC_RECREATED if `Log.anchor` gave ``anchor`` for another topic; StoreError CORRUPT.
        """

    def pull_matching(
        self,
        queue: MessageQueue,
        offset: int,
        max_messages: int,
        max_bytes: int,
        columns: tuple[str, ...],
        matching: Filter,
        anchor: str | None = None,
    ) -> tuple[pa.RecordBatch, int]:
        """The matching rows of [``offset``, next), perhaps none, and next, the offset to resume at.

        next is at most ``max_messages`` above ``offset``, and equal to it only if the queue ends there. Otherwise as `pull`.
        """

    def require_filter(self, matching: Filter, topics: Sequence[str]) -> None:
        """Check that the brokers support the filter. Raises OptionError UNSUPPORTED, or INVALID if the SQL does not parse."""

    def require_rights(self, topics: Sequence[str], group: str | None) -> None:
        """Check that the account may read the topics as the group. Raises RocketMQError NO_PERMISSION with all it lacks."""

    def append(self, rows: Mapping[MessageQueue, pa.RecordBatch]) -> dict[MessageQueue, OffsetRange]:
        """Append rows (any of the PRODUCER_COLUMNS, ``body`` required) to their queues durably, and return their offsets.

        Raises MessageError, TopicError MISSING or NO_SUCH_QUEUE, StoreFullError; then no row is added. An error of a server may
        come when some rows are stored, if publishing is not atomic (Capabilities). It then says how many are stored in each queue.
        """

    def append_delayed(self, rows: Mapping[MessageQueue, pa.RecordBatch]) -> None:
        """Send rows that become messages when they are due (`rows.delays`), after all were checked. OptionError UNSUPPORTED."""


class Groups(Protocol):
    """Members, queue locks and group offsets."""

    def join(self, owner: str) -> ClientIdentity:
        """Register this process as a client of ``owner``, so that others can tell whether it is alive."""

    def leave(self, client: ClientIdentity) -> None:
        """Remove the client. Its locks should have been given back before."""

    def heartbeat(
        self, group: str, client: ClientIdentity, subscription: Subscription, room: str | None = None
    ) -> list[Member]:
        """Join the group, or stay in it, for a lock's life. Return all members, by client id, this client included."""

    def cut_off(self, client: ClientIdentity) -> bool:
        """Whether the client lost the connection that made it a member, so that it needs a heartbeat. Sends no request."""

    def members(self, group: str) -> list[Member]:
        """Return the group's current members, by client id."""

    def lock(
        self, group: str, client: ClientIdentity, queues: Sequence[MessageQueue]
    ) -> dict[MessageQueue, LockToken | Refusal]:
        """Ask for the lock of each queue on its own. A queue that this client holds is renewed under the same epoch."""

    def renew(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        """Prolong the locks, and return the tokens that are *lost*. It never grants a free queue."""

    def check(self, token: LockToken) -> bool:
        """Whether the token still holds its queue. Prolongs the lock only if the broker has no other way to tell."""

    def stale(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        """Return the tokens that no longer hold their queues. The others are not prolonged."""

    def unlock(self, tokens: Sequence[LockToken], linger: float = 0.0) -> None:
        """Give queues back, after ``linger`` seconds at most (a task may still be at work). A stale token changes nothing."""

    def offsets(self, group: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the next offset to process per queue; a queue that was never committed is left out."""

    def commit(self, offsets: Mapping[LockToken, int]) -> None:
        """Move group offsets forward, all or none; a lower value changes nothing. Raises LockError LOST if any is stale."""

    def reset(self, offsets: Mapping[LockToken, int]) -> int:
        """Set group offsets in any direction under their locks. Raise the group's reset number, and return it."""

    def settle(self, token: LockToken, offsets: Sequence[int]) -> None:
        """Record that messages of the token's queue were processed out of turn. The group's offset stays where it is.

        The record lasts until the group's offset of the queue is sought or reset, or the group or the topic is deleted. Raises
        LockError LOST; OffsetError INVALID for a message so far into its queue that the broker has no place for it.
        """

    def settled(self, group: str, queue: MessageQueue, span: OffsetRange) -> set[int]:
        """Return which offsets in the range `settle` has recorded, whether or not the group's offset has passed them."""

    def dead_letter(self, token: LockToken, letters: pa.RecordBatch, offsets: Sequence[int]) -> int:
        """Put messages of the token's queue aside, into the topic %DLQ%<group>, which is made if it is missing.

        ``letters`` (PRODUCER_COLUMNS) has a row for each of ``offsets``. A message that was put aside before is left as it is:
        its identity is (group, queue, offset), until the group's offset of the queue is sought or reset, or the group is deleted.
        Return how many are new. Raises LockError LOST.
        """

    def letters(self, token: LockToken, spans: Sequence[OffsetRange]) -> set[int]:
        """Return which offsets of the token's queue in these ranges have dead letters that `dead_letter` would leave as they are.

        ``spans`` are in ascending order. The lock is not checked.
        """

    def park(self, token: LockToken, puts: Sequence[Put]) -> list[bool]:
        """Park messages of the token's queue, or of its parking lot, in the lot, which is made if it is missing (`parking.rules`).

        They are copied from the places in ``puts``, in this order, all or none. One that was parked from its place before is left
        as it is; one below the group's offset of its queue was settled before. Return for each whether it lies in the lot now:
        False if it was settled. Raises LockError LOST, DataLossError AGED_OUT if a message is gone.
        """

    def send_back(self, token: LockToken, messages: Sequence[tuple[int, int]], max_reconsume_times: int) -> int:
        """Have the broker put copies of messages of the token's queue into the retry topic %RETRY%<group>, each after a delay.

        ``messages``: offsets and delay levels, 1 to 18, or below 0 for a dead letter. One that was retried ``max_reconsume_times``
        times becomes a dead letter, too. Return how many were sent back, the first of them, at least one. One that is sent back twice
        comes twice. Raises LockError LOST, DataLossError AGED_OUT, OptionError UNSUPPORTED where brokers have no retry topics.
        """

    def reset_number(self, group: str) -> int:
        """Return how often the group was reset. A checkpoint with a lower number follows the group's offsets."""


class Staging(Protocol):
    """The rows of one attempt of one writing task; invisible until published, if publishing is atomic (Capabilities)."""

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        """Stage rows (PRODUCER_COLUMNS, ``body`` required) behind those added before; those with a column of `rows.delays`, if
        brokers have delays, at the end, without an order.
        """

    def receipt(self) -> Receipt:
        """Make everything added durable and return its receipt. No more rows may be added."""

    def abandon(self) -> None:
        """Forget the staged rows. If publishing is not atomic, rows that were sent stay."""


class Outbox(Protocol):
    """Writes batches, each once; invisible until published, if publishing is atomic (Capabilities)."""

    def register(self, run: SourceRun, queue: MessageQueue, offsets: OffsetRange, token: LockToken | None) -> None:
        """Register that a task of ``run`` reads ``offsets``. The publish of its batch requires the token to be current."""

    def require_delays(self, columns: Sequence[str], topic: str | None) -> None:
        """Raises OptionError UNSUPPORTED if the topic's brokers cannot deliver rows later, as these columns (`rows.delays`) say."""

    def require_rights(self, topic: str, group: str | None, *, identified: bool) -> None:
        """As `Log.require_rights`, to write, where a server refuses even routes. ``identified``: batches have a `SinkBatch.sink_id`."""

    def open(self, batch: SinkBatch, partition: int) -> Staging:
        """Return a staging area for one attempt of one task."""

    def publish(
        self, batch: SinkBatch, receipts: Sequence[Receipt], *, move_offsets: bool = True, skip_differing_replay: bool = False
    ) -> Published:
        """Make the receipts' rows visible, in (partition, row) order, once per (sink_id, batch_id).

        Raises LockError LOST if a source epoch registered by this run is stale, SinkError REPLAY_DIFFERS, BATCH_TOO_OLD,
        OUT_OF_ORDER, TOKEN_GONE; then no row is visible, if publishing is atomic.
        """

    def discard(self, receipts: Sequence[Receipt]) -> None:
        """Delete staged rows that will not be published; published ones stay."""


class Admin(Protocol):
    """Topics and groups for the command and for tests. Topics of parking lots are not altered, grown or trimmed: TopicError RESERVED."""

    def create_topic(
        self, name: str, queues: int, *, retention_seconds: float | None = None, retention_bytes: int | None = None,
        compression: str = DEFAULT_COMPRESSION, message_type: str | None = None,
    ) -> TopicInfo:  # fmt: skip
        """Create a topic. ``message_type``: one of `model.MESSAGE_TYPES`, for RocketMQ 5 only; None: the broker's default.

        Raises TopicError EXISTS, BAD_NAME, RESERVED, QUEUE_COUNT, and OptionError UNSUPPORTED or INVALID for settings.
        """

    def add_queues(self, name: str, queues: int) -> TopicInfo:
        """Grow a topic to ``queues`` queues. Keys go to other queues from then on. Raises TopicError MISSING or QUEUE_COUNT."""

    def alter_topic(
        self, name: str, *, retention_seconds: float | Keep | None = Keep.KEEP, retention_bytes: int | Keep | None = Keep.KEEP
    ) -> TopicInfo:
        """Change retention, from the next write or trim on. Raises TopicError MISSING, OptionError INVALID or UNSUPPORTED."""

    def delete_topic(self, name: str) -> None:
        """Delete a topic, its offsets and its parking lots. TopicError MISSING; of a lot, GroupError PARKED, or IN_USE by a query."""

    def describe_topic(self, name: str) -> list[QueueInfo]:
        """Return the state of each queue of a topic, in order. Raises TopicError MISSING."""

    def kept_for(self, topics: Iterable[str]) -> dict[str, float]:
        """Return for how many seconds messages of these topics are kept by age. A topic that is kept for ever, or of which that is not
        known, is left out."""

    def waiting_bytes(self, name: str) -> int:
        """Return the bytes of a topic's deleted messages whose room is not free yet: they share a file with messages that stay."""

    def message_type(self, name: str) -> str | None:
        """Return the type of a topic's messages, if the broker has such types and tells."""

    def trim(self, name: str, before: Mapping[MessageQueue, int] | None = None) -> dict[MessageQueue, int]:
        """Delete whole chunks before the given offsets, or by the topic's retention. Return the messages deleted per queue."""

    def groups(self, *, of_sinks: bool = False) -> list[str]:
        """Return the consumer groups. ``of_sinks``: those in which sinks over RocketMQ keep bookmarks, instead of the others."""

    def group_offsets(self, group: str) -> dict[MessageQueue, int]:
        """Return all committed offsets of a group. Raises GroupError MISSING."""

    def seek(self, group: str, offsets: Mapping[MessageQueue, int], *, force: bool = False, parked: AtSeek = None) -> int:
        """Set group offsets, clear the queues' lineage, raise the reset number and return it. GroupError IN_USE unless forced; PARKED."""

    def order_parked(self, group: str, queue: MessageQueue, orders: Sequence[Order]) -> None:
        """Append orders to the queue's parking lot, for its owner. TopicError MISSING or NO_SUCH_QUEUE if nothing was ever parked."""

    def require_unused(self, group: str) -> None:
        """Raises GroupError IN_USE if a live process owns a queue of the group or is a member of it."""

    def delete_group(self, group: str, *, force: bool = False) -> None:
        """Forget a group's offsets, locks, members and lots; its dead letters stay. GroupError MISSING; IN_USE, PARKED unless forced."""

    def release(self, group: str, queues: Sequence[MessageQueue], *, force: bool = False) -> list[MessageQueue]:
        """Take held locks away and return their queues. Raises GroupError IN_USE if a holder is alive, unless forced."""

    def locks(self, group: str | None = None) -> list[LockInfo]:
        """Return the queue locks of a group, or of all groups."""

    def members(self, group: str) -> list[MemberInfo]:
        """Return the group's current members, in the order in which they joined."""


class Broker(Protocol):
    """A connection to one broker, which has the four protocols. It is a context manager, which closes it."""

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def identity(self) -> str:
        """A text that identifies this broker among others of its kind (embedded: the store id)."""

    @property
    def log(self) -> Log: ...
    @property
    def groups(self) -> Groups: ...
    @property
    def outbox(self) -> Outbox: ...
    @property
    def admin(self) -> Admin: ...
    @property
    def trace(self) -> Callable[[TracedCall], None] | None: ...

    def traced(self, topic: str = TRACE_TOPIC, *, check: bool = True) -> Broker:
        """This connection with RocketMQ's message trace in ``topic``, of what log and outbox send and of calls given to `trace`.

        Raises OptionError UNSUPPORTED for a broker without it; with ``check`` also if the cluster does not have the topic.
        """

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None: ...
