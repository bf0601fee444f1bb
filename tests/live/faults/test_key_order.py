"""Order per key under kill -9: workers and drivers are killed, keys fail at random or always, members of a group come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.faults.conftest import World
from tests.live.faults.key_storm import Storm


@pytest.mark.fault("killed process", "embedded")
@pytest.mark.holds("order per key", "final dead letter")
@pytest.mark.timeout(300)
def test_killed_workers_and_drivers_lose_and_reorder_nothing_of_any_key(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Storm(world, tmp_path / "calls", monkeypatch, keys=200, members=1).run(messages=3000, poison=2, kills=3, moody=2)
