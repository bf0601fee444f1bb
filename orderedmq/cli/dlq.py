"""``orderedmq dlq``: shows dead letters, and sends them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from orderedmq.broker import Broker
from orderedmq.cli import queue_names
from orderedmq.cli.groups import Group
from orderedmq.cli.parked import Keys
from orderedmq.cli.queue_names import KeyTypeOption, SelectorOption
from orderedmq.cli.shell import Column, Full, Shell, command, commands, fault, parse_moment
from orderedmq.cli.topics import Yes
from orderedmq.conditions import OffsetCondition, OptionCondition
from orderedmq.errors import OffsetError, OptionError, RocketMQError, no_such_offset
from orderedmq.model import EMBEDDED_BROKER, check_group
from orderedmq.routing.selector import keying_of
from orderedmq.tools.dead_letters import (
    MAX_REPLAYS,
    DeadLetter,
    LetterFilter,
    find,
    letter_queues,
    replayed_to,
    require_one_broker,
)
from orderedmq.tools.readable import body_fields, body_text, moment, recent_moment
from orderedmq.tools.replay import Replayed, other_readers, replay

app = commands("List and replay dead letters: messages whose retries all failed.")

Error = Annotated[
    str | None,
    typer.Option(
        "--error", help="Only letters whose error contains this text (case-sensitive).", metavar="TEXT", show_default=False
    ),
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since",
        help="Only letters written at this time or later, in ISO-8601 (UTC unless it has a zone), as 18:05 of today, or 5m ago.",
        metavar="TIME",
        show_default=False,
    ),
]
MaxReplays = Annotated[
    int,
    typer.Option(
        "--max-replays",
        min=1,
        help="A letter is in quarantine if its message was already replayed this many times for the group. Give the same number in all "
        "commands for a group. Otherwise a letter may be sent twice, or count as replayed although it was left out.",
        metavar="N",
    ),
]
AtBroker = Annotated[
    str | None,
    typer.Option(
        "--at-broker",
        help="Only letters at this broker of a cluster. Each broker stores the letters of its queues, and numbers them from 0.",
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
        raise OptionError(OptionCondition.INVALID, "option --error is empty. Give a text that the errors contain")
    return LetterFilter(
        frozenset(keys or ()),
        error,
        None if since is None else parse_moment(since, "--since"),
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


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row for a table, where one column names the queue that the message came from."""
    where = [row["topic"], *([] if row["broker"] == EMBEDDED_BROKER else [row["broker"]]), str(row["queue_id"])]
    state = "yes" if row["replayed"] else "quarantined" if row["quarantined"] else None
    return {**row, "body": body_text(row), "state": state, "from": None if row["topic"] is None else "/".join(where)}


@command(app, "list")
def list_letters(
    shell: Shell,
    group: Group,
    offset: Annotated[
        int | None,
        typer.Option(min=0, help="Begin at the dead letter with this number (default: the first).", show_default=False),
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
    """Show the dead letters of a group: where each came from, its key, the error, its body.

    OFFSET is the letter's number, which dlq replay --offset takes. FROM and AT are the queue and the offset of the message.

    REPLAYED is "yes" if replay --all has sent the letter, and
    "quarantined" if replay --all skips it. A table shows only the beginnings of bodies and errors. With --full, and in JSON, they are
    complete, with the time of the letter, how often the message was retried (RETRIES), and how often it was replayed before it became this
    letter (REPLAYS). JSON also has the properties of the message.
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
            # Read one letter more than is shown, to know whether more letters follow.
            for letters in find(broker.log, queue, chosen, begin, end, count + 1 - len(rows)):
                rows += [
                    _row(letter, replayed=chosen.replayed(letter, upto), quarantined=chosen.holds(letter)) for letter in letters
                ]
            if len(rows) > count:
                break
    more = rows[count:]
    del rows[count:]
    if not shell.json:
        rows = [_shown(row) for row in rows]
    several = len({row["at_broker"] for row in [*rows, *more]}) > 1
    details = (
        Column("retries", "retries", right=True),
        Column("stored", "stored (UTC)", recent_moment),
        Column("replays", "replays", right=True),
    )
    columns = (
        *((Column("at_broker", "at broker"),) if several else ()),
        Column("offset", "offset", right=True),
        Column("from", "from"),
        Column("origin_offset", "at", right=True),
        Column("sharding_key", "key"),
        Column("error", "error", cut=True, colour=fault),
        *(details if full else ()),
        *((Column("state", "replayed"),) if full or any(row.get("state") for row in rows) else ()),
        Column("body", "body", cut=True),
    )
    shell.show(rows, columns, none=f"no dead letters in group {group}", full=full)
    if more:
        where = f"--at-broker {more[0]['at_broker']} " if several else ""
        shell.note(f"more letters follow: {where}--offset {more[0]['offset']}")


@command(app, "replay")
def replay_letters(
    shell: Shell,
    group: Group,
    offset: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Send the dead letter with this number, even if it was replayed before. May be repeated.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Send all letters that were not replayed yet.")] = False,
    key: Keys = None,
    error: Error = None,
    since: Since = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Send only the first letters, at most this many.", show_default=False)
    ] = None,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="Only letters in quarantine. With --offset: also letters in quarantine.")
    ] = False,
    max_replays: MaxReplays = MAX_REPLAYS,
    at_broker: AtBroker = None,
    to_topic: Annotated[
        str | None,
        typer.Option(
            help="Send the letters to this topic (default: the topic that each came from).",
            metavar="TOPIC",
            show_default=False,
            autocompletion=queue_names.topics,
        ),
    ] = None,
    to_group: Annotated[
        bool, typer.Option("--to-group", help="Give the letters back to this group alone, through its parking lots.")
    ] = False,
    key_type: KeyTypeOption = None,
    selector: SelectorOption = None,
    yes: Yes = False,
) -> None:
    """Send dead letters again to the topics that they came from: to the queue of their sharding key, or without a key to their old queue.

    Letters have their keys as text. Replay refuses a letter whose queue shows that its producer hashed the key as a number. In that case
    give --sharding-key-type or --selector.

    Give --offset, or --all, or conditions (--key, --error, --since, --quarantined). A letter is sent if it meets all conditions. Without
    --offset, letters that an earlier replay --all has sent are left out. --limit sends only the first letters.

    A letter becomes a new message at the end of its queue, after later messages of its key, for all groups that read the topic. If there
    are others, the command names them and asks first. With --to-group only this group gets it, after the messages of its key that are
    parked. The letter itself is kept. Without conditions, --all and --limit record what they have sent in the offsets of the group
    dlq-replay, and the next replay continues there. group seek dlq-replay --topic %DLQ%GROUP makes the letters replayable again. Letters
    chosen by --offset or by conditions are sent each time, and again by a later --all. If a replay of all letters over RocketMQ is killed,
    the next one repeats up to 500 letters. It can begin after a minute.

    Each message records how often it was replayed. If it becomes a dead letter again after --max-replays replays, that letter is in
    quarantine, and only a replay with --quarantined sends it.
    """
    check_group(group)
    conditions = bool(key or error is not None or since is not None or quarantined)
    if offset and (everything or key or error is not None or since is not None or limit):
        raise OptionError(
            OptionCondition.CONFLICT, "--offset already selects the letters. Drop --all, --key, --error, --since and --limit"
        )
    if not (offset or everything or conditions or limit):
        raise OptionError(
            OptionCondition.MISSING,
            "the command does not say which letters. Give --offset, --all, or conditions (--key, --error, --since, --quarantined, --limit)",
        )
    # With --offset and --quarantined, send the letters whether or not they are in quarantine.
    chosen = _filter(key, error, since, offset, None if offset and quarantined else quarantined, max_replays, at_broker)
    keying = keying_of(selector, key_type)
    replayed = Replayed()
    with shell.broker() as broker:
        queues = letter_queues(broker, group, chosen)
        if not queues and offset:
            raise OffsetError(OffsetCondition.BEYOND_END, f"group {group!r} has no dead letters")
        if queues:
            try:
                with shell.progress("replaying") as bar:

                    def confirm(topics: Mapping[str, int]) -> None:
                        bar.progress.stop()
                        if not to_group:
                            _ask(shell, broker, group, topics, yes)
                        bar.progress.start()

                    replay(
                        broker,
                        queues,
                        chosen,
                        replayed,
                        limit=limit,
                        to_topic=to_topic,
                        keying=keying,
                        progress=bar.at,
                        confirm=confirm,
                        to_group=to_group,
                    )
            except BaseException:
                if replayed.letters:
                    shell.note(f"{replayed.letters:,} dead letters were replayed before the failure")
                raise
    to = ", ".join(f"{count:,} to {topic}" for topic, count in sorted(replayed.topics.items()))
    shell.done(
        {
            "group": group,
            "replayed": replayed.letters,
            "topics": dict(sorted(replayed.topics.items())),
            "quarantined": replayed.quarantined,
            "deleted": replayed.deleted,
        },
        f"replayed {replayed.letters:,} dead letter{'' if replayed.letters == 1 else 's'} of group {group}{f': {to}' if to else ''}"
        f"{' for this group only' if to and to_group else ''}",
    )
    if replayed.quarantined:
        shell.note(
            f"left out {replayed.quarantined:,} in quarantine, because each was replayed {max_replays} times or more and failed again. Give "
            "--quarantined to send them"
        )
    if replayed.deleted:
        shell.note(f"{replayed.deleted:,} dead letters were deleted by retention before a replay of all letters reached them")


def _ask(shell: Shell, broker: Broker, group: str, topics: Mapping[str, int], yes: bool) -> None:
    """Name the other groups that get the letters, and ask. ``topics``: how many letters go to each topic."""
    try:
        readers = other_readers(broker, group, topics)
    except RocketMQError as error:
        if not error.denied:
            raise
        readers = ["all others, which this account may not list"]
    if readers:
        letters = f"{sum(topics.values()):,} dead letters of group {group} to {', '.join(sorted(topics))}"
        shell.ask(f"Send {letters}? Groups that also read there: {', '.join(readers)}.", yes)
