"""The writer's options.

Rules: as in values.py. The writer checks later whether the named columns exist and whether a user's function can be imported.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import MAX_QUEUES
from orderedmq.options.endpoint import BrokerOptions
from orderedmq.options.values import (
    choice,
    conflict,
    half_given,
    integer,
    invalid,
    option,
    parse_group,
    parse_size,
    parse_topic,
    shown,
)
from orderedmq.ownership.micro_batch import LARGEST_BATCH
from orderedmq.routing.sharding_key import KEY_TYPES, GivenKeyType

OnKeyConflict = Literal["error", "warn", "ignore"]
OnReplayDiffers = Literal["error", "skip"]
Compression = Literal["none", "lz4"]

#: Selectors that choose a queue by the key.
_BY_KEY: Final = ("hash", "mod")
#: The value of shardingKey for rows without a key.
NO_KEY: Final = "none"
_SELECTORS: Final = {"hash": "hash", "mod": "mod", "random": "random", "queueid": "queueId"}
#: Maximum size of the rows that a task sorts. They become one Arrow array per column, and an array of texts holds less than 2 GiB.
_MAX_BUFFER: Final = 2 * 1024**3
#: Maximum length of txnAppId, which is limited because it becomes a key in the store.
MAX_APP_ID_LENGTH: Final = 255
_SORT_COLUMN: Final = re.compile(r"(?:`([^`]+)`|([^\s`]+))(?:\s+(asc|desc))?", re.IGNORECASE)


class SortColumn(NamedTuple):
    """One column of ``orderBy``."""

    name: str
    descending: bool = False


def _topic(text: str, option: str) -> str:
    if "," in text:
        raise invalid(
            option,
            f"{shown(text)} is a list, but the option names one topic. For several topics, drop it and write a column topic",
        )
    return parse_topic(text, option, writing=True)


def _column(text: str, option: str) -> str:
    if not text:
        raise invalid(option, "the column's name is empty. Write for example order_id")
    return text


def _app_id(text: str, option: str) -> str:
    if not 0 < len(text) <= MAX_APP_ID_LENGTH:
        raise invalid(
            option, f"{shown(text)} has {len(text)} characters, not 1 to {MAX_APP_ID_LENGTH}. Write for example billing-job"
        )
    return text


def _txn_version(text: str, option: str) -> int:
    version = integer(0, example=7)(text, option)
    if version > LARGEST_BATCH:
        raise invalid(
            option,
            f"{shown(text)} is the largest number of 64 bits and leaves no greater one for the next write. Write {LARGEST_BATCH} or less, "
            "for example 7",
        )
    return version


def _selector(text: str, option: str) -> str:
    name = _SELECTORS.get(text.lower())
    if name:
        return name
    module, colon, function = text.partition(":")
    if not colon or not all(part.isidentifier() and not keyword.iskeyword(part) for part in (*module.split("."), function)):
        raise invalid(
            option,
            f"{shown(text)} is not hash, mod, random, queueId or module:function. Write for example my.rules:choose",
        )
    return text


def parse_buffer_size(text: str, option: str) -> int:
    """Return the bytes of rows that a task may hold to sort them."""
    size = parse_size(text, option)
    if size > _MAX_BUFFER:
        raise invalid(
            option,
            f"{shown(text)} is too large: a task sorts at most 2 GiB of rows. Write at most 2g, and spread the rows over more tasks",
        )
    return size


def parse_order_by(text: str, option: str = "order_by") -> tuple[SortColumn, ...]:
    """Return the columns in a text such as ``created_at, id desc``. A name with blanks or commas is written in backquotes."""
    columns: list[SortColumn] = []
    # A comma separates columns if it is followed by an even number of backquotes.
    for item in re.split(r",(?=(?:[^`]*`[^`]*`)*[^`]*$)", text):
        match = _SORT_COLUMN.fullmatch(item.strip())
        if not match:
            raise invalid(
                option, f"{shown(item.strip())} is not a column with asc or desc. Write for example created_at, id desc"
            )
        name = match[1] or match[2]
        if any(name == column.name for column in columns):
            raise invalid(option, f"column {shown(name)} is named twice. Name it once")
        columns.append(SortColumn(name, (match[3] or "").lower() == "desc"))
    return tuple(columns)


@dataclass(frozen=True, kw_only=True)
class SinkOptions(BrokerOptions):
    """The checked options of a writer. Sizes in bytes.

    ``topic`` None: rows need the column topic. ``selector`` is ``hash``, ``mod``, ``random``, ``queueId`` or
    ``module:function``. ``topic_queue_nums`` None: a missing topic is an error.
    ``sink_group`` None: the broker chooses its name. ``txn_app_id`` and ``txn_version`` are both None or both set.
    """

    topic: str | None = option(_topic, "topic to write to; overrides the column topic", shown="the column topic")
    sharding_key: str | None = option(
        _column,
        "column of the sharding key. Rows with the same key go to the same queue, in order. none: rows have no key and no order",
        shown="sharding_key",
    )
    sharding_key_type: GivenKeyType = option(
        choice(KEY_TYPES),
        "how the key is hashed: as a Java producer hashes text (a String), int (an Integer) or long (a Long). auto: by the column's type",
        "auto",
    )
    selector: str = option(
        _selector,
        "how a row's queue is chosen: hash (as in Java), mod (key % queues), random, queueId (the column queue_id), or "
        "module:function",
        "hash",
        name="messageQueueSelector",
    )
    topic_queue_nums: int | None = option(
        integer(1, MAX_QUEUES, 8),
        f"create a missing topic with this number of queues, 1 to {MAX_QUEUES}. An existing topic keeps its number; "
        "over RocketMQ it must be the same, unless the topic was resized",
    )
    order_by: tuple[SortColumn, ...] = option(
        parse_order_by,
        "columns by which each task sorts its rows, such as: created_at, id desc",
        absent=(),
        shown="the rows' own order",
    )
    order_buffer_size: int = option(
        parse_buffer_size, "maximum bytes that each task holds in memory for orderBy, at most 2g", "256m"
    )
    on_key_conflict: OnKeyConflict = option(
        choice(get_args(OnKeyConflict)),
        "what to do if two tasks of a batch have rows of one key, whose order is then undefined: error|warn|ignore",
        "error",
        cluster="warn",
    )
    on_replay_differs: OnReplayDiffers = option(
        choice(get_args(OnReplayDiffers)),
        "what to do if a repeated batch has other rows than the committed batch, but the same input: error|skip. Never skipped: other "
        "messages of a source on the same store",
        "error",
    )
    compression: Compression | None = option(
        choice(get_args(Compression)),
        "compression of a topic that the sink creates on the embedded broker: none|lz4",
        shown="lz4",
    )
    sink_group: str | None = option(
        parse_group,
        "with namesrvAddr: consumer group that stores the sink's bookmarks. Use another group for each query (or txnAppId) and topic",
        shown="OMQ_SINK_ and a hash of the query and the topic",
    )
    txn_app_id: str | None = option(
        _app_id, "batch write only: together with txnVersion makes the write idempotent, as in Delta"
    )
    txn_version: int | None = option(
        _txn_version, "batch write only: a number that grows with each write of txnAppId, such as the batch id"
    )

    @property
    def key_column(self) -> str | None:
        """The column of the sharding key, None if rows have no key. It must exist if shardingKey is given or `needs_key` is true."""
        return None if self.sharding_key == NO_KEY else self.sharding_key or "sharding_key"

    @property
    def needs_key(self) -> bool:
        """Whether the selector chooses by a key. If it does, rows without a key lose their order, which is probably a mistake."""
        return self.key_column is not None and self.selector in _BY_KEY

    def check(self, given: Collection[str], streaming: bool | None) -> None:
        """Raise OptionError if the options do not fit together. ``streaming`` None: not known yet."""
        super().check(given, streaming)
        _check_txn(given, streaming)
        _check_key(self, given)
        _check_broker(self, given)


def _check_key(options: SinkOptions, given: Collection[str]) -> None:
    selector, key_type = options.selector, options.sharding_key_type
    if options.sharding_key == NO_KEY and "shardingKeyType" in given:
        raise conflict("option shardingKeyType says how keys are hashed, but with shardingKey=none rows have no keys. Drop one")
    if options.sharding_key == NO_KEY and selector == "mod":
        raise conflict(
            "option messageQueueSelector=mod chooses by the key, but with shardingKey=none rows have no keys. Name the key's column, or use "
            "random"
        )
    if selector == "mod" and key_type == "text":
        raise conflict(
            "option messageQueueSelector=mod needs keys that are whole numbers, so it excludes shardingKeyType=text. Use long, or hash"
        )


def _check_txn(given: Collection[str], streaming: bool | None) -> None:
    for name, other in (("txnAppId", "txnVersion"), ("txnVersion", "txnAppId")):
        if name not in given:
            continue
        if streaming is True:
            raise OptionError(
                OptionCondition.UNSUPPORTED,
                f"option {name} is not supported in a stream, which is idempotent because of its checkpoint. Drop it, or use df.write",
            )
        if other not in given:
            raise half_given(name, other)


def _check_broker(options: SinkOptions, given: Collection[str]) -> None:
    embedded = options.endpoint.embedded
    if options.on_key_conflict == "error" and not options.endpoint.capabilities.atomic_publish:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            "option onKeyConflict=error is not supported with namesrvAddr: readers of a cluster see rows as soon as they are sent, before a "
            "conflict can be found. Use warn, and ordered_sink.route",
        )
    if "compression" in given and not embedded:
        raise conflict(
            "option compression belongs to the embedded broker's topics. Drop it, or use path instead of namesrvAddr"
        )
    if "sinkGroup" in given and embedded:
        raise conflict(
            "option sinkGroup belongs to a RocketMQ cluster, where a sink keeps bookmarks in a group. Drop it, or use namesrvAddr"
        )
