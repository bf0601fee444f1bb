"""The Python snippets of the README and of the site run: those of a page one after another, in a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.snippets import name, pages, run

PAGES = pages()
#: Pages whose snippets need 7 s and more. Those of other formats, state and order per key are what users copy once.
LONG = ("formats", "stateful-processing", "order-per-key", "sink", "migrating-from-kafka", "deploying", "rollouts")


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=name(path), marks=[pytest.mark.nightly] if path.stem in LONG else []) for path in PAGES]
)
@pytest.mark.timeout(400)
def test_the_snippets_of_a_page_run_one_after_another(
    path: Path, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(PAGES[path], spark, tmp_path)


def test_pages_with_snippets_are_found() -> None:
    assert len(PAGES) >= 8
    assert sum(map(len, PAGES.values())) >= 30
