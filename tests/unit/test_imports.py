"""Which modules may import which: pure packages, few imports of Spark, wings that import only earlier wings, no cycles.

An import inside a function or under TYPE_CHECKING counts like any other, because a reader of the module has to know the imported
name. When a submodule is imported, the ``__init__`` of its package does not count: an ``__init__`` that exports names loads them
on first use.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import requires
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("orderedmq", "ordered_source", "ordered_sink")

#: The packages and modules that decide, parse and encode. They get time, randomness, bytes and answers as arguments.
#: orderedmq.rocketmq.group also has rules but is not in this list, because lock_rules reads the clock and the host's name, and
#: running_info reads the clock.
RULES: Final = (
    *("orderedmq.ownership", "orderedmq.routing", "orderedmq.rows"),
    *("orderedmq.parking.rules", "orderedmq.parking.lot", "orderedmq.listening"),
)
PURE: Final = (*RULES, "orderedmq.rocketmq.wire", "orderedmq.rocketmq.codec", "orderedmq.rocketmq.append.once")
#: Other modules that the pure modules may import. They are equally pure.
SHARED: Final = (
    "orderedmq.model",
    "orderedmq.errors",
    "orderedmq.conditions",
    "orderedmq.schema",
    "orderedmq.capabilities",
    "orderedmq.text",
    "orderedmq.broker",
    "orderedmq.endpoint",
)
#: The shared modules that import the rules. The rules may not import them.
ABOVE_RULES: Final = ("orderedmq.broker", "orderedmq.endpoint")
IMPURE: Final = {
    *("asyncio", "http", "select", "selectors", "socket", "ssl", "urllib"),
    *("fcntl", "glob", "io", "lmdb", "mmap", "os", "pathlib", "shutil", "subprocess", "tempfile"),
    *("datetime", "time"),
    *("concurrent", "multiprocessing", "queue", "signal", "threading"),
    *("random", "secrets", "uuid"),
    "importlib",
}
#: Imports of pure modules that look impure.
EXCEPTIONS: Final = {
    # It loads the selector that a user names as package.module:function.
    "orderedmq.routing.selector": {"importlib"},
    # It loads orderedmq.schema, which needs pyarrow, on first use.
    "orderedmq.model": {"importlib"},
    # It only converts a given time and reads no clock: a UNIQ_KEY counts from the beginning of the month in local time.
    "orderedmq.rocketmq.codec.message_id": {"datetime"},
}

SPARK: Final = {"pyspark", "py4j"}
#: Separate programs, which no module imports: the demo's job, the driver that makes the archive of Spark's classes, and the query
#: that a user's test kills.
PROGRAMS: Final = ("orderedmq.demo.job", "orderedmq.startup.training", "orderedmq.testing.killed_run")
#: The package of helpers for users' tests, and its modules whose functions take or create a Spark session.
TESTING: Final = "orderedmq.testing"
PLUGIN: Final = "pytest_orderedmq"
TESTING_WITH_SPARK: Final = (f"{TESTING}.queries", f"{TESTING}.session", f"{TESTING}.store", PLUGIN)
#: Everything else can be used and tested without Spark.
WITH_SPARK: Final = ("ordered_source", "ordered_sink", "pyspark_orderedmq", *PROGRAMS, *TESTING_WITH_SPARK)

#: The wings of orderedmq/rocketmq. Each may import only itself and earlier wings. Modules directly in that folder may import all wings.
WINGS: Final = ("wire", "codec", "net", "append", "messages", "group", "sink")
#: Servers on this machine, for users without a cluster. This package imports no wing, and only the command imports it.
LOCAL: Final = "local"

#: The web page of `orderedmq ui`, and the packages of its extra.
PAGE: Final = "orderedmq.ui"
WEB: Final = {"starlette", "uvicorn", "jinja2", "markupsafe"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES: Final = [
    *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))),
    ROOT / "pyspark_orderedmq.py",
    ROOT / "pytest_orderedmq.py",
]
MODULES: Final = {name_of(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """The modules that a file imports. For ``from a import b``, that is a.b if a.b is a module of this project, otherwise a."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in MODULES else str(node.module) for name in inner.values())
    return found


@functools.cache
def imported() -> dict[str, set[str]]:
    return {name: imports(path) for name, path in MODULES.items()}


def inside(name: str, rooms: Iterable[str]) -> bool:
    """Whether a module is one of the modules and packages ``rooms``, or is inside one of them."""
    return any(name == room or name.startswith(room + ".") for room in rooms)


def roots(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def own(names: Iterable[str]) -> set[str]:
    return {name for name in names if name in MODULES}


def wing_of(name: str) -> str | None:
    """The folder of orderedmq/rocketmq that contains a module; None if no such folder does."""
    folder = name.removeprefix("orderedmq.rocketmq.").partition(".")[0]
    return folder if folder != name and folder in (*WINGS, LOCAL) else None


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules that import each other in a circle, found by depth-first search; empty if there are none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(graph[name]):
                if found := visit(other, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in graph if (found := visit(name, []))), [])


# -- pure packages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODULES if inside(name, (*PURE, *SHARED))])
def test_what_decides_or_parses_is_pure(name: str) -> None:
    assert roots(imported()[name]) & IMPURE == EXCEPTIONS.get(name, set())
    calls = (node.func for node in ast.walk(ast.parse(MODULES[name].read_text())) if isinstance(node, ast.Call))
    assert not {call.id for call in calls if isinstance(call, ast.Name)} & {"open", "input", "print"}


@pytest.mark.parametrize("room", PURE)
def test_a_pure_room_knows_only_pure_ones(room: str) -> None:
    known: tuple[str, ...] = (*PURE, *SHARED)
    if room in RULES:
        known = (*RULES, *(name for name in SHARED if name not in ABOVE_RULES))
    for name in MODULES:
        if inside(name, [room]):
            assert [other for other in own(imported()[name]) if not inside(other, known)] == [], name


def test_what_the_pure_rooms_share_knows_only_the_rules() -> None:
    for name in SHARED:
        assert [other for other in own(imported()[name]) if not inside(other, (*RULES, *SHARED))] == [], name


def test_a_module_that_says_it_is_pure_is_pure() -> None:
    claims = re.compile(r"\bPure(?:[.:]| and )")
    said = [name for name, path in MODULES.items() if claims.search(ast.get_docstring(ast.parse(path.read_text())) or "")]
    assert len(said) > 40
    assert {name: roots(imported()[name]) & IMPURE for name in said} == {name: EXCEPTIONS.get(name, set()) for name in said}


def test_no_two_classes_have_one_name() -> None:
    """A reader could mistake a class in one module for the class of the same name in another."""
    defined: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(name)
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}


# -- Spark, source and sink -------------------------------------------------------------------------------------------------------


def test_spark_is_imported_by_source_sink_three_programs_and_the_room_of_users_tests_alone() -> None:
    assert [name for name, found in imported().items() if roots(found) & SPARK and not inside(name, WITH_SPARK)] == []
    assert [name for name, found in imported().items() if found & set(PROGRAMS)] == []
    # When it is called, `orderedmq.register` imports the module that Spark discovers.
    assert [name for name, found in imported().items() if "pyspark_orderedmq" in found] == ["orderedmq"]


def test_the_queue_imports_neither_source_nor_sink() -> None:
    for name, found in imported().items():
        if inside(name, ["orderedmq"]):
            assert not roots(found) & {"ordered_source", "ordered_sink"}, name


@pytest.mark.parametrize(("package", "other"), [("ordered_source", "ordered_sink"), ("ordered_sink", "ordered_source")])
def test_source_and_sink_do_not_import_each_other(package: str, other: str) -> None:
    for name, found in imported().items():
        if inside(name, [package]):
            assert other not in roots(found), name


@pytest.mark.parametrize("package", ["ordered_source", "ordered_sink"])
def test_source_and_sink_know_no_kind_of_broker(package: str) -> None:
    for name, found in imported().items():
        if inside(name, [package]):
            assert [other for other in found if inside(other, ["orderedmq.embedded", "orderedmq.rocketmq"])] == [], name


# -- kinds of broker --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "other"), [("embedded", "rocketmq"), ("rocketmq", "embedded")])
def test_one_kind_of_broker_does_not_know_the_other(kind: str, other: str) -> None:
    for name, found in imported().items():
        if inside(name, [f"orderedmq.{kind}"]):
            assert [module for module in found if inside(module, [f"orderedmq.{other}"])] == [], name


def test_no_wing_of_rocketmq_imports_a_later_one() -> None:
    folders = {path.name for path in (ROOT / "orderedmq" / "rocketmq").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == {*WINGS, LOCAL}
    for name, found in imported().items():
        wing = wing_of(name)
        known = {other: wing_of(other) for other in found if inside(other, ["orderedmq.rocketmq"])}
        if wing == LOCAL:
            assert set(known.values()) <= {LOCAL}, name
        elif wing is not None:
            earlier = WINGS[: WINGS.index(wing) + 1]
            assert [other for other, theirs in known.items() if theirs not in earlier] == [], name
        else:
            assert LOCAL not in known.values() or inside(name, ["orderedmq.cli"]), name


# -- users' tests ----------------------------------------------------------------------------------------------------------------


def test_only_the_plugin_knows_the_room_of_users_tests_and_only_the_plugin_knows_pytest() -> None:
    assert [
        name
        for name, found in imported().items()
        if any(inside(one, [TESTING]) for one in found) and not inside(name, [TESTING])
    ] == [PLUGIN]
    assert [name for name, found in imported().items() if "pytest" in roots(found)] == [PLUGIN]
    assert [name for name, found in imported().items() if PLUGIN in found] == []


def test_the_room_of_users_tests_knows_neither_the_command_nor_a_kind_of_broker() -> None:
    for name, found in imported().items():
        if inside(name, [TESTING]):
            assert [
                one for one in found if inside(one, ["orderedmq.cli", PAGE, "orderedmq.embedded", "orderedmq.rocketmq"])
            ] == [], name


# -- the web page ----------------------------------------------------------------------------------------------------------------


def test_only_the_command_knows_the_web_page_and_only_that_knows_a_server() -> None:
    assert [
        name for name, found in imported().items() if any(inside(one, [PAGE]) for one in found) and not inside(name, [PAGE])
    ] == ["orderedmq.cli.exporter", "orderedmq.cli.ui"]
    assert [name for name, found in imported().items() if roots(found) & WEB and not inside(name, [PAGE])] == []


def test_the_web_page_stands_on_the_tools_and_knows_neither_the_command_nor_a_kind_of_broker() -> None:
    for name, found in imported().items():
        if inside(name, [PAGE]):
            assert [one for one in found if inside(one, ["orderedmq.cli", "orderedmq.embedded", "orderedmq.rocketmq"])] == [], (
                name
            )


# -- circles, sizes, what an import loads -----------------------------------------------------------------------------------------


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle({name: own(found) for name, found in imported().items()}) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": ["b", "c"], "b": [], "c": ["d"], "d": ["b", "a"]}) == ["a", "c", "d", "a"]
    assert circle({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}) == []


def test_importing_the_package_loads_neither_arrow_nor_spark() -> None:
    code = "import sys, orderedmq; print(sorted({'pyarrow', 'numpy', 'lmdb', 'pyspark'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_pyspark_and_what_mapinarrow_needs_come_with_the_extra_spark_alone() -> None:
    """``consume_orderly`` and ``route`` use mapInArrow, for which pyspark needs pandas without declaring that dependency."""
    needed = [Requirement(line) for line in requires("orderedmq") or ()]
    assert {"pyspark", "pandas"} & {requirement.name for requirement in needed if requirement.marker is None} == set()
    extra = {
        requirement.name for requirement in needed if requirement.marker and requirement.marker.evaluate({"extra": "spark"})
    }
    assert extra == {"pyspark", "pandas"}


def test_only_the_group_session_changes_the_state_of_a_querys_owner() -> None:
    #: Other objects also have methods with these names, so the object's name is also checked. Methods in ``own`` exist only in Owner.
    shared = {"boundary", "lost", "drop", "enter", "backlog", "skip", "plan", "replay", "found", "commit", "place", "repeat"}
    shared.add("give_up")
    own = {"locked", "assume", "unplace", "roll_back"}
    found = []
    for name, path in MODULES.items():
        if not inside(name, ("ordered_source",)) or name == "ordered_source.group_session":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            changed: list[ast.expr] = []
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr in shared:
                    changed = [owner]
                case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr in own and "session" not in ast.unparse(
                    owner
                ):
                    found.append(f"{name}: {ast.unparse(node)}")
                case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                    changed = [target.value for target in targets if isinstance(target, ast.Attribute | ast.Subscript)]
                case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                    changed = [target.value] if isinstance(target, ast.Attribute | ast.Subscript) else []
            names = {ast.unparse(one).rpartition(".")[2] for one in changed}
            if names & {"owner", "_owner", "owned", "leader"}:
                found.append(f"{name}: {ast.unparse(node)}")
    assert found == []
