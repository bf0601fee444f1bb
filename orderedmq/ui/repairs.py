"""The pages that repair: replay dead letters; decide what becomes of parked keys and messages; set or copy a group's offsets.

Rules: each change is a POST that uses `guard.read_change`. A change that cannot be undone needs a second confirmation. A seek or
a copy is shown before it is made, and sets exactly the offsets that were shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast, get_args

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from orderedmq.broker import Broker
from orderedmq.conditions import GroupCondition, OptionCondition
from orderedmq.errors import GroupError, OptionError
from orderedmq.model import MessageQueue, check_group
from orderedmq.options.values import parse_timestamp, shown, whole_number
from orderedmq.ownership.offsets import offsets_to_json
from orderedmq.parking import AtSeek, CommandAction
from orderedmq.routing.selector import Keying
from orderedmq.text import is_text
from orderedmq.tools import dead_letters
from orderedmq.tools import parked as tools
from orderedmq.tools.dead_letters import MAX_REPLAYS, DeadLetter, LetterFilter
from orderedmq.tools.parked import ParkedKey, chosen
from orderedmq.tools.replay import Replayed, replay
from orderedmq.tools.seek import Sought, copy_offsets, parse_target, seek
from orderedmq.ui.guard import FormFields, read_change
from orderedmq.ui.pages import ROWS, identity, number_of
from orderedmq.ui.site import Site, group_url

#: Maximum letters that one page searches, and that one press of a button replays, because a browser waits for the answer.
_SEARCHED: Final = 20_000
_AT_ONCE: Final = 10_000
#: How a producer's keys choose their queues: form value → description and keying. The form values are the command's option values.
KEYINGS: Final[dict[str, tuple[str, Keying | None]]] = {
    "": ("as text, checked against the letter's original queue", None),
    "text": ("as text", Keying("hash", "text")),
    "int": ("as an Integer", Keying("hash", "int")),
    "long": ("as a Long", Keying("hash", "long")),
    "mod": ("number modulo queues", Keying("mod", "long")),
}


class Repairs:
    """The handlers of pages that repair something."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def change(self, handle: Callable[[str, FormFields, Request], Response]) -> Callable[[Request], Any]:
        """Return a handler for a POST. It checks the form with `read_change`, then calls ``handle`` with the group and the form."""

        async def run(request: Request) -> Response:
            form = await read_change(request, self._site.rules)
            group: str = request.path_params["group"]
            check_group(group)
            return await run_in_threadpool(handle, group, form, request)

        return run

    # -- dead letters

    def letters(self, request: Request) -> Response:
        """Show dead letters, beginning with the newest page, which users usually need. With conditions, begin with the oldest match."""
        group, broker = request.path_params["group"], self._site.broker
        fields: Mapping[str, str] = request.query_params
        chosen = _filter(fields)
        filtered = chosen.chooses or bool(chosen.quarantined)
        queues = dead_letters.letter_queues(broker, group)
        brokers = [each.broker_name for each in queues]
        names: dict[str, Any] = {"letters": [], "waiting": 0, "earlier": None, "later": None, "queue": None, "brokers": brokers}
        if queues:
            # Each broker numbers its letters from 0, so a page shows the letters of one broker.
            queue = dead_letters.at_broker(queues, chosen.at_broker)[0]
            at, upto = broker.log.bounds([queue])[queue], dead_letters.replayed_to(broker, queue)
            first, last = number_of(request, "first"), at.max_offset
            begin = first if first is not None else at.min_offset if filtered else last - ROWS
            [(begin, _)] = chosen.spans(broker.log, queue, min(max(at.min_offset, begin), last), last)
            end = min(begin + (_SEARCHED if filtered else ROWS), last)
            letters = [letter for piece in dead_letters.find(broker.log, queue, chosen, begin, end, ROWS) for letter in piece]
            if filtered and len(letters) == ROWS:
                end = letters[-1].offset + 1
            if len(queues) > 1:
                fields = {**fields, "broker": queue.broker_name}
            names["queue"] = queue
            names["letters"] = [(letter, _state(letter, chosen, upto)) for letter in letters]
            names["waiting"] = max(last - upto, 0)
            conditions = _conditions(fields)
            if begin > at.min_offset and not filtered:
                names["earlier"] = group_url(group, "/dead", first=max(at.min_offset, begin - ROWS), **conditions)
            names["later"] = group_url(group, "/dead", first=end, **conditions) if end < last else None
        return self._site.page(
            request, "letters.html", title=f"Dead letters of {group}", at="groups", group=group, keyings=KEYINGS, filtered=filtered,
            fields=fields, conditions=_conditions(fields), max_replays=MAX_REPLAYS, **names
        )  # fmt: skip

    def replay(self, group: str, form: FormFields, request: Request) -> Response:
        """Send the chosen dead letters again, or all unreplayed letters that meet the conditions in the URL."""
        matching, offsets = _filter(request.query_params), frozenset(map(_offset_in_form, form.all("offset")))
        if form.one("all"):
            chosen = replace(matching, quarantined=bool(matching.quarantined))
        elif offsets:
            # On the page of letters in quarantine, all letters that the user can choose are in quarantine.
            chosen = LetterFilter(
                offsets=offsets, quarantined=None if matching.quarantined else False, at_broker=matching.at_broker
            )
        else:
            raise OptionError(OptionCondition.MISSING, "no dead letter is chosen. Go back and choose some, or replay all")
        how, to_group = form.one("keying"), bool(form.one("group"))
        if how not in KEYINGS:
            raise OptionError(OptionCondition.INVALID, f"{shown(how)} is not a way in which keys choose queues")
        broker, replayed = self._site.broker, Replayed()
        queues = dead_letters.letter_queues(broker, group, chosen)
        if queues:
            try:
                replay(
                    broker, queues, chosen, replayed, limit=_AT_ONCE, to_topic=form.one("to") or None, keying=KEYINGS[how][1],
                    to_group=to_group,
                )  # fmt: skip
            finally:
                if replayed.letters:
                    self._site.tell(f"replayed {replayed.letters:,} dead letters of group {group}")
        to = ", ".join(f"{count:,} to {topic}" for topic, count in sorted(replayed.topics.items()))
        text = f"Replayed {replayed.letters:,} dead letter{'' if replayed.letters == 1 else 's'}{f': {to}' if to else ''}"
        text += " for this group only." if to and to_group else "."
        if replayed.letters == _AT_ONCE:
            text += (
                " There may be more matches: set a later time to continue, since the same replay sends these again."
                if chosen.chooses or chosen.quarantined
                else " There may be more letters: replay again to continue."
            )
        if replayed.quarantined:
            text += f" Left out {replayed.quarantined:,} in quarantine."
        if replayed.deleted:
            text += f" Retention deleted {replayed.deleted:,} before a replay of all letters reached them."
        return self._site.done(text, group_url(group, "/dead", **_conditions(request.query_params)))

    # -- parked keys

    def command(self, group: str, form: FormFields, request: Request) -> Response:
        """Order the owners of the chosen parked keys to retry or hold them, or what becomes of their first messages, or of all.

        What cannot be undone needs a second confirmation, whose form names the messages that were shown.
        """
        action, names, broker = form.one("action"), list(dict.fromkeys(form.all("key"))), self._site.broker
        if action not in ("drop_all", *get_args(CommandAction)):
            raise OptionError(OptionCondition.INVALID, f"{shown(action)} is not a command")
        if not names:
            raise OptionError(OptionCondition.MISSING, "no key is chosen. Go back and choose some")
        those = _chosen(broker, group, names)
        command = cast(CommandAction, action.removesuffix("_all"))
        if action in ("drop", "dead_letter", "replace"):
            offsets = form.all("offset") or [str(key.offset) for key in those]
            those = [
                named
                for key, text in zip(those, offsets)
                for named in chosen(group, [key], (), [_offset_in_form(text)], False, single=True)
            ]
        order = tools.order(command, those)
        if action not in ("retry", "hold") and form.one("sure") != "yes":
            former = tools.parked_row(broker, group, those)["body"] if action == "replace" else b""
            return self._site.page(
                request,
                "sure.html",
                title=f"{order[0].upper()}{order[1:]}?",
                at="groups",
                group=group,
                action=action,
                keys=list(zip(names, those)),
                body=former.decode() if is_text(former) else "",
            )
        # Browsers end lines with CR LF.
        body = next(iter(form.all("body")), "").replace("\r\n", "\n").encode() if action == "replace" else None
        # Ask for the owners first, because this may fail, and a command that was given must be reported.
        alive = tools.owned(broker, group)
        tools.give(broker, group, command, those, body)
        alone = sorted({str(key.queue) for key in those if not alive.get(key.queue, False)})
        when = "the queue's next owner carries out the command" if alone else "the owner does so in its next micro-batch"
        self._site.tell(f"ordered to {order} of group {group}")
        return self._site.done(f"Ordered to {order}: {when}.", group_url(group, "/parked"))

    # -- offsets

    def plan_seek(self, request: Request) -> Response:
        """Ask for the target of a seek, and show what the seek would change. Nothing is changed."""
        group, broker, fields = request.path_params["group"], self._site.broker, request.query_params
        check_group(group)
        plan = None
        if fields.get("to", "").strip():
            topics = [fields["topic"]] if fields.get("topic") else []
            plan = seek(
                broker,
                group,
                parse_target(fields["to"], "to"),
                topics,
                force=_force(fields.get),
                parked=_parked(fields.get),
                dry_run=True,
            )
        return self._site.page(request, "seek.html", title=f"Seek {group}", at="groups", **self._plan(group, fields, plan))

    def set_offsets(self, group: str, form: FormFields, _: Request) -> Response:
        """Set the offsets that were shown."""
        target = parse_target(form.one("to"), "to")
        return self._done(
            group, seek(self._site.broker, group, target, [], force=_force(form.one), parked=_parked(form.one), dry_run=False)
        )

    def plan_copy(self, request: Request) -> Response:
        """Ask which group gets this group's offsets, and show what the copy would change. Nothing is changed."""
        group, broker, fields = request.path_params["group"], self._site.broker, request.query_params
        check_group(group)
        plan, target = None, fields.get("target", "").strip()
        if target:
            topics = [fields["topic"]] if fields.get("topic") else []
            plan = copy_offsets(
                broker, group, target, topics, force=_force(fields.get), parked=_parked(fields.get),
                leave_parked=bool(fields.get("leave_parked")), dry_run=True,
            )  # fmt: skip
        names = self._plan(group, fields, plan)
        return self._site.page(request, "copy.html", title=f"Copy {group}", at="groups", target=target, **names)

    def copy_offsets(self, group: str, form: FormFields, _: Request) -> Response:
        """Set the other group's offsets to those that were shown."""
        target, offsets = form.one("target"), parse_target(form.one("to"), "to")
        check_group(target)
        if offsets.offsets is None or target == group:
            raise OptionError(
                OptionCondition.INVALID, "this form has no offsets for another group. Go back and show what would change"
            )
        sought = seek(self._site.broker, target, offsets, [], force=_force(form.one), parked=_parked(form.one), dry_run=False)
        return self._done(target, sought)

    def _plan(self, group: str, fields: Mapping[str, str], plan: Sought | None) -> dict[str, Any]:
        """Return the template values of the pages that plan a change of offsets."""
        return {
            "group": group,
            "fields": fields,
            "topics": sorted({queue.topic for queue in self._site.broker.admin.group_offsets(group)}),
            "plan": plan,
            "moves": [] if plan is None else _moves(plan),
            "offsets": "" if plan is None else json.dumps(offsets_to_json(dict(plan.new))),
            "rows": ROWS,
        }

    def _done(self, group: str, sought: Sought) -> Response:
        queues = f"{len(sought.new):,} queue{'' if len(sought.new) == 1 else 's'}"
        text = f"Set the offsets of {queues} of group {group}."
        self._site.tell(text)
        return self._site.done(text, group_url(group))


def _force(fields: Callable[[str], str | None]) -> bool:
    return bool(fields("force"))


def _parked(fields: Callable[[str], str | None]) -> AtSeek:
    """Return the form's choice for parked messages. Raises OptionError INVALID."""
    parked = fields("parked") or None
    if parked not in (None, "keep", "drop"):
        raise OptionError(OptionCondition.INVALID, f"{shown(parked)} is not a choice for parked messages. Use keep or drop")
    return cast(AtSeek, parked)


def _moves(plan: Sought) -> list[tuple[MessageQueue, int | None, int]]:
    """Return the queues with their old and new offsets; queues whose offset changes come first."""
    moves = [(queue, plan.old.get(queue), offset) for queue, offset in plan.new.items()]
    return sorted(moves, key=lambda move: (move[1] == move[2], move[0]))


def _chosen(broker: Broker, group: str, names: Sequence[str]) -> list[ParkedKey]:
    """Return the parked keys with these identities. Raises GroupError NOT_PARKED for a key that is no longer parked."""
    by_identity = {identity(parked_key): parked_key for parked_key in tools.parked_keys(broker, group)}
    for name in names:
        if name not in by_identity or by_identity[name].ticket.has_ended:
            raise GroupError(
                GroupCondition.NOT_PARKED, f"{name} of group {group!r} is not parked any more. Go back and reload the page"
            )
    return [by_identity[name] for name in names]


def _conditions(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the conditions on dead letters in a URL's query."""
    return {name: fields.get(name, "") for name in ("key", "error", "since", "quarantined", "broker")}


def _filter(fields: Mapping[str, str]) -> LetterFilter:
    """Return the filter for the conditions in a URL's query. Raises OptionError INVALID."""
    key, error, since, quarantined, broker = _conditions(fields).values()
    return LetterFilter(
        frozenset([key] if key else ()),
        error or None,
        parse_timestamp(since.strip(), "since") if since.strip() else None,
        quarantined=True if quarantined else None,
        at_broker=broker or None,
    )


def _state(letter: DeadLetter, chosen: LetterFilter, upto: int) -> str:
    """Return the text of the column "Replayed": yes, no or quarantined."""
    return "yes" if chosen.replayed(letter, upto) else "quarantined" if chosen.holds(letter) else "no"


def _offset_in_form(text: str) -> int:
    """Return the offset of a message or a dead letter, from a form. Raises OptionError INVALID."""
    offset = whole_number(text)
    if offset is None:
        raise OptionError(OptionCondition.INVALID, f"{shown(text)} is not the offset of a message or a dead letter")
    return offset
