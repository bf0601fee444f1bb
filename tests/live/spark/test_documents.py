"""The Python snippets of the README and of the site run. Those of a page run in order, in a separate folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from orderedmq.cli import app
from tests.snippets import ROOT, Snippet, name, pages, quick_start, run

PAGES = pages()
#: Pages whose snippets take 7 s or longer. Only the long tier runs them.
LONG = (
    "formats",
    "other-sinks",
    "stateful-processing",
    "order-per-key",
    "sink",
    "migrating-from-kafka",
    "deploying",
    "rollouts",
)


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=name(path), marks=[pytest.mark.nightly] if path.stem in LONG else []) for path in PAGES]
)
@pytest.mark.timeout(400)
def test_the_snippets_of_a_page_run_one_after_another(
    path: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(PAGES[path], spark, tmp_path)


def test_the_quick_start_runs(spark: SparkSession, tmp_path: Path) -> None:
    program, (_, *commands) = quick_start()
    readme = (ROOT / "README.md").read_text()
    assert f"```python\n{program}```" in readme, "README and docs/index.md must have the same program"
    in_readme = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    assert "".join(in_readme).splitlines()[1:] == commands[:5], "README and docs/index.md must have the same commands"
    said = ""
    for command in commands:
        if command == "python invoices.py":
            run([Snippet(ROOT / "docs" / "index.md", 1, program, "")], spark, tmp_path)
            continue
        before, _, after = command.rpartition("orderedmq ")
        typed = before.removeprefix("printf '").removesuffix("' | ").replace("\\n", "\n")
        done = CliRunner().invoke(app, shlex.split(after.replace("data/", f"{tmp_path}/data/")), input=typed)
        assert done.exit_code == 0, f"{command}\n{done.output}"
        said = done.output
    assert re.findall(r"order-1 was (\w+)", said) == re.findall(r"order-2 was (\w+)", said) == ["created", "paid", "shipped"]
