"""Compares two histories per sharding key: did every message arrive, once and in order? Pure numpy, apart from temporary files.

A history is a sequence of rows. A row has a key, an identity (by default its body, or a field of it) and a number. Keys and
identities are compared by 64-bit hashes, and identities only within a key: among 10 million rows of one key, two different
identities have the same hash with a probability of 3 in a million.

The order of a key: the first occurrences of identities must have the same order in ACTUAL as in EXPECTED. A row that comes after
a row that should follow it is out of order. An identity that occurs n times in EXPECTED is matched n times; further occurrences
in ACTUAL count as duplicated.

Memory is bounded: rows are divided by key into buckets, which are compared one by one. A bucket has at most about two million
rows of both sides, in temporary files of 36 bytes a row. (A bucket is larger if one key has more rows, or if both sides together
have more than 512 million rows.)
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Target number of rows of both sides in a bucket, and the maximum number of buckets. A bucket has one file per side.
BUCKET_ROWS: Final = 2_000_000
MAX_BUCKETS: Final = 256
#: The key hash of rows without a key, which have no order.
NO_KEY: Final = np.uint64(0)
#: ``at``: the row's number on its side. A side's rows are sorted by ``order``, then by ``at``. ``lane``: the row's queue.
ROW: Final = np.dtype([("key", "<u8"), ("id", "<u8"), ("at", "<i8"), ("order", "<i8"), ("lane", "<i4")])
Rows = npt.NDArray[Any]

KINDS: Final = ("lost", "duplicated", "out_of_order", "moved", "extra")


class Location(NamedTuple):
    """An example row as shown to users: its location, key and identity."""

    where: str
    key: str | None
    id: str


class Side(Protocol):
    """One of the two histories."""

    @property
    def name(self) -> str: ...
    @property
    def messages(self) -> int:
        """The number of rows."""
        ...

    def rows(self) -> Iterator[Rows]:
        """Yield all rows, in batches of dtype ROW."""
        ...

    def locate(self, rows: Sequence[int]) -> list[Location]:
        """Return the locations of the rows with these numbers."""
        ...


@dataclass
class Extent:
    """The counts of one side.

    split_keys: keys that occur in several queues, so that their messages have no common order. repeated: messages whose identity
    occurred before.
    """

    name: str
    messages: int = 0
    keys: int = 0
    split_keys: int = 0
    repeated: int = 0


@dataclass(frozen=True)
class Example:
    kind: str
    side: str
    where: str
    key: str | None
    id: str


class Finding(NamedTuple):
    """A kind of difference: its identifier, its name for users, the number of messages with it, and a note or ""."""

    kind: str
    name: str
    messages: int
    note: str = ""


@dataclass
class Audit:
    """The findings, counted in messages.

    lost: in EXPECTED but not in ACTUAL. lost_at_end: lost messages without a later message of their key in ACTUAL, as is normal while
    a pipeline is running. gaps: runs of other lost or moved messages. duplicated: more often in ACTUAL than in EXPECTED.
    moved: in ACTUAL under another key. extra: in ACTUAL but not in EXPECTED. out_of_order: after a message that should follow it.
    keys_affected: keys with any of these differences.
    """

    expected: Extent
    actual: Extent
    lost: int = 0
    lost_at_end: int = 0
    gaps: int = 0
    duplicated: int = 0
    moved: int = 0
    extra: int = 0
    out_of_order: int = 0
    keys_affected: int = 0
    examples: list[Example] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether exactly the messages of EXPECTED arrived, each once, in the order of its key, and each key in one queue."""
        return not any(finding.messages for finding in self.findings) and not self.actual.split_keys

    @property
    def findings(self) -> list[Finding]:
        """All kinds of difference, including kinds that no message has."""
        note = f"{self.gaps:,} gaps, {self.lost_at_end:,} at the end of their key" if self.lost else ""
        return [
            Finding("lost", "lost", self.lost, note),
            Finding("duplicated", "duplicated", self.duplicated),
            Finding("out_of_order", "out of order", self.out_of_order),
            Finding("moved", "under another key", self.moved),
            Finding("extra", "unexpected", self.extra),
        ]

    @property
    def nothing_in_common(self) -> bool:
        """Whether no message of EXPECTED is in ACTUAL although both have messages, as when a query has changed the bodies."""
        return 0 < self.lost == self.expected.messages and 0 < self.extra == self.actual.messages

    @property
    def verdict(self) -> str:
        """The result in one or two sentences."""
        if self.nothing_in_common:
            return (
                f"No message of {self.expected.name} is in {self.actual.name}, because whole bodies are compared and all differ. "
                "If a field of JSON bodies identifies a message, compare by it (--id-field, or id_field in Python)."
            )
        if self.ok:
            return f"{self.actual.name} has every message of {self.expected.name}, once and in the order of its key."
        if not any(finding.messages for finding in self.findings):
            return (
                f"{self.actual.split_keys:,} keys are in several queues of {self.actual.name}, so their messages have no order."
            )
        return f"{self.keys_affected:,} of {max(self.expected.keys, self.actual.keys):,} keys are affected."

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def audit(
    expected: Side,
    actual: Side,
    *,
    examples: int = 5,
    progress: Callable[[int], None] | None = None,
    bucket_rows: int = BUCKET_ROWS,
) -> Audit:
    """Return the differences between two histories.

    ``examples``: maximum number of examples of each kind. ``progress`` is called with the number of rows of each batch that is read.
    """
    buckets = min(MAX_BUCKETS, 1 + (expected.messages + actual.messages) // bucket_rows)
    found = _Found(Audit(Extent(expected.name), Extent(actual.name)))
    with _Buckets(buckets) as wanted, _Buckets(buckets) as got:
        for dealt, side in ((wanted, expected), (got, actual)):
            for rows in side.rows():
                dealt.add(rows)
                if progress is not None:
                    progress(len(rows))
        for bucket in range(buckets):
            found.compare(wanted.rows(bucket), got.rows(bucket))
    return found.result(expected, actual, examples)


class _Buckets:
    """Rows divided into buckets by key; kept in memory if there is only one bucket."""

    def __init__(self, buckets: int) -> None:
        self._kept: list[Rows] = []
        self._open = contextlib.ExitStack()
        self._files: list[IO[bytes]] = []
        if buckets > 1:
            self._files = [self._open.enter_context(tempfile.TemporaryFile()) for _ in range(buckets)]  # noqa: SIM115

    def __enter__(self) -> _Buckets:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, rows: Rows) -> None:
        if not self._files:
            self._kept.append(rows)
            return
        # A row without a key has no order, so its bucket is chosen by its identity, which is the same on both sides.
        number = np.where(rows["key"] == NO_KEY, rows["id"], rows["key"]) % np.uint64(len(self._files))
        order = np.argsort(number, kind="stable")
        ends = np.searchsorted(number[order], np.arange(len(self._files)), side="right")
        for file, part in zip(self._files, np.split(rows[order], ends[:-1]), strict=True):
            file.write(part.tobytes())

    def rows(self, bucket: int) -> Rows:
        if not self._files:
            return np.concatenate(self._kept) if self._kept else np.empty(0, ROW)
        file = self._files[bucket]
        file.seek(0)
        return np.frombuffer(file.read(), ROW)


class _History(NamedTuple):
    """One side's rows of one bucket, sorted by key and then by their order. ``begins`` is true at the first row of each key."""

    key: Words
    id: Words
    at: Int64s
    begins: Bools

    @property
    def has_key(self) -> Bools:
        out: Bools = self.key != NO_KEY
        return out


def _history(rows: Rows, extent: Extent) -> _History:
    rows = rows[np.lexsort((rows["at"], rows["order"], rows["key"]))]
    key, lane = np.ascontiguousarray(rows["key"]), rows["lane"]
    begins = _changes(key)
    history = _History(key, np.ascontiguousarray(rows["id"]), np.ascontiguousarray(rows["at"]), begins)
    extent.messages += len(rows)
    extent.keys += int(np.count_nonzero(begins & history.has_key))
    elsewhere = np.zeros(len(rows), dtype=bool)
    elsewhere[1:] = (lane[1:] != lane[:-1]) & ~begins[1:]
    extent.split_keys += len(np.unique(key[elsewhere & history.has_key]))
    return history


def _changes(values: npt.NDArray[Any]) -> Bools:
    """Return whether each value differs from the value before it; true for the first value."""
    out = np.ones(len(values), dtype=bool)
    out[1:] = values[1:] != values[:-1]
    return out


class _Found:
    """The findings of all buckets."""

    def __init__(self, report: Audit) -> None:
        self._report = report
        self._numbers: dict[str, list[Int64s]] = {"duplicated": [], "out_of_order": []}
        # Rows without a partner: identity, number, and for lost rows whether they are the last rows of their key. `result` pairs moved rows.
        self._lost: list[tuple[Words, Int64s, Bools]] = []
        self._extra: list[tuple[Words, Int64s]] = []

    def compare(self, expected_rows: Rows, actual_rows: Rows) -> None:
        report = self._report
        expected = _history(expected_rows, report.expected)
        actual = _history(actual_rows, report.actual)
        partner, wanted, again = _match(expected, actual, report)
        lost = np.ones(len(expected.key), dtype=bool)
        lost[partner[partner >= 0]] = False
        gaps, at_end = _holes(expected, lost)
        report.gaps += gaps
        # Partners of later keys have greater numbers, so one running maximum works for all keys.
        found = np.where(partner >= 0, partner, -1)
        before = np.maximum.accumulate(found) if len(found) else found
        late = np.zeros(len(found), dtype=bool)
        late[1:] = (partner[1:] >= 0) & (partner[1:] < before[:-1])
        late &= actual.has_key
        for kind, mask in (("duplicated", again), ("out_of_order", late)):
            setattr(report, kind, getattr(report, kind) + int(np.count_nonzero(mask)))
            self._numbers[kind].append(actual.at[mask])
        self._lost.append((expected.id[lost], expected.at[lost], at_end[lost]))
        self._extra.append((actual.id[~wanted], actual.at[~wanted]))
        wrong = np.concatenate((expected.key[lost], actual.key[again | late | ~wanted]))
        report.keys_affected += len(np.unique(wrong[wrong != NO_KEY]))

    def result(self, expected: Side, actual: Side, examples: int) -> Audit:
        """Return the report. Call it after all buckets were compared."""
        report = self._report
        lost_id, lost_at, at_end = (np.concatenate(part) for part in zip(*self._lost, strict=True))
        extra_id, extra_at = (np.concatenate(part) for part in zip(*self._extra, strict=True))
        left, came = _common(lost_id, extra_id)
        report.lost, report.moved = int(np.count_nonzero(~left)), int(np.count_nonzero(left))
        report.lost_at_end = int(np.count_nonzero(at_end & ~left))
        report.extra = int(np.count_nonzero(~came))
        numbers = {kind: np.concatenate(parts) for kind, parts in self._numbers.items()}
        numbers |= {"lost": lost_at[~left], "moved": extra_at[came], "extra": extra_at[~came]}
        for kind in KINDS:
            side = expected if kind == "lost" else actual
            first = np.sort(numbers[kind])[:examples].tolist()
            report.examples += [Example(kind, side.name, *location) for location in side.locate(first)] if first else []
        return report


def _match(expected: _History, actual: _History, report: Audit) -> tuple[Int64s, Bools, Bools]:
    """Return for each row of ACTUAL: its partner in EXPECTED (-1: none), whether EXPECTED has its identity, whether it is duplicated."""
    count = len(expected.key)
    key = np.concatenate((expected.key, actual.key))
    identity = np.concatenate((expected.id, actual.id))
    # Sorting brings equal rows together: first those of EXPECTED, then those of ACTUAL, each in their side's order.
    order = np.lexsort((identity, key))
    begins = _changes(key[order]) | _changes(identity[order])
    group = np.cumsum(begins) - 1
    start = np.flatnonzero(begins)
    ours = order < count
    there = np.bincount(group[ours], minlength=len(start))
    report.expected.repeated += int(np.sum(np.maximum(there - 1, 0)))
    report.actual.repeated += int(np.sum(np.maximum(np.bincount(group[~ours], minlength=len(start)) - 1, 0)))
    turn = np.arange(len(order)) - start[group] - there[group]
    matched = ~ours & (turn < there[group])
    partner = np.full(len(order), -1, dtype=np.int64)
    partner[order[matched]] = order[(start[group] + turn)[matched]]
    wanted = np.zeros(len(order), dtype=bool)
    wanted[order] = there[group] > 0
    partner, wanted = partner[count:], wanted[count:]
    return partner, wanted, wanted & (partner < 0)


def _holes(expected: _History, lost: Bools) -> tuple[int, Bools]:
    """Return the number of gaps, and which lost rows are the last rows of their key.

    A gap is a run of lost rows that is followed by a row of the same key that is not lost. Rows without a key have no gaps.
    """
    if not len(lost):
        return 0, lost
    number = np.cumsum(expected.begins) - 1
    rows = np.arange(len(lost))
    last = np.maximum.reduceat(np.where(lost, -1, rows), np.flatnonzero(expected.begins))[number]
    run = lost & (expected.begins | ~np.concatenate(([False], lost[:-1])))
    return int(np.count_nonzero(run & (rows < last) & expected.has_key)), lost & (rows > last)


def _common(ours: Words, others: Words) -> tuple[Bools, Bools]:
    """Return which elements of ``ours`` and of ``others`` can be paired one to one with an equal identity."""
    identity = np.concatenate((ours, others))
    order = np.argsort(identity, kind="stable")
    begins = _changes(identity[order])
    group = np.cumsum(begins) - 1
    start = np.flatnonzero(begins)
    mine = order < len(ours)
    count = np.bincount(group[mine], minlength=len(start)), np.bincount(group[~mine], minlength=len(start))
    turn = np.arange(len(order)) - start[group]
    paired = np.where(mine, turn, turn - count[0][group]) < np.minimum(*count)[group]
    out = np.zeros(len(order), dtype=bool)
    out[order] = paired
    return out[: len(ours)], out[len(ours) :]
