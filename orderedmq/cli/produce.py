"""``orderedmq produce``: lines or JSON objects into a topic, many at once."""

from __future__ import annotations

import io
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from orderedmq import json_field
from orderedmq.broker import Broker
from orderedmq.cli.keys import KeyTypeOption, SelectorOption, chosen_keying
from orderedmq.cli.shell import Shell, command, number, size
from orderedmq.cli.topics import Name
from orderedmq.errors import OptionError, OrderedMQError, SchemaError, StoreError, TopicError
from orderedmq.json_field import BadJson
from orderedmq.model import MAX_BODY_BYTES, MAX_QUEUES
from orderedmq.producer import Producer
from orderedmq.selector import Keying
from orderedmq.sharding_key import KeyType, check_lines

#: Bytes of lines that are appended at once; what comes slowly is appended after so many seconds.
BLOCK_BYTES: Final = 8 * 1024 * 1024
LINGER: Final = 0.2
#: A line longer than any message can be is not worth collecting.
_LONGEST: Final = 2 * MAX_BODY_BYTES


def add_to(app: typer.Typer) -> None:
    command(app, "produce")(produce)


def produce(
    shell: Shell,
    topic: Name,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Read this file (default: standard input).", show_default=False, metavar="FILE"),
    ] = None,
    kind: Annotated[
        Literal["lines", "json"] | None,
        typer.Option("--format", help="A message per line: any text, or a JSON object (default: json with --key, else lines)."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Field of the JSON objects that is the sharding key; a.b leads into objects.", metavar="FIELD"),
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(help="What stands between sharding key and body in a line.", metavar="TEXT")
    ] = None,
    key_type: KeyTypeOption = None,
    selector: SelectorOption = None,
    queues: Annotated[
        int | None,
        typer.Option("--queues", min=1, max=MAX_QUEUES, help="Create the topic with so many queues if it is missing."),
    ] = None,
) -> None:
    """Write a message per line of a file or of standard input: the line is the body.

    A sharding key chooses the queue, as in the sink; lines without one go round. A key is text unless --sharding-key-type or --selector
    says that it is a number. Messages are appended in blocks, each durable when the next one begins; lines that come slowly are appended
    within a moment.
    """
    form = kind or ("json" if key else "lines")
    if key is not None and (form == "lines" or key_separator is not None):
        raise OptionError(
            "CONFLICT", "option --key names a field of JSON objects: it excludes --format lines and --key-separator"
        )
    if key_separator is not None and form == "json":
        raise OptionError("CONFLICT", "option --key-separator splits lines: it excludes --format json; give --key FIELD")
    if key_separator == "":
        raise OptionError("INVALID", "option --key-separator is empty; give for example --key-separator ':'")
    keying = chosen_keying(selector, key_type) or Keying()
    began = time.monotonic()
    messages = total = 0
    with _opened(file, shell) as source, shell.broker() as broker:
        _ensure(broker, topic, queues)
        producer = Producer(broker.log, topic, sharding_key_type=keying.key_type, selector=keying.selector)
        length = os.fstat(source.fileno()).st_size if file else None
        try:
            with shell.progress(f"writing to {topic}", length, size) as bar:
                for first, lines in _lines(source):
                    rows = _rows(lines, first, form, key, key_separator, keying.key_type)
                    if rows.num_rows:
                        producer.send(rows)
                    messages += rows.num_rows
                    total += int(pc.sum(pc.binary_length(rows["body"])).as_py() or 0)
                    bar.advance(int(pc.sum(pc.binary_length(lines)).as_py() or 0) + len(lines))
        except (OrderedMQError, KeyboardInterrupt):
            shell.note(f"{messages:,} messages were written before")
            raise
    seconds = time.monotonic() - began
    shell.done(
        {"topic": topic, "messages": messages, "bytes": total, "seconds": round(seconds, 3)},
        f"wrote {messages:,} messages ({size(total)}) to {topic} in {seconds:.1f} s, {number(messages / max(seconds, 1e-9))} messages/s",
    )


def _opened(file: Path | None, shell: Shell) -> IO[bytes]:
    if file is None:
        if sys.stdin.isatty():
            shell.note("reading lines from the terminal; end with Ctrl-D")
        return sys.stdin.buffer
    try:
        return open(file, "rb")
    except OSError as error:
        raise OptionError("INVALID", f"option --file: {file} cannot be read: {error.strerror}") from error


def _ensure(broker: Broker, topic: str, queues: int | None) -> None:
    """The topic is there, with the number of queues that was asked for."""
    try:
        found = broker.log.topic(topic).queues
    except (TopicError, StoreError) as error:
        if error.sub != "MISSING":
            raise
        if queues is None:
            if isinstance(error, StoreError):
                raise
            raise TopicError("MISSING", f"no topic {topic!r}; give --queues N to create it") from error
        broker.admin.create_topic(topic, queues)
        return
    if queues is not None and found != queues:
        raise TopicError("QUEUE_COUNT", f"topic {topic!r} has {found} queues, not {queues}; leave --queues out")


def _lines(source: IO[bytes]) -> Iterator[tuple[int, pa.Array]]:
    """Blocks of whole lines with the number of the first one, from 1."""
    first, rest = 1, b""
    for block in _blocks(source):
        whole, newline, tail = block.rpartition(b"\n")
        if not newline:
            rest += tail
            if len(rest) > _LONGEST:
                raise SchemaError("WRONG_TYPE", f"line {first} is longer than any message may be ({MAX_BODY_BYTES} bytes)")
            continue
        lines = (rest + whole).split(b"\n")
        rest = tail
        yield first, _stripped(lines)
        first += len(lines)
    if rest:
        yield first, _stripped([rest])


def _stripped(lines: list[bytes]) -> pa.Array:
    """Without the carriage returns of a file from Windows."""
    column = pa.array(lines, pa.binary())
    returned = pc.ends_with(column, b"\r")
    if not pc.any(returned).as_py():
        return column
    return pc.if_else(returned, pc.binary_slice(column, 0, -1), column)


def _blocks(source: IO[bytes]) -> Iterator[bytes]:
    """What there is, up to BLOCK_BYTES; never waiting longer than LINGER once there is something."""
    try:
        descriptor = source.fileno()
    except (OSError, io.UnsupportedOperation):
        while block := source.read(BLOCK_BYTES):
            yield block
        return
    parts: list[bytes] = []
    held, until = 0, 0.0
    while True:
        if parts and not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
            part = None
        else:
            part = os.read(descriptor, BLOCK_BYTES - held)
            if part and not parts:
                until = time.monotonic() + LINGER
            parts.append(part)
            held += len(part)
        if not part or held >= BLOCK_BYTES:
            if held:
                yield b"".join(parts)
            parts, held = [], 0
        if part == b"":
            return


def _rows(lines: pa.Array, first: int, form: str, key: str | None, separator: str | None, kind: KeyType) -> pa.RecordBatch:
    """Messages of lines. Raises SchemaError or MessageError that names a line that cannot be one."""
    if form == "json":
        numbers = pa.array(np.arange(first, first + len(lines)))
        blank = pc.equal(pc.binary_length(pc.utf8_trim_whitespace(_as_text(lines, first))), 0)
        if pc.any(blank).as_py():
            lines, numbers = lines.filter(pc.invert(blank)), numbers.filter(pc.invert(blank))
        try:
            # Without a key the objects are still looked at: a field that none has.
            keys = json_field.values(lines, key or "")
        except BadJson as error:
            raise SchemaError("WRONG_TYPE", f"line {numbers[error.row]} of the input: {error.why}") from error
        if key is None:
            return pa.RecordBatch.from_arrays([lines], names=["body"])
        if keys.null_count:
            row = int(pc.index(keys.is_null(), True).as_py())
            raise SchemaError(
                "MISSING_COLUMN",
                f"line {numbers[row]} of the input has no field {key!r}: a message without a key has no order; filter it out",
            )
        check_lines(keys, kind, numbers.tolist())
        return pa.RecordBatch.from_arrays([lines, keys], names=["body", "sharding_key"])
    if separator is None:
        return pa.RecordBatch.from_arrays([lines], names=["body"])
    text = _as_text(lines, first)
    place = pc.find_substring(text, separator)
    if pc.any(pc.less(place, 0)).as_py():
        row = int(pc.index(pc.less(place, 0), True).as_py())
        raise SchemaError("MISSING_COLUMN", f"line {first + row} of the input has no {separator!r} between key and body")
    parts = pc.split_pattern(text, separator, max_splits=1)
    keys = pc.list_element(parts, 0)
    check_lines(keys, kind, range(first, first + len(keys)))
    return pa.RecordBatch.from_arrays([pc.list_element(parts, 1), keys], names=["body", "sharding_key"])


def _as_text(lines: pa.Array, first: int) -> pa.Array:
    try:
        return lines.cast(pa.string())
    except pa.ArrowInvalid as error:
        for row, line in enumerate(lines.to_pylist()):
            try:
                line.decode()
            except UnicodeDecodeError:
                raise SchemaError("WRONG_TYPE", f"line {first + row} of the input is not UTF-8") from error
        raise
