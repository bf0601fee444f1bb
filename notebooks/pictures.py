"""The notebooks' pictures: messages in queues, paths of orders, lag, locks, hand-overs, calls of a listener, keys that wait, and a resize."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from shop import Look, ResizedQueue, Turn

from orderedmq.broker import LockInfo
from orderedmq.ownership.lock import LOCK_LIFE

#: Okabe and Ito's colours, which colour-blind people can tell apart, and a text colour that is easy to read on each.
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
#: The answers of a listener: colour and label.
ANSWERS = {
    "SUCCESS": ("#009E73", "success"),
    "SUSPEND_CURRENT_QUEUE_A_MOMENT": ("#E69F00", "suspend"),
    "ValueError": ("#D55E00", "ValueError"),
}

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
    """Draw the first ``length`` messages of each queue: a dot with the order's number, a colour for each order.

    ``messages`` has queue_id, queue_offset and sharding_key, sorted by queue and offset.
    """
    queues = sorted(set(messages["queue_id"].to_pylist()))
    figure, axes = _figure(0.55 * len(queues) + 1.2)
    colours: dict[str, str] = {}
    for row in messages.to_pylist():
        queue, offset, key = row["queue_id"], row["queue_offset"], row["sharding_key"]
        if offset < length:
            # Colours go by first appearance, so that neighbouring orders differ.
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
    """Draw the events of ``orders`` in their queues, with messages of other orders in grey. ``messages`` also has tags."""
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
            # Neighbours may be close together, so names alternate above and below.
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
    """Draw the lag of each queue after each micro-batch, ``waiting[batch][queue]``, and mark where new messages arrived."""
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
    """Draw the locks of a group at several moments: ``looks[title]``. A bar is the life that a lock has left if it is not renewed."""
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


def group(looks: Mapping[str, Look]) -> Figure:
    """Draw a group at several moments: ``looks[title]``.

    A bar shows a queue's next offset, its colour the owner. A line under the title lists the members.
    """
    queues = list(next(iter(looks.values())).offsets)
    longest = max(offset for look in looks.values() for offset in look.offsets.values())
    figure, panels = plt.subplots(
        1, len(looks), figsize=(10, 0.5 * len(queues) + 1.3), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for (title, look), axes in zip(looks.items(), panels[0]):
        for lane, queue in enumerate(queues):
            owner = look.owners[queue]
            axes.barh(lane, longest, color=FAINT, alpha=0.45, height=0.6)
            axes.barh(lane, look.offsets[queue], color=_colour(owner) if owner else QUIET, height=0.6)
            axes.text(
                longest * 0.97, lane, f"{look.offsets[queue]}", ha="right", va="center_baseline", fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "boxstyle": "round,pad=0.2", "alpha": 0.85},
            )  # fmt: skip
        axes.set_title(title, pad=24)
        axes.text(
            0, 1.03, f"members: {', '.join(look.members)}", transform=axes.transAxes, color=QUIET, fontsize=9, va="bottom"
        )
        _lane_names(axes, [f"queue {queue}" for queue in queues])
        axes.set(xlabel="next offset", xlim=(0, longest))
        axes.xaxis.set_major_locator(_whole_numbers(4))
    figure.get_layout_engine().set(wspace=0.06)
    plt.close(figure)
    return figure


def resize(looks: Mapping[str, Sequence[ResizedQueue]]) -> Figure:
    """Draw the queues of a resized topic at several moments: ``looks[title]``.

    A bar has the messages of the old and of the new generation, those that the group has not processed in pale colours. A line leads
    from a queue that waits to the queue for which it waits.
    """
    longest = max(queue.end for look in looks.values() for queue in look)
    height = max(len(look) for look in looks.values())
    figure, panels = plt.subplots(
        1, len(looks), figsize=(10, 0.4 * height + 1.6), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    generations = {"old generation": COLOURS[0], "new generation": COLOURS[1]}
    for (title, look), axes in zip(looks.items(), panels[0]):
        lane_of = {queue.queue: lane for lane, queue in enumerate(look)}
        for lane, queue in enumerate(look):
            for colour, begin, end in zip(generations.values(), (0, queue.begin), (queue.begin, queue.end)):
                axes.barh(lane, end - begin, left=begin, color=colour, height=0.6, alpha=0.25, linewidth=0)
                axes.barh(lane, max(0, min(queue.offset, end) - begin), left=begin, color=colour, height=0.6, linewidth=0)
            for parent in queue.waits:
                # Lines of neighbouring queues lie side by side.
                place = longest * (1.08 + 0.05 * (lane % 4))
                axes.plot([queue.end, place, place], [lane, lane, lane_of[parent]], color=INK, linewidth=1)
                axes.annotate(
                    "",
                    (look[lane_of[parent]].end, lane_of[parent]),
                    (place, lane_of[parent]),
                    arrowprops={"arrowstyle": "->", "color": INK, "shrinkA": 0, "shrinkB": 1},
                )
        _lane_names(axes, [f"queue {queue.queue}" for queue in look])
        axes.set(title=title, xlabel="offset in the queue", xlim=(0, longest * 1.27))
        axes.xaxis.set_major_locator(_whole_numbers(5))
    kinds = [(colour, name) for name, colour in generations.items()]
    figure.legend(*_dots(kinds), loc="outside upper right", ncols=len(kinds), frameon=False, fontsize=9)
    plt.close(figure)
    return figure


def turns(turns: Sequence[Turn], moments: Mapping[str, float]) -> Figure:
    """Draw the turns of owners over time, with the first and last offset of each. A notch is a micro-batch.

    ``moments[name]`` is a time in seconds since 1970.
    """
    queues = sorted({turn.queue for turn in turns})
    start = min(at.timestamp() for turn in turns for at in turn.done)
    figure, axes = _figure(0.75 * len(queues) + 1.4)
    for turn in turns:
        lane, colour = queues.index(turn.queue), _colour(turn.owner)
        done = [at.timestamp() - start for at in turn.done]
        axes.barh(lane, done[-1] - done[0] + 0.16, left=done[0] - 0.08, color=colour, height=0.4)
        axes.vlines(done, lane - 0.3, lane - 0.2, color=colour, linewidth=1.5)
        axes.text(
            (done[0] + done[-1]) / 2, lane, f"{turn.begin}-{turn.end - 1}",
            ha="center", va="center_baseline", fontsize=9, color=PALETTE[colour],
        )  # fmt: skip
    for number, (name, moment) in enumerate(moments.items()):
        axes.axvline(moment - start, color=QUIET, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        # Moments may be close together, so names alternate in height.
        axes.annotate(
            name,
            (moment - start, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2 + 13 * (number % 2)),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
        )
    _lane_names(axes, [f"queue {queue}" for queue in queues])
    axes.set_title("Whose turn it was, and from which offset to which", pad=34)
    axes.set(xlabel="seconds since the first notice")
    return figure


def hand_over(messages: pa.Table, taken: Sequence[Turn], around: int) -> Figure:
    """Draw the last messages of each queue before a turn and the first ones in it. Strong colours: orders on both sides.

    ``messages`` has queue_id, queue_offset, sharding_key and owner, sorted by queue and offset.
    """
    rows = messages.to_pylist()
    figure, axes = _figure(0.6 * len(taken) + 1.1)
    for lane, turn in enumerate(taken):
        near = [row for row in rows if row["queue_id"] == turn.queue and -around <= row["queue_offset"] - turn.begin < around]
        before = {row["sharding_key"] for row in near if row["queue_offset"] < turn.begin}
        after = {row["sharding_key"] for row in near if row["queue_offset"] >= turn.begin}
        axes.axhline(lane, color=FAINT, linewidth=6, zorder=0)
        for row in near:
            colour, both = _colour(row["owner"]), row["sharding_key"] in before & after
            place = row["queue_offset"] - turn.begin + 0.5
            axes.plot(place, lane, "o", color="white", markersize=18)
            axes.plot(place, lane, "o", color=colour, markersize=18, alpha=1.0 if both else 0.25, markeredgewidth=0)
            axes.text(
                place, lane, _number(row["sharding_key"]),
                ha="center", va="center_baseline", fontsize=8, color=PALETTE[colour] if both else QUIET,
            )  # fmt: skip
    axes.axvline(0, color=QUIET, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    _lane_names(axes, [f"queue {turn.queue}\nfrom offset {turn.begin}" for turn in taken])
    axes.set(
        xlim=(-around - 0.4, around + 0.4),
        xticks=[],
        title="The hand-over, message by message; strong colours: orders that went from hand to hand",
    )
    axes.spines["bottom"].set_visible(False)
    return figure


def calls(diary: Sequence[Mapping[str, Any]], given_up: Sequence[str]) -> Figure:
    """Draw each call of a listener: a dot with the order's number, in the lane of its queue, coloured by the answer.

    ``diary`` has at (seconds since 1970), queue, order and answer; the last refused call of an order that was ``given_up`` is marked.
    """
    queues = sorted({call["queue"] for call in diary})
    start = min(call["at"] for call in diary)
    figure, axes = _figure(0.7 * len(queues) + 1.5)
    for queue in queues:
        axes.axhline(queues.index(queue), color=FAINT, linewidth=6, zorder=0)
    for call in diary:
        lane, place, (colour, _) = queues.index(call["queue"]), call["at"] - start, ANSWERS[call["answer"]]
        axes.plot(place, lane, "o", color=colour, markersize=15)
        axes.text(
            place, lane, _number(call["order"]), ha="center", va="center_baseline", fontsize=7.5, color=PALETTE[colour]
        )  # fmt: skip
    for order in given_up:
        last = [call for call in diary if call["order"] == order and call["answer"] != "SUCCESS"][-1]
        axes.annotate(
            "put aside",
            (last["at"] - start, queues.index(last["queue"])),
            xytext=(0, -20),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=9,
            arrowprops={"arrowstyle": "<-", "color": QUIET, "shrinkB": 8},
        )
    _lane_names(axes, [f"queue {queue}" for queue in queues])
    figure.legend(*_dots(ANSWERS.values()), loc="outside upper right", ncols=len(ANSWERS), frameon=False, fontsize=9)
    axes.set(xlabel="seconds", title="One dot is a call, its number the order")
    return figure


def keys(
    diaries: Mapping[str, Sequence[Mapping[str, Any]]], orders: Sequence[str], parked: Mapping[str, Sequence[str]]
) -> Figure:
    """Draw the calls with events of ``orders``, in a lane for each order, with ``diaries[title]`` side by side on one scale.

    A diary has at (seconds since 1970), order, step and answer. ``parked[order]`` has the steps that wait after the last failed call.
    """
    figure, panels = plt.subplots(
        1, len(diaries), figsize=(10, 0.42 * len(orders) + 1.3), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    waiting = ANSWERS["SUSPEND_CURRENT_QUEUE_A_MOMENT"][0]
    drawn = {title: [call for call in diary if call["order"] in orders] for title, diary in diaries.items()}
    starts = {title: min(call["at"] for call in diaries[title]) for title in drawn}
    end = 1.05 * max(call["at"] - starts[title] for title, calls in drawn.items() for call in calls)
    for (title, all_calls), axes in zip(drawn.items(), panels[0]):
        for lane, order in enumerate(orders):
            calls = [call for call in all_calls if call["order"] == order]
            axes.axhline(lane, color=FAINT, linewidth=5, zorder=0)
            for call in calls:
                axes.plot(call["at"] - starts[title], lane, "o", color=ANSWERS[call["answer"]][0], markersize=8, clip_on=False)
            failed = [call for call in calls if call["answer"] != "SUCCESS"]
            if not failed:
                continue
            last = failed[-1]["at"] - starts[title]
            if failed[-1] is calls[-1]:
                axes.barh(lane, end - last, left=last, color=waiting, height=0.55, zorder=1)
                axes.text(
                    (last + end) / 2, lane, f"parked: {', '.join(parked[order])}", ha="center", va="center_baseline", fontsize=9
                )
            else:
                axes.annotate(
                    "dead letter", (last, lane), xytext=(0, 7), textcoords="offset points", ha="center", va="bottom", fontsize=9
                )
        _lane_names(axes, list(orders))
        axes.set(xlim=(-0.03 * end, end), xlabel="seconds", title=title)
    kinds = [ANSWERS["SUCCESS"], ANSWERS["ValueError"]]
    figure.legend(*_dots(kinds), loc="outside upper right", ncols=len(kinds), frameon=False, fontsize=9)
    plt.close(figure)
    return figure


def outage(counts: Sequence[Mapping[str, float]], moments: Mapping[str, float]) -> Figure:
    """Draw how many messages were sent, accepted and parked over time. The time from ``moments["down"]`` to ``moments["up"]`` is shaded.

    ``counts`` have at (seconds since 1970), sent, accepted and parked.
    """
    start = counts[0]["at"]
    seconds = [count["at"] - start for count in counts]
    figure, axes = _figure(3.4)
    axes.axvspan(moments["down"] - start, moments["up"] - start, color=FAINT, alpha=0.6, linewidth=0)
    axes.annotate(
        "the service is down",
        ((moments["down"] + moments["up"]) / 2 - start, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=9,
    )
    for name, colour, style in (("sent", QUIET, "--"), ("accepted", COLOURS[2], "-"), ("parked", COLOURS[1], "-")):
        axes.plot(seconds, [count[name] for count in counts], style, color=colour, linewidth=2, label=name)
    axes.fill_between(seconds, [count["parked"] for count in counts], color=COLOURS[1], alpha=0.25, linewidth=0)
    axes.set(xlabel="seconds", ylabel="messages", ylim=(0, None), xlim=(0, seconds[-1]))
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.legend(frameon=False)
    return figure


def batches(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the offsets that each micro-batch has written to each queue, with the batch's number in the middle.

    ``found`` has a row for each queue_id and batch, with the first offset, ``min(queue_offset)``, and the number of messages, ``count(1)``.
    """
    queues = sorted({row["queue_id"] for row in found})
    numbers = sorted({row["batch"] for row in found})
    figure, axes = _figure(0.5 * len(queues) + 1.3)
    for row in found:
        colour = COLOURS[numbers.index(row["batch"]) % len(COLOURS)]
        begin, count = row["min(queue_offset)"], row["count(1)"]
        axes.barh(queues.index(row["queue_id"]), count, left=begin, color=colour, height=0.5, edgecolor="white")
        axes.text(
            begin + count / 2, queues.index(row["queue_id"]), f"{row['batch']}",
            ha="center", va="center_baseline", fontsize=9, color=PALETTE[colour],
        )  # fmt: skip
    _lane_names(axes, [f"queue {queue}" for queue in queues])
    axes.set(xlabel="offset in the queue", title="Which micro-batch sent which messages")
    axes.xaxis.set_major_locator(_whole_numbers())
    return figure


def second_chance(messages: pa.Table, order: str, refused: int, again: int) -> Figure:
    """Draw the queue of ``order``, whose message at offset ``refused`` became a dead letter and was sent again to offset ``again``.

    ``messages`` has queue_id, queue_offset, sharding_key and tags, sorted by offset.
    """
    rows = messages.to_pylist()
    (queue,) = {row["queue_id"] for row in rows if row["sharding_key"] == order}
    figure, axes = _figure(2.1)
    axes.axhline(0, color=FAINT, linewidth=6, zorder=0)
    for row in rows:
        offset = row["queue_offset"]
        if row["queue_id"] != queue:
            continue
        if row["sharding_key"] != order:
            axes.plot(offset, 0, "o", color="#BBBBBB", markersize=7)
            continue
        axes.plot(offset, 0, "o", color=COLOURS[5] if offset == refused else COLOURS[2], markersize=13)
        axes.annotate(row["tags"], (offset, 0), xytext=(0, -11), textcoords="offset points", ha="center", va="top", fontsize=9)
    axes.annotate(
        "",
        (again, 0.08),
        (refused, 0.08),
        arrowprops={"arrowstyle": "->", "color": COLOURS[5], "connectionstyle": "arc3,rad=-0.2", "shrinkA": 5, "shrinkB": 5},
    )
    axes.text((refused + again) / 2, 0.84, "dead letter, sent again", ha="center", fontsize=9, color=COLOURS[5])
    _lane_names(axes, [f"{order}\nin queue {queue}"])
    axes.set(ylim=(-0.6, 1.15), xlabel="offset in the queue", title="The message resumes at the end of its queue")
    axes.xaxis.set_major_locator(_whole_numbers())
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(10, height), layout="constrained")
    # Close the figure, so that it is shown only once: where a cell returns it.
    plt.close(figure)
    return figure, axes


def _dots(kinds: Collection[tuple[str, str]]) -> tuple[list[Line2D], list[str]]:
    """Return handles and labels of a legend: colours and their meanings."""
    handles = [Line2D([], [], marker="o", linestyle="", color=colour, markersize=9) for colour, _ in kinds]
    return handles, [meaning for _, meaning in kinds]


def _colour(name: str) -> str:
    """Return the colour of a query, which is named after its colour."""
    return {"blue": COLOURS[0], "orange": COLOURS[1]}[name]


def _whole_numbers(most: int = 9) -> MaxNLocator:
    return MaxNLocator(most, integer=True, steps=[1, 2, 5, 10])


def _lane_names(axes: Axes, names: Sequence[str]) -> None:
    """Order lanes from top to bottom, and show their names instead of an axis."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _number(order: str) -> str:
    return order.rpartition("-")[2].lstrip("0")
