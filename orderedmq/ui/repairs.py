"""What can be mended: dead letters are replayed, parked keys retried, held or dropped, a group's offsets set.

Rules: what would change something is a POST with `guard.read_change`. What cannot be taken back is asked for once more. A seek is shown
before it is done, and sets exactly the offsets that were shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, cast, get_args
from urllib.parse import unquote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from orderedmq.broker import Broker
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import MessageQueue, check_group
from orderedmq.options.values import shown, whole_number
from orderedmq.ownership.offsets import offsets_to_json
from orderedmq.parking.rules import AtSeek, OrderAction
from orderedmq.routing.selector import Keying
from orderedmq.tools import dead_letters
from orderedmq.tools.dead_letters import DeadLetter, Replayed
from orderedmq.tools.parked import ParkedKey, chosen, give, owned, parked_keys
from orderedmq.tools.seek import Sought, parse_target, seek
from orderedmq.ui.guard import FormFields, read_change
from orderedmq.ui.pages import ROWS, identity, number_of
from orderedmq.ui.rendering import group_url
from orderedmq.ui.site import Site

#: How a producer's keys choose their queues: the names of the choices, as the command has them.
KEYINGS: Final[dict[str, tuple[str, Keying | None]]] = {
    "": ("as text, checked against where each came from", None),
    "text": ("as text", Keying("hash", "text")),
    "int": ("as an Integer", Keying("hash", "int")),
    "long": ("as a Long", Keying("hash", "long")),
    "mod": ("number modulo queues", Keying("mod", "long")),
}


class Repairs:
    """The handlers of pages that mend something."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def change(self, handle: Callable[[str, FormFields, Request], Response]) -> Callable[[Request], Any]:
        """Make a handler of a POST, which gets the group and a form that may change something."""

        async def run(request: Request) -> Response:
            form = await read_change(request, self._site.rules)
            group: str = request.path_params["group"]
            check_group(group)
            return await run_in_threadpool(handle, group, form, request)

        return run

    # -- dead letters

    def letters(self, request: Request) -> Response:
        """Show dead letters, the last page first: these are why somebody comes."""
        group, broker = request.path_params["group"], self._site.broker
        queue = dead_letters.dead_letter_queue(broker, group)
        names: dict[str, Any] = {"letters": [], "replayed": 0, "waiting": 0, "earlier": None, "later": None, "queue": queue}
        if queue is not None:
            at, replayed = broker.log.bounds([queue])[queue], dead_letters.replayed_to(broker, queue)
            first = number_of(request, "first")
            begin = min(max(at.min_offset, at.max_offset - ROWS if first is None else first), at.max_offset)
            end = min(begin + ROWS, at.max_offset)
            found: list[DeadLetter] = [one for piece in dead_letters.read(broker.log, queue, begin, end) for one in piece]
            names |= {"letters": found, "replayed": replayed, "waiting": at.max_offset - replayed}
            names["earlier"] = (
                group_url(group, "/dead", first=max(at.min_offset, begin - ROWS)) if begin > at.min_offset else None
            )
            names["later"] = group_url(group, "/dead", first=end) if end < at.max_offset else None
        return self._site.page(
            request, "letters.html", title=f"Dead letters of {group}", at="groups", group=group, keyings=KEYINGS, **names
        )

    def replay(self, group: str, form: FormFields, _: Request) -> Response:
        """Send chosen dead letters again, or all that were not yet."""
        everything = bool(form.one("all"))
        offsets = [_letter(text) for text in form.all("offset")]
        if not everything and not offsets:
            raise OptionError(OptionCondition.MISSING, "no dead letter is chosen: go back and choose some, or replay all")
        how = form.one("keying")
        if how not in KEYINGS:
            raise OptionError(OptionCondition.INVALID, f"{shown(how)} is no way in which keys choose queues")
        broker, done = self._site.broker, Replayed()
        queue = dead_letters.dead_letter_queue(broker, group)
        if queue is not None:
            try:
                dead_letters.replay(
                    broker,
                    queue,
                    None if everything else offsets,
                    form.one("to") or None,
                    done,
                    lambda _: None,
                    KEYINGS[how][1],
                )
            finally:
                if done.letters:
                    self._site.tell(f"replayed {done.letters:,} dead letters of group {group}")
        to = ", ".join(f"{count:,} to {topic}" for topic, count in sorted(done.topics.items()))
        said = f"Replayed {done.letters:,} dead letter{'' if done.letters == 1 else 's'}{f': {to}' if to else ''}."
        if done.deleted:
            said += f" {done.deleted:,} were deleted by retention before they were replayed."
        if done.ahead:
            said += f" Replay all has not reached {', '.join(map(str, done.ahead[:20]))} yet, and will send them again."
        return self._site.done(said, group_url(group, "/dead"))

    # -- parked keys

    def order(self, group: str, form: FormFields, request: Request) -> Response:
        """Tell the owners of chosen parked keys to try, hold or drop them. A drop is asked for once more."""
        action = form.one("action")
        if action not in get_args(OrderAction):
            raise OptionError(OptionCondition.INVALID, f"{shown(action)} is no order: retry, hold or drop")
        wanted, broker = form.all("key"), self._site.broker
        if not wanted:
            raise OptionError(OptionCondition.MISSING, "no key is chosen: go back and choose some")
        those = _chosen(broker, group, wanted)
        messages = sum(one.messages for one in those)
        said = (
            f"{messages:,} parked message{'' if messages == 1 else 's'} of {len(those):,} key{'' if len(those) == 1 else 's'}"
        )
        if action == "drop" and form.one("sure") != "yes":
            return self._site.page(
                request,
                "sure.html",
                title=f"Drop {said}?",
                at="groups",
                group=group,
                keys=[(identity(one), one) for one in those],
            )
        give(broker, group, cast(OrderAction, action), those)
        alive = owned(broker, group)
        alone = sorted({str(one.queue) for one in those if not alive.get(one.queue, False)})
        when = "the next query that owns the queue carries it out" if alone else "the owner does so in its next micro-batch"
        self._site.tell(f"ordered to {action} {said} of group {group}")
        return self._site.done(f"Ordered to {action} {said}: {when}.", group_url(group, "/parked"))

    # -- offsets

    def plan_seek(self, request: Request) -> Response:
        """Ask where to, and show what a seek would do. Nothing is changed."""
        group, broker, given = request.path_params["group"], self._site.broker, request.query_params
        check_group(group)
        topics = sorted({queue.topic for queue in broker.admin.group_offsets(group)})
        names: dict[str, Any] = {"group": group, "topics": topics, "given": given, "plan": None, "moves": [], "offsets": ""}
        if given.get("to", "").strip():
            plan = self._sought(group, given["to"], [given["topic"]] if given.get("topic") else [], given.get, dry_run=True)
            names |= {"plan": plan, "moves": _moves(plan), "offsets": json.dumps(offsets_to_json(dict(plan.new)))}
        return self._site.page(request, "seek.html", title=f"Seek {group}", at="groups", rows=ROWS, **names)

    def set_offsets(self, group: str, form: FormFields, _: Request) -> Response:
        """Set the offsets that were shown."""
        done = self._sought(group, form.one("to"), [], lambda name, default="": form.one(name) or default, dry_run=False)
        queues = f"{len(done.new):,} queue{'' if len(done.new) == 1 else 's'}"
        said = f"Set the offsets of {queues} of group {group}; its reset number is {done.reset}."
        self._site.tell(said)
        return self._site.done(said, group_url(group))

    def _sought(self, group: str, to: str, topics: Sequence[str], given: Callable[..., str], *, dry_run: bool) -> Sought:
        parked = given("parked", "")
        if parked not in ("", "keep", "drop"):
            raise OptionError(
                OptionCondition.INVALID, f"{shown(parked)} is nothing that can become of parked messages: keep or drop"
            )
        return seek(
            self._site.broker, group, parse_target(to, "to"), topics, force=bool(given("force", "")),
            parked=cast(AtSeek, parked or None), dry_run=dry_run,
        )  # fmt: skip


def _moves(plan: Sought) -> list[tuple[MessageQueue, int | None, int]]:
    """Return the queues with their old and new offsets, those that move before those that stay."""
    moves = [(queue, plan.old.get(queue), offset) for queue, offset in plan.new.items()]
    return sorted(moves, key=lambda move: (move[1] == move[2], move[0]))


def _chosen(broker: Broker, group: str, wanted: Sequence[str]) -> list[ParkedKey]:
    """Return the parked keys of these identities. Raises GroupError NOT_PARKED for one that is not parked any more."""
    there = parked_keys(broker, group)
    known = {unquote(identity(one)): one for one in there}
    found: list[ParkedKey] = []
    for name in dict.fromkeys(map(unquote, wanted)):
        # The topic's, the broker's and the queue's names have no slash; a key may have any.
        *_, kind, key = name.split("/", 4) if name.count("/") >= 4 else ("k", name)
        offset = whole_number(key) if kind == "o" else None
        keys, offsets = ([key], []) if offset is None else ([], [offset])
        found += chosen(group, [known[name]] if name in known else [], keys, offsets, False)
    return found


def _letter(text: str) -> int:
    """Return the number of a dead letter. Raises OptionError INVALID."""
    offset = whole_number(text)
    if offset is None:
        raise OptionError(OptionCondition.INVALID, f"{shown(text)} is not the number of a dead letter")
    return offset
