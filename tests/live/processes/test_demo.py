"""The demo's data, and the results that it computes from them, without Spark."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
import pytest

from orderedmq.demo import flights
from orderedmq.demo.job import follow
from orderedmq.demo.play import Demo, DemoError, _Job


@pytest.fixture(scope="module")
def events() -> pa.RecordBatch:
    return flights.events()


def at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["actual"]).timestamp() / 60


def test_a_year_of_flights_is_in_order_and_makes_sense(events: pa.RecordBatch) -> None:
    # 328,521 flights departed, and 328,063 of them are known to have landed.
    assert events.num_rows == 656_584
    lines = pa.py_buffer(b"\n".join(events["body"].to_pylist()))
    fields = pa.schema([(name, pa.string()) for name in ("id", "type", "tailnum", "actual")])
    options = pa_json.ParseOptions(explicit_schema=fields, unexpected_field_behavior="ignore")
    parsed = pa_json.read_json(lines, parse_options=options).combine_chunks()
    ids, kinds, aircraft, texts = (parsed[name].combine_chunks() for name in fields.names)
    assert dict(Counter(kinds.to_pylist())) == {"departure": 328_521, "arrival": 328_063}
    assert pc.count_distinct(ids).as_py() == len(ids)
    assert events["sharding_key"].equals(aircraft)
    assert pc.count_distinct(aircraft).as_py() == 4037
    assert np.array_equal(pc.sort_indices(texts), np.arange(len(texts)))
    assert (texts[0].as_py(), texts[-1].as_py()) == ("2013-01-01 10:17:00Z", "2014-01-01 10:53:00Z")
    # The time zones are right, because every flight has a positive duration, and almost no flight overlaps with its aircraft's
    # next one.
    minutes = pc.strptime(texts, "%Y-%m-%d %H:%M:%SZ", "s").cast(pa.int64()).to_numpy() / 60
    flight = pc.replace_substring_regex(ids, r"/[^/]*$", "")
    lands = np.flatnonzero(pc.equal(kinds, "arrival"))
    leaves = np.flatnonzero(pc.equal(kinds, "departure"))
    left = pc.index_in(flight.take(lands), value_set=flight.take(leaves))
    assert left.null_count == 0
    took = minutes[lands] - minutes[leaves[left]]
    assert took.min() > 30
    assert np.sort(took)[len(took) // 2] == 161
    by_aircraft = np.argsort(aircraft.dictionary_encode().indices, kind="stable")
    same_aircraft, same_kind = (
        pc.equal(column.take(by_aircraft[1:]), column.take(by_aircraft[:-1])) for column in (aircraft, kinds)
    )
    assert pc.sum(pc.and_(same_aircraft, same_kind)).as_py() < 0.002 * len(ids)


def test_fewer_events_are_the_first_ones_also_of_the_aircraft_at_which_the_demo_lets_users_look(events: pa.RecordBatch) -> None:
    first = flights.events(1000)
    assert first.equals(events.slice(0, 1000))
    [(most, _)] = Counter(events["sharding_key"].to_pylist()).most_common(1)
    assert most == "N725MQ"
    assert most in first["sharding_key"].to_pylist()


def one_by_one(bodies: list[bytes]) -> list[dict[str, Any]]:
    """Compute the results of `follow` again, event by event."""
    last_by_aircraft: dict[str, dict[str, Any]] = {}
    out = []
    for body in bodies:
        event = json.loads(body)
        last = last_by_aircraft.get(event["tailnum"])
        new: dict[str, Any] = {"turnaround": None, "carried": None}
        if event["type"] == "departure" and last is not None and last["type"] == "arrival":
            new["turnaround"] = int(at(event) - at(last))
            if last["delay"] is not None and event["delay"] is not None:
                new["carried"] = max(0, min(last["delay"], event["delay"]))
        last_by_aircraft[event["tailnum"]] = event
        out.append(new | event)
    return out


def test_every_event_has_the_result_of_a_calculation_event_by_event_in_any_batches(events: pa.RecordBatch) -> None:
    # Choose one of forty aircraft, so that the same aircraft occur often.
    bodies = [
        body for body, key in zip(events["body"].to_pylist(), events["sharding_key"].to_pylist()) if hash_of(key) % 40 == 0
    ]
    assert len(bodies) > 10_000
    expected = one_by_one(bodies)
    dice = random.Random(4)
    for sizes in ([len(bodies)], [1, 2, 50, 1000]):
        last, begin = b"", 0
        results: list[tuple[bytes, str]] = []
        while begin < len(bodies):
            count = dice.choice(sizes)
            last, messages = follow(last, bodies[begin : begin + count])
            results += messages.itertuples(index=False, name=None)
            begin += count
        assert [json.loads(body) for body, _ in results] == expected
        assert [tail for _, tail in results] == [event["tailnum"] for event in expected]


def hash_of(key: str) -> int:
    return sum(key.encode())


def test_a_folder_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(DemoError, match=r"FOLDER_IN_USE.* is not empty"):
        Demo(tmp_path)
    for file in (tmp_path / "mine", tmp_path / "mine" / "below"):
        with pytest.raises(
            DemoError, match=r"FOLDER_IN_USE.* cannot be the folder of the demo: .*Give the demo another --path"
        ):
            Demo(file)
    assert Demo(tmp_path / "new").endpoint.path == str(tmp_path / "new" / "store")


def test_a_paused_job_whose_batch_is_already_done_continues_and_another_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    job = _Job.__new__(_Job)
    job._driver, job._jvm, job.killed = process, process.pid, False
    stood: list[str] = []

    def done_meanwhile() -> bool:
        stood.append(psutil.Process(process.pid).status())
        return False

    try:
        assert not job.kill(done_meanwhile)
        assert stood == [psutil.STATUS_STOPPED]
        assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
        assert not job.killed
        assert job.kill(lambda: True)
        assert job.killed
        assert process.returncode == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
