"""The README and the pages of the site agree with the code."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import ordered_sink.once
import ordered_source
import orderedmq
import orderedmq.testing
import orderedmq.trace_context
from orderedmq.cli import COMMANDS, GROUPS, app, load
from orderedmq.embedded.store import schema
from orderedmq.errors import OrderedMQError
from orderedmq.listening.key_engine import OrderPerKey
from orderedmq.options.parse import OPTIONS
from orderedmq.ownership import membership, offsets
from orderedmq.schema import MESSAGE_SCHEMA
from tests.snippets import snippets

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]


def script(name: str) -> ModuleType:
    """Return a module of the folder docs, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The MkDocs hook that generates parts of pages from the code."""
    return script("generate")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_the_generated_parts_of_a_page_are_what_the_code_says(path: Path, generate: ModuleType) -> None:
    text = path.read_text()
    stale = [now for before, now in zip_longest(text.splitlines(), generate.fill(text).splitlines()) if before != now]
    assert stale[:3] == [], "generated parts are out of date: run make reference"
    assert "<!-- include" not in generate.on_page_markdown(text)


def test_the_diagrams_are_drawn_by_the_code_and_shown_in_documents() -> None:
    diagrams = script("diagrams")
    files = {f"{name.replace('_', '-')}.svg": draw() for name, draw in diagrams.DIAGRAMS.items()}
    assert {file.name: file.read_text() for file in diagrams.FOLDER.iterdir()} == files, "outdated: run make reference"
    assert [file for file in files if not any(f"diagrams/{file})" in path.read_text() for path in DOCUMENTS)] == []
    assert [str(path) for path in DOCUMENTS if "```mermaid" in path.read_text()] == []


def test_the_guide_of_order_per_key_has_the_defaults() -> None:
    text = page("guides/order-per-key.md")
    table = text.partition("| setting of `OrderPerKey`")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.M))
    settings = {field.name: field.default for field in dataclasses.fields(OrderPerKey)}
    assert set(rows) == set(settings)
    for name, default in rows.items():
        assert ast.literal_eval(default.strip("`")) == settings[name], name
    [option] = [option for option in OPTIONS["source"] if option.name == "parkingLotMaxMessages"]
    assert f"`parkingLotMaxMessages` of the source, {int(option.shown):,}," in text


def test_the_page_of_columns_has_every_column_in_its_order() -> None:
    named = re.findall(r"^\| `(\w+)` \|", page("reference/columns.md"), re.MULTILINE)
    assert named[: len(MESSAGE_SCHEMA.names)] == MESSAGE_SCHEMA.names


def test_the_page_of_conditions_has_every_condition_with_what_is_said_of_it(generate: ModuleType) -> None:
    made = page("reference/conditions.md")
    found = generate.families()
    assert len(found) >= 15
    for _, doc, conditions in found:
        assert doc
        for condition in conditions:
            assert condition.messages, condition.name
            assert f"### {condition.name}\n" in made
    examples = json.loads((ROOT / "docs" / "reference" / "examples.json").read_text())
    assert sorted(examples) == sorted(condition.name for _, _, conditions in found for condition in conditions)
    aged_out = made.partition("### ORDEREDMQ_DATA_LOSS.AGED_OUT\n")[2].partition("\n### ")[0]
    assert "Keep messages longer or read sooner" in aged_out


def test_the_rights_that_an_account_needs_are_told_of_every_command() -> None:
    text = page("guides/rocketmq.md")
    told = text.partition("## Rights of an account\n")[2].partition("\n## ")[0]
    names = [name if name not in GROUPS else f"{name} {one}" for name in (*COMMANDS, *GROUPS) for one in _commands_of(name)]
    assert len(names) > 20
    assert [name for name in names if not re.search(rf"`{name}[ `]", told)] == []


def _commands_of(group: str) -> list[str]:
    """The names of a group's commands. For a command outside a group, one empty name."""
    return list(getattr(load(group), "commands", {"": None}))


def test_each_promise_is_held_by_tests_and_each_mark_names_a_promise(generate: ModuleType) -> None:
    names = generate.promise_names()
    assert len(names) == len(set(names)) > 60
    assert set(generate.held()) == set(names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_leads_to_one(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            assert (path.parent / target.partition("#")[0]).exists(), f"{path.name}: {target}"


def snippet(path: Path, containing: str) -> str:
    """The only Python block of a document that contains this text."""
    (found,) = (one.code for one in snippets(path) if containing in one.code)
    return found


def test_the_producer_of_the_documents_writes_where_the_command_and_the_sink_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(snippet(ROOT / "docs" / "index.md", "create_topic"), {})
    done = CliRunner().invoke(
        app,
        ["--path", "data/omq", "produce", "returns", "--key-separator", ":"],
        input="order-1:paid back\norder-2:announced\n",
    )
    assert done.exit_code == 0, done.output
    with orderedmq.connect("data/omq") as broker:
        found: dict[str, list[tuple[int, bytes]]] = {}
        for queue in broker.log.queues("returns"):
            rows: pa.RecordBatch = broker.log.pull(queue, 0, 100, 1 << 20, ("sharding_key", "body"))
            for key, body in zip(rows["sharding_key"].to_pylist(), rows["body"].to_pylist(), strict=True):
                found.setdefault(key, []).append((queue.queue_id, body))
    assert [body for _, body in found["order-1"]] == [b"announced", b"received", b"paid back"]
    assert len({queue for queue, _ in found["order-1"]}) == 1


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_snippet_is_python_and_is_run_by_a_test(path: Path) -> None:
    found = snippets(path)
    # No snippet is missed, even if it is indented.
    assert len(found) == len(re.findall(r"^ *```python", path.read_text(), re.MULTILINE))
    for one in found:
        compile(one.code, f"{path.name}:{one.line}", "exec")
        assert one.needs in ("", "rocketmq"), one.mark
        if one.tested:
            file, _, test = one.tested.partition("::")
            assert f"def {test}(" in (ROOT / file).read_text(), one.tested


def user_code() -> Iterator[tuple[str, str]]:
    """The code that users copy, each piece with its place: snippets of the documents, cells of the notebooks, and examples."""
    for path in DOCUMENTS:
        for one in snippets(path):
            yield f"{path.name}:{one.line}", one.code
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for number, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] == "code":
                yield f"{path.name}, cell {number}", "".join(cell["source"])
    for path in sorted((ROOT / "examples").rglob("*.py")):
        yield str(path), path.read_text()


def test_what_users_copy_imports_public_names_of_the_packages() -> None:
    packages = {one.__name__: one for one in (orderedmq, orderedmq.testing, ordered_source, ordered_sink)}
    imported = set()
    for place, code in user_code():
        for node in ast.walk(ast.parse(code)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.partition(".")[0] in packages:
                    assert name in packages, f"{place} imports {name}"
                    imported.add(name)
            if isinstance(node, ast.ImportFrom) and node.module in packages:
                assert {alias.name for alias in node.names} <= set(packages[node.module].__all__), place
    assert imported == set(packages)


def test_the_list_for_language_models_has_every_page_with_a_sentence(tmp_path: Path, generate: ModuleType) -> None:
    generate.on_post_build({"site_dir": str(tmp_path)})
    listed = re.findall(r"^- \[.+\]\(\./(.*)\): (.+)$", (tmp_path / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(address for address, _ in listed) == sorted(
        str(path.relative_to(ROOT / "docs").with_suffix("")).removesuffix("index") for path in PAGES
    )
    assert [sentence for _, sentence in listed if not re.match(r".{15,}\.$", sentence)] == []


def test_the_readme_is_short_enough_to_be_read() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(r"\]\(", text)) <= 15, "links and pictures"
    assert [len(one.code.splitlines()) <= 15 for one in snippets(ROOT / "README.md")] == [True]


def test_the_page_of_the_api_has_every_public_name() -> None:
    headings = set(re.findall(r"^### (\S+)$", page("reference/api.md"), re.MULTILINE))
    modules = (orderedmq, orderedmq.trace_context, orderedmq.testing, ordered_source, ordered_sink.once)
    assert {name for module in modules for name in module.__all__} | {"route", "Broker", "Log", "Admin"} == headings


def test_the_example_of_a_supervisor_restarts_after_every_error_that_may_pass() -> None:
    text = page("guides/deploying.md")
    passing = set(text.partition('PASSING = """')[2].partition('"""')[0].split())
    classes = [OrderedMQError]
    for one in classes:
        classes += one.__subclasses__()
    retriable = {f"{one.family}.{sub}".removeprefix("ORDEREDMQ_") for one in classes if one.retriable for sub in one.conditions}
    assert passing == retriable | {"LOCK.HELD_BY_OTHER", "LOCK.LOST", "GROUP.IN_USE"}


def test_the_page_of_compatibility_names_tests_that_exist_and_todays_formats() -> None:
    text = page("compatibility.md")
    runs_on = text.partition("## What it runs on\n")[2].partition("\n### Managed platforms\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| (tested|expected|not supported) \| ([^|]*) ?\|$", runs_on, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| [^|]+ \| [^|]+ \| ", runs_on, re.MULTILINE)) > 20
    for name, state, why in rows:
        files = re.findall(r"`(tests/[^`]+)`", why)
        assert state != "tested" or files or why.strip() == "all tests", name
        assert [file for file in files if not (ROOT / file).exists()] == [], name
    numbers = (schema.FORMAT, offsets.FORMAT, membership.FORMAT, 1)
    assert f"\n| {orderedmq.__version__} | {' | '.join(map(str, numbers))} |\n" in text


def test_no_document_names_a_folder_of_its_authors_machine() -> None:
    for path in DOCUMENTS:
        assert not re.search(r"(?<![\w.])/(?:root|work|Users|private)\b", path.read_text()), path
