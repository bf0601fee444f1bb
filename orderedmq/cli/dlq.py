"""``orderedmq dlq``: shows messages that a listener gave up, and sends them again."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from orderedmq.cli import completion, queue_names
from orderedmq.cli.groups import Group
from orderedmq.cli.keys import KeyTypeOption, SelectorOption, chosen_keying
from orderedmq.cli.shell import WHOLE, Column, Full, Shell, command, commands
from orderedmq.conditions import OffsetCondition, OptionCondition
from orderedmq.errors import OffsetError, OptionError, no_such_offset
from orderedmq.model import check_group
from orderedmq.tools.dead_letters import DeadLetter, Replayed, dead_letter_queue, read, replay, replayed_to
from orderedmq.tools.readable import body_fields, body_text, moment, one_line, short_moment, shortened

app = commands("Dead letters: messages that a listener gave up. List and replay.")

#: Maximum characters of a body or an error in a table.
_PREVIEW: Final = 80


def _row(letter: DeadLetter, replayed: int) -> dict[str, Any]:
    origin = letter.origin
    return {
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
        "replayed": letter.offset < replayed,
        "properties": dict(letter.properties),
        **body_fields(letter.body),
    }


def _beginning(text: str) -> str:
    return one_line(shortened(text, _PREVIEW, WHOLE))


@command(app, "list")
def list_letters(
    shell: Shell,
    group: Group,
    offset: Annotated[
        int | None, typer.Option(min=0, help="Begin at this dead letter (default: the first).", show_default=False)
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Maximum number of letters.")] = 20,
    full: Full = False,
) -> None:
    """Show the dead letters of a group: where each came from, its key, the error, how often it was retried, its body.

    OFFSET is the letter's number for dlq replay. REPLAYED is yes for letters before the one where replay --all goes on. A table has the
    beginnings of bodies and errors; --full shows them whole. JSON has them whole, and the message's own properties.
    """
    check_group(group)
    rows: list[dict[str, Any]] = []
    end = 0
    with shell.broker() as broker:
        queue = dead_letter_queue(broker, group)
        if queue is not None:
            at, replayed = broker.log.bounds([queue])[queue], replayed_to(broker, queue)
            begin, end = max(at.min_offset, offset or 0), at.max_offset
            if offset is not None and offset > end:
                raise no_such_offset(queue, end, f"dead letter {offset}")
            for piece in read(broker.log, queue, begin, min(end, begin + count)):
                rows += [_row(letter, replayed) for letter in piece]
    if not shell.json:
        rows = [{**row, "body": body_text(row)} for row in rows]
    columns = (
        Column("offset", "offset", right=True),
        *queue_names.columns(rows),
        Column("origin_offset", "its offset", right=True),
        Column("sharding_key", "key"),
        Column("error", "error", str if full else _beginning),
        Column("retries", "retries", right=True),
        Column("stored", "stored (UTC)", short_moment),
        Column("replayed", "replayed", lambda done: "yes" if done else ""),
        Column("body", "body", str if full else _beginning),
    )
    shell.show(rows, columns, none=f"no dead letters of group {group}", full=full)
    if rows and rows[-1]["offset"] + 1 < end:
        shell.note(f"{end - rows[-1]['offset'] - 1:,} more follow: --offset {rows[-1]['offset'] + 1}")


@command(app, "replay")
def replay_letters(
    shell: Shell,
    group: Group,
    offset: Annotated[
        list[int] | None,
        typer.Option(min=0, help="This dead letter, replayed before or not; may be repeated.", metavar="N", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that were not replayed yet.")] = False,
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

    A letter becomes a new message at the queue's end, behind later ones of its key, for all groups that read the topic. The
    letters stay. The next --all goes on where the last one ended, at the offset of the group dlq-replay; group seek dlq-replay
    sets it back. The offset is committed after every 500 letters. A replay that was killed sends its last step again, so
    delivery is at least once.
    """
    check_group(group)
    if everything == bool(offset):
        raise OptionError(
            OptionCondition.CONFLICT if everything else OptionCondition.MISSING,
            "give either --offset, once or several times, or --all",
        )
    keying = chosen_keying(selector, key_type)
    done = Replayed()
    with shell.broker() as broker:
        queue = dead_letter_queue(broker, group)
        if queue is None and offset:
            raise OffsetError(OffsetCondition.BEYOND_END, f"group {group!r} has no dead letters")
        if queue is not None:
            try:
                with shell.progress("replaying") as bar:
                    replay(broker, queue, None if everything else offset, to_topic, done, bar.advance, keying)
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
            "ahead": done.ahead,
            "deleted": done.deleted,
        },
        f"replayed {done.letters:,} dead letter{'' if done.letters == 1 else 's'} of group {group}{f': {to}' if to else ''}",
    )
    if done.deleted:
        shell.note(f"{done.deleted:,} dead letters were deleted by retention before they were replayed")
    if done.ahead:
        shell.note(f"--all has not reached {', '.join(map(str, done.ahead))} yet, and will send them again")
