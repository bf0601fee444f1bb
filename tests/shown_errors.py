"""A pytest plugin: the examples in docs/reference/conditions.md are messages of errors that tests raise.

``docs/reference/examples.json`` names a test and a message for each condition. Each of these tests fails if no error with that condition and
message was raised while it ran. ``make examples`` runs the suite and writes the file. It keeps an example whose test still raises it.
For any other condition it prefers a message with a remedy, from the cheapest test that raises one.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import pytest

from orderedmq.errors import OrderedMQError

FILE: Final = Path(__file__).parents[1] / "docs" / "reference" / "examples.json"
#: The key of the errors in the output of a pytest-xdist worker.
_KEY = "shown errors"
#: The folders of tests. Those that need neither Spark nor servers come first.
_FOLDERS: Final = ("unit", "contract", "loop", "processes", "spark", "rocketmq", "clusters", "faults")
#: The usual number of characters of a message that says what happened and what to do.
_USUAL: Final = 150
_PACKAGES: Final = tuple(str(FILE.parents[2] / package) for package in ("orderedmq", "ordered_source", "ordered_sink"))
#: Patterns of texts that differ from run to run, and their replacements.
_VARYING: Final = (
    (re.compile(rf"{re.escape(tempfile.gettempdir())}/pytest-of-[^/\s]*/pytest-\d+/(?:popen-gw\d+/)?[^/\s,;:')]*"), "/data"),
    (re.compile(r"(?<=127\.0\.0\.1:)\d+"), "9876"),
    (re.compile(r"(?<=free port was found from )\d+ to \d+"), "9876 to 9886"),
    # Root gets another error than other users.
    (re.compile(r"\[Errno 1\] Operation not permitted"), "[Errno 13] Permission denied"),
    (re.compile(r"(?<=this process runs as user )[\w-]+"), "spark"),
    (re.compile(r"@[\w.-]+-\d+-[0-9a-f]{8}\b"), "@host-4711-0123abcd"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "01234567-89ab-cdef-0123-456789abcdef"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "0123456789abcdef0123456789abcdef"),
    (re.compile(r"\b[0-9A-F]{32}\b"), "0123456789ABCDEF0123456789ABCDEF"),
)


class Met(NamedTuple):
    """An error that was raised in a test."""

    condition: str
    message: str
    test: str


def masked(message: str) -> str:
    """Return a message without the parts that differ from run to run."""
    for pattern, text in _VARYING:
        message = pattern.sub(text, message)
    return message


def _raised_by_the_product() -> bool:
    """Return whether the product's code, and not a test, is creating the current error."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in ("noting", "__init__"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGES)


def examples() -> dict[str, dict[str, str]]:
    """Return the test and the message of each condition that has an example."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def chosen(met: list[Met], before: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return an example for each condition: the former one if its test ran and raised it again, or did not run."""
    ran = {one.test for one in met}
    raised = set(met)
    found = {
        condition: dict(example)
        for condition, example in before.items()
        if example["test"] not in ran or Met(condition, example["message"], example["test"]) in raised
    }
    # If a test ran and did not raise its example again, its messages vary.
    varying = {example["test"] for condition, example in before.items() if condition not in found}
    by_cost = sorted(
        met,
        key=lambda one: (
            ". " not in one.message,
            _FOLDERS.index(one.test.split("/")[1]),
            abs(len(one.message) - _USUAL),
            one.test,
        ),
    )
    for one in by_cost:
        if one.condition not in found and one.test not in varying:
            found[one.condition] = {"message": one.message, "test": one.test}
    return dict(sorted(found.items()))


class ShownErrors:
    """The plugin's pytest hooks in one process."""

    def __init__(self, config: pytest.Config) -> None:
        self._writes = config.getoption("--write-examples")
        self._wanted: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        for condition, example in examples().items():
            self._wanted[example["test"]].add((condition, example["message"]))
        self._running = ""
        self._met: list[Met] = []
        init: Callable[..., None] = OrderedMQError.__init__

        def noting(error: OrderedMQError, *args: Any, **named: Any) -> None:
            init(error, *args, **named)
            if self._running and _raised_by_the_product():
                self._met.append(Met(error.condition, masked(error.message), self._running))

        OrderedMQError.__init__ = noting  # type: ignore[assignment, method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        wanted = self._wanted[item.nodeid]
        if not wanted and not self._writes:
            return (yield)
        self._running, begun = item.nodeid, len(self._met)
        try:
            yield
        finally:
            self._running = ""
        met = self._met[begun:]
        if self._writes:
            # Leave out property tests, whose values are random.
            if hasattr(getattr(item, "obj", None), "hypothesis"):
                del self._met[begun:]
        else:
            del self._met[begun:]
            assert wanted <= {(one.condition, one.message) for one in met}, (
                "the example in docs/reference/examples.json was not raised: run make examples"
            )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._met += (Met(*one) for one in getattr(node, "workeroutput", {}).get(_KEY, []))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._writes:
            return
        if hasattr(session.config, "workerinput"):
            session.config.workeroutput[_KEY] = [tuple(one) for one in dict.fromkeys(self._met)]  # type: ignore[attr-defined]
            return
        FILE.write_text(json.dumps(chosen(self._met, examples()), indent=1, ensure_ascii=False) + "\n")
