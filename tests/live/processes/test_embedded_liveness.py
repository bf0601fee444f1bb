"""Which clients are alive: a dead owner is known to be dead immediately; a stopped owner is alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orderedmq.broker import Broker, SinkBatch
from orderedmq.conditions import StoreFullCondition
from orderedmq.embedded import garbage, liveness
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.liveness import Presence, _file, is_alive
from orderedmq.errors import StoreFullError
from orderedmq.ownership.lock import LockToken, Refusal
from orderedmq.ownership.membership import Subscription
from tests.contract.support import queues_of, refused

ROOT = Path(__file__).parents[3]

OWNER = """
    import os, subprocess, sys
    from orderedmq import connect
    broker = connect(sys.argv[1])
    queue = broker.log.queues("orders")[0]
    client = broker.groups.join("them")
    token = broker.groups.lock("g", client, [queue])[queue]
    {more}
    print(client.client_id, flush=True)
    sys.stdin.readline()
    broker.close()
"""


class OwnerProcess:
    """A process that owns a queue until the test ends or kills it."""

    def __init__(self, path: Path, more: str) -> None:
        code = textwrap.dedent(OWNER).format(more=more)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.client_id = self.process.stdout.readline().strip()

    def go(self) -> None:
        self.process.communicate("go\n", timeout=30)

    def kill(self) -> None:
        """Kill the process without reaping it, so that it is a zombie."""
        self.process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "store") as broker:
        broker.admin.create_topic("orders", 1)
        yield broker


@pytest.fixture
def start(broker: EmbeddedBroker) -> Iterator[Callable[..., OwnerProcess]]:
    started: list[OwnerProcess] = []

    def make(more: str = "pass") -> OwnerProcess:
        started.append(OwnerProcess(broker.path, more))
        assert started[-1].client_id, "the owner failed to start"
        return started[-1]

    yield make
    for owner in started:
        owner.process.send_signal(signal.SIGCONT)
        owner.process.kill()
        owner.process.communicate()


def ask(broker: Broker) -> LockToken | Refusal:
    [queue] = queues_of(broker)
    return broker.groups.lock("g", broker.groups.join("me"), [queue])[queue]


def test_an_owner_is_alive_while_it_runs_and_gone_when_it_ends(broker: EmbeddedBroker, start):
    owner = start()
    for _ in range(3):
        assert is_alive(broker.path, owner.client_id)
    refusal = ask(broker)
    assert isinstance(refusal, Refusal)
    assert (refusal.client_id, refusal.alive) == (owner.client_id, True)
    owner.go()
    assert not is_alive(broker.path, owner.client_id)
    assert isinstance(ask(broker), LockToken)


def test_a_stopped_owner_is_alive(broker: EmbeddedBroker, start):
    owner = start()
    owner.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, owner.process.pid, os.WSTOPPED | os.WNOWAIT)
    assert is_alive(broker.path, owner.client_id)
    assert isinstance(ask(broker), Refusal)
    owner.process.send_signal(signal.SIGCONT)
    owner.go()
    assert isinstance(ask(broker), LockToken)


def test_the_locks_of_a_killed_owner_are_free_before_it_is_reaped(broker: EmbeddedBroker, start):
    owner = start()
    owner.kill()
    assert not is_alive(broker.path, owner.client_id)
    assert isinstance(ask(broker), LockToken)
    assert owner.process.poll() == -signal.SIGKILL, "the process must have been a zombie until now"


def test_a_child_does_not_keep_a_killed_owner_alive(broker: EmbeddedBroker, start):
    owner = start("child = subprocess.Popen(['sleep', '60'], close_fds=False).pid\nprint(child, flush=True)")
    pid = int(owner.client_id)
    try:
        owner.client_id = owner.process.stdout.readline().strip()
        assert is_alive(broker.path, owner.client_id)
        owner.kill()
        os.kill(pid, 0)
        assert not is_alive(broker.path, owner.client_id)
        assert isinstance(ask(broker), LockToken)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_an_owner_stays_alive_if_its_process_opens_and_closes_its_file(broker: EmbeddedBroker, start):
    owner = start(
        "from orderedmq.embedded.liveness import _file, is_alive\n"
        "for _ in range(3):\n"
        "    open(_file(broker.path, client.client_id)).close()\n"
        "    assert is_alive(broker.path, client.client_id)\n"
        "broker.groups.alive(client.client_id)"
    )
    assert is_alive(broker.path, owner.client_id)
    assert isinstance(ask(broker), Refusal)


def test_an_unknown_client_is_dead(broker: EmbeddedBroker):
    for name in ("nobody", "../index.db", "", "x" * 1000):
        assert not is_alive(broker.path, name)
    assert (broker.path / "index.db").exists()


def test_a_dead_owners_file_is_removed_by_the_process_that_finds_it(broker: EmbeddedBroker, start):
    owner = start()
    folder = broker.path / "owners"
    assert len(list(folder.iterdir())) == 1
    owner.kill()
    assert not is_alive(broker.path, owner.client_id)
    assert list(folder.iterdir()) == []


@pytest.mark.holds("no leftovers")
def test_files_of_dead_owners_are_removed_and_no_others(broker: EmbeddedBroker):
    folder = broker.path / "owners"
    me = broker.groups.join("me")
    left = {_file(broker.path, name).name for name in ("them@here-1-01234567", "/" * 300)} | {f".{uuid.uuid4().hex}"}
    others = {"notes.alive", ".hidden", "me@here-1-0123456789.alive"}
    for name in left | others:
        (folder / name).touch()
    os.utime(broker.path / "segments" / garbage.LOOKED, (1, 1))
    broker.outbox.publish(SinkBatch(None), [])
    assert {path.name for path in folder.iterdir()} == {f"{me.client_id}.alive"} | others


def test_an_owner_joins_while_files_of_others_are_removed(broker: EmbeddedBroker):
    stopped = threading.Event()

    def sweep() -> None:
        while not stopped.is_set():
            liveness.sweep(broker.path)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for _ in range(500):
            presence = Presence(broker.path, "me")
            assert is_alive(broker.path, presence.client.client_id)
            presence.close()
    finally:
        stopped.set()
        sweeper.join()
    assert list((broker.path / "owners").iterdir()) == []


def test_a_presence_ends_once(broker: EmbeddedBroker):
    presence = Presence(broker.path, "me")
    other = Presence(broker.path, "me")
    for _ in range(2):
        presence.close()
        assert not is_alive(broker.path, presence.client.client_id)
        assert is_alive(broker.path, other.client.client_id)
    other.close()


def test_a_client_leaves_although_the_store_cannot_be_written(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch):
    def full() -> None:
        raise StoreFullError(StoreFullCondition.FULL, "no room")

    me = broker.groups.join("me")
    broker.groups.heartbeat("g", me, Subscription("shared", "orders"))
    monkeypatch.setattr(broker.groups._store, "write", full)
    with refused("STORE.FULL"):
        broker.groups.leave(me)
    assert not is_alive(broker.path, me.client_id)
    assert broker.groups.members("g") == []
