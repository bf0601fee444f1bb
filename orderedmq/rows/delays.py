"""Delayed rows: the meaning of their columns, and which values a broker accepts. Pure.

A row with a value in one of two columns is *delayed*: RocketMQ keeps its message in an internal topic of the broker
(SCHEDULE_TOPIC_XXXX, rmq_sys_wheel_timer) and puts it into its queue when it is due. So the message has no order relative to other
messages, and it cannot be found in its queue before it is due.

``delay_time_level`` is the number of a step in the broker's ``messageDelayLevel``, beginning with 1. A broker treats a number
above its last step as the last step. 0 means no delay, as in Java. ``deliver_timestamp`` is a time. Brokers support it from 5.0
on, with a precision of ``timerPrecisionMs`` (1 s) and at most ``timerMaxDelaySec`` (3 days) ahead. A message with a time in the
past is delivered immediately. Source: HookUtils.handleScheduleMessage, MessageStoreConfig.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import MessageCondition, OptionCondition, SchemaCondition
from orderedmq.errors import MessageError, OptionError, SchemaError
from orderedmq.schema import null_where

LEVEL: Final = "delay_time_level"
TIME: Final = "deliver_timestamp"
#: The columns of delayed rows, and their types.
DELAY_COLUMNS: Final = (LEVEL, TIME)
_TYPES: Final = {LEVEL: pa.int32(), TIME: pa.timestamp("ms", "UTC")}
_MOST_INT: Final = 2**31 - 1
#: The number of levels by default: 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h.
DEFAULT_LEVELS: Final = 18


@dataclass(frozen=True)
class DelayLimits:
    """The delays that one broker accepts. ``no_time``: why the broker refuses ``deliver_timestamp``, None if it accepts the column.

    ``most``: how many ms ahead a time may be, None if unknown.
    """

    broker: str
    levels: int = DEFAULT_LEVELS
    no_time: str | None = None
    most: int | None = None

    def require_columns(self, columns: Sequence[str]) -> None:
        """Raises OptionError UNSUPPORTED for a column with which the broker would deliver rows immediately, or refuse them all."""
        if TIME in columns and self.no_time is not None:
            raise OptionError(
                OptionCondition.UNSUPPORTED,
                f"column {TIME!r} is not supported by broker {self.broker}: {self.no_time}. Write {LEVEL} instead, or hold the rows back "
                "until they are due",
            )

    def require(self, rows: pa.RecordBatch, where: str, first: int, now: int) -> None:
        """Check delayed rows. ``first`` is the number of the first row in errors, and ``now`` is in ms since the epoch.

        Raises OptionError UNSUPPORTED or MessageError BAD_DELAY.
        """
        self.require_columns([name for name in DELAY_COLUMNS if values(rows, name).null_count < rows.num_rows])
        row = pc.index(pc.fill_null(pc.greater(values(rows, LEVEL), self.levels), False), True).as_py()
        if row >= 0:
            raise MessageError(
                MessageCondition.BAD_DELAY,
                f"in row {first + row} of {where}, {LEVEL} is {values(rows, LEVEL)[row].as_py()}, but broker {self.broker} has the levels "
                f"1 to {self.levels} (messageDelayLevel) and would use the last one",
            )
        if self.most is None:
            return
        times = values(rows, TIME)
        row = pc.index(pc.fill_null(pc.greater(times.cast(pa.int64()), now + self.most), False), True).as_py()
        if row >= 0:
            raise MessageError(
                MessageCondition.BAD_DELAY,
                f"in row {first + row} of {where}, {TIME} is {times[row].as_py():%Y-%m-%dT%H:%M:%SZ}, but broker {self.broker} accepts a "
                f"message at most {self.most // 1000} s ahead (timerMaxDelaySec). Write the row later, or raise that setting",
            )


def delays(rows: pa.RecordBatch, where: str, first: int) -> dict[str, pa.Array]:
    """Check the delay columns of rows. Return, by name, the columns that delay at least one row.

    ``first`` is the number of the first row in errors. Raises MessageError BAD_DELAY for a negative level or a row with both columns.
    Raises NULL_BODY for a delayed row with an empty body: delayed rows are sent one by one, and a broker refuses a single empty message.
    """
    found = {}
    for name in DELAY_COLUMNS:
        column = values(rows, name)
        if name == LEVEL and column.null_count < len(column):
            row = pc.index(pc.fill_null(pc.less(column, 0), False), True).as_py()
            if row >= 0:
                raise MessageError(
                    MessageCondition.BAD_DELAY,
                    f"in row {first + row} for {where}, {LEVEL} is {column[row].as_py()}. Write a level from 1 on, or null for no delay",
                )
            column = null_where(pc.equal(column, 0), column)
        if column.null_count < len(column):
            found[name] = column
    if not found:
        return found
    if len(found) == 2:
        row = pc.index(pc.and_(*(column.is_valid() for column in found.values())), True).as_py()
        if row >= 0:
            raise MessageError(
                MessageCondition.BAD_DELAY,
                f"row {first + row} for {where} has both {LEVEL} and {TIME}, and a broker would ignore the time. Set one of them to null",
            )
    empty = pc.fill_null(pc.equal(pc.binary_length(rows.column("body")), 0), False)
    row = pc.index(pc.and_(empty, _any_valid(list(found.values()))), True).as_py()
    if row >= 0:
        raise MessageError(
            MessageCondition.NULL_BODY,
            f"row {first + row} for {where} is delayed and has an empty body: such a message is sent alone and needs at least one byte",
        )
    return found


def delays_nothing(what: str) -> OptionError:
    """Return the embedded broker's error for delayed rows. ``what``: their column or option, such as "column 'delay_time_level'"."""
    return OptionError(
        OptionCondition.UNSUPPORTED,
        f"{what} is not supported with path: the embedded broker delays no message. Drop it and write the rows when they are due, or use "
        "namesrvAddr",
    )


def require_types(schema: pa.Schema, where: str) -> None:
    """Raises SchemaError WRONG_TYPE unless the level is a whole number and the time has a time zone, as in the sink's columns."""
    for name, what, fits in (
        (LEVEL, "a whole number", pa.types.is_integer),
        (TIME, "a timestamp with a time zone", lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None),
    ):
        if name in schema.names and not fits(schema.field(name).type):
            raise SchemaError(
                SchemaCondition.WRONG_TYPE, f"column {name!r} for {where} is {schema.field(name).type}, not {what}. Cast it"
            )


def split(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
    """Return two batches: the rows without a delay, from which the delay columns are removed, and the delayed rows or None."""
    there = [name for name in DELAY_COLUMNS if name in rows.schema.names]
    if not there:
        return rows, None
    is_delayed = _any_valid([rows.column(name) for name in there])
    ordinary = rows.filter(pc.invert(is_delayed)).select([name for name in rows.schema.names if name not in there])
    delayed = rows.filter(is_delayed)
    return ordinary, delayed if delayed.num_rows else None


def _any_valid(columns: Sequence[pa.Array]) -> pa.Array:
    is_delayed = columns[0].is_valid()
    for column in columns[1:]:
        is_delayed = pc.or_(is_delayed, column.is_valid())
    return is_delayed


def values(rows: pa.RecordBatch, name: str) -> pa.Array:
    """Return a delay column in its own type (int32, or a timestamp in ms). If the column is missing, all values are null."""
    at = rows.schema.get_field_index(name)
    if at < 0:
        return pa.nulls(rows.num_rows, _TYPES[name])
    column = rows.column(at)
    if column.type == _TYPES[name]:
        return column
    if name == LEVEL and column.type in (pa.int64(), pa.uint32(), pa.uint64()):
        # Limit levels that do not fit 32 bits: no broker has them, but a truncated number could be a valid level.
        most = pa.scalar(_MOST_INT, column.type)
        column = pc.if_else(pc.greater(column, most), most, column)
        column = pc.if_else(pc.less(column, -1), -1, column) if column.type == pa.int64() else column
    # µs are truncated to ms, because no broker delivers with a precision of 1 ms.
    return column.cast(_TYPES[name], safe=name == LEVEL)
