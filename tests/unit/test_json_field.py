"""The values of a field in many JSON objects are the same as when each object is parsed alone."""

from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.tools.json_field import BadJson, values

VALUES: list[Any] = ["x", 'é\n"', 5, -3, 2**70, 1.5, True, None, [1], {"b": "y"}, {"b": 3}, "2013-01-01", "", {}]


def one_by_one(objects: list[bytes], path: str) -> list[str | None]:
    first = json.loads(objects[0])
    names = [path] if path in first else path.split(".")
    out: list[str | None] = []
    for text in objects:
        value = json.loads(text)
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        plain = value is None or isinstance(value, str)
        out.append(value if plain else json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_any_values_in_any_form(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(300):
        pool = dice.sample(VALUES, dice.randint(1, 3))
        objects = []
        for _ in range(dice.randint(1, 6)):
            made = (
                {"other": dice.choice(VALUES), "a.b": dice.choice(VALUES)}
                if dice.random() < 0.3
                else {"other": dice.choice(VALUES)}
            )
            if dice.random() < 0.8:
                made["a"] = dice.choice(pool)
            objects.append(json.dumps(made, ensure_ascii=dice.random() < 0.5, indent=dice.choice([None, None, 2])).encode())
        for path in ("a", "a.b", "a.b.c", ""):
            assert values(pa.array(objects), path).to_pylist() == one_by_one(objects, path), (objects, path)


@pytest.mark.parametrize(
    ("objects", "row", "why"),
    [
        ([b'{"a":1}', b"", b'{"a":1}{"a":2}'], 1, "not JSON"),
        ([b'{"a":1}{"a":2}', b'{"a":3}'], 0, "Extra data"),
        ([b'{"a":1}', b'{"a":1} {"a":2}', b"{"], 1, "Extra data"),
        ([b'{"a":1}', b'{"a":{"a":2}', b"}"], 1, "not JSON"),
        ([b'{"a":"0"}', b'{"a":"1","x":', b'{"a":1}}', b'{"a":"3"} {"a":"4"}'], 1, "not JSON"),
        ([b'{"x":{"y":1}', b'{"a":1}}', b'{"a":3}{"a":4}'], 0, "not JSON"),
        ([b'{"x":"}', b'{"a":1}', b'{"a":3}{"a":4}'], 0, "not JSON"),
        ([b'{"a":"x', b'{"a":"y"}'], 0, "not JSON"),
        ([b'{"a":1}', b"[1]"], 1, "not a JSON object"),
        ([b'{"a":1}', b'{"a":1'], 1, "not JSON"),
        ([b"\xff"], 0, "not UTF-8"),
        ([b'{"a":%s}' % (b"9" * 5000)], 0, "more digits"),
        ([b'{"a":"x"}', b'{"a":"\xff"}'], 1, "not UTF-8"),
        ([b'{"a":"x"}', b'{"a":"\\ud800"}'], 1, "half a character"),
        ([b'{"a":' * 100_000], 0, "nested too deeply|not JSON"),
    ],
)
def test_refuses_text_that_is_not_a_json_object(objects: list[bytes], row: int, why: str) -> None:
    with pytest.raises(BadJson, match=why) as found:
        values(pa.array(objects, pa.binary()), "a")
    assert found.value.row == row
    assert len(str(found.value)) < 200


def test_no_objects_and_no_text() -> None:
    assert values(pa.array([], pa.binary()), "a").to_pylist() == []
    with pytest.raises(BadJson, match="there is no text"):
        values(pa.array([b"{}", None]), "a")
    # Slices and strings also work.
    assert values(pa.array(['{"a":1}', '{"a":2}', '{"a":3}']).slice(1), "a").to_pylist() == ["2", "3"]
