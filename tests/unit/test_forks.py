"""Objects that must start afresh in a child process after a fork."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from orderedmq.forks import BeginAnew
from orderedmq.rocketmq.messages.puller import Puller
from orderedmq.rocketmq.messages.sender import Sender
from orderedmq.rocketmq.net.client import Client

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Counter:
    def __init__(self) -> None:
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1


def in_child(say: Callable[[], bytes]) -> bytes:
    """The bytes that ``say`` returns in a fork of this process."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(theirs, say())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    with os.fdopen(ours, "rb") as pipe:
        return pipe.read()


def test_each_living_object_begins_anew_in_a_child_and_in_no_parent() -> None:
    known = BeginAnew(Counter.begin)
    counters = [Counter(), Counter()]
    for counter in counters:
        known.add(counter)
    known.add(Counter())
    assert in_child(lambda: bytes(counter.begun for counter in counters)) == b"\x01\x01"
    assert [counter.begun for counter in counters] == [0, 0]


def test_a_child_makes_other_keys_of_messages_than_its_parent() -> None:
    client = Client("127.0.0.1:1")
    sender = Sender(client, Puller(client))

    def maker() -> bytes:
        """The part of a message key that precedes its time and counter."""
        return str(sender.keys.take(1)[0].as_py())[:20].encode()

    ours = maker()
    assert len(ours) == 20
    assert maker() == ours
    assert in_child(maker) not in (ours, b"")
