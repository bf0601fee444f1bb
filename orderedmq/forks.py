"""Resets state in a child after a fork: connections, descriptors and locks are the parent's, so the child starts over."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def call_in_child(begin_anew: Callable[[], object]) -> None:
    """Have a function called in every child after a fork, in the order of these calls."""
    os.register_at_fork(after_in_child=begin_anew)


class BeginAnew(Generic[T]):
    """A set of objects, each of which starts over in every child after a fork. It does not keep them alive."""

    def __init__(self, begin_anew: Callable[[T], None]) -> None:
        self._begin_anew = begin_anew
        self._objects: weakref.WeakSet[T] = weakref.WeakSet()
        call_in_child(self._in_child)

    def add(self, one: T) -> None:
        self._objects.add(one)

    def _in_child(self) -> None:
        for one in list(self._objects):
            self._begin_anew(one)
