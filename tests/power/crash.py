"""Generates the states in which a loss of power can leave the files of a recording.

Each write since a file's last sync may be complete, missing, or torn at 512 bytes. Changes of a file's length and of a folder's
entries since the last sync may also be missing. Different files and folders are independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from tests.power.recorder import Event, Link, Make, Mark, Rename, Sync, Truncate, Unlink, Write

SECTOR: Final = 512


@dataclass
class _File:
    """``durable``: the content after the last sync. ``pending``: the changes since then."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Write | Truncate] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change)
        self.pending.clear()

    def after_loss(self, random: Random, under_way: Write | None) -> bytes:
        changes = [*self.pending, *([under_way] if under_way is not None else [])]
        content = bytearray(self.durable)
        mood = random.choice(("none", "all", "mixed", "mixed"))
        longest = len(content)
        for change in changes:
            if isinstance(change, Write):
                longest = max(longest, change.position + len(change.data))
            fate = mood if mood != "mixed" else random.choice(("none", "all", "torn"))
            if fate == "all":
                _apply(content, change)
            elif fate == "torn" and isinstance(change, Write):
                for begin in range(0, len(change.data), SECTOR):
                    # Sectors are aligned on the disk, and a write may begin within a sector.
                    begin = max(0, begin - change.position % SECTOR)
                    piece = change.data[begin : begin + SECTOR - (change.position + begin) % SECTOR]
                    if random.random() < 0.5:
                        _apply(content, Write(change.path, change.position + begin, piece, False))
        if changes and random.random() < 0.5:
            # The length is metadata, so it may be older or newer than the content.
            length = random.randint(min(len(self.durable), longest), longest)
            del content[length:]
            content.extend(bytes(length - len(content)))
        return bytes(content)


def _apply(content: bytearray, change: Write | Truncate) -> None:
    if isinstance(change, Truncate):
        del content[change.size :]
        content.extend(bytes(change.size - len(content)))
        return
    end = change.position + len(change.data)
    content.extend(bytes(max(0, end - len(content))))
    content[change.position : end] = change.data


@dataclass
class _Folder:
    """``durable``: the file numbers by name after the last sync. ``pending``: the changes of entries since then. ``now``: what programs see."""

    durable: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int | None]] = field(default_factory=list)
    now: dict[str, int] = field(default_factory=dict)

    def change(self, entries: dict[str, int | None]) -> None:
        self.pending.append(entries)
        self.now = _entries(self.now, [entries])

    def sync(self) -> None:
        self.durable = _entries(self.durable, self.pending)
        self.pending.clear()

    def after_loss(self, random: Random) -> dict[str, int]:
        # A file system with a journal keeps the order of such changes. A file system without a journal may not.
        if random.random() < 0.5:
            kept = self.pending[: random.randint(0, len(self.pending))]
        else:
            kept = [change for change in self.pending if random.random() < 0.5]
        return _entries(self.durable, kept)


def _entries(entries: dict[str, int], changes: Sequence[dict[str, int | None]]) -> dict[str, int]:
    out = dict(entries)
    for change in changes:
        for name, number in change.items():
            if number is None:
                out.pop(name, None)
            else:
                out[name] = number
    return out


class Disk:
    """The files below a folder, as the events change them, and what a loss of power leaves of them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[int, _Folder] = {0: _Folder()}
        self._files: dict[int, _File] = {}
        self._next = 1
        #: What the process had reported, in order.
        self.marks: list[str] = []

    def apply(self, event: Event) -> None:
        match event:
            case Mark(text):
                self.marks.append(text)
            case Make(path, folder):
                number, self._next = self._next, self._next + 1
                if folder:
                    self._folders[number] = _Folder()
                else:
                    self._files[number] = _File()
                self._enter(path, number)
            case Rename(path, to):
                number = self._number(path)
                if path.parent == to.parent:
                    self._parent(path).change({path.name: None, to.name: number})
                else:
                    self._enter(to, number)
                    self._enter(path, None)
            case Link(path, to):
                self._enter(to, self._number(path))
            case Unlink(path):
                self._enter(path, None)
            case Write(path, _, _, synced):
                file = self._files[self._number(path)]
                if synced:
                    # A synchronous write does not write other pending changes, and none of them concerns the same bytes.
                    _apply(file.durable, event)
                else:
                    file.pending.append(event)
            case Truncate(path):
                self._files[self._number(path)].pending.append(event)
            case Sync(path, failed):
                number = self._number(path)
                found = self._folders.get(number) or self._files[number]
                if failed:
                    # After a failed sync, the kernel marks the pages as clean, so they are never written.
                    found.pending.clear()
                else:
                    found.sync()

    def after_loss(self, place: Path, random: Random, under_way: Event | None) -> None:
        """Write into the folder ``place`` the files that a loss of power leaves. ``under_way``: the interrupted event."""
        self._write(0, place, random, under_way)

    def _write(self, number: int, place: Path, random: Random, under_way: Event | None) -> None:
        place.mkdir(exist_ok=True)
        for name, child in self._folders[number].after_loss(random).items():
            if child in self._folders:
                self._write(child, place / name, random, under_way)
            elif name.endswith("-shm"):
                # Processes write this file through maps, which the recording lacks, so anything may be in it.
                if random.random() < 0.5:
                    (place / name).write_bytes(random.randbytes(32 * 1024))
            else:
                mine = under_way if isinstance(under_way, Write) and self._find(under_way.path) == child else None
                (place / name).write_bytes(self._files[child].after_loss(random, mine))

    def _enter(self, path: Path, number: int | None) -> None:
        self._parent(path).change({path.name: number})

    def _parent(self, path: Path) -> _Folder:
        return self._folders[self._number(path.parent)]

    def _number(self, path: Path) -> int:
        number = self._find(path)
        assert number is not None, f"{path} does not exist"
        return number

    def _find(self, path: Path) -> int | None:
        number: int | None = 0
        for name in path.relative_to(self._root).parts:
            if number not in self._folders:
                return None
            number = self._folders[number].now.get(name)
        return number


def states(events: Sequence[Event], root: Path, seeds: Sequence[int]) -> Iterator[tuple[int, Random, Disk, Event | None]]:
    """Yield (seed, its random numbers, the disk, the interrupted event) for each seed, ordered by the time of the loss of power."""
    points = sorted((Random(seed).randrange(len(events) + 1), seed) for seed in seeds)
    disk, done = Disk(root), 0
    for point, seed in points:
        while done < point:
            disk.apply(events[done])
            done += 1
        random = Random(seed)
        random.randrange(len(events) + 1)
        yield seed, random, disk, events[point] if point < len(events) else None
