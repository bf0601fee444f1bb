"""Errors and their conditions: each class has its own conditions, and errors can be sent between processes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

import orderedmq
from orderedmq.conditions import LockCondition, StoreCondition, StoreFullCondition, UnavailableCondition
from orderedmq.errors import ErrorOf, OptionError, OrderedMQError, RocketMQError, StoreError, StoreFullError, TopicError
from orderedmq.tools.producer import Producer


def classes(base: type[OrderedMQError] = OrderedMQError) -> Iterator[type[OrderedMQError]]:
    for one in base.__subclasses__():
        if one is not ErrorOf:
            yield one
        yield from classes(one)


@pytest.mark.parametrize("kind", sorted(classes(), key=str))
def test_every_condition_of_a_class_is_its_name_and_survives_pickling(kind: type[OrderedMQError]) -> None:
    conditions = kind.conditions
    assert isinstance(conditions, type)
    for sub in conditions:
        assert sub.value == sub.name
        error = kind(sub, "what happened. Set an option")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), again.sub, again.message) == (kind, sub, error.message)
        assert type(again.sub) is conditions
        assert str(again) == str(error) == f"[{kind.family}.{sub.name}] what happened. Set an option"
        assert again.condition == f"{kind.family}.{sub.name}"


@pytest.mark.parametrize(
    ("kind", "sub"),
    [
        (TopicError, LockCondition.LOST),
        (TopicError, StoreCondition.MISSING),
        (TopicError, "MISSING"),
        (StoreError, StoreFullCondition.FULL),
        (StoreFullError, StoreCondition.MISSING),
        (RocketMQError, UnavailableCondition.BUSY),
    ],
)
def test_a_condition_of_another_class_is_refused_though_its_text_may_be_the_same(kind: Any, sub: StrEnum) -> None:
    with pytest.raises(AssertionError, match=f"{kind.__name__} has no condition"):
        kind(sub, "what happened")


@pytest.mark.parametrize("address", ["path", "namesrv_addr"])
def test_a_connection_and_what_belongs_to_it_cannot_be_sent_to_another_process(address: str, tmp_path: Path) -> None:
    where: Any = {address: str(tmp_path / "store") if address == "path" else "127.0.0.1:1"}
    with orderedmq.connect(**where) as broker:
        with pytest.raises(OptionError, match=r"UNSUPPORTED.*orderedmq\.connect"):
            pickle.dumps(broker)
        if address == "path":
            broker.admin.create_topic("t", 1)
        parts = [broker, broker.log, broker.groups, broker.outbox, broker.admin, broker.log.append]
        for part in [*parts, *([Producer(broker.log, "t")] if address == "path" else [])]:
            with pytest.raises(OptionError, match=r"UNSUPPORTED.*orderedmq\.connect"):
                pickle.dumps(part)
