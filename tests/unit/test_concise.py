"""Spark gets the package's errors without stack frames and causes. All other errors keep both."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.routing.selector import FunctionSelector, load_function
from orderedmq.spark_support import concise, concise_calls


def deep(error: Exception, cause: Exception | None, depth: int = 5) -> None:
    if depth:
        deep(error, cause, depth - 1)
    try:
        if cause is not None:
            raise cause
    except Exception as found:
        raise error from found
    raise error


@concise_calls
class Called:
    """Calls as Spark makes them: a constructor, a method, and a method that is a generator."""

    def __init__(self, error: Exception | None, cause: Exception | None = None) -> None:
        if error is not None:
            deep(error, cause)

    def call(self, error: Exception, cause: Exception | None = None) -> None:
        deep(error, cause)

    def rows(self, error: Exception, cause: Exception | None = None) -> Iterator[int]:
        return self._rows(error, cause)

    def _rows(self, error: Exception, cause: Exception | None) -> Iterator[int]:
        yield 1
        deep(error, cause)


CALLS: dict[str, Callable[..., Any]] = {
    "a constructor": Called,
    "a method": lambda *given: Called(None).call(*given),
    "a generator": lambda *given: list(Called(None).rows(*given)),
}


def told(call: Callable[..., Any], *given: Any) -> list[str]:
    with pytest.raises((OptionError, KeyError)) as caught:
        call(*given)
    return "".join(traceback.format_exception(caught.value)).splitlines()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_error_of_ours_has_neither_frames_nor_causes(call: Callable[..., Any]) -> None:
    lines = told(call, OptionError(OptionCondition.MISSING, "set topic"), OSError("gone"))
    assert lines[-1].endswith("[ORDEREDMQ_OPTION.MISSING] set topic")
    assert not [line for line in lines if "in deep" in line or "gone" in line]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_fault_keeps_frames_and_causes(call: Callable[..., Any]) -> None:
    lines = told(call, KeyError("a fault"), OSError("gone"))
    assert len([line for line in lines if "in deep" in line]) >= 5
    assert [line for line in lines if line == "OSError: gone"]


def test_what_a_users_own_code_raised_stays_as_the_cause(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(keys: pa.Array, n: int) -> Any:
        return np.array([1 // 0 for _ in keys])

    select = concise(FunctionSelector(choose, "choose").select)
    with pytest.raises(Exception, match="SELECTOR_FAILED") as caught:
        select(pa.record_batch({"body": [b"x"]}), None, 4)
    assert "in choose" in "".join(traceback.format_exception(caught.value))
    (tmp_path / "broken_module_of_a_test.py").write_text("def half():\n    raise KeyError('mine')\nhalf()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match="cannot be loaded") as invalid:
        concise(load_function)("broken_module_of_a_test:choose")
    assert "in half" in "".join(traceback.format_exception(invalid.value))
