"""What the Tab key shows of the package and of what a user holds, and what ``help`` says about it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ordered_sink
import ordered_source
import orderedmq
import orderedmq.testing
import orderedmq.trace_context
from ordered_sink import once
from orderedmq.broker import Admin, Broker, Groups, Log, Outbox
from orderedmq.endpoint import Endpoint
from orderedmq.rocketmq.broker import RocketMQBroker

MODULES = (orderedmq, orderedmq.trace_context, orderedmq.testing, ordered_source, ordered_sink, once)
INTERFACES = {"log": Log, "groups": Groups, "outbox": Outbox, "admin": Admin}


def public(kind: type) -> set[str]:
    """The public names that the classes of this project give to ``kind``."""
    own = [
        each for each in kind.__mro__ if each.__module__.partition(".")[0] in ("orderedmq", "ordered_source", "ordered_sink")
    ]
    return {name for each in own for name in vars(each) if not name.startswith("_")}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_tab_shows_the_public_names_of_a_module(module: Any) -> None:
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.fixture(params=["embedded", "rocketmq"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    if request.param == "rocketmq":
        # It connects at first use.
        yield RocketMQBroker(Endpoint(None, "127.0.0.1:9876"))
        return
    with orderedmq.connect(tmp_path / "store") as connection:
        connection.admin.create_topic("orders", 1)
        yield connection


def test_tab_shows_the_interface_of_a_connection(broker: Broker) -> None:
    assert set(dir(broker)) == public(Broker) == {*INTERFACES, "capabilities", "close", "identity"}
    for name, interface in INTERFACES.items():
        assert set(dir(getattr(broker, name))) == public(interface)


def test_tab_shows_no_attribute_of_a_producer_or_of_messages_besides_their_methods(tmp_path: Path) -> None:
    with orderedmq.connect(tmp_path / "store") as broker:
        broker.admin.create_topic("orders", 1)
        for held in (orderedmq.Producer(broker.log, "orders"), orderedmq.read("orders", path=tmp_path / "store")):
            assert {name for name in dir(held) if not name.startswith("_")} == public(type(held))


def test_every_public_function_class_and_method_has_a_docstring(broker: Broker) -> None:
    described = {f"{module.__name__}.{name}": getattr(module, name) for module in MODULES for name in module.__all__}
    for place, kind in [(place, value) for place, value in described.items() if isinstance(value, type)]:
        described |= {f"{place}.{name}": getattr(kind, name) for name in public(kind)}
    for place, part in {"connection": broker, **{name: getattr(broker, name) for name in INTERFACES}}.items():
        described |= {f"{place}.{name}": getattr(type(part), name) for name in dir(part)}
    documentable = {place: value for place, value in described.items() if callable(value) or isinstance(value, property)}
    assert {place for place, value in documentable.items() if not inspect.getdoc(value)} == set()
