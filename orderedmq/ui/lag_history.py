"""The recent history of a group's queues, read from the broker at intervals: lag, hand-overs, last commits. Also its charts. Pure.

A chart is SVG without styles: the page's style sheet defines the colours.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from markupsafe import Markup

from orderedmq.model import MessageQueue
from orderedmq.tools.readable import number

#: Seconds of one step of a history, and number of steps kept: ten minutes in total.
STEP: Final = 5.0
STEPS: Final = 120
#: Maximum number of hand-overs kept. Queues that moved between the same two owners since the previous call count as one hand-over.
MOST_HAND_OVERS: Final = 50

#: A lag for each step from the oldest to the current one; None for a step in which the lag was not read.
Series = list[int | None]
_UNKNOWN: Final = -1


class LagHistory:
    """The greatest lag of each queue, and of all queues together, in each of the last `STEPS` steps.

    Other threads may read the history while one thread calls `see`.
    """

    def __init__(self) -> None:
        self._places: dict[MessageQueue, int] = {}
        #: For each step: its number, the lag of each queue at the queue's index in `_places`, and the total as a list of one element.
        self._steps: deque[tuple[int, array[int], list[int]]] = deque(maxlen=STEPS)

    def see(self, now: float, lags: Mapping[MessageQueue, int]) -> None:
        """Record the lags that were read at ``now`` (in seconds)."""
        number = int(now // STEP)
        # After the clock was set back, the steps that are now in the future are wrong.
        while self._steps and self._steps[-1][0] > number:
            self._steps.pop()
        if not self._steps or self._steps[-1][0] < number:
            self._steps.append((number, array("q"), [0]))
        _, current, total = self._steps[-1]
        for queue, lag in lags.items():
            place = self._places.setdefault(queue, len(self._places))
            if place >= len(current):
                current.extend([_UNKNOWN] * (place + 1 - len(current)))
            current[place] = max(current[place], lag)
        total[0] = max(total[0], sum(lags.values()))

    def of(self, now: float, queue: MessageQueue) -> Series:
        """Return the history of one queue up to ``now``."""
        place = self._places.get(queue, -1)
        return self._series(now, {number: lags[place] for number, lags, _ in tuple(self._steps) if 0 <= place < len(lags)})

    def total(self, now: float) -> Series:
        """Return the history of all queues together up to ``now``."""
        return self._series(now, {number: total[0] for number, _, total in tuple(self._steps)})

    @staticmethod
    def _series(now: float, lags: Mapping[int, int]) -> Series:
        last = int(now // STEP)
        series = (lags.get(number, _UNKNOWN) for number in range(last - STEPS + 1, last + 1))
        return [None if lag == _UNKNOWN else lag for lag in series]


@dataclass(frozen=True)
class HandOver:
    """Queues that changed from one owner to another. ``when``: seconds since 1970. An owner of None means that there was no owner."""

    when: float
    before: str | None
    after: str | None
    queues: tuple[MessageQueue, ...]


@dataclass
class Owners:
    """The current owner of each queue, and the hand-overs seen so far, the newest first.

    ``handed_over``: how often a queue was seen with an owner different from its previous owner.
    """

    seen: dict[MessageQueue, str] | None = None
    hand_overs: deque[HandOver] = field(default_factory=lambda: deque(maxlen=MOST_HAND_OVERS))
    handed_over: int = 0
    _last: dict[MessageQueue, str] = field(default_factory=dict)

    def see(self, when: float, owners: Mapping[MessageQueue, str]) -> None:
        """Record the current owners; ``owners`` leaves out queues without an owner. The first call records no hand-over."""
        former, self.seen = self.seen, dict(owners)
        self.handed_over += sum(self._last.get(queue, owner) != owner for queue, owner in owners.items())
        self._last |= owners
        if former is None or former == self.seen:
            return
        moved: dict[tuple[str | None, str | None], list[MessageQueue]] = {}
        for queue in sorted(former.keys() | owners.keys()):
            change = former.get(queue), owners.get(queue)
            if change[0] != change[1]:
                moved.setdefault(change, []).append(queue)
        for (before, after), queues in moved.items():
            self.hand_overs.appendleft(HandOver(when, before, after, tuple(queues)))


class CommitTimes:
    """The time at which the group's offset of each queue was last seen to change. Brokers do not store the time of a commit."""

    def __init__(self) -> None:
        self._seen: dict[MessageQueue, tuple[int | None, float]] = {}

    def see(self, when: float, offsets: Mapping[MessageQueue, int | None]) -> dict[MessageQueue, float]:
        """Record the current offsets. Return when each last changed, or was first seen if it has not changed since."""
        previous, self._seen = self._seen, {}
        for queue, offset in offsets.items():
            former = previous.get(queue)
            self._seen[queue] = former if former is not None and former[0] == offset else (offset, when)
        return {queue: at for queue, (_, at) in self._seen.items()}


_MINUTES: Final = round(STEP * STEPS / 60)
#: Width and height of the small chart and of the large one. The style sheet stretches the large one to the width of the page.
_SMALL: Final = (STEPS, 22)
_LARGE: Final = (600, 52)


def small(series: Series) -> Markup:
    """Return a chart for a table cell. Its axis shows where it begins also if only the newest lags are known."""
    width, height = _SMALL
    return _drawing("small", series, width, height, _axis(height - 1, width))


def large(series: Series) -> Markup:
    """Return a chart that is labelled with its greatest value and its time span.

    The labels are not in the drawing, because they would shrink with it on a narrow screen.
    """
    width, height = _LARGE
    drawing = _drawing("large", series, width, height, _axis(1, width) + _axis(height - 1, width))
    return Markup('<div class="chart"><span>{} messages</span>{}<span>{} minutes ago</span><span>now</span></div>').format(
        number(_most(series)), drawing, _MINUTES
    )


def _drawing(name: str, series: Series, width: int, height: int, axes: Markup) -> Markup:
    return Markup(
        '<svg class="{}" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}{}</svg>'
    ).format(name, width, height, _said(series), axes, _lines(series, width, 1, height - 2, _most(series)))


def _axis(height: int, width: int) -> Markup:
    return Markup('<line class="axis" x1="0" y1="{0}" x2="{1}" y2="{0}"/>').format(height, width)


def _said(series: Series) -> str:
    lags = [lag for lag in series if lag is not None]
    if not lags:
        return "lag not known"
    return f"lag {number(lags[-1])}, between {number(min(lags))} and {number(max(lags))} in the last {_MINUTES} minutes"


def _most(series: Series) -> int:
    return max((lag for lag in series if lag is not None), default=0)


def _lines(series: Series, width: int, top: int, height: int, most: int) -> Markup:
    """Return one line for each run of values without a gap; a single value becomes a short line."""
    step = width / len(series)
    out = ""
    for first, lags in _stretches(series):
        points = [((first + place) * step, top + height - height * lag / (most or 1)) for place, lag in enumerate(lags)]
        points.append((points[-1][0] + step, points[-1][1]))
        # The points are only numbers, so they need no escaping.
        out += f'<polyline points="{" ".join(f"{x:.0f},{y:.1f}" for x, y in _corners(points))}"/>'
    return Markup(out)


def _stretches(series: Series) -> Iterator[tuple[int, list[int]]]:
    """Yield the index and the lags of each run of steps with known values."""
    first, lags = 0, list[int]()
    for place, lag in enumerate([*series, None]):
        if lag is not None:
            if not lags:
                first = place
            lags.append(lag)
        elif lags:
            yield first, lags
            lags = []


def _corners(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points, except those inside a horizontal part of the line."""
    inner = [
        here
        for before, here, after in zip(points, points[1:], points[2:], strict=False)
        if not before[1] == here[1] == after[1]
    ]
    return [points[0], *inner, points[-1]]
