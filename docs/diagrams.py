"""Draws the diagrams of the documents: ``make reference`` writes docs/diagrams/NAME.svg for each function in `DIAGRAMS`.

The pictures are committed, so that pages show them without a build, and a test compares them. Each has its own background and a second set
of colours for dark mode, because a page that shows an SVG as an image cannot pass its colours on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from orderedmq.ownership.owned_queue import TRANSITIONS, Phase, Step

FOLDER: Final = Path(__file__).with_name("diagrams")

_STYLE: Final = """
svg { font: 14px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
.paper { fill: #ffffff; } text { fill: #1f2328; stroke: #ffffff; stroke-width: 5px; paint-order: stroke; }
.in { stroke: none; } .quiet { fill: #59636e; }
.line, .life { stroke: #59636e; fill: none; stroke-width: 1.5; } .life { stroke-dasharray: 3 4; stroke: #9aa4ae; } .tip, .dot { fill: #59636e; }
.box { fill: #f6f8fa; stroke: #9aa4ae; } .good { fill: #dafbe1; stroke: #4ac26b; } .work { fill: #ddf4ff; stroke: #54aeff; }
.wait { fill: #fff8c5; stroke: #d4a72c; } .bad { fill: #ffebe9; stroke: #ff8182; } .gone { fill: none; stroke: #9aa4ae; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #0d1117; } text { fill: #e6edf3; stroke: #0d1117; } .in { stroke: none; } .quiet { fill: #9198a1; }
  .line { stroke: #9198a1; } .life { stroke: #59636e; } .tip, .dot { fill: #9198a1; }
  .box { fill: #151b23; stroke: #59636e; } .good { fill: #12361f; stroke: #2ea043; } .work { fill: #10304f; stroke: #388bfd; }
  .wait { fill: #3b2f0b; stroke: #9e7a1a; } .bad { fill: #4b1717; stroke: #da3633; } .gone { stroke: #59636e; }
}
"""


class Picture:
    """An SVG of ``width`` by ``height`` pixels. ``title`` is what a screen reader says."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._root = ElementTree.Element(
            "svg",
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width} {height}",
            width=str(width),
            height=str(height),
            role="img",
        )
        ElementTree.SubElement(self._root, "title").text = title
        ElementTree.SubElement(self._root, "style").text = _STYLE
        self._add("rect", "paper", x=0, y=0, width=width, height=height, rx=6)

    def _add(self, tag: str, kind: str, **attributes: object) -> ElementTree.Element:
        return ElementTree.SubElement(
            self._root, tag, {"class": kind, **{name.replace("_", "-"): str(value) for name, value in attributes.items()}}
        )

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """Write one line whose middle, start or end (``anchor``) is at ``x``, with its baseline at ``y``."""
        self._add("text", kind, x=x, y=y, text_anchor=anchor).text = text

    def box(self, x: float, y: float, width: float, height: float, lines: Sequence[str], kind: str = "box") -> None:
        """Draw a box with lines of text in its middle."""
        self._add("rect", kind, x=x, y=y, width=width, height=height, rx=4)
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + (number - (len(lines) - 1) / 2) * 18, line, "in")

    def line(self, *points: tuple[float, float], kind: str = "line", tip: bool = True) -> None:
        """Draw a line through ``points``, whose last part is horizontal or vertical, with a tip at its end."""
        self._add("polyline", kind, points=" ".join(f"{x:g},{y:g}" for x, y in points))
        if tip:
            (fx, fy), (x, y) = points[-2:]
            dx, dy = (x > fx) - (x < fx), (y > fy) - (y < fy)
            a, b = (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)
            self._add("polygon", "tip", points=f"{x:g},{y:g} {a[0]:g},{a[1]:g} {b[0]:g},{b[1]:g}")

    def dot(self, x: float, y: float) -> None:
        self._add("circle", "dot", cx=x, cy=y, r=4)

    def svg(self) -> str:
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"


@dataclass
class Lifelines:
    """Columns with a dashed line each, and rows of arrows between them, which are read from top to bottom."""

    title: str
    columns: Sequence[str]
    #: Pixels to the left of the first column for the rows' labels, and between two columns.
    margin: int = 110
    gap: int = 220
    rows: list[tuple[str, Sequence[tuple[int, int]], str]] = field(default_factory=list)

    def step(self, label: str, *arrows: tuple[int, int], side: str = "") -> None:
        """Add a row: arrows from one column to another, or to itself, with a label above them or at the left edge (``side``)."""
        self.rows.append((label, arrows, side))

    def svg(self) -> str:
        height = 84 + 44 * len(self.rows)
        picture = Picture(2 * self.margin + self.gap * (len(self.columns) - 1), height, self.title)
        at = [self.margin + self.gap * number for number in range(len(self.columns))]
        if any(side for *_, side in self.rows):
            at = [x + self.margin - 70 for x in at]
        for x, name in zip(at, self.columns, strict=True):
            picture.line((x, 46), (x, height - 14), kind="life", tip=False)
            picture.box(x - 65, 14, 130, 32, [name])
        for number, (label, arrows, side) in enumerate(self.rows):
            y = 86 + 44 * number
            for begin, end in arrows:
                picture.dot(at[begin], y)
                if begin == end:
                    picture.line((at[begin], y), (at[begin] + 26, y), (at[begin] + 26, y + 14), (at[begin] + 3, y + 14))
                else:
                    picture.line((at[begin], y), (at[end] + (3 if end < begin else -3), y))
            if side:
                picture.text(14, y + 5, side, anchor="start")
            if label:
                spread = [at[column] for arrow in arrows for column in arrow]
                picture.text((min(spread) + max(spread)) / 2 if max(spread) > min(spread) else spread[0], y - 8, label)
        return picture.svg()


def message_life() -> str:
    """The life of a message: a queue with its offsets, who writes, who reads, and what the group's offset separates."""
    picture = Picture(880, 330, "A queue from its oldest message to its end, and what moves its offsets")
    left, width, top = 50, 68, 120
    kinds = ["gone"] * 2 + ["good"] * 3 + ["work"] * 3 + ["wait"] * 3
    for number, kind in enumerate(kinds):
        picture.box(left + width * number, top, width, 40, [str(40 + number)], kind)
    at = [left + width * number for number in range(len(kinds) + 1)]
    middle = top + 20
    picture.box(660, 20, 190, 44, ["producer or sink"])
    picture.text(648, 38, "1. The hash of the sharding key chooses", anchor="end")
    picture.text(648, 56, "the queue. The message gets the next offset.", anchor="end")
    picture.line((830, 64), (830, middle), (at[-1] + 3, middle))
    for begin, end, first, second in (
        (0, 2, "6. deleted by", "retention"),
        (2, 5, "5. processed: the group's", "offset has passed them"),
        (5, 8, "3. in flight: Spark has logged", "this range for a micro-batch"),
        (8, 11, "2. waiting: what no", "micro-batch has taken yet"),
    ):
        x = (at[begin] + at[end]) / 2
        picture.text(x, top + 62, first)
        picture.text(x, top + 80, second)
    picture.line((at[2], top - 30), (at[2], top - 4))
    picture.text(at[2], top - 36, "minimum offset")
    picture.line((at[5], top - 30), (at[5], top - 4))
    picture.text(at[5], top - 36, "the group's offset")
    middle_of_flight = (at[5] + at[8]) / 2
    picture.line((middle_of_flight, top + 90), (middle_of_flight, top + 124))
    picture.box(middle_of_flight - 95, top + 126, 190, 44, ["one Spark task"], "work")
    picture.text(middle_of_flight + 106, top + 144, "4. reads the range in offset order and", anchor="start")
    picture.text(middle_of_flight + 106, top + 162, "gives the rows to the rest of the query.", anchor="start")
    picture.line((middle_of_flight - 95, top + 148), (at[3] + 33, top + 148), (at[3] + 33, top + 92))
    picture.text(at[3] + 24, top + 144, "When Spark has finished the", anchor="end")
    picture.text(at[3] + 24, top + 162, "micro-batch, the offset moves.", anchor="end")
    picture.text(440, 318, "Lag is the number of messages from the group's offset to the end: here 6.", "quiet")
    return picture.svg()


def lock() -> str:
    """What happens to the lock of a queue."""
    figure = Lifelines("The lock of a queue", ["free", "owned", "lingering"], margin=90, gap=380)
    figure.step("granted to a query, with a new epoch", (0, 1))
    figure.step("renewed every 20 s", (1, 1))
    figure.step("given back between two micro-batches", (1, 0))
    figure.step("not renewed for 60 s, or its process is known to be dead", (1, 0))
    figure.step("stopped in the middle of a micro-batch", (1, 2))
    figure.step("the same query starts again", (2, 1))
    figure.step("after 20 s", (2, 0))
    return figure.svg()


def hand_over() -> str:
    """A hand-over of queues between two queries of a group."""
    figure = Lifelines(
        "Query A hands two of its four queues over to query C", ["query A", "broker", "query C"], margin=245, gap=260
    )
    figure.step("heartbeat: C is a member", (2, 1), side="C starts.")
    figure.step("who is a member? A and C", (0, 1), side="A has finished a micro-batch.")
    figure.step("commit the offsets of queues 2 and 3", (0, 1))
    figure.step("unlock queues 2 and 3", (0, 1), side="A keeps queues 0 and 1.")
    figure.step("lock queues 2 and 3", (2, 1), side="C, before its first micro-batch.")
    figure.step("the group's offsets of both", (1, 2))
    figure.step("pull from there", (2, 1), side="C reads where A stopped.")
    return figure.svg()


def parked_key() -> str:
    """What happens to the messages of a key that fails."""
    figure = Lifelines("A key that fails waits in the parking lot", ["queue", "listener", "parking lot"], margin=225, gap=260)
    figure.step("order-2 created", (0, 1), side="micro-batch 1")
    figure.step("it fails: parked, due in 10 s", (1, 2))
    figure.step("order-2 paid: parked after it, not called", (0, 2))
    figure.step("order-3 created: accepted", (0, 1), side="other keys continue")
    figure.step("order-2 created: accepted", (2, 1), side="micro-batch 2, when it is due")
    figure.step("order-2 paid: accepted", (2, 1))
    figure.step("order-2 shipped: accepted", (0, 1), side="the key is no longer parked")
    return figure.svg()


def tenure() -> str:
    """A queue's tenure in a query: every transition of the code's table."""
    phases = list(Phase)
    figure = Lifelines("The states of a queue in a query", [phase.value for phase in phases], margin=265, gap=200)
    for step in Step:
        arrows = [(phases.index(before), phases.index(after)) for (before, told), after in TRANSITIONS.items() if told is step]
        figure.step("", *arrows, side=step.value)
    return figure.svg()


def failures() -> str:
    """Where each kind of failure ends up."""
    picture = Picture(880, 552, "Where each kind of failure ends up")
    causes = [
        (["A task fails or its", "Python worker is killed"], "Spark runs the task again; the sink writes each row once"),
        (["The driver is killed or", "the machine restarts"], "start the query again: it repeats the unfinished micro-batch"),
        (["A server does not", "answer"], "requests are repeated, then the query fails; start it again"),
        (["A paused query lost", "the lock of a queue"], "the query fails; the new owner continues at the group's offset"),
        (["A listener fails,", "OrderPerQueue"], "the queue waits while it is called again; in the end"),
        (["A listener fails,", "OrderPerKey"], "the key is parked and comes back; in the end"),
        (["A row cannot be decoded"], "dead_letter() in the query sends it there"),
        (["Messages were deleted", "before they were read"], "failOnDataLoss=true: error; false: skipped"),
        (["A store or a disk", "is damaged"], "nothing is guessed or skipped"),
    ]
    ends = [
        ("good", ["processed in order,", "without a gap"], 0, 3),
        ("wait", ["dead-letter topic", "%DLQ%<group>;", "orderedmq dlq replay"], 4, 6),
        ("bad", ["error, or skipped", "with a warning"], 7, 7),
        ("bad", ["error that says", "what to restore"], 8, 8),
    ]
    for number, (lines, what) in enumerate(causes):
        y = 14 + 59 * number
        picture.box(14, y, 190, 48, lines)
        picture.line((204, y + 24), (684, y + 24))
        picture.text(444, y + 17, what)
    for kind, lines, first, last in ends:
        picture.box(686, 14 + 59 * first, 180, 48 + 59 * (last - first), lines, kind)
    return picture.svg()


DIAGRAMS: Final[Mapping[str, Callable[[], str]]] = {
    function.__name__: function for function in (message_life, lock, hand_over, parked_key, tenure, failures)
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DIAGRAMS.items():
        (FOLDER / f"{name.replace('_', '-')}.svg").write_text(draw())


if __name__ == "__main__":
    main()
