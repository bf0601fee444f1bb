"""Finds the Python snippets of the documents, and runs those of a page one after another, as a reader would.

A comment in the line before a snippet exempts it: ``<!-- needs: rocketmq -->`` (tests/live/rocketmq runs it, because it needs servers)
or ``<!-- tested: tests/…::test_… -->`` (that test runs it). ``<!-- page tested: tests/…::test_… -->`` exempts all snippets of a
page.
"""

from __future__ import annotations

import logging
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENTS: Final = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_PAGE: Final = re.compile(r"^<!-- page ([^\n]*) -->$", re.MULTILINE)
_FENCE: Final = re.compile(r"^(?:<!-- ([^\n]*) -->\n+)?( *)```python\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    """A snippet. ``line``: where its code begins. ``mark``: the content of the comment before it, such as ``needs: rocketmq``, or ""."""

    path: Path
    line: int
    code: str
    mark: str

    @property
    def needs(self) -> str:
        """The servers that the snippet needs in addition to Spark; "" if none."""
        return self.mark.removeprefix("needs:").strip() if self.mark.startswith("needs:") else ""

    @property
    def tested(self) -> str:
        """The test that runs the snippet separately from its page; "" if none."""
        return self.mark.removeprefix("tested:").strip() if self.mark.startswith("tested:") else ""


def snippets(path: Path) -> list[Snippet]:
    text = path.read_text()
    of_page = _PAGE.search(text)
    return [
        Snippet(
            path,
            text.count("\n", 0, found.start(3)) + 1,
            textwrap.dedent(found[3]),
            found[1] or (of_page[1] if of_page else ""),
        )
        for found in _FENCE.finditer(text)
    ]


def quick_start() -> tuple[dict[str, str], list[str]]:
    """Return the programs of docs/index.md by file name, and its commands in order. The first command installs the package."""
    text = (ROOT / "docs" / "index.md").read_text()
    marked = "".join(re.findall(r"<!-- quickstart -->(.*?)<!-- /quickstart -->", text, re.DOTALL))
    programs = dict(re.findall(r"Save it as `(\S+)`:\n.*?```python\n(.*?)```", text, re.DOTALL))
    return programs, "".join(re.findall(r"```bash\n(.*?)```", marked, re.DOTALL)).splitlines()


def pages(needs: str = "") -> dict[Path, list[Snippet]]:
    """Return the snippets with this need by document; documents without any are left out."""
    found = {path: [one for one in snippets(path) if not one.tested and one.needs == needs] for path in DOCUMENTS}
    return {path: some for path, some in found.items() if some}


def name(path: Path) -> str:
    """Return a document's path for use as the id of a test."""
    return str(path.relative_to(ROOT))


def execute(one: Snippet, names: dict[str, Any]) -> None:
    """Run a snippet with these global names. Its lines keep the numbers that they have in the document, for tracebacks."""
    exec(compile("\n" * (one.line - 1) + one.code, name(one.path), "exec"), names)


def run(some: Sequence[Snippet], spark: SparkSession, folder: Path, replaced: Mapping[str, str] | None = None) -> None:
    """Run the snippets of a page in the tests' session, with ``data/`` inside ``folder``. Queries that are left running must not fail."""
    names: dict[str, Any] = {"__name__": "__main__"}
    # The paths are made absolute, because Spark's processes have another working directory.
    texts = {'"data/': f'"{folder}/data/', "'data/": f"'{folder}/data/", **(replaced or {})}
    with _as_before(spark), warnings.catch_warnings():
        # A library's warning is not an error of the page.
        warnings.simplefilter("default")
        for one in some:
            code = one.code
            for text, other in texts.items():
                code = code.replace(text, other)
            execute(one._replace(code=code), names)
        for query in spark.streams.active:
            query.processAllAvailable()
            assert query.exception() is None


@contextmanager
def _as_before(spark: SparkSession) -> Iterator[None]:
    """Restore the settings, views and loggers that snippets change in the session and in this process."""
    settings = dict(spark.conf.getAll)
    views = {table.name for table in spark.catalog.listTables() if table.isTemporary}
    loggers = [logging.getLogger(), logging.getLogger("orderedmq")]
    levels = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    try:
        yield
    finally:
        for query in spark.streams.active:
            query.stop()
        for table in spark.catalog.listTables():
            if table.isTemporary and table.name not in views:
                spark.catalog.dropTempView(table.name)
        for key, value in dict(spark.conf.getAll).items():
            if key not in settings:
                spark.conf.unset(key)
            elif settings[key] != value:
                spark.conf.set(key, settings[key])
        for logger, level, handlers in levels:
            logger.setLevel(level)
            logger.handlers[:] = handlers
