"""A storm over a shared group with order per key: its broker is killed while queues are being handed over.

A third member joins and leaves repeatedly, either in an orderly way or by kill -9. Each time, the broker is killed as soon as the list
of members or a queue's owner has changed. Keys fail at random or always, so parking lots are also handed over.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from orderedmq.errors import OrderedMQError
from tests import event_log
from tests.faults.drivers import Driver, Refused
from tests.faults.key_listener import at_work, judge
from tests.faults.key_storm import Storm
from tests.rocketmq.test_key_storm import World
from tests.waits import until

#: For so many seconds after the end of a micro-batch, a killed broker may lose the offsets of that micro-batch: a broker writes
#: its offsets every 5 s, but not in the first 10 s after its start.
FORGETS: Final = 20.0
#: Minimum number of unprocessed messages, so that each member has work.
AHEAD: Final = 1500


class HandOverStorm(Storm):
    """A storm with two permanent members and a third one that joins and leaves."""

    world: World

    def __init__(self, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch, *, seed: int) -> None:
        super().__init__(world, folder, monkeypatch, keys=120, members=2)
        self.draw = random.Random(seed)
        self.batch = 400
        self.hand_overs: Counter[str] = Counter()
        self.failures: list[str] = []
        #: When the broker was killed (seconds of the wall clock).
        self.kills: list[float] = []
        self._third = False
        self._moving: Future[Any] | None = None
        self._pool = ThreadPoolExecutor(1, "third member")

    def storm(self, *, messages: int, poison: int, rounds: int, seconds: float) -> Counter[str]:
        """Kill the broker in ``rounds`` hand-overs, let the queries finish, then check the result. Return the counts."""
        self.produce(messages, poison)
        deadline = time.monotonic() + seconds
        try:
            for member in range(self.members):
                self.begin(member)
            for _ in range(rounds):
                self._hand_over()
            self._until(lambda: self._moving is None and self.done(), "every message is settled", deadline - time.monotonic())
            for driver in self.drivers[: self.members + self._third]:
                driver.stop()
        finally:
            for driver in self.drivers:
                driver.close()
            self._pool.shutdown()
        seen = judge(self.world.broker, self.world.group, self.world.queues, self.folder)
        seen.update({f"repeats of {kind}": count for kind, count in self._repeats().items()})
        print(json.dumps({"broker killed": len(self.kills), "queries failed": len(self.failures), **self.hand_overs, **seen}))
        print("\n".join(self.failures))
        return seen

    # -- a hand-over --------------------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        before = self._until(self._divided, "all members have queues", 300.0)
        self._until(lambda: at_work(self.folder) is not None, "a listener is at work", 120.0)
        how = self._join() if not self._third else self.draw.choice([self._leave, self._die])()
        members, changed = len(set(before.values())), self.draw.choice(["members", "queues"])

        def begun() -> bool:
            if changed == "members":
                return len(self.world.broker.groups.members(self.world.group)) != members
            return any(self._owners().get(queue) != owner for queue, owner in before.items())

        self._until(begun, f"the {changed} change", 300.0)
        self.kills.append(time.time())
        self.world.cluster.broker.kill()
        print(f"{how}, killed when the {changed} changed", flush=True)
        self.hand_overs[f"{how}, {changed}"] += 1
        self.world.cluster.broker.start()

    def _join(self) -> str:
        self._third = True

        def begin() -> None:
            if not self.drivers[self.members :] or not self.drivers[self.members].alive:
                self.drivers[self.members :] = [Driver(self.world.folder / f"third-{time.monotonic_ns()}")]
            try:
                self.query(self.members)
            except Refused:
                # Start the query again, as its user would do.
                self.query(self.members)

        self._moving = self._pool.submit(begin)
        return "join"

    def _leave(self) -> str:
        self._third = False
        self._moving = self._pool.submit(self.drivers[self.members].stop)
        return "leave"

    def _die(self) -> str:
        self._third = False
        self.drivers[self.members].kill_all()
        self.drivers[self.members].close()
        return "die"

    def _owners(self) -> dict[str, str]:
        locks = self.world.broker.admin.locks(self.world.group)
        return {str(lock.queue): lock.client_id for lock in locks if lock.queue in self.world.queues}

    def _divided(self) -> dict[str, str]:
        """Return the owner of each queue, or {} until every queue has an owner, every member a queue, and enough messages wait."""
        world = self.world
        at = world.broker.groups.offsets(world.group, world.queues)
        if sum(one.max_offset for one in world.broker.log.bounds(world.queues).values()) - sum(at.values()) < AHEAD:
            self.produce(AHEAD, 0)
        self.retry_all()
        owners = self._owners()
        complete = len(owners) == len(world.queues) and len(set(owners.values())) == self.members + self._third
        return owners if complete else {}

    # -- queries ------------------------------------------------------------------------------------------------------------------

    def _until(self, condition: Any, what: str, timeout: float) -> Any:
        def tended() -> Any:
            self.restart_failed()
            with contextlib.suppress(OrderedMQError):
                return condition()

        try:
            return until(tended, what, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.left()}, {self.failures[-3:]}") from error

    def restart_failed(self) -> None:
        if self._moving is not None:
            if not self._moving.done():
                return
            self._moving.result()
            self._moving = None
        for member in range(self.members + self._third):
            state = self.drivers[member].state()
            if not state["active"]:
                lines = str(state["failure"]).splitlines()
                self.failures.append(next((line for line in reversed(lines) if "ORDEREDMQ" in line), lines[0])[:600])
                # A query that is refused is started again at the next check.
                with contextlib.suppress(Refused):
                    self.query(member)

    # -- checking the result ------------------------------------------------------------------------------------------------------

    def _repeats(self) -> Counter[str]:
        """Count messages that were accepted again, by what happened to the micro-batch that had accepted them first."""
        ended: dict[tuple[str, int], float] = {}
        for checkpoint in self.world.folder.glob("ck-*"):
            query = json.loads((checkpoint / "metadata").read_text())["id"]
            for file in (checkpoint / "commits").iterdir():
                if file.name.isdigit():
                    ended[query, int(file.name)] = file.stat().st_mtime
        wall = time.time() - time.monotonic()
        first: dict[tuple[str, int], tuple[str, int]] = {}
        found: Counter[str] = Counter()
        for call in event_log.read(self.folder):
            for offset in call["offsets"] if call["ok"] else ():
                place, batch = (call["queue"], offset), (call["query"], call["batch"])
                if place not in first:
                    first[place] = batch
                    continue
                end = ended.get(first[place])
                if end is None:
                    found["a batch that was not committed"] += 1
                elif call["at"] / 1e9 + wall < end:
                    found["a batch that was still at work"] += 1
                elif any(end - 1 < kill < end + FORGETS for kill in self.kills):
                    found["a batch that the broker forgot"] += 1
                else:
                    found["a committed batch"] += 1
        return found
