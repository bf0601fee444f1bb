"""A table of a SQL database, by any driver of Python's DB-API. Positions are rows of a table next to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Final

import pyarrow as pa

from ordered_sink.once.rule import Position, Positions
from ordered_sink.once.targets import Append, Conflict, first_line, require_columns
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import MessageQueue

_POSITIONS: Final = (
    "target VARCHAR(128), stream VARCHAR(128), topic VARCHAR(128), broker_name VARCHAR(128), queue_id INTEGER, "
    "next_offset BIGINT NOT NULL, stored BIGINT NOT NULL, PRIMARY KEY (target, stream, topic, broker_name, queue_id)"
)
_KEY: Final = "target = ? AND stream = ? AND topic = ? AND broker_name = ? AND queue_id = ?"
_MARKS: Final = {"qmark": "?", "format": "%s", "pyformat": "%s"}


class SqlTarget:
    """A table that exists. ``connect`` returns a new connection, whose transactions end only with commit or rollback."""

    def __init__(self, connect: Callable[[], Any], table: str, stream: str) -> None:
        self._connect, self._table, self._stream = connect, table, stream
        schema, dot, _ = table.rpartition(".")
        self._positions = f"{schema}{dot}orderedmq_positions"
        self.name = f"table {table}"

    def prepare(self, schema: pa.Schema) -> None:
        names = self._columns(self._table)
        if isinstance(names, Exception):
            raise OptionError(
                OptionCondition.INVALID, f"{self.name} cannot be read: {first_line(names)}. Create it before the query begins"
            ) from names
        require_columns(self.name, names, schema)
        if isinstance(self._columns(self._positions), Exception):
            with self._session() as session:
                try:
                    session.run(f"CREATE TABLE {self._positions} ({_POSITIONS})")
                    session.transaction.commit()
                except session.driver.Error:
                    # Another writer may have created it at the same time.
                    if isinstance(self._columns(self._positions), Exception):
                        raise

    def read(self, queues: Sequence[MessageQueue]) -> tuple[Positions, Append]:
        positions: dict[MessageQueue, Position] = {}
        if not isinstance(self._columns(self._positions), Exception):
            columns = "topic, broker_name, queue_id, next_offset, stored"
            query = f"SELECT {columns} FROM {self._positions} WHERE target = ? AND stream = ?"
            with self._session() as session:
                for *queue, offset, stored in session.run(query, self._table, self._stream).fetchall():
                    positions[MessageQueue(*queue)] = Position(offset, stored)
        positions = {queue: positions[queue] for queue in queues if queue in positions}
        return positions, partial(self._append, positions)

    def _append(self, before: Positions, rows: pa.RecordBatchReader, moved: Positions) -> None:
        with self._session() as session:
            try:
                for batch in rows:
                    session.insert(self._table, batch)
                # The positions come last, so that a writer that is paused while it inserts does not block the others. They are in the order
                # of queues, so that two writers do not wait for each other.
                for queue, at in sorted(moved.items()):
                    key = (self._table, self._stream, *queue)
                    if queue not in before:
                        session.run(f"INSERT INTO {self._positions} VALUES (?, ?, ?, ?, ?, ?, ?)", *key, *at)
                        continue
                    update = f"UPDATE {self._positions} SET next_offset = ?, stored = ? WHERE {_KEY} AND next_offset = ? AND stored = ?"
                    if session.run(update, *at, *key, *before[queue]).rowcount != 1:
                        session.transaction.rollback()
                        raise Conflict
                session.transaction.commit()
            except (session.driver.OperationalError, session.driver.IntegrityError) as error:
                # Another writer holds a lock for too long, or has inserted the same rows or positions.
                raise Conflict from error

    def _columns(self, table: str) -> list[str] | Exception:
        """Return the names of a table's columns, or why it cannot be read."""
        with self._session() as session:
            try:
                return [column[0] for column in session.run(f"SELECT * FROM {table} WHERE 1 = 0").description]
            except session.driver.Error as error:
                reason: Exception = error
                return reason

    @contextmanager
    def _session(self) -> Iterator[_Session]:
        with closing(self._connect()) as connection:
            yield _Session(connection)


class _Session:
    """A connection in a transaction, and the module of its driver. Statements have ``?`` for each value."""

    def __init__(self, connection: Any) -> None:
        package = type(connection).__module__.partition(".")[0]
        self.driver: Any = sys.modules[package]
        self._mark = _MARKS.get(getattr(self.driver, "paramstyle", ""))
        autocommit = getattr(connection, "autocommit", None)
        # sqlite3 has -1 here if its older attribute isolation_level decides.
        if autocommit in (None, -1):
            autocommit = getattr(connection, "isolation_level", "") is None
        if self._mark is None or autocommit is True:
            raise OptionError(
                OptionCondition.INVALID,
                f"connect returns a connection of {package} that once.sql cannot use. It needs a driver of Python's DB-API with parameters in "
                f"the style {', '.join(_MARKS)}, and a connection without autocommit, which would store rows before their position",
            )
        self._cursor = connection.cursor()
        #: What ends the transaction. A cursor of DuckDB is a connection.
        self.transaction = connection
        if hasattr(self._cursor, "begin"):
            self.transaction = self._cursor.begin()

    def run(self, statement: str, *values: Any) -> Any:
        self._cursor.execute(statement.replace("?", str(self._mark)), values)
        return self._cursor

    def insert(self, table: str, rows: pa.RecordBatch) -> None:
        names = ", ".join(f'"{name}"' for name in rows.schema.names)
        marks = ", ".join([str(self._mark)] * rows.num_columns)
        values = list(zip(*(column.to_pylist() for column in rows.columns), strict=True))
        if values:
            self._cursor.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)
