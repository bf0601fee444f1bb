"""Each message once in a table of PostgreSQL, whose transactions wait for each other: the tests of the other databases, on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.jars import jars_required
from tests.postgres import Postgres
from tests.unit.test_once import Table, database
from tests.unit.test_once import test_a_batch_without_rows_for_the_table_moves_its_position as test_a_batch_without_rows
from tests.unit.test_once import test_a_column_that_the_table_lacks_is_refused_before_any_row as test_an_unknown_column
from tests.unit.test_once import test_a_repeat_adds_only_what_the_table_lacks as test_a_repeat
from tests.unit.test_once import test_a_writer_that_was_overtaken_looks_again as test_a_conflict
from tests.unit.test_once import test_an_append_that_fails_moves_no_position as test_a_failure
from tests.unit.test_once import test_two_writers_of_the_first_batch_add_it_once as test_two_first_writers

__all__ = [
    "test_a_batch_without_rows", "test_a_conflict", "test_a_failure", "test_a_repeat", "test_an_unknown_column", "test_two_first_writers",
]  # fmt: skip


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with jars_required():
        server = Postgres()
    with server:
        yield server


@pytest.fixture
def table(postgres: Postgres) -> Table:
    with psycopg.connect(postgres.database) as connection:
        connection.execute("DROP TABLE IF EXISTS payments, orderedmq_positions")
    return database(lambda: psycopg.connect(postgres.database))
