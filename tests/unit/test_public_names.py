"""Every name that a user could write with the former release is there today, and means the same place.

public_names.json has the names of that release, here of commit 825f74c. A new name needs no entry until it is released: then
`python -m tests.unit.test_public_names` writes all names of the code that it runs with.
"""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

import orderedmq
import orderedmq.demo.play
from orderedmq.cli import COMMANDS, GROUPS, load
from orderedmq.errors import OrderedMQError
from orderedmq.options.declared import SINK_OPTIONS, SOURCE_OPTIONS
from orderedmq.schema import MESSAGE_SCHEMA, PRODUCER_COLUMNS
from pyspark_orderedmq import DefaultSource

FILE = Path(__file__).parent / "public_names.json"
FORMER = json.loads(FILE.read_text())


def parameters(value: Any) -> list[str]:
    """The names of a function's or constructor's parameters; the members of an enumeration."""
    if hasattr(value, "__members__"):
        return list(value.__members__)
    return list(inspect.signature(value).parameters)


def conditions(base: type[OrderedMQError] = OrderedMQError) -> Iterator[str]:
    """Of all classes of errors; those of the demo are in orderedmq.demo.play."""
    for one in base.__subclasses__():
        yield from (f"{one.family}.{sub}" for sub in one.conditions)
        yield from conditions(one)


def commands() -> Iterator[tuple[str, list[str]]]:
    found = {name: load(name) for name in COMMANDS}
    found |= {f"{group} {name}": command for group in GROUPS for name, command in load(group).commands.items()}
    for name, command in found.items():
        yield name, sorted(option for one in command.params for option in one.opts if option.startswith("--"))


def names() -> dict[str, dict[str, Any]]:
    """Each kind of name: the name, and what belongs to it."""
    packages = [import_module(name) for name in ("orderedmq", "ordered_source", "ordered_sink")]
    return {
        "python": {f"{one.__name__}.{name}": parameters(getattr(one, name)) for one in packages for name in one.__all__},
        "source option": {option.name: option.default for option in SOURCE_OPTIONS},
        "sink option": {option.name: option.default for option in SINK_OPTIONS},
        "column": {field.name: str(field.type) for field in MESSAGE_SCHEMA},
        "written column": dict.fromkeys(PRODUCER_COLUMNS),
        "condition": dict.fromkeys(sorted(conditions())),
        "command": dict(commands()),
    }


@pytest.mark.parametrize("kind", sorted(FORMER))
def test_a_name_of_the_former_release_is_there_and_is_what_it_was(kind: str) -> None:
    today = names()[kind]
    for name, former in FORMER[kind].items():
        assert name in today, f"the {kind} {name} is gone"
        if isinstance(former, list):
            # More parameters or options do no harm.
            assert set(former) <= set(today[name]), f"the {kind} {name}"
        else:
            assert today[name] == former, f"the {kind} {name}"


def test_columns_are_in_the_order_in_which_they_were() -> None:
    assert list(names()["column"])[: len(FORMER["column"])] == list(FORMER["column"])


def test_the_format_and_the_command_have_the_names_that_they_had() -> None:
    assert DefaultSource.name() == "orderedmq"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["name"] == "orderedmq"
    assert project["version"] == orderedmq.__version__
    assert project["scripts"] == {"orderedmq": "orderedmq.cli:app"}
    assert callable(cast(Any, import_module("orderedmq.cli")).app)
    assert find_spec("orderedmq.__main__"), "python -m orderedmq"


def write() -> None:
    """A line for each name, so that a difference can be read."""
    kinds = [
        f" {json.dumps(kind)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(is_)}" for name, is_ in found.items())
        + "\n }"
        for kind, found in names().items()
    ]
    FILE.write_text("{\n" + ",\n".join(kinds) + "\n}\n")


if __name__ == "__main__":
    write()
