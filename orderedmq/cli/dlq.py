"""``orderedmq dlq``: shows messages that a listener gave up, and sends them again."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from orderedmq.cli import completion, queue_names
from orderedmq.cli.groups import Group
from orderedmq.cli.keys import KeyTypeOption, SelectorOption, chosen_keying
from orderedmq.cli.parked import Keys
from orderedmq.cli.shell import WHOLE, Column, Full, Shell, command, commands
from orderedmq.conditions import OffsetCondition, OptionCondition
from orderedmq.errors import OffsetError, OptionError, no_such_offset
from orderedmq.model import check_group
from orderedmq.options.values import parse_timestamp
from orderedmq.tools.dead_letters import (
    MAX_REPLAYS,
    DeadLetter,
    LetterFilter,
    Replayed,
    find,
    letter_queues,
    replay,
    replayed,
    replayed_to,
    require_one_broker,
)
from orderedmq.tools.readable import body_fields, body_text, moment, one_line, short_moment, shortened

app = commands("Dead letters: messages that a listener gave up. List and replay.")

#: Maximum characters of a body or an error in a table.
_PREVIEW: Final = 80

Error = Annotated[
    str | None,
    typer.Option(
        "--error", help="Only letters whose error has this text in it, in the same case.", metavar="TEXT", show_default=False
    ),
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        help="Only letters put aside at this time or later: ISO-8601 (UTC if it names no zone), or ms since 1970.",
        metavar="TIME",
        show_default=False,
    ),
]
MaxReplays = Annotated[
    int,
    typer.Option(
        "--max-replays",
        min=1,
        help="A letter whose message was replayed this often for the group is in quarantine.",
        metavar="N",
    ),
]
AtBroker = Annotated[
    str | None,
    typer.Option(
        "--at-broker",
        help="Only letters that this broker of a cluster has. Each broker has those of its own queues, and numbers them from 0.",
        metavar="NAME",
        show_default=False,
    ),
]


def _filter(
    keys: list[str] | None,
    error: str | None,
    since: str | None,
    offsets: list[int] | None,
    quarantined: bool | None,
    most: int,
    at_broker: str | None,
) -> LetterFilter:
    if error == "":
        raise OptionError(OptionCondition.INVALID, "option --error is empty: give a text that the errors have in them")
    return LetterFilter(
        frozenset(keys or ()),
        error,
        None if since is None else parse_timestamp(since.strip(), "--since"),
        frozenset(offsets or ()),
        quarantined,
        most,
        at_broker,
    )


def _row(letter: DeadLetter, *, replayed: bool, quarantined: bool) -> dict[str, Any]:
    origin = letter.origin
    return {
        "at_broker": letter.queue.broker_name,
        "offset": letter.offset,
        "topic": origin and origin.topic,
        "broker": origin and origin.broker_name,
        "queue_id": origin and origin.queue_id,
        "origin_offset": letter.origin_offset,
        "sharding_key": letter.sharding_key,
        "tags": letter.tags,
        "keys": letter.keys,
        "error": letter.error,
        "retries": letter.retries,
        "message_id": letter.message_id,
        "stored": moment(letter.stored),
        "replayed": replayed,
        "replays": letter.replays,
        "quarantined": quarantined,
        "properties": dict(letter.properties),
        **body_fields(letter.body),
    }


def _beginning(text: str) -> str:
    return one_line(shortened(text, _PREVIEW, WHOLE))


def _state(row: dict[str, Any]) -> str:
    return "yes" if row["replayed"] else "quarantined" if row["quarantined"] else ""


@command(app, "list")
def list_letters(
    shell: Shell,
    group: Group,
    offset: Annotated[
        int | None, typer.Option(min=0, help="Begin at this dead letter (default: the first).", show_default=False)
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Maximum number of letters.")] = 20,
    key: Keys = None,
    error: Error = None,
    since: Since = None,
    quarantined: Annotated[bool, typer.Option("--quarantined", help="Only letters in quarantine.")] = False,
    max_replays: MaxReplays = MAX_REPLAYS,
    at_broker: AtBroker = None,
    full: Full = False,
) -> None:
    """Show the dead letters of a group: where each came from, its key, the error, how often it was retried, its body.

    OFFSET is the letter's number for dlq replay. REPLAYED is yes for a letter that was replayed, and quarantined for one that replay
    --all passes by. REPLAYS is how often its message was replayed before it became this letter. A table has the beginnings of bodies
    and errors; --full shows them whole. JSON has them whole, and the message's own properties.
    """
    check_group(group)
    chosen = _filter(key, error, since, None, quarantined or None, max_replays, at_broker)
    rows: list[dict[str, Any]] = []
    with shell.broker() as broker:
        queues = letter_queues(broker, group, chosen)
        if offset is not None:
            require_one_broker(queues)
        for queue in queues:
            at, upto = broker.log.bounds([queue])[queue], replayed_to(broker, queue)
            begin, end = max(at.min_offset, offset or 0), at.max_offset
            if offset is not None and offset > end:
                raise no_such_offset(queue, end, f"dead letter {offset}")
            # One more than is shown: it tells whether there are more.
            for letters in find(broker.log, queue, chosen, begin, end, count + 1 - len(rows)):
                before = replayed(broker, queue, letters, chosen, upto)
                rows += [_row(one, replayed=one.offset in before, quarantined=chosen.holds(one)) for one in letters]
            if len(rows) > count:
                break
    more = rows[count:]
    del rows[count:]
    if not shell.json:
        rows = [{**row, "body": body_text(row), "state": _state(row)} for row in rows]
    several = len({row["at_broker"] for row in [*rows, *more]}) > 1
    columns = (
        *((Column("at_broker", "at broker"),) if several else ()),
        Column("offset", "offset", right=True),
        *queue_names.columns(rows),
        Column("origin_offset", "its offset", right=True),
        Column("sharding_key", "key"),
        Column("error", "error", str if full else _beginning),
        Column("retries", "retries", right=True),
        Column("stored", "stored (UTC)", short_moment),
        Column("replays", "replays", lambda times: str(times or ""), right=True),
        Column("state", "replayed"),
        Column("body", "body", str if full else _beginning),
    )
    shell.show(rows, columns, none=f"no dead letters of group {group}", full=full)
    if more:
        where = f"--at-broker {more[0]['at_broker']} " if several else ""
        shell.note(f"more follow: {where}--offset {more[0]['offset']}")


@command(app, "replay")
def replay_letters(
    shell: Shell,
    group: Group,
    offset: Annotated[
        list[int] | None,
        typer.Option(min=0, help="This dead letter, replayed before or not; may be repeated.", metavar="N", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that were not replayed yet.")] = False,
    key: Keys = None,
    error: Error = None,
    since: Since = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many letters, the first of them.", show_default=False)
    ] = None,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Only letters in quarantine; with --offset, those as well.")
    ] = False,
    max_replays: MaxReplays = MAX_REPLAYS,
    at_broker: AtBroker = None,
    to_topic: Annotated[
        str | None,
        typer.Option(
            help="Send them there (default: where each came from).",
            metavar="TOPIC",
            show_default=False,
            autocompletion=completion.topics,
        ),
    ] = None,
    key_type: KeyTypeOption = None,
    selector: SelectorOption = None,
) -> None:
    """Send dead letters again to the topics that they came from: to the queue of their sharding key, else to the queue they were in.

    Letters have their keys as text. Replay refuses a letter whose queue shows that its producer hashed the key as a number: then
    give --sharding-key-type or --selector.

    Give --offset, or conditions that a letter has to meet all of (--key, --error, --since, --quarantined), or --all. Without --offset,
    letters that were replayed before are left out, whichever replay sent them. --limit sends the first of them; the same command
    again resumes from there.

    A letter becomes a new message at the queue's end, behind later ones of its key, for all groups that read the topic. The
    letters stay. The group dlq-replay keeps what was replayed; group seek dlq-replay --topic %DLQ%GROUP sets it back. It is noted
    after every 500 letters. A replay that was killed sends its last step again, so delivery is at least once.

    A message counts how often it was replayed. If it becomes a dead letter again after --max-replays replays, that letter is in
    quarantine: it is left out, and only --quarantined sends it.
    """
    check_group(group)
    conditions = bool(key or error is not None or since is not None or quarantined)
    if offset and (everything or key or error is not None or since is not None or limit):
        raise OptionError(
            OptionCondition.CONFLICT, "--offset names the letters itself: drop --all, --key, --error, --since and --limit"
        )
    if not (offset or everything or conditions or limit):
        raise OptionError(
            OptionCondition.MISSING,
            "say which letters: --offset, --all, or conditions (--key, --error, --since, --quarantined, --limit)",
        )
    # Letters that are named may be in quarantine or not.
    chosen = _filter(key, error, since, offset, None if offset and quarantined else quarantined, max_replays, at_broker)
    keying = chosen_keying(selector, key_type)
    done = Replayed()
    with shell.broker() as broker:
        queues = letter_queues(broker, group, chosen)
        if not queues and offset:
            raise OffsetError(OffsetCondition.BEYOND_END, f"group {group!r} has no dead letters")
        if queues:
            try:
                with shell.progress("replaying") as bar:
                    replay(broker, queues, chosen, done, limit=limit, to_topic=to_topic, keying=keying, progress=bar.at)
            except BaseException:
                if done.letters:
                    shell.note(f"{done.letters:,} dead letters were replayed before")
                raise
    to = ", ".join(f"{count:,} to {topic}" for topic, count in sorted(done.topics.items()))
    shell.done(
        {
            "group": group,
            "replayed": done.letters,
            "topics": dict(sorted(done.topics.items())),
            "quarantined": done.quarantined,
            "deleted": done.deleted,
        },
        f"replayed {done.letters:,} dead letter{'' if done.letters == 1 else 's'} of group {group}{f': {to}' if to else ''}",
    )
    if done.quarantined:
        shell.note(
            f"left out {done.quarantined:,} in quarantine: replayed {max_replays} times or more, and given up again; --quarantined sends them"
        )
    if done.deleted:
        shell.note(f"{done.deleted:,} dead letters were deleted by retention before they were replayed")
