"""The recipes of docs/guides/other-sinks.md: their queries are killed twice, and each table has each message once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog

from orderedmq.testing.kill import kill_all
from tests import packages
from tests.jars import jars_required
from tests.live.faults.other_sinks_job import PAGE, makes_topic, runs
from tests.live.faults.points import Points
from tests.postgres import Postgres
from tests.snippets import snippets
from tests.waits import until

RECIPES = ("to-delta", "to-iceberg", "to-merged", "to-postgres")


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with jars_required():
        server = Postgres()
    with server:
        yield server


class Job:
    """A run of tests.live.faults.other_sinks_job in a folder."""

    def __init__(self, folder: Path, postgres: Postgres, where: str) -> None:
        self._errors = folder / "stderr.txt"
        self._points = Points(folder / "points")
        if where != "-":
            for name in RECIPES:
                self._points.arm(name)
        # Use a core for each task, because a task that is stopped at its point keeps its core.
        cores = 2 if where == "-" else 8
        self._process = packages.start(
            "tests.live.faults.other_sinks_job", [postgres.address, where], folder, self._errors, cores
        )

    def kill_when_all_stand(self) -> None:
        """Wait until every recipe is stopped at its point. Then kill -9 the driver, its JVM and all workers."""

        def stand() -> bool:
            if self._process.poll() is not None:
                packages.require_success(self._process, self._errors)
                raise AssertionError("the job has ended")
            return all((self._points.folder / f"{name}.reached").exists() for name in RECIPES)

        until(stand, "every recipe is stopped at its point", 300)
        kill_all(self._process)

    def end(self) -> None:
        packages.require_success(self._process, self._errors)

    def close(self) -> None:
        kill_all(self._process)


def committed(folder: Path) -> dict[str, list[int]]:
    """The batches that Spark has committed, for each recipe."""
    return {
        name: sorted(int(file.name) for file in (folder / "data" / f"ck-{name}" / "commits").glob("[0-9]*")) for name in RECIPES
    }


def appended(folder: Path) -> list[int]:
    """The number of commits of Delta's table, and of snapshots of each Iceberg table."""
    delta = str(folder / "data/payments-delta")
    lake = SqlCatalog("lake", uri=f"sqlite:///{folder}/data/lake/catalog.db")
    return [
        DeltaTable(delta).version() + 1 if DeltaTable.is_deltatable(delta) else 0,
        *(len(lake.load_table(f"shop.{name}").metadata.snapshots) for name in ("payments", "merged")),
    ]


@pytest.mark.holds("recipes")
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_each_table_has_each_message_once_after_a_kill_in_the_write_and_one_behind_it(
    tmp_path: Path, postgres: Postgres
) -> None:
    jobs: list[Job] = []
    counted = "SELECT coalesce(sum(payments), 0)::int FROM totals"
    try:
        with jars_required():
            jobs.append(Job(tmp_path, postgres, "writing"))
            jobs[-1].kill_when_all_stand()
        assert list(committed(tmp_path).values()) == [[]] * len(RECIPES)
        assert (appended(tmp_path), postgres.query(counted)) == ([0, 0, 0], [(0,)])
        jobs.append(Job(tmp_path, postgres, "written"))
        jobs[-1].kill_when_all_stand()
        assert list(committed(tmp_path).values()) == [[0]] * len(RECIPES)
        assert (appended(tmp_path), postgres.query(counted)) == ([2, 2, 2], [(200,)])
        # Run the page's code to its end. It waits for the recipes and checks the content of the tables.
        jobs.append(Job(tmp_path, postgres, "-"))
        jobs[-1].end()
        assert list(committed(tmp_path).values()) == [[0, 1, 2]] * len(RECIPES)
        assert (appended(tmp_path), postgres.query("SELECT count(*) FROM staged")) == ([3, 3, 3], [(0,)])
    finally:
        for job in jobs:
            job.close()


def test_the_page_makes_its_topic_once_and_ends_with_what_the_tables_have() -> None:
    recipes = snippets(PAGE)
    assert [sum(map(condition, recipes)) for condition in (makes_topic, runs)] == [1, 1]
    assert "== 300" in next(snippet.code for snippet in recipes if runs(snippet))
