"""``orderedmq group``: shows the progress and members of consumer groups, sets their offsets, and deletes them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import typer

from orderedmq.broker import LockInfo, MemberInfo
from orderedmq.cli import queue_names
from orderedmq.cli.queue_names import queue_fields
from orderedmq.cli.shell import Column, Shell, command, commands, fault, some
from orderedmq.errors import GroupError
from orderedmq.model import check_group, check_topic
from orderedmq.ownership.offsets import offsets_to_json
from orderedmq.parking import Lot
from orderedmq.tools import seek as tools
from orderedmq.tools.group_state import GroupQueue, group_queues, own_offsets, owners_of, short_names
from orderedmq.tools.parked import LotReader, due_in
from orderedmq.tools.readable import duration, moment, number, yes_no
from orderedmq.tools.seek import Sought, parse_target

app = commands("Show the offsets and lag of consumer groups; seek, copy and delete.")

Group = Annotated[str, typer.Argument(metavar="GROUP", show_default=False, autocompletion=queue_names.groups)]
Force = Annotated[
    bool,
    typer.Option("--force", help="Set the offsets even while queries are at work. The queries lose their queues and fail."),
]
AtSeekOption = Annotated[
    Literal["keep", "drop"] | None,
    typer.Option(
        "--parked",
        help="What to do with parked messages of these queues: keep (they come back when they are due) or drop (they are never processed). "
        "Required if messages are parked.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what the command would change.")]
#: The columns for the offset fields of `queue_row`.
OFFSET_COLUMNS: Final = (
    Column("offset", "offset", number, right=True),
    Column("lag", "lag", number, right=True, colour=some),
)


def owner_fields(lock: LockInfo | None) -> dict[str, Any]:
    """Return the fields of a queue's owner, all None without a lock. ``owner`` is the full client id, as in errors."""
    return {
        "owner": lock and lock.client_id,
        "query": lock and lock.owner,
        "query_name": lock and lock.name,
        "lock_age": lock and round(lock.age, 3),
        "lock_remaining": lock and round(lock.remaining, 3),
        "alive": lock and lock.alive,
    }


def queue_row(queue_state: GroupQueue, lot: Lot | None = None) -> dict[str, Any]:
    """Return the fields of a queue. ``lot``: its parking lot, if messages are parked there."""
    wait = None if lot is None else due_in(lot.next_due(), time.time())
    return {
        "group": queue_state.group,
        **queue_fields(queue_state.queue),
        "offset": queue_state.offset,
        "end": queue_state.end,
        "lag": queue_state.lag,
        "progress": queue_state.progress,
        "waits_for": queue_state.waits,
        "parked": 0 if lot is None else lot.messages,
        "parked_keys": 0 if lot is None else len(lot.keys),
        "parked_due_in": None if wait is None else round(wait, 3),
        **owner_fields(queue_state.lock),
    }


def progress_columns(rows: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the column for the progress of running micro-batches, or no column if none is recorded."""
    return (Column("progress", "done", number, right=True),) if any(row.get("progress") for row in rows) else ()


def parked_columns(rows: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the columns for parked messages, or no columns if nothing is parked."""
    if not any(row.get("parked") for row in rows):
        return ()
    return (
        Column("parked", "parked", number, right=True, colour=some),
        Column("parked_due_in", "due in", lambda wait: duration(wait) if wait else "now", right=True),
    )


def wait_columns(rows: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the column for queues that wait for others since a resize, or no column if none do."""
    return (Column("waits_for", "waits for", colour=some),) if any(row.get("waits_for") for row in rows) else ()


def _member_row(group: str, info: MemberInfo) -> dict[str, Any]:
    member, subscription = info.member, info.member.subscription
    return {
        "kind": "member",
        "group": group,
        "client": member.client_id,
        "query": member.owner,
        "query_name": member.name,
        "topics": subscription.topics,
        "assignment": subscription.assignment,
        "strategy": subscription.strategy,
        "filter": subscription.filter,
        "heartbeat_age": round(info.age, 3),
        # The broker lists only members that are alive.
        "alive": True,
    }


@command(app, "list")
def list_groups(
    shell: Shell,
    sinks: Annotated[
        bool,
        typer.Option(
            "--sinks",
            help="Over RocketMQ: show instead the groups in which sinks keep bookmarks. Their lag counts the messages since the last batch.",
        ),
    ] = False,
) -> None:
    """Show all consumer groups: their topics, their lag, and whether a query is at work."""
    rows = []
    with shell.broker() as broker:
        for group in broker.admin.groups(of_sinks=sinks):
            try:
                queues = group_queues(broker, group)
            except GroupError:
                # The group was deleted after it was listed.
                continue
            rows.append(
                {
                    "group": group,
                    "topics": sorted({state.queue.topic for state in queues}),
                    "queues": len(queues),
                    "lag": sum(state.lag for state in queues),
                    "owned_queues": sum(state.owned for state in queues),
                    "alive": any(state.lock is not None and state.lock.alive for state in queues),
                }
            )
    columns = (
        Column("group", "group"),
        Column("topics", "topics", ", ".join),
        Column("queues", "queues", number, right=True),
        Column("lag", "lag", number, right=True, colour=some),
        Column("owned_queues", "owned", number, right=True),
        Column("alive", "at work", yes_no),
    )
    shell.show(rows, columns, none=f"there are no {'sinks' if sinks else 'consumer groups'} in {shell.address}")


@command(app, "describe")
def describe(shell: Shell, group: Group) -> None:
    """Show a group: its members, and each queue's next offset to process, lag and owner.

    If messages are parked, the command also shows how many, and when the next of them is due. See orderedmq parked list.

    JSON has one object per member ("kind": "member") and per queue ("kind": "queue").
    """
    check_group(group)
    with shell.broker() as broker:
        lots = LotReader(broker).look(group)
        queues = [{"kind": "queue", **queue_row(state, lots.get(state.queue))} for state in group_queues(broker, group, lots)]
        members = [_member_row(group, seen) for seen in broker.admin.members(group)]
    short = short_names({row["client"]: row["query_name"] for row in members} | owners_of(queues))
    member_columns = (
        Column("client", "member", short.__getitem__),
        Column("topics", "topics"),
        Column("assignment", "assignment"),
        Column("strategy", "strategy"),
        Column("heartbeat_age", "heartbeat", duration, right=True),
    )
    columns = (
        *queue_names.columns(queues),
        *OFFSET_COLUMNS,
        *progress_columns(queues),
        *parked_columns(queues),
        *wait_columns(queues),
        *owner_columns(short),
    )
    shell.show(members, member_columns, none=f"group {group} has no members now")
    shell.show(queues, columns, none=f"group {group} has no queues left")


@command(app, "seek")
def seek(
    shell: Shell,
    group: Group,
    to: Annotated[
        str,
        typer.Option(
            help="The new position: earliest, latest, a time, or offsets. A time means the first message stored then or later: ISO-8601 (UTC "
            "unless it has a zone), ms since 1970, or µs (16 digits). Offsets are JSON: "
            '{"orders": {"embedded": {"0": 23, "1": -2}}}, where -1 is latest and -2 earliest. Queues that are not named keep their offsets.',
            metavar="WHERE",
            show_default=False,
        ),
    ],
    topic: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this topic. May be repeated (default: the topics in which the group has offsets).",
            metavar="TOPIC",
            autocompletion=queue_names.topics,
        ),
    ] = None,
    force: Force = False,
    parked: AtSeekOption = None,
    dry_run: DryRun = False,
) -> None:
    """Set a group's offsets, without asking for confirmation. --dry-run only shows the change.

    The command is refused while a query is at work in the group. It is also refused if messages of these queues are parked, unless
    --parked says what to do with them.

    A query that restarts after a seek resumes at the new offsets in these queues, and at the offsets in its checkpoint in all others. With
    --topic or offsets, a group that has never run is created, so that its first query begins there.
    """
    check_group(group)
    for name in topic or ():
        check_topic(name, writing=False)
    target = parse_target(to, "--to")
    with shell.broker() as broker:
        sought = tools.seek(broker, group, target, topic or (), force=force, parked=parked, dry_run=dry_run)
    _show_sought(shell, group, sought, dry_run)


def _show_sought(shell: Shell, group: str, sought: Sought, dry_run: bool, copied_at: str | None = None) -> None:
    """Show the offsets that were set. ``copied_at``: when they were read from the other group."""
    rows: list[dict[str, Any]] = [
        {
            "group": group,
            **queue_fields(queue),
            "old": sought.old.get(queue),
            "new": offset,
            "dry_run": dry_run,
            **({"time": copied_at} if copied_at else {}),
        }
        for queue, offset in sought.new.items()
    ]
    columns = (
        *queue_names.columns(rows),
        Column("old", "old offset", number, right=True),
        Column("new", "new offset", number, right=True),
    )
    title = f"group {group} would move to" if dry_run else f"group {group}"
    shell.show(rows, columns, title=title, none="no queues")
    if not sought.old:
        shell.note(f"group {group} had no offsets in these queues")
    if copied_at is not None and not shell.json:
        shell.say(f"copied at {copied_at}")


@command(app, "copy")
def copy(
    shell: Shell,
    source: Annotated[
        str, typer.Argument(help="The group whose offsets are copied.", show_default=False, autocompletion=queue_names.groups)
    ],
    target: Annotated[
        str,
        typer.Argument(
            help="The group that gets the offsets. It is created if it is missing.",
            show_default=False,
            autocompletion=queue_names.groups,
        ),
    ],
    topic: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this topic. May be repeated (default: the topics in which SOURCE has offsets).",
            metavar="TOPIC",
            autocompletion=queue_names.topics,
        ),
    ] = None,
    force: Force = False,
    parked: AtSeekOption = None,
    leave_parked: Annotated[
        bool,
        typer.Option(
            "--leave-parked", help="Copy even if SOURCE has parked messages. They stay there, and TARGET does not get them."
        ),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Set the offsets of TARGET to those of SOURCE, without asking, for example for a canary that reads the same messages from now on.

    Queries of SOURCE may be at work. The command uses their last commit and changes nothing in SOURCE. For TARGET this is a seek, which
    is refused while a query is at work in TARGET. It is also refused if TARGET has parked messages of these queues, unless --parked says
    what to do with them. TARGET keeps its offsets in other queues. --dry-run only shows the change. The output has the time of the copy
    (JSON: time), for the option --since of an audit.

    Unless --leave-parked is given, the command is also refused if SOURCE has parked messages, because they are below its offsets. It is
    refused if retention has deleted messages that SOURCE has not processed.
    """
    for name in topic or ():
        check_topic(name, writing=False)
    with shell.broker() as broker:
        now = moment(time.time_ns() // 1000)
        sought = tools.copy_offsets(
            broker, source, target, topic or (), force=force, parked=parked, leave_parked=leave_parked, dry_run=dry_run
        )
    _show_sought(shell, target, sought, dry_run, None if dry_run else now)


@command(app, "delete")
def delete(
    shell: Shell,
    group: Group,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Delete the group even while queries are at work (they lose their queues and fail) or messages are parked (they are lost).",
        ),
    ] = False,
) -> None:
    """Delete a group: its offsets, locks, members and parking lots. Refused while a query is at work in it, or if messages are parked.

    Prints the offsets that the group had. Its dead letters stay (topic delete removes them). A query with a checkpoint resumes from its
    checkpoint.
    """
    check_group(group)
    with shell.broker() as broker:
        offsets = own_offsets(broker, group)
        broker.admin.delete_group(group, force=force)
    shell.done(
        {"group": group, "deleted": len(offsets), "offsets": offsets_to_json(offsets)},
        f"deleted group {group} with the offsets of {len(offsets)} queues",
    )


def owner_columns(short: Mapping[str, str]) -> tuple[Column, ...]:
    """Return the columns for a queue's owner. ``short``: short names of owners."""
    return (Column("owner", "owner", short.__getitem__, cut=True), Column("alive", "alive", yes_no, colour=fault))
