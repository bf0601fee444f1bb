"""Makes the parts of pages that come from the code: options, conditions, the command's help, the API.

``python docs/generate.py`` writes these parts into the pages, between the lines ``<!-- generated: NAME ARGUMENTS -->`` and
``<!-- end of generated -->``. The function with that name in `MAKERS` returns the text. The parts are committed, so that the reference
can be read in the repository, and a test compares them with the code.

MkDocs loads this module as a hook (``hooks`` in mkdocs.yml). In the site only, a document of the repository's root replaces a line
``<!-- include: FILE -->``, and llms.txt lists the pages for language models. This module does not import MkDocs, so that tests can use it
without MkDocs.
"""

from __future__ import annotations

import ast
import html
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import yaml
from typer.main import get_command

from orderedmq.cli import COMMANDS, GROUPS, app, load
from orderedmq.errors import OrderedMQError
from orderedmq.options.parse import OPTIONS

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("orderedmq", "ordered_source", "ordered_sink")

_PART: Final = re.compile(r"(<!-- generated: (\w+)((?: \S+)*) -->\n).*?(?=<!-- end of generated -->)", re.DOTALL)
_INCLUDE: Final = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)
#: A row of a table with an escaped bar.
_PIPE: Final = re.compile(r"^\|.*\\\|.*$", re.MULTILINE)
#: An example of a message for each condition, written by hand.
EXAMPLES: Final = ROOT / "docs" / "reference" / "examples.json"
#: Options of every command, which the page has once, at its top.
_SHARED: Final = ("path", "as_json", "namesrv", "namespace", "profile", "option")
#: The word for an option's value in a table, by its type, if the option does not name its value.
_WORDS: Final = {"int": "NUMBER", "integer": "NUMBER", "float": "NUMBER", "path": "FILE"}
#: The pages of the site that have the documents of the repository's root.
_PLACES: Final = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "internals.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "RELEASING.md": "releasing.md",
}


def fill(markdown: str) -> str:
    """Return a page with its generated parts written again. Raises KeyError for a part without a maker."""
    return _PART.sub(lambda found: f"{found[1]}\n{MAKERS[found[2]](*found[3].split())}\n\n", markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page that the site shows for a page that MkDocs has read."""
    return _PIPE.sub(_piped, _INCLUDE.sub(lambda found: include(found[1]), markdown))


def _piped(row: re.Match[str]) -> str:
    """Return a table row with its bars as entities, because MkDocs would show the backslash that GitHub needs before a bar in code."""
    return re.sub(
        r"`([^`]*\\\|[^`]*)`",
        lambda code: f"<code>{html.escape(code[1], quote=False).replace(chr(92) + '|', '&#124;')}</code>",
        row[0],
    )


# Options.


def options(kind: str) -> str:
    """Return the table of the options of ``broker``, ``source`` or ``sink``."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in OPTIONS[kind]:
        lines.append(f"| `{option.name}` | {_cell(option.shown)} | {_cell(option.meaning)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return text escaped for a cell of a Markdown table. Text in backticks stays code."""
    parts = re.split(r"`([^`]+)`", text)
    return "".join(
        f"`{part}`" if index % 2 else re.sub(r"([*_\[\]])", r"\\\1", html.escape(part, quote=False)).replace("|", "&#124;")
        for index, part in enumerate(parts)
    )


# Conditions.


@dataclass
class Condition:
    """One condition and its messages in the code. A part between ``\\0`` marks is filled in when the error is raised."""

    name: str
    retriable: bool
    messages: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Factory:
    """A function that makes an error from its arguments and returns it."""

    conditions: Collection[str]
    parameters: tuple[str, ...]
    message: str

    def called(self, call: ast.Call, names: Mapping[str, object]) -> str | None:
        """Return the message of a call, or None if none of its arguments is a text in the code."""
        given: dict[str, ast.expr] = dict(zip(self.parameters, call.args))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        texts = {name: _text(value, names) for name, value in given.items() if isinstance(value, ast.Constant | ast.JoinedStr)}
        used = {name: text for name, text in texts.items() if f"\0{_spoken(name)}\0" in self.message}
        if not any(" " in text for text in used.values()):
            return None
        message = self.message
        for name, text in used.items():
            message = message.replace(f"\0{_spoken(name)}\0", text)
        return message


def conditions() -> str:
    """Return the page of conditions: each family, its conditions, an example, and all messages."""
    lines: list[str] = []
    examples = json.loads(EXAMPLES.read_text())
    for family, doc, found in families():
        lines += ["", f"## {family}", "", doc, ""]
        for condition in found:
            lines += [f"### {condition.name}", ""]
            if condition.retriable:
                lines += ["The same call may succeed later.", ""]
            if condition.name in examples:
                lines += [f"> {_cell(examples[condition.name])}", ""]
            entries = "".join(f"<li>{_shown(message)}</li>" for message in condition.messages)
            many = len(condition.messages)
            listed = f'<ul class="messages">{entries}</ul>'
            lines += [f"<details><summary>{many} {'message' if many == 1 else 'messages'}</summary>{listed}</details>", ""]
    return "\n".join(lines).strip()


@cache
def families() -> list[tuple[str, str, list[Condition]]]:
    """Return each family with its class's docstring and its conditions in alphabetical order."""
    trees = list(_sources())
    classes = _classes()
    found = {
        f"{one.family}.{_name(sub)}": Condition(f"{one.family}.{_name(sub)}", one.retriable)
        for one in classes.values()
        for sub in one.conditions
    }
    factories: dict[str, _Factory] = {}
    generic: dict[str, list[str]] = {}
    for module, tree in trees:
        names = _names(module)
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or function.name.startswith("__"):
                continue
            parameters = tuple(arg.arg for arg in function.args.args)
            for call in _calls(function, classes):
                raised = _raised(call, classes, found)
                message = _message(call, names)
                if raised and any(f"\0{_spoken(name)}\0" in message for name in parameters):
                    factories[function.name] = _Factory(raised, parameters, message)
                    generic.setdefault(function.name, []).append(message)
    for module, tree in trees:
        known, texts = _names(module), _locals(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name, names = _called(node), {**known, **texts.get(node, {})}
            if name in classes:
                for raised_name in _raised(node, classes, found):
                    found[raised_name].messages.append(_message(node, names))
            elif name in factories and (told_by_call := factories[name].called(node, names)) is not None:
                for raised_name in factories[name].conditions:
                    # The message of a call says more than the factory's own message, so it replaces that.
                    said = [one for one in found[raised_name].messages if one not in generic[name]]
                    found[raised_name].messages = [*said, told_by_call]
    for condition in found.values():
        condition.messages = _told(condition.messages)
    told: dict[str, tuple[str, list[Condition]]] = {}
    for one in classes.values():
        _, conditions_ = told.setdefault(one.family, ((one.__doc__ or "").replace("``", "`"), []))
        own = [found[f"{one.family}.{_name(sub)}"] for sub in one.conditions]
        conditions_.extend([condition for condition in own if condition not in conditions_])
    return [(family, doc, sorted(all_, key=lambda one: one.name)) for family, (doc, all_) in sorted(told.items())]


def _classes() -> dict[str, type[OrderedMQError]]:
    for module in ("orderedmq.demo.play", "orderedmq.testing.queries"):
        import_module(module)  # defines a class of errors
    found: dict[str, type[OrderedMQError]] = {}
    waiting = [OrderedMQError]
    while waiting:
        for one in waiting.pop(0).__subclasses__():
            if one.conditions and one.__module__.partition(".")[0] in PACKAGES:
                found[one.__name__] = one
            waiting.append(one)
    return found


def _sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of the packages with their syntax trees, with the modules of the command last."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    for file in sorted(files, key=lambda file: "cli" in file.parts):
        yield ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), ast.parse(file.read_text())


def _names(module: str) -> Mapping[str, object]:
    return vars(import_module(module)) if not module.endswith("__main__") else {}


def _locals(tree: ast.Module) -> Mapping[ast.Call, Mapping[str, object]]:
    """Return, for each call in a function, the local names that the function binds to a text exactly once."""
    found: dict[ast.Call, Mapping[str, object]] = {}
    # ast.walk visits an inner function after the function around it, so its names win.
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                assigned.setdefault(node.targets[0].id, []).append(node.value)
        texts: dict[str, object] = {
            name: values[0] for name, values in assigned.items() if len(values) == 1 and isinstance(values[0], ast.JoinedStr)
        }
        found |= {node: texts for node in ast.walk(function) if isinstance(node, ast.Call)}
    return found


def _calls(tree: ast.AST, classes: Collection[str]) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in classes)


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else str(getattr(call.func, "attr", ""))


def _name(sub: object) -> str:
    """Return the name of a condition, which is text or a member of an enumeration."""
    return str(getattr(sub, "value", sub))


def _raised(call: ast.Call, classes: Mapping[str, type[OrderedMQError]], known: Collection[str]) -> list[str]:
    """Return the conditions that a call of an error's class names, or an empty list if they are in a variable."""
    if not call.args:
        return []
    words = [str(node.value) for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)]
    words += [node.attr for node in ast.walk(call.args[0]) if isinstance(node, ast.Attribute)]
    family = classes[_called(call)].family
    return [condition for condition in dict.fromkeys(f"{family}.{word}" for word in words) if condition in known]


def _message(call: ast.Call, names: Mapping[str, object]) -> str:
    """Return the message in a call of an error's class."""
    return _text(call.args[1], names) if len(call.args) > 1 else ""


def _text(node: ast.expr, names: Mapping[str, object]) -> str:
    """Return the text of an expression, with its variable parts between ``\\0`` marks."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.JoinedStr):
        return _text(node.func.value, names)
    if isinstance(node, ast.Name) and isinstance(names.get(node.id), str | int | float):
        return str(names[node.id])
    if isinstance(node, ast.Name) and isinstance(text := names.get(node.id), ast.JoinedStr):
        return _text(text, names)
    if isinstance(node, ast.Name):
        return f"\0{_spoken(node.id)}\0"
    if isinstance(node, ast.Attribute):
        return f"\0{_spoken(node.attr)}\0"
    return "\0…\0"


def _spoken(name: str) -> str:
    return name.strip("_").replace("_", " ")


def _told(messages: list[str]) -> list[str]:
    """Return messages without repeats. Messages that consist of variable parts are left out if other messages have words."""
    unique = list(dict.fromkeys(" ".join(message.split()) for message in messages))
    saying = [message for message in unique if len(re.findall(r"\w\w+", re.sub("\0[^\0]*\0", "", message))) >= 2]
    return saying or unique


def _shown(message: str) -> str:
    parts = message.split("\0")
    return "".join(
        f"<var>{html.escape(part)}</var>"
        if index % 2
        else re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(part, quote=False))
        for index, part in enumerate(parts)
    )


# The command.


def commands() -> str:
    """Return the page of commands, with arguments and options."""
    lines: list[str] = []
    for name in (*GROUPS, *COMMANDS):
        top = load(name)
        lines += ["", f"## orderedmq {name}", ""]
        if name in GROUPS:
            lines += [_prose(top.help), ""]
            for sub in top.commands:
                lines += [f"### orderedmq {name} {sub}", "", *_command(f"orderedmq {name} {sub}", top.commands[sub])]
        else:
            lines += _command(f"orderedmq {name}", top)
    return "\n".join(lines).strip()


def shared_options() -> str:
    """Return the table of the options that every command has."""
    return "\n".join(_table([one for one in get_command(app).params if one.name in _SHARED]))


def _command(name: str, command: Any) -> list[str]:
    shown = [
        one
        for one in command.params
        if getattr(one, "rich_help_panel", None) is None and one.name != "help" and not getattr(one, "hidden", False)
    ]
    arguments = [one for one in shown if not one.opts[0].startswith("-")]
    usage = " ".join([name, "[OPTIONS]", *(_argument(one) for one in arguments)])
    lines = ["```text", usage, "```", "", _prose(command.help), ""]
    if any(one.help for one in arguments):
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{_argument(one)}` | {_cell(one.help or '')} |" for one in arguments] + [""]
    named = [one for one in shown if one not in arguments]
    return lines + ([*_table(named), ""] if named else [])


def _argument(one: Any) -> str:
    word = str(one.metavar or one.name.upper()) + ("..." if one.nargs == -1 else "")
    return word if one.required or word.startswith("[") else f"[{word}]"


def _table(params: list[Any]) -> list[str]:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for one in params:
        names = " ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
        value = "" if one.is_flag else f" {_cell(_value(one))}"
        default = "required" if one.required else _default(one)
        lines.append(f"| {names}{value} | {default} | {_cell(one.help or '')} |")
    return lines


def _value(one: Any) -> str:
    """Return the word for an option's value, as the table shows it."""
    if choices := getattr(one.type, "choices", None):
        return "|".join(map(str, choices))
    return str(one.metavar or _WORDS.get(one.type.name.removesuffix(" range"), "TEXT"))


def _default(one: Any) -> str:
    plain = one.default is not None and one.default is not False and not callable(one.default) and one.default != []
    return f"`{one.default}`" if plain else ""


def _prose(text: str | None) -> str:
    """Return a command's help as Markdown. A placeholder such as <group> is text, not an HTML tag."""
    paragraphs = re.split(r"\n\s*\n", (text or "").replace("\f", "").strip())
    return "\n\n".join(html.escape(" ".join(one.split()), quote=False).replace("*", "\\*") for one in paragraphs)


# Documents that live at the root of the repository.


def include(name: str) -> str:
    """Return a document of the repository's root without its title and with links to pages of the site."""
    text = (ROOT / name).read_text()
    body = re.sub(r"\A# .*\n", "", text)
    body = body.replace("](docs/", "](")
    for source, target in _PLACES.items():
        body = body.replace(f"]({source}", f"]({target}")
    return body.strip()


# Promises.

_PROMISE: Final = re.compile(r"^\| \*\*(.+?)\*\*:", re.MULTILINE)


def promise_names() -> list[str]:
    """Return the names of the promises, in the order of docs/promises.md."""
    return _PROMISE.findall((ROOT / "docs" / "promises.md").read_text())


def held() -> dict[str, list[str]]:
    """Return the tests of each promise, which have marks like ``@pytest.mark.holds("one owner")``."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.holds(" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        long_tier = any(isinstance(node, ast.Assign) and _is_nightly(node.value) for node in tree.body)
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            shown = f"`{path.relative_to(ROOT)}::{node.name}`"
            if long_tier or any(_is_nightly(mark) for mark in node.decorator_list):
                shown += " (long tier)"
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.holds":
                    for name in mark.args:
                        found.setdefault(ast.literal_eval(name), []).append(shown)
    return found


def _is_nightly(node: ast.expr) -> bool:
    return any(ast.unparse(one) == "pytest.mark.nightly" for one in ast.walk(node) if isinstance(one, ast.expr))


def promises() -> str:
    """Return a table of the promises and the tests that hold them."""
    tests = held()
    rows = [f"| {name} | {'<br>'.join(tests.get(name, []))} |" for name in promise_names()]
    return "\n".join(["| promise | tests |", "|---|---|", *rows])


# Reliability.


def reliability() -> str:
    """Return a table of the results of the tests of faults, by fault and broker."""
    # The site is built without pytest, so the modules of the tests are imported only here.
    evidence = import_module("tests.evidence")
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for test in evidence.read_results()["tests"].values():
        groups.setdefault((test["fault"], test["broker"]), []).append(test)
    lines = [
        "| fault | broker | tests | runs | acknowledged | lost | twice | out of order | other | date |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (fault, broker), tests in sorted(
        groups.items(), key=lambda group: (evidence.FAULTS.index(group[0][0]), group[0][1].lower())
    ):
        run = [test for test in tests if "date" in test]
        failed = sum(not test["passed"] for test in run)
        of = f"{len(run)} of {len(tests)}" + (f", **{failed} failed**" if failed else "")
        if not run:
            lines.append(f"| {fault} | {broker} | {of} | test exists, not in these results | | | | | | |")
            continue
        sums = {name: sum((test["counts"] or {}).get(name, 0) for test in run) for name in evidence.COUNTS}
        dates = sorted({test["date"] for test in run})
        # Where a fault meets no messages, as in the state of a lock, nothing can be lost.
        cells = [
            f"{sums[name]:,}" if sums[name] or name in ("runs", "wrong") or sums["acknowledged"] else ""
            for name in evidence.COUNTS
        ]
        lines.append(
            f"| {fault} | {broker} | {of} | {' | '.join(cells)} | {' to '.join(dict.fromkeys((dates[0], dates[-1])))} |"
        )
    return "\n".join(lines)


def simulations() -> str:
    """Return a table of the long runs of the simulation."""
    lines = [
        "| kind | seeds | steps | messages | locks granted | failures | commit | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    runs = import_module("tests.evidence").read_results()["simulations"]
    names = ("seeds", "steps", "messages", "grants", "failures")
    total = {"kind": "all", **{name: sum(run[name] for run in runs) for name in names}, "commit": "", "date": ""}
    for run in (*runs, total):
        counts = [f"{run[name]:,}" for name in names]
        lines.append(f"| {' | '.join([run['kind'], *counts, run['commit'], run['date']])} |")
    return "\n".join(lines)


def planted() -> str:
    """Return a table of the planted bugs and the tests that find them."""
    lines, total = ["| test | planted bugs |", "|---|---|"], 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if not re.search(r"^def test_\w*planted", path.read_text(), re.MULTILINE):
            continue
        place = path.relative_to(ROOT)
        module = import_module(".".join(place.with_suffix("").parts))
        tests = [test for name, test in vars(module).items() if re.match(r"test_\w*planted", name)]
        bugs: dict[str, None] = {}
        names = []
        for test in tests:
            own = [_bug(bug) for bug in _parameters(test)] or [_words_of(test.__name__)]
            if not bugs.keys() >= set(own):
                names.append(f"`{place}::{test.__name__}`")
            bugs |= dict.fromkeys(own)
        total += len(bugs)
        lines.append(f"| {'<br>'.join(names)} | {'<br>'.join(map(_cell, bugs))} |")
    return "\n".join([f"{total} bugs:", "", *lines])


def _parameters(test: Any) -> list[Any]:
    """Return the values of the parameter ``bug`` of a test."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize" and "bug" in (
            names := mark.args[0] if isinstance(mark.args[0], tuple) else (mark.args[0],)
        ):
            return [value[names.index("bug")] if len(names) > 1 else value for value in mark.args[1]]
    return []


def _bug(bug: Any) -> str:
    """Return what a planted bug does: its docstring, or its name."""
    if isinstance(bug, str):
        return bug
    return (bug.__doc__ or _words_of(bug.__name__)).strip().splitlines()[0].rstrip(".").replace("``", "`")


def _words_of(name: str) -> str:
    return name.removeprefix("test_").strip("_").replace("_", " ")


# The list of pages for language models.


def on_post_build(config: Mapping[str, Any], **_: Any) -> None:
    """Write llms.txt into the site that MkDocs has built."""
    (Path(config["site_dir"]) / "llms.txt").write_text(llms())


def llms() -> str:
    """Return the pages of the site, in its order, each with its first sentence (https://llmstxt.org)."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}", ""]
    sections: dict[str, list[str]] = {}
    for entry in site["nav"]:
        ((title, target),) = entry.items()
        pages = [page for one in target for page in one.items()] if isinstance(target, list) else [(title, target)]
        # Pages outside a section come first.
        sections.setdefault(title if isinstance(target, list) else "Overview", []).extend(
            f"- [{name}](./{file.removesuffix('.md').removesuffix('index')}): {_first_sentence(file)}" for name, file in pages
        )
    for section, entries in sections.items():
        lines += [f"## {section}", "", *entries, ""]
    return "\n".join(lines)


def _first_sentence(file: str) -> str:
    text = _INCLUDE.sub(lambda found: include(found[1]), (ROOT / "docs" / file).read_text())
    paragraphs = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE).split("\n\n")
    prose = next(" ".join(one.split()) for one in paragraphs if re.match(r"[\w`]", one))
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", re.split(r"(?<=\.) ", prose)[0])


# The exporter's metrics.


def metrics() -> str:
    """Return the table of the exporter's metrics."""
    kinds: tuple[Any, ...] = import_module("orderedmq.ui.metrics").METRICS
    rows = [f"| `{kind.name}` | {', '.join(kind.labels) or 'none'} | {_cell(kind.meaning)} |" for kind in kinds]
    return "\n".join(["| metric | labels | meaning |", "|---|---|---|", *rows])


# The API.

#: A longer signature has a line for each parameter.
_WIDE: Final = 100


class _Annotation(str):
    """An annotation as it is written in the code, without the quotes of a text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def api(module: str, *names: str) -> str:
    """Return the signature and the first paragraph of each public name of a module, or only of ``names``."""
    home = import_module(module)
    lines: list[str] = []
    for name in names or home.__all__:
        value = getattr(home, name)
        lines += ["", f"### {name}", ""]
        if not callable(value):
            lines.append(f"`{module}.{name} = {value!r}`")
            continue
        lines += ["```text", signature(name, value), "```", "", _paragraph(value)]
        if isinstance(value, type) and (members := list(_members(value))):
            lines += ["", *members]
    return "\n".join(lines).strip()


def _members(kind: type) -> Iterator[str]:
    """Yield a line for each public method and property that this project gives to a class, in the order of the code."""
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] in PACKAGES]
    for name in dict.fromkeys(name for each in reversed(own) for name in vars(each) if not name.startswith("_")):
        value = inspect.getattr_static(kind, name)
        if isinstance(value, Enum):
            yield f"- `{name}`"
        elif isinstance(value, property):
            yield f"- `{name}`: {_paragraph(value)}"
        elif isinstance(value, FunctionType | classmethod | staticmethod):
            yield f"- `{' '.join(signature(name, getattr(kind, name), method=True).split())}`: {_paragraph(value)}"


def signature(name: str, value: Any, *, method: bool = False) -> str:
    """Return a signature as it is written in the code, with a line for each parameter if it is long."""
    if isinstance(value, type) and (issubclass(value, Enum | Exception) or getattr(value, "_is_protocol", False)):
        return f"class {name}"
    found = inspect.signature(value)
    parameters = [
        each.replace(annotation=_written(each.annotation), default=_default_shown(each.default))
        for each in found.parameters.values()
        if not (method and each.name == "self")
    ]
    text = f"{name}{found.replace(parameters=parameters, return_annotation=_written(found.return_annotation))}"
    text = text if not isinstance(value, type) else f"class {text.removesuffix(' -> None')}"
    if len(text) <= _WIDE or method:
        return text
    head, tail = text.partition("(")[0], text[text.rindex(")") :]
    return "\n".join([f"{head}(", *(f"    {each}," for each in _with_markers(parameters)), tail])


def _with_markers(parameters: list[inspect.Parameter]) -> Iterator[str]:
    starred = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not starred:
            yield "*"
        starred = starred or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        yield str(each)


def _written(annotation: Any) -> Any:
    text = getattr(annotation, "__forward_arg__", annotation)
    return _Annotation(text) if isinstance(text, str) else annotation


def _default_shown(value: Any) -> Any:
    if isinstance(value, Enum):
        return _Annotation(f"{type(value).__name__}.{value.name}")
    return _Annotation("…") if len(repr(value)) > 40 or " at 0x" in repr(value) else value


def _paragraph(value: Any) -> str:
    """Return the first paragraph of a docstring as Markdown."""
    text = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return _cell(text.replace("``", "`"))


MAKERS: Final[Mapping[str, Callable[..., str]]] = {
    "api": api,
    "options": options,
    "conditions": conditions,
    "shared_options": shared_options,
    "commands": commands,
    "promises": promises,
    "reliability": reliability,
    "simulations": simulations,
    "planted": planted,
    "metrics": metrics,
}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for _page in (*sorted((ROOT / "docs" / "reference").glob("*.md")), ROOT / "docs" / "reliability.md"):
        _page.write_text(fill(_page.read_text()))
