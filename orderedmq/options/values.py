"""Declares options on the fields of dataclasses, and parses their texts: numbers, durations, sizes, times, names, queues. Pure, except for
relative paths.

Each option's name, default, parser and meaning exist once, in its field. Options are checked as text, before any side effect. Names are
case-insensitive (Spark passes them in lower case) and shown in camelCase. An error is one line with the option, the wrong value and the
remedy. A parser gets the text and the option's name, and raises OptionError INVALID (or UNSUPPORTED).
"""

from __future__ import annotations

import functools
import json
import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final, NoReturn, TypeVar

from orderedmq.conditions import OptionCondition, TopicCondition
from orderedmq.errors import GroupError, OptionError, TopicError, no_such_queue
from orderedmq.model import EMBEDDED_BROKER, LAST_MS, MAX_QUEUES, MessageQueue, check_group, check_topic

T = TypeVar("T")
#: Turns an option's text and name into its value; raises OptionError INVALID (or UNSUPPORTED).
Parser = Callable[[str, str], T]

MAX_LONG: Final = 2**63 - 1
DEFAULT_DIRECTORY: Final = "orderedmq-data"
_OPTION: Final = "option"
#: Maximum number of choices that an error lists.
_MOST_CHOICES: Final = 8


@dataclass(frozen=True)
class Option:
    """One option. `option` explains the fields. ``shown``: the default as tables show it."""

    name: str
    parse: Parser[Any]
    meaning: str
    shown: str
    default: str | None
    cluster: str | None
    absent: Any
    only_cluster: str
    secret: bool

    def value(self, texts: Mapping[str, str]) -> Any:
        """Return the option's value in a user's texts, or its default. Raises the errors of its parser."""
        default = self.default if "namesrvAddr" not in texts else self.cluster or self.default
        text = texts.get(self.name, default)
        return self.absent if text is None else self.parse(text, self.name)


def option(
    parse: Parser[T],
    meaning: str,
    default: str | None = None,
    *,
    name: str = "",
    cluster: str | None = None,
    shown: str = "",
    absent: T | None = None,
    only_cluster: str = "",
    secret: bool = False,
) -> T:
    """Return a dataclass's field that is an option. Its value is what ``parse`` makes of the option's text.

    ``meaning``: one line for the tables of the documents. ``default``: the text that is parsed if the option is not given; without one
    the value is ``absent``. ``cluster``: another default with namesrvAddr. ``name``: the option's name if it is not the field's in
    camelCase. ``shown``: what tables show instead of the default. ``only_cluster``: the reason why a store does not need the option,
    which is refused with a path. ``secret``: no repr shows the value.
    """
    default_shown = shown or (default or "none") + (f", {cluster} with namesrvAddr" if cluster else "")
    declared = Option(name, parse, meaning, default_shown, default, cluster, absent, only_cluster, secret)
    value: Any = absent if default is None else parse(default, name)
    as_field: T = field(default=value, repr=not secret, metadata={_OPTION: declared})
    return as_field


def options_of(kind: type) -> Mapping[str, Option]:
    """Return the options that a dataclass's fields declare, by field and in declared order."""
    return _declared(kind)


@functools.cache
def _declared(kind: type) -> Mapping[str, Option]:
    declared: dict[str, Option] = {each_field.name: each_field.metadata[_OPTION] for each_field in fields(kind)}
    return {name: replace(each, name=each.name or _camel_case(name)) for name, each in declared.items()}


def names_of(kind: type) -> dict[str, str]:
    """Return the names of a dataclass's options by their names in lower case."""
    return {each.name.lower(): each.name for each in options_of(kind).values()}


def _camel_case(name: str) -> str:
    return re.sub("_(.)", lambda match: match[1].upper(), name)


def shown(value: object) -> str:
    """Return ``value`` as one short line for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def invalid(option: str, why: str) -> OptionError:
    return OptionError(OptionCondition.INVALID, f"option {option}: {why}")


def conflict(why: str) -> OptionError:
    return OptionError(OptionCondition.CONFLICT, why)


def half_given(option: str, other: str) -> OptionError:
    """Return the error for an option that has no meaning without another."""
    return OptionError(OptionCondition.MISSING, f"option {option} needs {other}. Set both, or neither")


def only_for_cluster(option: str, why: str) -> OptionError:
    """Return the error for a RocketMQ option that is given with a path. ``why``: the reason that a store does not need the option."""
    return conflict(f"option {option} belongs to a RocketMQ cluster: {why}. Set namesrvAddr, or drop {option}")


def parse_bool(text: str, option: str) -> bool:
    value = {"true": True, "false": False}.get(text.lower())
    if value is None:
        raise invalid(option, f"{shown(text)} is neither true nor false. Write for example true")
    return value


def whole_number(text: str) -> int | None:
    """Return the whole number in a text; None if the text is not a whole number. Numbers above `MAX_LONG` become `MAX_LONG`.

    They are limited because Python's ``int`` refuses more than 4,300 digits, and offsets have 64 bits.
    """
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    return min(int(digits), MAX_LONG) if len(digits) <= len(str(MAX_LONG)) else MAX_LONG


def integer(low: int, high: int = MAX_LONG, example: int = 1000) -> Parser[int]:
    """Return a parser of whole decimal numbers from ``low`` to ``high``, both inclusive."""

    def parse(text: str, option: str) -> int:
        value = int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None
        if value is None or not low <= value <= high:
            upper = "" if high == MAX_LONG else f" to {high}"
            at_least = " or more" if high == MAX_LONG else ""
            raise invalid(option, f"{shown(text)} is not a whole number ({low}{upper}{at_least}). Write for example {example}")
        return value

    return parse


_DURATION: Final = re.compile(r"([0-9]{1,12})(ms|s|m|h)")
_MILLIS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


def parse_duration(text: str, option: str) -> float:
    """Return the seconds in a text such as ``500ms``, ``30s``, ``2m``, ``1h`` or ``0``."""
    if text == "0":
        return 0.0
    match = _DURATION.fullmatch(text.lower())
    if not match:
        raise invalid(option, f"{shown(text)} is not a duration. Write a whole number and ms, s, m or h, for example 30s")
    return int(match[1]) * _MILLIS[match[2]] / 1000


_SIZE: Final = re.compile(r"([0-9]{1,18})([kmg]?)")
_BYTES: Final = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def parse_size(text: str, option: str) -> int:
    """Return the bytes in a text such as ``1048576``, ``512k``, ``64m`` or ``1g`` (powers of 1024). It must be at least 1."""
    match = _SIZE.fullmatch(text.lower())
    size = int(match[1]) * _BYTES[match[2]] if match else 0
    if not 0 < size <= MAX_LONG:
        raise invalid(
            option, f"{shown(text)} is not a size. Write a number of bytes, or a number with k, m or g, for example 64m"
        )
    return size


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ISO_EXAMPLE: Final = "for example 2026-03-01T12:00:00Z"


def parse_timestamp(text: str, option: str) -> int:
    """Return the µs since 1970 of an ISO-8601 text (UTC if it has no zone) or of a number of ms since 1970."""
    if re.fullmatch(r"[0-9]{1,15}", text):
        # RocketMQ writes times as yyyyMMddHHmmss. If such a number were read as ms, it would be a time centuries away.
        if len(text) in (8, 14) and _is_calendar(text):
            raise invalid(option, f"{shown(text)} may be a date or ms since 1970. Write ISO-8601, {_ISO_EXAMPLE}")
        if int(text) <= LAST_MS:
            return int(text) * 1000
    else:
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            pass
        else:
            value = ((when if when.tzinfo else when.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
            if 0 <= value // 1000 <= LAST_MS:
                return value
    raise invalid(option, f"{shown(text)} is not a time since 1970. Write ISO-8601, {_ISO_EXAMPLE}, or ms since 1970")


def _is_calendar(digits: str) -> bool:
    try:
        datetime.strptime(digits, "%Y%m%d" if len(digits) == 8 else "%Y%m%d%H%M%S")
    except ValueError:
        return False
    return True


def choice(values: Sequence[T]) -> Parser[T]:
    """Return a parser that accepts each of the texts ``values`` in any case."""
    by_key = {str(value).lower(): value for value in values}

    def parse(text: str, option: str) -> T:
        if text.lower() not in by_key:
            raise invalid(option, f"{shown(text)} is not one of {', '.join(map(str, values))}. Write for example {values[0]}")
        return by_key[text.lower()]

    return parse


def parse_path(text: str, option: str) -> str:
    """Return the absolute path of a local directory. The scheme ``file:`` is removed, and any other scheme is refused."""
    example = "for example /data/omq"
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):(?=/)|(file):", text, re.IGNORECASE)
    if match:
        scheme = (match[1] or match[2]).lower()
        if scheme != "file":
            # The error shows only the scheme, because such an address may contain credentials.
            raise OptionError(
                OptionCondition.UNSUPPORTED,
                f"option {option}: {scheme}: addresses are not supported. The embedded broker needs a local directory, {example}",
            )
        text = text[match.end() :]
        if text.startswith("//"):
            host, slash, rest = text[2:].partition("/")
            if host.lower() not in ("", "localhost"):
                raise invalid(option, f"the file: address names another host, {shown(host)}. Give a local directory, {example}")
            text = slash + rest
    if not text or "\0" in text:
        raise invalid(option, f"{shown(text)} is not a directory. Give a local one, {example}")
    if text.split("/")[0].startswith("~"):
        raise invalid(option, f"{shown(text)} has a ~, which is not expanded. Write the home directory out, {example}")
    try:
        if not os.path.isabs(text) and _in_a_sessions_folder():
            raise invalid(
                option,
                f"{shown(text)} is relative, and this session's working directory is a temporary folder of the Spark Connect server. Write an "
                f"absolute path on the server, {example}",
            )
        return os.path.abspath(text)
    except OSError as error:
        raise invalid(
            option, "the working directory no longer exists, so a relative path has no meaning. Give an absolute path"
        ) from error


def parse_store_path(text: str, option: str) -> str:
    """Return the absolute path of a store's directory, as `parse_path` does. Also refuses the address of a server."""
    if re.fullmatch(r"[\w.-]+:\d{1,5}([;,].*)?", text) and not os.path.exists(text):
        raise invalid(
            option,
            f"{shown(text)} is the address of a server, not a directory. For a RocketMQ cluster, set namesrvAddr (--namesrv, in Python "
            "namesrv_addr)",
        )
    return parse_path(text, option)


def _in_a_sessions_folder() -> bool:
    """Return whether the working directory is a session's folder, which Spark Connect removes with the session."""
    session = os.environ.get("SPARK_JOB_ARTIFACT_UUID")
    return bool(session) and os.path.basename(os.getcwd()) == session


def parse_topic(text: str, option: str, *, writing: bool) -> str:
    """Return the topic's name. Raises TopicError BAD_NAME or RESERVED, with the option in its message."""
    try:
        check_topic(text, writing=writing)
    except TopicError as error:
        raise TopicError(error.sub, f"option {option}: {error.message}") from error
    return text


def parse_group(text: str, option: str) -> str:
    """Return the consumer group's name. Raises GroupError BAD_NAME, with the option in its message."""
    try:
        check_group(text)
    except GroupError as error:
        raise GroupError(error.sub, f"option {option}: {error.message}. Write for example billing") from error
    return text


def parse_name(text: str, option: str) -> str:
    """Return a name that is shown to people: one line, not empty, at most 127 characters."""
    if not text.strip() or not text.isprintable() or len(text) > 127:
        raise invalid(option, f"{shown(text)} is not a name. Write one line of at most 127 characters, for example billing")
    return text.strip()


def find_queue(text: str, queues: Sequence[MessageQueue]) -> MessageQueue:
    """Return the queue that a text of the form QUEUE, BROKER/QUEUE or TOPIC/BROKER/QUEUE names. ``queues``: all queues of the topic.

    Raises OptionError INVALID, TopicError NO_SUCH_QUEUE or AMBIGUOUS.
    """
    topic = queues[0].topic
    broker, _, digits = text.removeprefix(f"{topic}/").rpartition("/")
    number = whole_number(digits)
    if number is None or "/" in broker:
        raise OptionError(
            OptionCondition.INVALID,
            f"{text!r} is no queue of topic {topic!r}. Write for example 3, {queues[0].broker_name}/3 or {queues[0]}",
        )
    matching = [queue for queue in queues if queue.queue_id == number and broker in ("", queue.broker_name)]
    if not matching:
        raise no_such_queue(topic, text, f"its queues are {queue_spans(queues)}")
    if len(matching) > 1:
        choices = ", ".join(map(str, matching[:_MOST_CHOICES])) + (", …" if matching[_MOST_CHOICES:] else "")
        raise TopicError(
            TopicCondition.AMBIGUOUS, f"{len(matching)} brokers have a queue {text} of topic {topic!r}. Give one of {choices}"
        )
    return matching[0]


def queue_spans(queues: Sequence[MessageQueue]) -> str:
    """Return the text for a topic's queues in a message: ``0 to 7``, or ``broker-a/0 to broker-a/3, broker-b/0``."""
    texts = []
    for broker, of_broker in groupby(sorted(queues), key=lambda queue: queue.broker_name):
        numbers = [queue.queue_id for queue in of_broker]
        prefix = "" if broker == EMBEDDED_BROKER else f"{broker}/"
        last = f" to {prefix}{numbers[-1]}" if len(numbers) > 1 else ""
        texts.append(f"{prefix}{numbers[0]}{last}")
    return ", ".join(texts)


#: Values that a user may write instead of an offset: the queue's end (LATEST) and its first stored message (EARLIEST).
LATEST: Final = -1
EARLIEST: Final = -2

OFFSETS_EXAMPLE: Final = '{"orders": {"embedded": {"0": 23, "1": -2}}}'


class _Pairs(list[tuple[str, object]]):
    """A JSON object as a list, because a dict would silently drop repeated keys."""


def parse_offsets_json(text: str, option: str) -> dict[MessageQueue, int]:
    """Return the offsets in ``{"topic": {"broker": {"queue id": next offset}}}``; LATEST and EARLIEST are allowed.

    Raises OptionError INVALID.
    """
    offsets: dict[MessageQueue, int] = {}
    for topic, broker, queues in _brokers(text, option):
        where = f"topic {shown(topic)}, broker {shown(broker)}"
        for queue_id, offset in _members(queues, where, "queues", option):
            if not re.fullmatch(r"0|[1-9][0-9]{0,5}", queue_id) or int(queue_id) >= MAX_QUEUES:
                raise invalid(option, f"{where}: {shown(queue_id)} is not a queue id. Write for example 0")
            # bool is a subclass of int in Python, but true is not a number in JSON.
            if not isinstance(offset, int) or isinstance(offset, bool) or not EARLIEST <= offset <= MAX_LONG:
                raise invalid(
                    option,
                    f"{where}, queue {queue_id}: {_json_shown(offset)} is not an offset. Write a whole number, "
                    f"{LATEST} (latest) or {EARLIEST} (earliest)",
                )
            offsets[MessageQueue(topic, broker, int(queue_id))] = offset
    return offsets


def _brokers(text: str, option: str) -> Iterator[tuple[str, str, object]]:
    """Yield (topic, broker, JSON value of its queues). Raises OptionError INVALID during the iteration."""
    try:
        root: object = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = (
            f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else "bad number or nesting"
        )
        raise invalid(option, f"the value is not JSON ({why}). Write for example {OFFSETS_EXAMPLE}") from error
    for topic, inside in _members(root, "the whole JSON", "topics", option):
        try:
            check_topic(topic, writing=False)
        except TopicError as error:
            raise invalid(option, f"{error.message}. Write for example {OFFSETS_EXAMPLE}") from error
        for broker, queues in _members(inside, f"topic {shown(topic)}", "brokers", option):
            yield topic, broker, queues


def _members(value: object, where: str, what: str, option: str) -> Iterator[tuple[str, object]]:
    """Yield the members of a JSON object. Raises OptionError INVALID if it is empty or repeats a key."""
    if not isinstance(value, _Pairs):
        raise invalid(option, f"{where}: {_json_shown(value)} is not an object of {what}. Write for example {OFFSETS_EXAMPLE}")
    if not value:
        raise invalid(option, f"{where} names no {what}. Write for example {OFFSETS_EXAMPLE}")
    keys: set[str] = set()
    for key, member in value:
        if key in keys:
            raise invalid(option, f"{where}: {shown(key)} is named twice in {what}. Name it once")
        keys.add(key)
        yield key, member


def _json_shown(value: object) -> str:
    """Return a value as one short line for a message."""
    if isinstance(value, _Pairs):
        return "an object"
    return shown(value) if isinstance(value, list) else shown(json.dumps(value))[1:-1]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
