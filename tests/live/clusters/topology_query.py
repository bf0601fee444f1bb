"""A query from topic to topic in a process that a storm kills and pauses: Spark's micro-batch loop with a checkpoint on disk.

    python -m tests.live.clusters.topology_query FOLDER

``FOLDER/query.json`` has the query's id and the options of its source and sink. As in Spark, the offset log and the commit log have
a file for each batch, which only one run can create. The process ends when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

from orderedmq.ownership.micro_batch import BATCH
from tests.loop.conftest import with_origin
from tests.micro_batches import AnotherRun, Checkpoint, MicroBatchLoop

#: Seconds between two requests for new offsets of a query that has nothing to read.
IDLE = 0.1


def with_batch(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns for the sink: each row's origin in ``keys``, and the number of the micro-batch in ``tags``."""
    context = TaskContext.get()
    # Without a task, the query's schema is derived from an empty batch.
    batch = None if context is None else context.getLocalProperty(BATCH)
    return with_origin(rows).append_column("tags", pa.array([f"batch-{batch}"] * rows.num_rows, pa.string()))


def read_checkpoint(folder: Path, query_id: str) -> Checkpoint:
    """Return the checkpoint that earlier runs have left in ``folder``."""
    logs = {name: folder / name for name in ("offsets", "commits")}
    for log in logs.values():
        log.mkdir(exist_ok=True)
    batches = sorted((file for file in logs["offsets"].iterdir() if file.name.isdigit()), key=lambda file: int(file.name))
    committed = sum(file.name.isdigit() for file in logs["commits"].iterdir())
    return Checkpoint([file.read_text() for file in batches], committed, 0, query_id)


def record(log: Path, batch: int, text: str) -> None:
    """Create the batch's file, complete or not at all. Raises AnotherRun if it exists."""
    draft = log / f"draft-{os.getpid()}"
    draft.write_text(text)
    try:
        os.link(draft, log / str(batch))
    except FileExistsError:
        raise AnotherRun(f"{log.name} of batch {batch}") from None
    finally:
        draft.unlink()


def run(folder: Path) -> None:
    query = json.loads((folder / "query.json").read_text())
    checkpoint = read_checkpoint(folder, query["id"])
    with contextlib.suppress(AnotherRun):
        loop = MicroBatchLoop(query["source"], query["sink"], checkpoint, rows=with_batch)
        while True:
            match loop.advance():
                case "logged":
                    record(folder / "offsets", len(checkpoint.log) - 1, checkpoint.log[-1])
                case "committed":
                    record(folder / "commits", checkpoint.committed - 1, "")
                case "idle":
                    time.sleep(IDLE)


def _end_with_parent() -> None:
    # Without the lock of sys.stdin, which would abort the interpreter at its end, after an error of the query.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run(Path(sys.argv[1]))
