"""Resets state in a child process after a fork, because connections, descriptors and locks belong to the parent."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def call_in_child(begin_anew: Callable[[], object]) -> None:
    """Register a function that every child process calls after a fork. Functions run in the order of registration."""
    os.register_at_fork(after_in_child=begin_anew)


class BeginAnew(Generic[T]):
    """A set of objects that are reset in every child process after a fork. The set does not keep them alive."""

    def __init__(self, begin_anew: Callable[[T], None]) -> None:
        self._begin_anew = begin_anew
        self._objects: weakref.WeakSet[T] = weakref.WeakSet()
        call_in_child(self._in_child)

    def add(self, one: T) -> None:
        self._objects.add(one)

    def _in_child(self) -> None:
        for one in list(self._objects):
            self._begin_anew(one)
