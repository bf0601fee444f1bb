"""Displayed names of owners."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import orderedmq
from orderedmq.cli import app
from orderedmq.model import OffsetRange
from orderedmq.ownership.membership import Subscription
from orderedmq.ownership.micro_batch import SourceRun, run_of
from orderedmq.tools.group_state import short_names

FIRST, SECOND = "f560b64a111247ab965d7efc9c5309a6", "e560b64a999947ab965d7efc9c5309a6"
HOST = "ip-10-0-12-34.eu-central-1.compute.internal"


@pytest.mark.parametrize(
    ("client", "name", "shown"),
    [
        (f"{FIRST}@{HOST}-17-0123abcd", None, "f560b64a@ip-10-0-12-34-17"),
        (f"orderedmq-{FIRST}@host-a-17-0123abcd", "billing", "billing@host-a-17"),
        # Not a hexadecimal id but a name, so it is shown whole.
        (f"dlq-replay@{HOST}-17-0123abcd", None, "dlq-replay@ip-10-0-12-34-17"),
        # A consumer in Java.
        ("10.0.0.1@4711#8129841", None, "10.0.0.1@4711#8129841"),
    ],
)
def test_the_short_name_of_an_owner_has_its_query_its_host_and_its_process(client: str, name: str | None, shown: str) -> None:
    assert short_names({client: name}) == {client: shown}


def test_the_name_of_a_query_is_what_spark_describes_its_job_by() -> None:
    properties = {"sql.streaming.queryId": "q-1", "streaming.sql.batchId": "3", "spark.jobGroup.id": "r-1"}

    def name(description: str | None) -> str | None:
        run = run_of((properties | ({} if description is None else {"spark.job.description": description})).get)
        assert run == SourceRun("q-1", 3, "r-1")
        return run.name

    assert name("my query\nid = q-1\nrunId = r-1\nbatch = 3") == "my query"
    # A query without a name; a query whose name looks like an id; a job with another description.
    assert name("id = q-1\nrunId = r-1\nbatch = 3") is None
    assert name("id = q-1\nid = q-1\nrunId = r-1") == "id = q-1"
    assert name("nightly job") is None
    assert name(None) is None


def recorded(store: Path, *arguments: str) -> list[str]:
    """The lines that a command prints on a terminal of 80 columns, without blank lines."""
    result = CliRunner().invoke(app, ["--path", str(store), "--no-json", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.stdout.splitlines() if line.strip()]


def test_owners_on_a_terminal_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orderedmq.embedded.liveness.socket.gethostname", lambda: HOST)
    with orderedmq.connect(tmp_path) as broker:
        broker.admin.create_topic("shipments", 3)
        groups, queues = broker.groups, broker.log.queues("shipments")
        for owner, queue, name in zip((FIRST, SECOND, FIRST[::-1]), queues, ("my billing", None, None), strict=True):
            client = replace(groups.join(owner), name=name)
            groups.heartbeat("warehouse", client, Subscription("shared", "shipments", "AVG"))
            [token] = groups.lock("warehouse", client, [queue]).values()
            # The third query's client has no name. Spark's name of the query comes from its tasks.
            if owner == FIRST[::-1]:
                broker.outbox.register(SourceRun("q", 0, "r", "parcels"), queue, OffsetRange(0, 0), token)  # type: ignore[arg-type]
        names = [f"{query}@ip-10-0-12-34-{os.getpid()}" for query in ("my billing", "e560b64a", "parcels")]
        rows = [
            json.loads(line) for line in CliRunner().invoke(app, ["--path", str(tmp_path), "lock", "list"]).stdout.splitlines()
        ]
        assert [(row["query"], row["query_name"]) for row in rows] == [
            (FIRST, "my billing"),
            (SECOND, None),
            (FIRST[::-1], "parcels"),
        ]
        assert all(row["owner"].startswith(f"{row['query']}@{HOST}-") for row in rows)
        shown = recorded(tmp_path, "group", "describe", "warehouse")
        members, owners = shown[2:5], shown[7:]
        for lines in (members, owners):
            assert [name in line for name, line in zip(names, lines, strict=True)] == [True] * 3
        for arguments in (("top", "warehouse"), ("lock", "list")):
            shown = recorded(tmp_path, *arguments)
            # The group of top, a header, a rule, and one line for each queue, so nothing is wrapped.
            assert len(shown) == 5 + (arguments[0] == "top")
            assert [name in line for name, line in zip(names, shown[-3:], strict=True)] == [True] * 3
        for looks in (("top", "warehouse"), ("lock", "list"), ("group", "describe", "warehouse")):
            lines = recorded(tmp_path, *looks)
            assert max(map(len, lines)) <= 80
            assert not any(re.search(r"…|\.\.\.", line) for line in lines)
