"""The notebooks run from beginning to end, and their stored outputs contain no names of the machine that created them."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from pyspark.sql import SparkSession

FOLDER = Path(__file__).parents[3] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: The start of an absolute path. It does not match within a longer path or a word.
ABSOLUTE = re.compile(r"(?<![\w.])/(?:tmp|root|home|work|Users|private|var)\b")
#: The id of a client, which contains its machine and process.
CLIENT = re.compile(r"@[\w.-]+-\d+-[0-9a-f]{8}\b")
#: The parts of an output that differ from run to run: an owner's short name and its lock's remaining life.
VARYING = re.compile(r"(?<=belong to query )[0-9a-f]{6}|(?<=ends in )\d+(?= s)")

#: This notebook needs a cluster, so tests/live/rocketmq/test_notebook.py runs it.
ON_A_CLUSTER = FOLDER / "04-rocketmq.ipynb"
WITHOUT_A_CLUSTER = [path for path in NOTEBOOKS if path != ON_A_CLUSTER]
FIRST = FOLDER / "01-explore.ipynb"
#: Limit in seconds for the sleeps of a cell. A listener sleeps without this limit, because it runs in another process.
SLEEP = 0.05

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def outputs(cells: list[Any]) -> list[Any]:
    return [output for cell in cells for output in cell.outputs]


def said(cells: list[Any]) -> list[str]:
    """The text that each cell printed. A kernel splits it into outputs at arbitrary times, so they are joined."""
    return [
        VARYING.sub("…", "".join(output.text for output in outputs([cell]) if output.output_type == "stream")) for cell in cells
    ]


def assert_clean(cells: list[Any]) -> None:
    """Assert that the outputs have no error, no text on standard error, and no path or name of this machine."""
    for output in outputs(cells):
        assert output.output_type != "error", output.evalue
        assert output.get("name") != "stderr", output.text
        # Leave out pictures, because base64 text may also contain slashes.
        texts = [output.get("text", ""), *(text for kind, text in output.get("data", {}).items() if kind.startswith("text/"))]
        for text in texts:
            assert not ABSOLUTE.search(text), text
            assert not CLIENT.search(text), text


@pytest.mark.timeout(400)
def test_the_first_notebook_prints_its_stored_outputs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the notebook in this process and session, because a kernel starts another JVM. The long tier runs all notebooks in a kernel."""
    run_in_this_session(FIRST, spark, tmp_path, monkeypatch)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_notebooks_run_one_after_another_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the notebooks as a reader does."""
    for path, cells in run(WITHOUT_A_CLUSTER, tmp_path, monkeypatch).items():
        assert_says_what_is_kept(path, cells)


def run(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, list[Any]]:
    """Run the code cells of each notebook in one kernel. Return them with outputs and errors. The names that a notebook has
    defined are cleared before the next one.
    """
    # Run in a copy with the modules, and keep temporary files next to it, so that no files are left in the repository.
    folder = tmp_path / "notebooks"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    all_cells = nbformat.v4.new_notebook()
    cells = {path: code_cells(path) for path in paths}
    for path in paths:
        all_cells.cells += [nbformat.v4.new_code_cell("%reset -f"), *cells[path]]
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(all_cells, timeout=180, kernel_name="python3", resources=resources, allow_errors=True).execute()
    return cells


class Shared:
    """The session of the tests, which outlives the notebook."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def stop(self) -> None:
        """Do nothing, because other tests need the session."""


def run_in_this_session(path: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the cells in this process and session, and compare their output with the stored outputs.

    This is quicker than a kernel, which starts another JVM.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(FOLDER))
    shop = importlib.import_module("shop")
    monkeypatch.setattr(shop, "local_spark", lambda *_, **__: Shared(spark))
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, SLEEP)))
    # As in a kernel, names are in __main__, so that Spark sends them to its workers by value.
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for cell in code_cells(path):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(cell.source, path.name, "exec"), names)
            assert VARYING.sub("…", printed.getvalue()) == said([cell])[0], cell.source
    finally:
        for query in spark.streams.active:
            query.stop()
        for module in ("shop", "pictures"):
            sys.modules.pop(module, None)


def assert_says_what_is_kept(path: Path, fresh: list[Any]) -> None:
    assert_clean(fresh)
    assert said(fresh) == said(code_cells(path))


@each_notebook
def test_a_kept_notebook_was_run_from_top_to_bottom(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert_clean(cells)


@each_notebook
def test_a_kept_notebook_has_its_outputs(path: Path) -> None:
    cells = code_cells(path)
    for cell in cells:
        # A cell that prints or ends in a picture must have outputs. A cell with only definitions has none.
        last = cell.source.splitlines()[-1]
        if "print(" in cell.source or ".show(" in cell.source or last.startswith("pictures."):
            assert cell.outputs, cell.source
    assert any("image/png" in output.get("data", {}) for output in outputs(cells))


@each_notebook
def test_a_kept_notebook_names_no_folder_of_its_authors_machine(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not ABSOLUTE.search(cell.source), cell.source
