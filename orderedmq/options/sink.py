"""The writer's options.

Rules: as in declared.py. The writer checks later whether the named columns exist and whether a user's function can be imported.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Self

from orderedmq.conditions import OptionCondition
from orderedmq.endpoint import Endpoint
from orderedmq.errors import OptionError
from orderedmq.model import MAX_QUEUES
from orderedmq.options.declared import Given
from orderedmq.options.endpoint import parse_endpoint
from orderedmq.options.values import (
    choice,
    conflict,
    half_given,
    integer,
    invalid,
    no_rooms,
    only_for_cluster,
    parse_bool,
    parse_group,
    parse_rooms,
    parse_size,
    parse_topic,
    shown,
)
from orderedmq.ownership.micro_batch import LARGEST_BATCH
from orderedmq.routing.sharding_key import KEY_TYPES, GivenKeyType
from orderedmq.rows.message_trace import TRACE_TOPIC

OnKeyConflict = Literal["error", "warn", "ignore"]
OnReplayDiffers = Literal["error", "skip"]
Compression = Literal["none", "lz4"]

_ON_KEY_CONFLICT: Final[Mapping[str, OnKeyConflict]] = {"error": "error", "warn": "warn", "ignore": "ignore"}
_ON_REPLAY_DIFFERS: Final[Mapping[str, OnReplayDiffers]] = {"error": "error", "skip": "skip"}
_COMPRESSIONS: Final[Mapping[str, Compression]] = {"none": "none", "lz4": "lz4"}
_SHARDING_KEY_TYPES: Final[Mapping[str, GivenKeyType]] = {name: name for name in KEY_TYPES}
#: Selectors that choose a queue by the key.
_BY_KEY: Final = ("hash", "mod", "machineRoom")
#: The value of shardingKey for rows without a key.
NO_KEY: Final = "none"
_SELECTORS: Final = {"hash": "hash", "mod": "mod", "random": "random", "queueid": "queueId", "machineroom": "machineRoom"}
#: Maximum size of the rows that a task sorts. They become one Arrow array per column, and an array of texts holds less than 2 GiB.
_MAX_BUFFER: Final = 2 * 1024**3
#: Maximum length of txnAppId, which is limited because it becomes a key in the store.
MAX_APP_ID_LENGTH: Final = 255


class SortColumn(NamedTuple):
    """One column of ``orderBy``."""

    name: str
    descending: bool = False


@dataclass(frozen=True)
class SinkOptions:
    """The checked options of a writer. Sizes in bytes.

    ``topic`` None: rows need the column topic. ``sharding_key`` is a column's name; None: rows have no key. The column must exist
    if ``sharding_key_explicit`` or ``needs_key`` is true. ``selector`` is ``hash``, ``mod``, ``random``, ``queueId``,
    ``machineRoom`` or ``module:function``; only ``machineRoom`` has ``machine_rooms``. ``topic_queue_nums`` None: a missing topic
    is an error. ``sink_group`` None: the broker chooses its name. ``trace_topic`` None: no message trace. ``txn_app_id`` and
    ``txn_version`` are both None or both set.
    """

    endpoint: Endpoint
    topic: str | None
    sharding_key: str | None
    sharding_key_explicit: bool
    sharding_key_type: GivenKeyType
    selector: str
    machine_rooms: tuple[str, ...]
    topic_queue_nums: int | None
    order_by: tuple[SortColumn, ...]
    order_buffer_size: int
    on_key_conflict: OnKeyConflict
    on_replay_differs: OnReplayDiffers
    compression: Compression | None
    sink_group: str | None
    trace_topic: str | None
    txn_app_id: str | None
    txn_version: int | None

    @property
    def needs_key(self) -> bool:
        """Whether the selector chooses by a key. If it does, rows without a key lose their order, which is probably a mistake."""
        return self.sharding_key is not None and self.selector in _BY_KEY

    @staticmethod
    def parse_order_by(text: str, option: str = "order_by") -> tuple[SortColumn, ...]:
        """Return the columns in a text such as ``created_at, id desc``. A name with blanks or commas is written in backquotes."""
        return _order_by(text, option)

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool | None) -> Self:
        """Return the checked options of a writer. ``streaming`` None: not known yet, so checks that depend on it are skipped.

        Raises OptionError, or TopicError for a bad or reserved topic.
        """
        given = Given(options, "sink")
        endpoint = parse_endpoint(given)
        _check_txn(given, streaming)
        selector = given.value("messageQueueSelector", _selector)
        key = given.value("shardingKey", _column)
        return cls(
            endpoint=endpoint,
            topic=given.optional("topic", _topic),
            sharding_key=None if key == NO_KEY else key,
            sharding_key_explicit=given.has("shardingKey"),
            sharding_key_type=_key_type(given, selector, key),
            selector=selector,
            machine_rooms=_machine_rooms(given, selector, endpoint),
            topic_queue_nums=given.optional("topicQueueNums", integer(1, MAX_QUEUES, 8)),
            order_by=given.optional("orderBy", _order_by) or (),
            order_buffer_size=given.value("orderBufferSize", parse_buffer_size),
            on_key_conflict=_key_conflict(given, endpoint),
            on_replay_differs=given.value("onReplayDiffers", choice(_ON_REPLAY_DIFFERS)),
            compression=_compression(given, endpoint),
            sink_group=_sink_group(given, endpoint),
            trace_topic=_trace_topic(given, endpoint),
            txn_app_id=given.optional("txnAppId", _app_id),
            txn_version=given.optional("txnVersion", _txn_version),
        )


def _key_type(given: Given, selector: str, key: str) -> GivenKeyType:
    chosen = given.value("shardingKeyType", choice(_SHARDING_KEY_TYPES))
    if key == NO_KEY and given.has("shardingKeyType"):
        raise conflict("option shardingKeyType says how keys are hashed, but with shardingKey=none rows have no keys. Drop one")
    if key == NO_KEY and selector == "mod":
        raise conflict(
            "option messageQueueSelector=mod chooses by the key, but with shardingKey=none rows have no keys. Name the key's column, or use "
            "random"
        )
    if selector == "mod" and chosen == "text":
        raise conflict(
            "option messageQueueSelector=mod needs keys that are whole numbers, so it excludes shardingKeyType=text. Use long, or hash"
        )
    return chosen


def _machine_rooms(given: Given, selector: str, endpoint: Endpoint) -> tuple[str, ...]:
    rooms = given.optional("machineRooms", parse_rooms) or ()
    if selector != "machineRoom":
        if rooms:
            raise conflict(
                f"option machineRooms needs messageQueueSelector=machineRoom, not {selector}. Set it, or drop machineRooms"
            )
        return ()
    if endpoint.embedded:
        raise no_rooms("messageQueueSelector=machineRoom", "is not supported with path", "Use hash")
    if not rooms:
        raise OptionError(
            OptionCondition.MISSING, "option messageQueueSelector=machineRoom needs the rooms to write to. Set machineRooms"
        )
    return rooms


def _key_conflict(given: Given, endpoint: Endpoint) -> OnKeyConflict:
    chosen = given.optional("onKeyConflict", choice(_ON_KEY_CONFLICT))
    if chosen is None:
        return "error" if endpoint.capabilities.atomic_publish else "warn"
    if chosen == "error" and not endpoint.capabilities.atomic_publish:
        raise OptionError(
            OptionCondition.UNSUPPORTED,
            "option onKeyConflict=error is not supported with namesrvAddr: readers of a cluster see rows as soon as they are sent, before a "
            "conflict can be found. Use warn, and ordered_sink.route",
        )
    return chosen


def _compression(given: Given, endpoint: Endpoint) -> Compression | None:
    if given.has("compression") and not endpoint.embedded:
        raise conflict(
            "option compression belongs to the embedded broker's topics. Drop it, or use path instead of namesrvAddr"
        )
    return given.optional("compression", choice(_COMPRESSIONS))


def _sink_group(given: Given, endpoint: Endpoint) -> str | None:
    if given.has("sinkGroup") and endpoint.embedded:
        raise conflict(
            "option sinkGroup belongs to a RocketMQ cluster, where a sink keeps bookmarks in a group. Drop it, or use namesrvAddr"
        )
    return given.optional("sinkGroup", parse_group)


def _trace_topic(given: Given, endpoint: Endpoint) -> str | None:
    for name in ("enableMsgTrace", "customizedTraceTopic"):
        if given.has(name) and endpoint.embedded:
            raise only_for_cluster(name, "a store has no message trace")
    topic = given.optional("customizedTraceTopic", _topic)
    if given.value("enableMsgTrace", parse_bool):
        return topic or TRACE_TOPIC
    if topic is not None:
        raise conflict("option customizedTraceTopic needs enableMsgTrace=true. Set it, or drop customizedTraceTopic")
    return None


def _check_txn(given: Given, streaming: bool | None) -> None:
    for name, other in (("txnAppId", "txnVersion"), ("txnVersion", "txnAppId")):
        if not given.has(name):
            continue
        if streaming is True:
            raise OptionError(
                OptionCondition.UNSUPPORTED,
                f"option {name} is not supported in a stream, which is idempotent because of its checkpoint. Drop it, or use df.write",
            )
        if not given.has(other):
            raise half_given(name, other)


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
    known = _SELECTORS.get(text.lower())
    if known:
        return known
    module, colon, function = text.partition(":")
    if not colon or not all(part.isidentifier() and not keyword.iskeyword(part) for part in (*module.split("."), function)):
        raise invalid(
            option,
            f"{shown(text)} is not hash, mod, random, queueId, machineRoom or module:function. Write for example my.rules:choose",
        )
    return text


_SORT_COLUMN: Final = re.compile(r"(?:`([^`]+)`|([^\s`]+))(?:\s+(asc|desc))?", re.IGNORECASE)


def parse_buffer_size(text: str, option: str) -> int:
    """Return the bytes of rows that a task may hold to sort them."""
    size = parse_size(text, option)
    if size > _MAX_BUFFER:
        raise invalid(
            option,
            f"{shown(text)} is too large: a task sorts at most 2 GiB of rows. Write at most 2g, and spread the rows over more tasks",
        )
    return size


def _order_by(text: str, option: str) -> tuple[SortColumn, ...]:
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
