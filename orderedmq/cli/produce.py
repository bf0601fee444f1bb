"""``orderedmq produce``: writes lines, JSON objects or binary bodies to a topic in large blocks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, Literal

import pyarrow.compute as pc
import typer

from orderedmq.broker import Broker
from orderedmq.cli.lines import LineForm, messages, read_lines
from orderedmq.cli.queue_names import KeyTypeOption, SelectorOption
from orderedmq.cli.shell import Shell, command, commands
from orderedmq.cli.topics import Name
from orderedmq.conditions import OptionCondition, StoreCondition, TopicCondition
from orderedmq.errors import OptionError, OrderedMQError, StoreError, TopicError
from orderedmq.model import MAX_QUEUES, is_reserved
from orderedmq.routing.selector import Keying, keying_of
from orderedmq.rows.message_rows import several_tags
from orderedmq.text import is_text
from orderedmq.tools.producer import Producer
from orderedmq.tools.readable import number, size

app = commands("")


@command(app, "produce")
def produce(
    shell: Shell,
    topic: Name,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Read this file (default: standard input).", show_default=False, metavar="FILE"),
    ] = None,
    kind: Annotated[
        Literal["lines", "json", "base64"] | None,
        typer.Option(
            "--format",
            help="Each line is any text (lines), a JSON object (json), or a body of any bytes in Base64 (base64), in front of which a key is "
            "text as in lines. Default: json if an option names a field, else lines.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Field of the JSON objects that is the sharding key. a.b is field b of object a.", metavar="FIELD"),
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(help="The text between sharding key and body in a line.", metavar="TEXT")
    ] = None,
    tags: Annotated[
        str | None,
        typer.Option(help="The tag of every message. Consumers can filter by it.", metavar="TAG", show_default=False),
    ] = None,
    tags_field: Annotated[
        str | None, typer.Option(help="Field of the JSON objects that is the tag.", metavar="FIELD", show_default=False)
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--property", help="A property of every message. May be repeated.", metavar="NAME=VALUE", show_default=False
        ),
    ] = None,
    property_fields: Annotated[
        list[str] | None,
        typer.Option(
            "--property-field",
            help="Copy a field of the JSON objects to property NAME. The field is FIELD, or NAME if no FIELD is given. May be repeated.",
            metavar="NAME[=FIELD]",
            show_default=False,
        ),
    ] = None,
    key_type: KeyTypeOption = None,
    selector: SelectorOption = None,
    queues: Annotated[
        int | None,
        typer.Option("--queues", min=1, max=MAX_QUEUES, help="Create the topic with this number of queues if it is missing."),
    ] = None,
) -> None:
    """Write each line of a file or of standard input as a message.

    A sharding key chooses the queue, as in the sink. Lines without a key go to the queues in turn. A key is text unless
    --sharding-key-type or --selector says that it is a number. Messages are appended in blocks. Each block is durable before the next one
    begins. Lines that arrive slowly are appended after a fraction of a second. All lines have the same format. If an object lacks a field,
    its message lacks that property or tag.
    """
    json = kind == "json" or (kind is None and any((key, tags_field, property_fields)))
    if key is not None and (not json or key_separator is not None):
        raise OptionError(
            OptionCondition.CONFLICT,
            "option --key names a field of JSON objects, so it excludes --format lines, --format base64 and --key-separator",
        )
    if not json and (tags_field is not None or property_fields):
        raise OptionError(
            OptionCondition.CONFLICT,
            "options --tags-field and --property-field name fields of JSON objects, so they exclude --format lines and --format base64",
        )
    if tags is not None and tags_field is not None:
        raise OptionError(OptionCondition.CONFLICT, "options --tags and --tags-field exclude each other. Give only one of them")
    if tags == "":
        raise OptionError(OptionCondition.INVALID, "option --tags is empty. Give a tag, or leave the option out")
    if key_separator is not None and json:
        raise OptionError(
            OptionCondition.CONFLICT, "option --key-separator splits lines, so it excludes --format json. Give --key FIELD"
        )
    texts = {"--key": key, "--key-separator": key_separator, "--tags": tags, "--tags-field": tags_field}
    texts |= {"--property": "".join(properties or ()), "--property-field": "".join(property_fields or ())}
    for name, text in texts.items():
        if not is_text(os.fsencode(text or "")):
            raise OptionError(OptionCondition.INVALID, f"option {name} is not UTF-8. Give it as UTF-8 text")
    if key_separator == "":
        raise OptionError(OptionCondition.INVALID, "option --key-separator is empty. Give for example --key-separator ':'")
    keying = keying_of(selector, key_type) or Keying()
    form = LineForm(
        json,
        key,
        key_separator,
        keying.key_type,
        tags,
        tags_field,
        _parse_properties(properties or (), "--property"),
        _parse_properties(property_fields or (), "--property-field"),
        base64=kind == "base64",
    )
    began = time.monotonic()
    count = total = several = 0
    with _open(file, shell) as source, shell.broker() as broker:
        _ensure_topic(broker, topic, queues)
        producer = Producer(
            broker.log,
            topic,
            sharding_key_type=keying.key_type,
            selector=keying.selector,
        )
        length = os.fstat(source.fileno()).st_size if file else None
        try:
            with shell.progress(f"writing to {topic}", length, size=True, typing=not file and sys.stdin.isatty()) as bar:
                for first, lines in read_lines(source):
                    rows = messages(lines, first, form)
                    # Delay Ctrl-C, so that every message that is written is also counted.
                    with _delayed_interrupt():
                        if rows.num_rows:
                            producer.send(rows)
                        count += rows.num_rows
                    several += several_tags(rows)
                    total += int(pc.sum(pc.binary_length(rows["body"])).as_py() or 0)
                    bar.advance(int(pc.sum(pc.binary_length(lines)).as_py() or 0) + len(lines))
        except (OrderedMQError, KeyboardInterrupt):
            shell.note(f"{count:,} messages were written before this")
            raise
    if several:
        shell.note(f"{several:,} messages have a tag with a comma or ||. A message has one tag, and no filter finds such a tag")
    seconds = time.monotonic() - began
    shell.done(
        {"topic": topic, "messages": count, "bytes": total, "seconds": round(seconds, 3)},
        f"wrote {count:,} messages ({size(total)}) to {topic} in {seconds:.1f} s, {number(count / max(seconds, 1e-9))} messages/s",
    )


def _parse_properties(texts: Sequence[str], option: str) -> dict[str, str]:
    """Parse texts of the form NAME=VALUE. For --property-field, NAME alone means NAME=NAME. Raises OptionError INVALID."""
    properties: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and option == "--property-field":
            value = name
        if not name or not value:
            raise OptionError(
                OptionCondition.INVALID,
                f"option {option}: {text!r} has no name or no value. Write for example {option} region=eu",
            )
        if is_reserved(name):
            raise OptionError(
                OptionCondition.INVALID,
                f"option {option}: {name!r} is a property that RocketMQ or a column sets. Give another name, or --tags for a tag",
            )
        if name in properties:
            raise OptionError(OptionCondition.INVALID, f"option {option}: {name!r} is given twice. Give it once")
        properties[name] = value
    return properties


def _open(file: Path | None, shell: Shell) -> IO[bytes]:
    if file is None:
        if sys.stdin.isatty():
            shell.note("reading lines from the terminal. Press Ctrl-D to end")
        return sys.stdin.buffer
    try:
        return open(file, "rb")
    except OSError as error:
        raise OptionError(OptionCondition.INVALID, f"option --file: {file} cannot be read: {error.strerror}") from error


def _ensure_topic(broker: Broker, topic: str, queues: int | None) -> None:
    """Create the topic if it is missing. If ``queues`` is given, check that an existing topic has this number of queues.

    Raises TopicError MISSING or QUEUE_COUNT, StoreError MISSING.
    """
    try:
        count = broker.log.topic(topic).queues
    except (TopicError, StoreError) as error:
        if error.sub not in (TopicCondition.MISSING, StoreCondition.MISSING):
            raise
        if queues is None:
            raise
        broker.admin.create_topic(topic, queues)
        return
    if queues is not None and count != queues:
        raise TopicError(TopicCondition.QUEUE_COUNT, f"topic {topic!r} has {count} queues, not {queues}. Leave --queues out")


@contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Delay the KeyboardInterrupt of a Ctrl-C until the end of the block. A second Ctrl-C interrupts the block immediately."""
    # If Ctrl-C was ignored from the start (nohup, a background job), it stays ignored.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    count = 0

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if count:
        raise KeyboardInterrupt
