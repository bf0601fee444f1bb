"""The notebook's pictures: lanes of queues, the way of an order, lag and locks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from orderedmq.broker import LockInfo
from orderedmq.lock import LOCK_LIFE

#: Okabe and Ito's colours, which colour-blind people can tell apart, and whether black or white is read better on each.
PALETTE = {
    "#0072B2": "white",
    "#E69F00": "black",
    "#009E73": "white",
    "#CC79A7": "black",
    "#56B4E9": "black",
    "#D55E00": "white",
    "#F0E442": "black",
}
COLOURS = list(PALETTE)
INK, QUIET, FAINT = "#222222", "#6B6B6B", "#DDDDDD"

plt.rcParams.update(
    {
        "font.size": 10,
        "axes.edgecolor": QUIET,
        "axes.labelcolor": QUIET,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlepad": 12,
        "text.color": INK,
        "xtick.color": QUIET,
        "ytick.color": INK,
    }
)


def lanes(messages: pa.Table, length: int) -> Figure:
    """The first ``length`` messages of each queue: a dot with the order's number, a colour for each order.

    ``messages`` has queue_id, queue_offset and sharding_key, sorted by queue and offset.
    """
    queues = sorted(set(messages["queue_id"].to_pylist()))
    figure, axes = _figure(0.55 * len(queues) + 1.2)
    colours: dict[str, str] = {}
    for row in messages.to_pylist():
        queue, offset, key = row["queue_id"], row["queue_offset"], row["sharding_key"]
        if offset < length:
            # By first appearance, so that orders which stand side by side differ.
            colour = colours.setdefault(key, COLOURS[len(colours) % len(COLOURS)])
            axes.plot(offset, queue, "o", color=colour, markersize=18)
            axes.text(offset, queue, _number(key), ha="center", va="center_baseline", fontsize=8, color=PALETTE[colour])
    for queue in queues:
        axes.axhline(queue, color=FAINT, linewidth=6, zorder=0)
    _lane_names(axes, [f"queue {queue}" for queue in queues])
    axes.set(xlim=(-0.8, length - 0.2), xlabel="offset in the queue", title="One dot is a message, its number the order")
    axes.xaxis.set_major_locator(_whole_numbers())
    return figure


def paths(messages: pa.Table, orders: Sequence[str]) -> Figure:
    """Where the events of ``orders`` stand in their queues; ``messages`` has tags as well. Grey: messages of other orders."""
    rows = messages.to_pylist()
    figure, axes = _figure(0.75 * len(orders) + 1.2)
    names, first, last = [], [], []
    for lane, order in enumerate(orders):
        events = [row for row in rows if row["sharding_key"] == order]
        queue, *others = {row["queue_id"] for row in events}
        assert not others, f"{order} is in several queues"
        offsets = [row["queue_offset"] for row in events]
        colour = COLOURS[lane % len(COLOURS)]
        axes.plot(offsets, [lane] * len(offsets), "o-", color=colour, markersize=9, linewidth=2.5)
        for at, (event, offset) in enumerate(zip(events, offsets)):
            # Neighbours may stand close together: names take turns above and below.
            axes.annotate(
                event["tags"],
                (offset, lane),
                xytext=(0, 9 if at % 2 == 0 else -9),
                textcoords="offset points",
                ha="center",
                va="bottom" if at % 2 == 0 else "top",
                fontsize=9,
            )
        names.append(f"{order}\nin queue {queue}")
        first.append(offsets[0])
        last.append(offsets[-1])
    begin, end = min(first) - 2, max(last) + 2
    for lane, order in enumerate(orders):
        queue = next(row["queue_id"] for row in rows if row["sharding_key"] == order)
        near = [row["queue_offset"] for row in rows if row["queue_id"] == queue and begin <= row["queue_offset"] <= end]
        axes.plot(near, [lane] * len(near), "o", color=FAINT, markersize=5, zorder=0)
    _lane_names(axes, names)
    axes.set(
        xlim=(begin - 0.5, end + 0.5), xlabel="offset in the queue", title="Each order stays in one queue, its events in order"
    )
    axes.xaxis.set_major_locator(_whole_numbers())
    return figure


def lag(waiting: Sequence[Mapping[int, int]]) -> Figure:
    """Messages that wait in each queue after each micro-batch: ``waiting[batch][queue]``. Marks where new ones arrived."""
    queues = sorted(waiting[0])
    figure, panels = plt.subplots(1, len(queues), figsize=(10, 2.7), sharey=True, layout="constrained")
    batches = range(len(waiting))
    for queue, axes in zip(queues, panels):
        values = [at[queue] for at in waiting]
        axes.fill_between(batches, values, color=COLOURS[0], alpha=0.15, linewidth=0)
        axes.plot(batches, values, "o-", color=COLOURS[0], markersize=4, clip_on=False)
        axes.set(title=f"queue {queue}", xlabel="micro-batch", ylim=(0, None))
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0, colors=QUIET)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(_whole_numbers(5))
        for batch in batches[1:]:
            if values[batch] > values[batch - 1]:
                axes.annotate(
                    "new events",
                    (batch, values[batch]),
                    xytext=(4, 8),
                    textcoords="offset points",
                    color=QUIET,
                    fontsize=9,
                )
    panels[0].set_ylabel("messages waiting")
    plt.close(figure)
    return figure


def locks(looks: Mapping[str, Sequence[LockInfo]]) -> Figure:
    """The locks of a group at several moments: ``looks[title]``. A bar is the life that is left if nobody renews it."""
    longest = max(len(look) for look in looks.values())
    figure, panels = plt.subplots(
        1, len(looks), figsize=(10, 0.5 * longest + 1.3), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for (title, look), axes in zip(looks.items(), panels[0]):
        for lane, lock in enumerate(look):
            axes.barh(lane, LOCK_LIFE, color=FAINT, alpha=0.45, height=0.6)
            axes.barh(lane, lock.remaining, color=COLOURS[4], height=0.6)
            state = f"epoch {lock.epoch} · {'held' if lock.held else 'free, last'} by {lock.owner[:6]}"
            if lock.alive is not None:
                state += " · alive" if lock.alive else " · dead"
            axes.text(1.2, lane, state, va="center_baseline", fontsize=9)
        _lane_names(axes, [f"queue {lock.queue.queue_id}" for lock in look])
        axes.set(title=title, xlabel="seconds of life left", xlim=(0, LOCK_LIFE), xticks=range(0, int(LOCK_LIFE) + 1, 20))
    figure.get_layout_engine().set(wspace=0.06)
    plt.close(figure)
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(10, height), layout="constrained")
    # A figure is shown once, where a cell returns it.
    plt.close(figure)
    return figure, axes


def _whole_numbers(most: int = 9) -> MaxNLocator:
    return MaxNLocator(most, integer=True, steps=[1, 2, 5, 10])


def _lane_names(axes: Axes, names: Sequence[str]) -> None:
    """Lanes from top to bottom, with names instead of an axis."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _number(order: str) -> str:
    return order.rpartition("-")[2].lstrip("0")
def group(looks): return None
def turns(a,b): return None
def hand_over(a,b,c): return None
