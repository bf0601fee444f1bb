"""Charts of a lag over time, as SVG without styles: the page's style sheet defines the colours. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from markupsafe import Markup

from orderedmq.tools.readable import number
from orderedmq.ui.lag_history import STEP, STEPS, Series

_MINUTES: Final = round(STEP * STEPS / 60)
#: Width and height of the small chart and of the large one.
_SMALL: Final = (STEPS, 22)
_LARGE: Final = (600, 84)
#: Space for labels in the large chart: above and below the lines.
_ABOVE: Final = 16
_BELOW: Final = 18


def small(series: Series) -> Markup:
    """Return a chart for a table cell."""
    width, height = _SMALL
    lines = _lines(series, width, 1, height - 2, _most(series))
    # The label needs no escaping, because it contains only fixed words and numbers.
    return Markup(f'<svg class="small" viewBox="0 0 {width} {height}" role="img" aria-label="{_said(series)}">{lines}</svg>')


def large(series: Series) -> Markup:
    """Return a chart that is labelled with its greatest value and its time span."""
    width, height = _LARGE
    most, floor = _most(series), height - _BELOW
    parts = [
        Markup('<line class="axis" x1="0" y1="{0}" x2="{1}" y2="{0}"/>').format(floor, width),
        Markup('<line class="axis" x1="0" y1="{0}" x2="{1}" y2="{0}"/>').format(_ABOVE, width),
        _lines(series, width, _ABOVE, floor - _ABOVE, most),
        Markup('<text x="0" y="11">{}</text>').format(f"{number(most)} messages"),
        Markup('<text x="0" y="{}">{} minutes ago</text>').format(height - 4, _MINUTES),
        Markup('<text x="{}" y="{}" text-anchor="end">now</text>').format(width, height - 4),
    ]
    return Markup('<svg class="large" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        width, height, _said(series), Markup("").join(parts)
    )


def _said(series: Series) -> str:
    known = [lag for lag in series if lag is not None]
    if not known:
        return "lag not known"
    return f"lag {number(known[-1])}, between {number(min(known))} and {number(max(known))} in the last {_MINUTES} minutes"


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
