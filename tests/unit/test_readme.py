"""What the README says of options and tests is what the code has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import orderedmq
from orderedmq.cli import app
from orderedmq.options.declared import option_table

ROOT = Path(__file__).parents[2]
Kind = Literal["broker", "source", "sink"]
README = (ROOT / "README.md").read_text()


def table(kind: Kind) -> str:
    """The Markdown table of one side's options."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for row in option_table(kind):
        meaning = row.meaning.replace("|", "\\|")
        lines.append(f"| `{row.name}` | {row.default} | {meaning} |")
    return "\n".join(lines)


@pytest.mark.parametrize("kind", ["broker", "source", "sink"])
def test_the_tables_of_options_are_the_declared_ones(kind: Kind) -> None:
    block = re.search(rf"<!-- options:{kind} -->\n(.*?)\n?<!-- /options -->", README, re.DOTALL)
    assert block is not None
    assert block[1].strip() == table(kind), f"paste into the README:\n{table(kind)}"


def test_every_promise_names_tests_that_exist() -> None:
    promises = README.partition("## What is promised")[2].partition("Not promised:")[0]
    lines = [line for line in promises.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(lines) >= 9
    for line in lines:
        named = re.findall(r"`(tests/[^`]+)`", line)
        assert named, line
        for reference in named:
            path, _, test = reference.partition("::")
            assert test, f"{reference}: name the test, not the folder"
            text = (ROOT / path).read_text()
            assert f"def {test}(" in text, reference
            decorators = text.partition(f"def {test}(")[0].rpartition("\n\n")[2]
            assert "@pytest.mark.slow\n" not in decorators, f"{reference} is slow: make test does not run it"


def snippet(containing: str) -> str:
    """The one Python block of the README that contains a text."""
    (found,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if containing in block)
    return found


def test_the_producer_of_the_readme_writes_where_the_command_and_the_sink_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(snippet("create_topic"), {})
    done = CliRunner().invoke(
        app, ["--path", "data/omq", "produce", "orders", "--key-separator", ":"], input="order-1:shipped\norder-2:created\n"
    )
    assert done.exit_code == 0, done.output
    with orderedmq.connect("data/omq") as broker:
        found: dict[str, list[tuple[int, bytes]]] = {}
        for queue in broker.log.queues("orders"):
            rows: pa.RecordBatch = broker.log.pull(queue, 0, 100, 1 << 20, ("sharding_key", "body"))
            for key, body in zip(rows["sharding_key"].to_pylist(), rows["body"].to_pylist(), strict=True):
                found.setdefault(key, []).append((queue.queue_id, body))
    assert [body for _, body in found["order-1"]] == [b"created", b"paid", b"shipped"]
    assert len({queue for queue, _ in found["order-1"]}) == 1
