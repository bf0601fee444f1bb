"""What each release has written is opened and continued, and what a newer version has written is refused (tests/formats.py)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orderedmq
from orderedmq.broker import Broker
from orderedmq.embedded.check import check
from orderedmq.embedded.store import database, schema
from orderedmq.errors import OffsetError, StoreError
from orderedmq.ownership import offsets
from tests import formats
from tests.formats import COPY, FOLDER, OUT
from tests.micro_batches import Checkpoint, MicroBatchLoop

VERSIONS = sorted(FOLDER.iterdir())
NOT_RELEASED = "if this version is not released, write its folder again: python -m tests.formats"

of_each_release = pytest.mark.parametrize("version", VERSIONS, ids=lambda folder: folder.name)


def written(version: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((version / f"{name}.json").read_text())
    return content


def resumed(version: Path, store: Path) -> MicroBatchLoop:
    """The query of the version's checkpoint, not started yet."""
    checkpoint = formats.read_checkpoint(version / "checkpoint")
    return MicroBatchLoop({"path": store, **COPY}, {"path": store, **OUT}, checkpoint, available_now=True)


def lacking(before: Any, now: Any, at: str = "") -> list[str]:
    """The names in ``before`` that are not in ``now``."""
    if isinstance(before, dict):
        return [name for key in before for name in lacking(before[key], now.get(key, []), f"{at} {key}".strip())]
    return [f"{at}: {name}" for name in before if name not in now]


@pytest.mark.holds("released formats")
@of_each_release
def test_a_query_on_a_store_of_a_release_resumes_where_it_stood(version: Path, tmp_path: Path) -> None:
    store, then = formats.restore(version, tmp_path / "store"), written(version, "expected")
    assert check(store) == []
    query = resumed(version, store)
    with orderedmq.connect(store) as broker:
        assert formats.expected(broker) == then
        query.advance("committed")
        # The batch that was logged and published is repeated, and the sink recognises it.
        assert (query.batches[0].number, query.rows) == (len(query.checkpoint.log) - 1, [4])
        assert formats.expected(broker) == then
        query.process_all_available()
        now = formats.expected(broker)
    assert Counter(body for texts in now["out"].values() for body in texts) == Counter(
        body for texts in then["in"].values() for body in texts
    )
    assert set(now["offsets"]["copy"].values()) == {len(then["in"]["0"])}


@pytest.mark.holds("released formats")
@of_each_release
def test_a_parked_key_of_a_release_returns_and_its_dead_letter_does_not(version: Path, tmp_path: Path) -> None:
    store, then = formats.restore(version, tmp_path / "store"), written(version, "expected")
    # The key's waiting time is over unless the folder was written a moment ago.
    assert formats.hear(str(store)) == then["parked"], NOT_RELEASED
    with orderedmq.connect(store) as broker:
        [letters] = broker.log.queues("%DLQ%work")
        assert [body.decode() for body in broker.log.pull(letters, 0, 10, 1 << 20, ("body",))["body"].to_pylist()] == then[
            "dead"
        ]


@pytest.mark.holds("released formats")
@of_each_release
def test_no_name_of_a_release_is_missing(version: Path, tmp_path: Path) -> None:
    store = formats.restore(version, tmp_path / "store")
    now = json.loads(json.dumps(formats.names(store)))
    before = written(version, "names")
    assert lacking(before, now) == [], NOT_RELEASED
    assert now["columns"][: len(before["columns"])] == before["columns"], NOT_RELEASED


@pytest.mark.holds("released formats")
@of_each_release
def test_rocketmqs_brokers_store_what_a_release_has_stored(version: Path) -> None:
    assert json.loads(json.dumps(formats.at_rocketmq())) == written(version, "rocketmq"), NOT_RELEASED


def test_the_version_under_development_has_a_folder() -> None:
    assert (FOLDER / orderedmq.__version__).is_dir(), NOT_RELEASED


# -- newer formats -------------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    """The content of each file of a store, without that of the lock file, which every process that looks at the store opens."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "index.lock"
    }


@pytest.mark.holds("newer format")
@of_each_release
@pytest.mark.parametrize("use", ["read", "write", "query", "check", "snapshot"])
def test_a_store_of_a_newer_format_is_refused_and_left_alone(
    version: Path, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = formats.restore(version, tmp_path / "store")
    before = contents(store)
    # This version is older than the store.
    monkeypatch.setattr(database, "FORMAT", schema.FORMAT - 1)
    uses: dict[str, Callable[[Broker], object]] = {
        "read": lambda broker: broker.log,
        "write": lambda broker: broker.admin.create_topic("t", 1),
        "query": lambda broker: resumed(version, store).advance(),
        "check": lambda broker: check(store),
        "snapshot": lambda broker: orderedmq.snapshot(store, tmp_path / "copy"),
    }
    with orderedmq.connect(store) as broker, pytest.raises(StoreError) as caught:
        uses[use](broker)
    assert caught.value.condition == "ORDEREDMQ_STORE.OTHER_FORMAT"
    assert "Upgrade orderedmq" in caught.value.message
    assert contents(store) == before


@pytest.mark.holds("newer format")
@of_each_release
@pytest.mark.parametrize("at", ["committed", "logged"])
def test_a_checkpoint_of_a_newer_format_is_refused_before_a_queue_is_locked(version: Path, at: str, tmp_path: Path) -> None:
    store = formats.restore(version, tmp_path / "store")
    checkpoint = formats.read_checkpoint(version / "checkpoint")
    newer = json.dumps({**checkpoint.end(-1), "v": offsets.FORMAT + 1, "quorum": {}})
    log = [*checkpoint.log[:-1], newer]
    query = MicroBatchLoop(
        {"path": store, **COPY},
        {"path": store, **OUT},
        Checkpoint(log, len(log) - (at == "logged"), query_id=checkpoint.query_id),
        available_now=True,
    )
    with orderedmq.connect(store) as broker:
        before = broker.log.change(), broker.admin.locks()
        with pytest.raises(OffsetError) as caught:
            query.advance()
        assert caught.value.condition == "ORDEREDMQ_OFFSET.NEWER_FORMAT"
        assert before[0] == broker.log.change()
        assert [lock.epoch for lock in before[1]] == [lock.epoch for lock in broker.admin.locks()]
