"""The interface through which the source, the sink and the command use a broker: four protocols.

Rules: source and sink use only this interface, and never branch on the kind of broker (``Capabilities`` says how brokers differ
by nature). Every change of a group's state carries the lock token under which it is made. A token of a parking lot is valid while
the lock of the lot's queue has the same epoch (`parking.queue_token`). tests/contract checks each broker.

This module is long because it is mostly the docstrings of the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

from orderedmq.endpoint import Capabilities
from orderedmq.model import DEFAULT_COMPRESSION, MessageQueue, OffsetRange
from orderedmq.ownership.lock import ClientIdentity, LockToken, Refusal
from orderedmq.ownership.micro_batch import SourceRun

if TYPE_CHECKING:
    import pyarrow as pa

    from orderedmq.ownership.membership import Member, Subscription
    from orderedmq.parking import AtSeek, Command, Parking
    from orderedmq.routing.generations import Resize
    from orderedmq.routing.selector import Queues
    from orderedmq.rows.filters import Filter

#: Maximum messages of a queue that are pulled but not yet handed over. Java's ``pullThresholdForQueue`` is 1,000, but a task that reads a
#: closed range needs more messages than a listener, because a pull returns at most 32 messages.
MAX_MESSAGES: Final = 65_536
#: Maximum bytes of a queue that are pulled but not yet handed over (Java: ``pullThresholdSizeForQueue``, 100 MiB).
MAX_BYTES: Final = 100 * 1024 * 1024


@dataclass(frozen=True)
class PullSettings:
    """How a reader pulls.

    ``group``: the group under whose name to read if the account may not read as TOOLS_CONSUMER, None if there is no such group.
    ``max_messages``, ``max_bytes``: limits per queue for messages that are pulled but not yet handed over (pullThresholdForQueue,
    pullThresholdSizeForQueue). ``verify_body_crc``: whether to verify the checksum that a broker stored with each body.
    """

    group: str | None = None
    max_messages: int = MAX_MESSAGES
    max_bytes: int = MAX_BYTES
    verify_body_crc: bool = False


DEFAULT_PULL = PullSettings()
#: Seconds between two records of a listener's progress in a queue (Java: ``persistConsumerOffsetInterval``).
PROGRESS_INTERVAL: Final = 5.0


@dataclass(frozen=True)
class QueueBounds:
    """The offset of a queue's first stored message, and the offset that its next message will get."""

    min_offset: int
    max_offset: int


@dataclass(frozen=True)
class TopicInfo:
    """A topic and its settings.

    ``queues``: the number of queues to which messages go. ``retention_*`` is None if messages are kept forever. Embedded only:
    ``incarnation`` changes if the topic is deleted and created again. ``closed``: the number of further queues, which take no more messages
    since the topic shrank. ``own_selector``: 1 if a selector of the user's own has chosen the queues of some rows.
    """

    name: str
    queues: int
    incarnation: str
    retention_seconds: float | None = None
    retention_bytes: int | None = None
    compression: str = "none"
    closed: int = 0
    own_selector: int = 0


class Keep(Enum):
    """The value that leaves a setting unchanged. None cannot mean this, because it is a valid setting."""

    KEEP = "keep"


@dataclass(frozen=True)
class QueueInfo:
    """One queue as ``topic describe`` shows it. Sizes are stored bytes. Times are µs since 1970, None without a message that can be read.

    ``readable``: whether the queue's messages can be read at the moment.
    """

    queue: MessageQueue
    bounds: QueueBounds
    chunks: int
    stored_bytes: int
    first_timestamp: int | None
    last_timestamp: int | None
    readable: bool = True


@dataclass(frozen=True)
class LockInfo:
    """A queue lock as ``lock list`` shows it, with durations in seconds. ``held`` is false for a lock that was given back.

    ``name``: the owner's readable name, if known.
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
    """A member as ``group describe`` shows it. ``age``: seconds since its last heartbeat."""

    member: Member
    age: float


class Progress(NamedTuple):
    """How far a group's listener is in a queue, while its micro-batch is not committed.

    Every message of the queue below ``offset`` is decided: accepted, a dead letter, or parked. So is each message of the queue's parking lot
    that lies at a place below ``lot`` and has an offset in the queue below ``offset``.
    """

    offset: int = 0
    lot: int = 0


@dataclass(frozen=True)
class SinkBatch:
    """A batch that a sink writes. Each (sink_id, batch_id) is published once. The broker cannot recognise a repeated batch without a sink_id.

    run: the Spark run that writes the batch, if any. The batch is published only if the run still has the locks under which its tasks
        registered their source ranges.
    group: the consumer group that keeps the sink's bookmarks, if the user names one and the broker needs one.
    job: names the Spark job that writes the batch. All attempts of one job have the same rows in a partition, but another job may
        distribute the rows differently. Without a job, all attempts have the same rows in a partition.
    topic: the topic of all rows, if they have only one.
    own_selector: whether a selector of the user's own chooses the rows' queues.
    """

    sink_id: str | None
    batch_id: int = 0
    run: SourceRun | None = None
    group: str | None = None
    job: str = ""
    topic: str | None = None
    own_selector: bool = False


#: Chooses the queues of staged rows again: (rows, number of queues) → the index of each row's queue. ``rows`` has PRODUCER_COLUMNS, and
#: queue_id with the index of the queue that was chosen first.
ChooseAgain = Callable[["pa.RecordBatch", int], "Queues"]


@dataclass(frozen=True)
class Receipt:
    """The result of one writing task, for the commit: the token of its staged rows, and the number of rows per queue.

    ``staged``: data that only the broker uses to publish the rows.
    """

    token: str
    partition: int
    rows: Mapping[MessageQueue, int]
    staged: Any = None


@dataclass(frozen=True)
class Published:
    """The result of a publish: the rows' offsets per queue. ``replayed``: an earlier attempt has published the batch."""

    replayed: bool
    ranges: Mapping[MessageQueue, OffsetRange]


class Interface(Protocol):
    """An object whose public names are those of its protocol."""

    def __dir__(self) -> Iterable[str]:
        """Return these names for Tab, without those that a broker's own modules use."""
        protocols = [kind for kind in type(self).__mro__ if getattr(kind, "_is_protocol", False)]
        return {name for kind in protocols for name in vars(kind) if not name.startswith("_")}


class Log(Interface, Protocol):
    """Describes topics and queues, and finds, reads and appends messages."""

    @property
    def tail_loss(self) -> str:
        """A clause for error messages that says why a queue of this broker may end before an offset that it reached earlier."""

    def reading(self, how: PullSettings) -> Log:
        """Return this log with the settings of a reader, as far as the broker supports these settings."""

    def topics(self) -> list[TopicInfo]:
        """Return every topic, sorted by name."""

    def topic(self, name: str) -> TopicInfo:
        """Return the topic called ``name``. Raises TopicError MISSING."""

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic that readers read, in order, also while a permission forbids reading them.

        A queue that takes no more messages since a resize is left out once its messages are deleted and no message of it is parked.
        Raises TopicError MISSING.
        """

    def readable(self, topic: str) -> list[MessageQueue]:
        """Return the `queues` that may be read at the moment. The members of a shared group divide these. Raises TopicError MISSING."""

    def targets(self, topic: str) -> list[MessageQueue]:
        """Return the queues that messages may be sent to, at least one. Queue selectors choose by index in this order.

        Raises TopicError MISSING, or NO_SUCH_QUEUE if no queue accepts messages.
        """

    def resizes(self, topics: Iterable[str]) -> list[Resize]:
        """Return the resizes of these topics that may still matter to a reader, those of a topic from the oldest to the newest.

        Read the ends of queues before these, because a message that was routed after a resize may be read only with that resize.
        """

    def anchor(self, topic: str, offsets: Mapping[MessageQueue, int]) -> str:
        """Return a text by which `is_another` recognises the topic later. Store it together with ``offsets``, the queues' next offsets.

        The text is "" while nothing identifies the topic. Raises TopicError MISSING.
        """

    def require_place_of(self, anchor: str) -> None:
        """Require that `anchor` returned this text for a topic of this store. A cluster only sees that it is a store's.

        Raises StoreError REPLACED, or OffsetError INVALID for a store's text.
        """

    def is_another(self, topic: str, anchor: str) -> bool:
        """Return whether the topic was deleted and created again since `anchor` returned this text, as far as the broker can see.

        Returns False for "". Frequent calls are cheap, because a broker that has to read data for it may reuse its answer for some
        seconds. Raises TopicError MISSING.
        """

    def bounds(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, QueueBounds]:
        """Return the current bounds of the queues that exist, also of those that cannot be read at the moment."""

    def change(self) -> int | None:
        """Return a number that is different after any change to the broker's data; None if the broker has no such number."""

    def offset_at(self, queue: MessageQueue, timestamp: int) -> int:
        """Return the offset of the first message stored at or after ``timestamp`` (µs since 1970), or the queue's end."""

    def stored_at(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """Return the time at which the message at each queue's offset was stored, in µs since 1970. Leaves out missing messages."""

    def advance(self, queue: MessageQueue, begin: int, end: int, max_bytes: int) -> int:
        """Return the largest offset in [begin, end] for which the bodies of [begin, offset) have at most ``max_bytes`` bytes."""

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
        """Return consecutive messages from ``offset`` on, with ``columns`` in that order. The result is empty only at the queue's end.

        ``until``: the offset up to which the caller will continue, so that a broker may read ahead. Raises TopicError MISSING;
        DataLossError AGED_OUT if ``offset`` is below the first message, BEYOND_END if it is after the end, or TOPIC_RECREATED if
        `Log.anchor` returned ``anchor`` for an earlier topic of this name; StoreError CORRUPT.
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
        """Return the matching messages of [``offset``, next), possibly none, and ``next``, the offset at which to resume.

        ``next`` is at most ``max_messages`` above ``offset``, and equals ``offset`` only if the queue ends there. Otherwise like `pull`.
        """

    def require_filter(self, matching: Filter, topics: Sequence[str]) -> None:
        """Check that the brokers support the filter. Raises OptionError UNSUPPORTED, or INVALID if the SQL does not parse."""

    def require_rights(self, topics: Sequence[str], group: str | None) -> None:
        """Check that the account may read the topics as the group. Raises RocketMQError NO_PERMISSION, which names a missing right."""

    def append(
        self,
        rows: Mapping[MessageQueue, pa.RecordBatch],
        among: Collection[MessageQueue] = (),
    ) -> dict[MessageQueue, OffsetRange]:
        """Append rows (any of the PRODUCER_COLUMNS, ``body`` required) to their queues durably, and return their offsets.

        ``among``: the targets of one or more topics, among which the rows' queues were chosen. Raises SchemaError, MessageError,
        TopicError MISSING or NO_SUCH_QUEUE, QUEUE_COUNT if one of these topics has other targets now, or StoreFullError, all without
        adding a row. Where publishing is not atomic (Capabilities), a server may fail after it has stored some rows. The error then
        says how many rows each queue got.
        """


class Groups(Interface, Protocol):
    """Members, queue locks and group offsets."""

    def join(self, owner: str) -> ClientIdentity:
        """Register this process as a client of ``owner``, so that other clients can see whether it is alive."""

    def leave(self, client: ClientIdentity) -> None:
        """Remove the client. Before this call, give its locks back."""

    def heartbeat(self, group: str, client: ClientIdentity, subscription: Subscription) -> list[Member]:
        """Join the group, or renew the membership, for as long as a lock lasts. Return all members, including this client, sorted by id."""

    def cut_off(self, client: ClientIdentity) -> bool:
        """Return whether the client lost the connection that made it a member, and so needs a heartbeat. Sends no request."""

    def members(self, group: str) -> list[Member]:
        """Return the group's current members, sorted by client id."""

    def lock(
        self,
        group: str,
        client: ClientIdentity,
        queues: Sequence[MessageQueue],
        tenures: Mapping[MessageQueue, int] | None = None,
    ) -> dict[MessageQueue, LockToken | Refusal]:
        """Request the lock of each queue separately. A lock that this client already holds is renewed under the same epoch.

        ``tenures``: the epochs at which the query's tenures began according to its checkpoint. A broker that does not keep earlier owners
        compares them with the last tenure of each queue.
        """

    def renew(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        """Renew the locks, and return the tokens that are *lost*. Never locks a queue that is free."""

    def check(self, token: LockToken) -> bool:
        """Return whether the token still holds its queue. Renews the lock only if the broker cannot answer in any other way."""

    def stale(self, tokens: Sequence[LockToken]) -> list[LockToken]:
        """Return the tokens that no longer hold their queues. Does not renew locks."""

    def unlock(self, tokens: Sequence[LockToken], linger: float = 0.0) -> None:
        """Give queues back. They are free within ``linger`` seconds, as a task may still be at work. A stale token changes nothing."""

    def end_tenures(self, group: str, tenures: Mapping[MessageQueue, int]) -> None:
        """End a query's tenures, which began at these epochs, because it leaves the queues out of a batch that it repeats.

        Others hold the queues. When the query gets them again, it must not resume after the batch.
        """

    def offsets(self, group: str, queues: Sequence[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the next offset to process per queue. Leaves out queues without a commit."""

    def commit(self, offsets: Mapping[LockToken, int]) -> None:
        """Move the group's offsets forward, all or none. A lower value changes nothing. Raises LockError LOST if any token is stale."""

    def pass_on(
        self,
        token: LockToken,
        rows: Mapping[MessageQueue, pa.RecordBatch],
        among: Collection[MessageQueue],
        offset: int | None,
    ) -> None:
        """Append rows to their queues for the owner of the token's queue, and commit ``offset`` unless it is None.

        ``among``: see `Log.append`. Both happen in one transaction where publishing is atomic (Capabilities). Otherwise the lock is
        checked before each request, and the offset is committed after the last one. Raises LockError LOST, and the errors of
        `Log.append`.
        """

    def reset(self, offsets: Mapping[LockToken, int]) -> list[LockToken]:
        """Set the group's offsets in these queues, forward or back, all or none, and begin a new tenure of each.

        Return the new tokens, in the same order; the given ones are stale from then on. Queries whose checkpoints are older follow the
        group's offsets in these queues. Raises LockError LOST if any token is stale, OffsetError INVALID.
        """

    def dead_letter(self, token: LockToken, letters: pa.RecordBatch, offsets: Sequence[int]) -> int:
        """Write messages of the token's queue as dead letters to the topic %DLQ%<group>, which is created if it is missing.

        ``letters`` (PRODUCER_COLUMNS) has a row for each of ``offsets``. A message that already has a dead letter gets no second one.
        The broker recognises the message by (group, queue, offset), until a seek or reset of the group's offset in the queue, or until
        the group is deleted. Return the number of new dead letters. Raises LockError LOST.
        """

    def letters(self, token: LockToken, spans: Sequence[OffsetRange]) -> set[int]:
        """Return the offsets in ``spans`` whose messages already have dead letters, so that `dead_letter` would not write another.

        ``spans`` are ranges of the token's queue in ascending order. The lock is not checked.
        """

    def record_progress(self, token: LockToken, progress: Progress, listener: str) -> None:
        """Record how far ``listener`` is in the token's queue, in place of what was recorded before. The group's offset does not move.

        A seek or a reset of the group's offset in the queue forgets the record, and so does the deletion of the group or the topic. Raises
        LockError LOST.
        """

    def progress(self, token: LockToken, listener: str) -> Progress:
        """Return the last record of ``listener`` in the token's queue, whichever owner made it; zeros if another listener made the last one.

        The lock is not checked.
        """

    def park(self, token: LockToken, parkings: Sequence[Parking]) -> list[bool]:
        """Park messages of the token's queue, or of its parking lot, in the lot, which is created if it is missing (`parking`).

        The messages are copied from the places in ``parkings``, in this order, all or none. A message is not copied if it was already
        parked from the same place, or if it is below the group's offset of its queue and so was already settled. Return for each
        message whether it is in the lot now, which is False if it was settled. Raises LockError LOST, or DataLossError AGED_OUT if a
        message was deleted.
        """


class Staging(Protocol):
    """The rows of one attempt of one writing task. They are invisible until published if publishing is atomic (Capabilities)."""

    def targets(self, topic: str, proposed: Sequence[MessageQueue]) -> list[MessageQueue]:
        """Return the queues over which the batch's rows of a topic are spread. Call this before the first `add` to the topic.

        ``proposed``: the queues that all attempts of this job propose, in the order of the indices that selectors compute. If another
        job has written the batch over other queues, these are returned, so that a repeat finds its rows. Raises SinkError QUEUES_AWAY
        if rows may be there and not all of these queues accept rows.
        """

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        """Stage rows, as `message_rows.normalise` returns them, after all rows that were added before."""

    def receipt(self) -> Receipt:
        """Make all added rows durable and return their receipt. No more rows may be added."""

    def abandon(self) -> None:
        """Forget the staged rows. Where publishing is not atomic, rows that were already sent stay."""


class Outbox(Interface, Protocol):
    """Writes each batch once. Its rows are invisible until published if publishing is atomic (Capabilities)."""

    def register(self, run: SourceRun, queue: MessageQueue, offsets: OffsetRange, token: LockToken | None) -> None:
        """Record that a task of ``run`` reads ``offsets``. The run's batch can be published only while the token is current."""

    def open(self, batch: SinkBatch, partition: int) -> Staging:
        """Return a staging area for one attempt of one task."""

    def publish(
        self,
        batch: SinkBatch,
        receipts: Sequence[Receipt],
        *,
        move_offsets: bool = True,
        skip_differing_replay: bool = False,
        again: Callable[[int], ChooseAgain] | None = None,
    ) -> Published:
        """Make the receipts' rows visible, in (partition, row) order, once per (sink_id, batch_id).

        ``again``: makes the selector of a partition. If a topic was resized after its rows were staged, all rows are staged again in the
        queues that it chooses. Without ``again``, TopicError QUEUE_COUNT is raised.

        Raises LockError LOST if an epoch that this run registered for its source is stale, or SinkError REPLAY_DIFFERS,
        BATCH_TOO_OLD, OUT_OF_ORDER or TOKEN_GONE. After an error no row is visible if publishing is atomic.
        """

    def discard(self, receipts: Sequence[Receipt]) -> None:
        """Delete staged rows that will not be published. Published rows stay."""


class Admin(Interface, Protocol):
    """Manages topics and groups. Altering, resizing or trimming a topic of parking lots raises TopicError RESERVED."""

    def create_topic(
        self, name: str, queues: int, *, retention_seconds: float | None = None, retention_bytes: int | None = None,
        compression: str = DEFAULT_COMPRESSION, message_type: str | None = None,
    ) -> TopicInfo:  # fmt: skip
        """Create a topic. ``message_type``: one of `model.MESSAGE_TYPES`, for RocketMQ 5 only; None: the broker's default.

        Raises TopicError EXISTS, BAD_NAME, RESERVED, QUEUE_COUNT, and OptionError UNSUPPORTED or INVALID for settings.
        """

    def resize_topic(self, name: str, queues: int) -> TopicInfo:
        """Make ``queues`` the number of queues to which messages go. Every key keeps its order (`routing.generations`).

        If the topic shrinks, the queues beyond take no more messages and are read to their ends. Unless this is atomic (Capabilities), the
        topic takes no messages until this returns. Raises TopicError MISSING, QUEUE_COUNT or RESERVED, OptionError UNSUPPORTED, GroupError
        IN_USE for an unfinished batch of a sink.
        """

    def alter_topic(
        self, name: str, *, retention_seconds: float | Keep | None = Keep.KEEP, retention_bytes: int | Keep | None = Keep.KEEP
    ) -> TopicInfo:
        """Change the retention; the next write or trim applies it. Raises TopicError MISSING, OptionError INVALID or UNSUPPORTED."""

    def delete_topic(self, name: str) -> None:
        """Delete a topic, its offsets and its parking lots.

        Raises TopicError MISSING, or RESERVED for a topic of parking lots, which is deleted with its topic or its group.
        """

    def describe_topic(self, name: str) -> list[QueueInfo]:
        """Return the state of each queue of a topic, in order. Raises TopicError MISSING."""

    def kept_for(self, topics: Iterable[str]) -> dict[str, float]:
        """Return the retention of these topics in seconds. Leaves out topics whose messages are kept forever or for an unknown time."""

    def message_type(self, name: str) -> str | None:
        """Return the type of a topic's messages, or None if the broker has no such types or does not report them."""

    def trim(self, name: str, before: Mapping[MessageQueue, int] | None = None) -> dict[MessageQueue, int]:
        """Delete whole chunks before the given offsets, or by the topic's retention. Return the number of deleted messages per queue."""

    def groups(self, *, of_sinks: bool = False) -> list[str]:
        """Return the consumer groups, or with ``of_sinks`` only the groups in which sinks over RocketMQ keep bookmarks."""

    def group_offsets(self, group: str) -> dict[MessageQueue, int]:
        """Return all committed offsets of a group. Raises GroupError MISSING."""

    def group_progress(self, group: str) -> dict[MessageQueue, int]:
        """Return `Progress.offset` as last recorded in each queue, also where the group's offset has passed it since."""

    def seek(self, group: str, offsets: Mapping[MessageQueue, int], *, force: bool = False, parked: AtSeek = None) -> None:
        """Set the group's offsets in these queues, and end all tenures of them.

        Raises GroupError IN_USE unless ``force`` is set, and PARKED if ``parked`` does not say what to do with parked messages.
        """

    def command_parked(self, group: str, queue: MessageQueue, commands: Sequence[Command]) -> None:
        """Append an operator's commands to the queue's parking lot; the queue's owner carries them out.

        Raises TopicError MISSING or NO_SUCH_QUEUE if no message was ever parked.
        """

    def require_unused(self, group: str) -> None:
        """Raise GroupError IN_USE if a live process owns a queue of the group or is a member of it."""

    def delete_group(self, group: str, *, force: bool = False) -> None:
        """Delete a group's offsets, locks, members and parking lots. Its dead letters stay.

        Raises GroupError MISSING, and IN_USE or PARKED unless ``force`` is set.
        """

    def release(self, group: str, queues: Sequence[MessageQueue], *, force: bool = False) -> list[MessageQueue]:
        """Release held locks and return their queues. Raises GroupError IN_USE if an owner is alive, unless ``force`` is set."""

    def locks(self, group: str | None = None) -> list[LockInfo]:
        """Return the queue locks of a group, or of all groups."""

    def members(self, group: str) -> list[MemberInfo]:
        """Return the group's current members, in the order in which they joined."""


class Broker(Interface, Protocol):
    """A connection to one broker, with the four protocols as attributes. As a context manager, it closes itself at the end."""

    @property
    def capabilities(self) -> Capabilities:
        """How this kind of broker differs from others by nature."""

    @property
    def identity(self) -> str:
        """A text that distinguishes this broker from others of its kind (embedded: the id of the store)."""

    @property
    def log(self) -> Log:
        """Topics, queues and messages."""

    @property
    def groups(self) -> Groups:
        """Members, locks and offsets, which a source uses."""

    @property
    def outbox(self) -> Outbox:
        """What a sink writes through."""

    @property
    def admin(self) -> Admin:
        """Creates, changes and deletes topics and groups."""

    def close(self) -> None:
        """Close the connection."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None: ...
