"""Tasks record the queues that they read, while queries continue and remove old records."""

from __future__ import annotations

import threading
from pathlib import Path

from orderedmq.embedded import runs
from orderedmq.model import EMBEDDED_BROKER, MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.micro_batch import SourceRun

QUEUE = MessageQueue("t", EMBEDDED_BROKER, 0)


def note(store: Path, query: str, batch: int) -> None:
    token = LockToken("g", QUEUE, query, f"{query}@1", 1, 1)
    runs.register(store, SourceRun(query, batch, "run", f"name of {query}"), runs.Registration(QUEUE, OffsetRange(0, 1), token))


def test_names_are_found_while_a_query_removes_what_it_noted_before(tmp_path: Path) -> None:
    """Each batch removes folders that a reader may have just listed."""
    (tmp_path / runs.FOLDER).mkdir()
    note(tmp_path, "other", 0)
    stopped = threading.Event()

    def go_on() -> None:
        batch = 0
        while not stopped.is_set():
            note(tmp_path, "busy", batch)
            batch += 1

    query = threading.Thread(target=go_on)
    query.start()
    try:
        for _ in range(1000):
            assert runs.query_names(tmp_path)["other@1"] == "name of other"
    finally:
        stopped.set()
        query.join()
