"""Sharding keys by type: text, or whole numbers that Java hashes as an Integer or a Long. Pure and vectorised.

A message stores its key as text, whatever the key's type was. The type decides the hash, and thus the queue: Java's producer may
send the String "17" and the Long 17 to different queues.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import MessageCondition, SchemaCondition
from orderedmq.errors import MessageError, SchemaError
from orderedmq.routing.key_hash import HashedKeys
from orderedmq.text import narrow, valid

#: The type that Java's producer hashes: a String, an Integer (or Short or Byte), or a Long.
KeyType: TypeAlias = Literal["text", "int", "long"]
#: ``auto``: the type of the column decides.
GivenKeyType: TypeAlias = Literal["auto", "text", "int", "long"]
KEY_TYPES: Final[tuple[GivenKeyType, ...]] = ("auto", "text", "int", "long")

_BITS: Final = {"int": 32, "long": 64}
#: Arrow's types of texts, and of binary values, which are keys if they are UTF-8. Spark's setting useLargeVarTypes chooses the large ones.
_TEXT_LIKE: Final = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_null,
)
_NUMBER: Final = "-?[0-9]+"
#: Maximum characters of a bad key that an error shows.
_SHOWN: Final = 40


class HashedNumbers(HashedKeys):
    """The hashes of whole numbers, which are stored as text. ``hash64`` is the hash of the text."""

    def __init__(self, texts: pa.Array, numbers: npt.NDArray[np.int64], kind: Literal["int", "long"]) -> None:
        """``numbers`` are the values of ``texts``, 0 for a null. If ``kind`` is ``int``, they must fit 32 bits."""
        super().__init__(texts)
        self.numbers = numbers
        self._kind: Final = kind

    @cached_property
    def java(self) -> npt.NDArray[np.int32]:
        """Java's Integer.hashCode or Long.hashCode of each key, 0 for a null."""
        if self._kind == "int":
            return self.numbers.astype(np.int32)
        words = self.numbers.view(np.uint64)
        return (words ^ words >> np.uint64(32)).astype(np.uint32).view(np.int32)

    def filter(self, mask: pa.Array) -> HashedNumbers:
        return HashedNumbers(self.keys.filter(mask), self.numbers[mask.to_numpy(zero_copy_only=False)], self._kind)


def key_type(column: pa.DataType, given: GivenKeyType = "auto") -> KeyType:
    """Return the type by which the keys of an Arrow column are hashed. Raises SchemaError WRONG_TYPE if the column cannot have keys."""
    whole = pa.types.is_integer(column)
    if not whole and not _is_text(column):
        raise SchemaError(
            SchemaCondition.WRONG_TYPE, f"a sharding key is a string or a whole number, not {column}. Cast the column"
        )
    if given != "auto":
        return given
    if not whole:
        return "text"
    # A column type whose values all fit a Java Integer is hashed as an Integer.
    return "int" if column.bit_width + pa.types.is_unsigned_integer(column) <= 32 else "long"


def _is_text(column: pa.DataType) -> bool:
    kind = column.value_type if pa.types.is_dictionary(column) else column
    return any(test(kind) for test in _TEXT_LIKE)


def hashed_keys(column: pa.Array, given: GivenKeyType, where: str, first: int = 0) -> HashedKeys:
    """Return the keys of a column with their hashes. A string that is not UTF-8 is decoded as Java does (text.py).

    In errors, ``where`` names the rows, and ``first`` is the number of the first row. Raises SchemaError WRONG_TYPE, or MessageError
    BAD_KEY for a key that is not a whole number or is too large for the type, TOO_LARGE for keys of more than 2 GiB.
    """
    kind = key_type(column.type, given)
    column = narrow(column, f"the column of sharding keys of {where}")
    try:
        texts = valid(column)[0].cast(pa.string())
    except pa.ArrowInvalid as error:
        raise SchemaError(
            SchemaCondition.WRONG_TYPE,
            f"the sharding keys of {where} are binary, and not all are UTF-8. Write the keys as text, for example hex(key)",
        ) from error
    if kind == "text":
        return HashedKeys(texts)
    numbers = _numbers(column if pa.types.is_integer(column.type) else texts, kind)
    if isinstance(numbers, int):
        raise _bad(f"row {first + numbers} of {where}", texts[numbers].as_py(), kind)
    return HashedNumbers(texts, numbers, kind)


def check_lines(keys: pa.Array, kind: KeyType, lines: Sequence[int]) -> None:
    """Check the keys (strings) of input lines. Raises MessageError BAD_KEY, which names the line, for a key that ``kind`` cannot hold."""
    if kind == "text":
        return
    found = _numbers(keys, kind)
    if isinstance(found, int):
        raise _bad(f"line {lines[found]} of the input", keys[found].as_py(), kind)


def _bad(where: str, key: str, kind: Literal["int", "long"]) -> MessageError:
    shown = repr(key) if len(key) <= _SHOWN else f"{key[:_SHOWN]!r}…"
    java = "Integer" if kind == "int" else "Long"
    return MessageError(
        MessageCondition.BAD_KEY,
        f"{where} has the sharding key {shown}, but Java's {java} holds only whole numbers of {_BITS[kind]} bits. "
        "Correct the key, or hash keys as text with shardingKeyType=text (--sharding-key-type text)",
    )


def _numbers(column: pa.Array, kind: Literal["int", "long"]) -> npt.NDArray[np.int64] | int:
    """Return the values of whole numbers or of their texts, 0 for a null. If ``kind`` cannot hold a value, return its row number instead."""
    if not pa.types.is_integer(column.type):
        bad = pc.fill_null(pc.invert(pc.match_substring_regex(column, f"^{_NUMBER}$")), False)
        if pc.any(bad).as_py():
            return int(pc.index(bad, True).as_py())
    try:
        wide = pc.fill_null(column.cast(pa.int64()), 0)
    except pa.ArrowInvalid:
        least, most = -(2**63), 2**63 - 1
        return next(row for row, key in enumerate(column.to_pylist()) if key is not None and not least <= int(key) <= most)
    numbers: npt.NDArray[np.int64] = wide.to_numpy(zero_copy_only=False)
    if kind == "int":
        large = np.flatnonzero(numbers.astype(np.int32) != numbers)
        if len(large):
            return int(large[0])
    return numbers


def is_number(key: str) -> bool:
    """Whether a key's text is a whole number of any size."""
    return re.fullmatch(_NUMBER, key) is not None
