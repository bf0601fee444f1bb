"""The live pages: groups, one group, its parked keys, topics, one topic. Each page has a live part, which the script refreshes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from orderedmq.broker import QueueInfo, TopicInfo
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.model import RESERVED_PREFIXES, RETRY_PREFIX
from orderedmq.options.values import shown, whole_number
from orderedmq.tools.group_state import short_names
from orderedmq.tools.parked import ParkedKey
from orderedmq.ui.lag_history import LagHistory
from orderedmq.ui.site import Rendering, Site
from orderedmq.ui.watches import GroupNow, ParkedNow, QueueNow, TopicNow

#: Maximum rows in a table of queues or keys. If a group has more queues, the table shows those with the greatest lag.
ROWS: Final = 50
#: Maximum number of queues that a line about a hand-over names.
_NAMED: Final = 4


class Pages:
    """The handlers of live pages. ``part`` renders the live part; the same address below /live returns only this part."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def page(self, part: Callable[[Request], tuple[Rendering, dict[str, Any]]]) -> Callable[[Request], Response]:
        def handle(request: Request) -> Response:
            rendering, names = part(request)
            return self._site.live_page(request, rendering=rendering, **names)

        return handle

    @staticmethod
    def live(part: Callable[[Request], tuple[Rendering, dict[str, Any]]]) -> Callable[[Request], Response]:
        def handle(request: Request) -> Response:
            rendering, _ = part(request)
            headers = {
                "etag": rendering.tag,
                "x-next": str(round(rendering.next * 1000)),
                "x-now": str(round(time.time() * 1000)),
                "x-age": str(round(rendering.age * 1000)),
            }
            if request.headers.get("if-none-match") == rendering.tag:
                return Response(status_code=304, headers=headers)
            return HTMLResponse(rendering.text, headers=headers)

        return handle

    # -- groups

    def groups(self, _: Request) -> tuple[Rendering, dict[str, Any]]:
        return self._site.live(self._site.watches.groups(), "groups.html", _of_groups), {"title": "Groups", "at": "groups"}

    def group(self, request: Request) -> tuple[Rendering, dict[str, Any]]:
        name, first = request.path_params["group"], number_of(request, "first")
        look, lags = self._site.watches.group(name)
        rendering = self._site.live(look, "group.html", lambda now: _of_group(now, lags, first), name, first)
        return rendering, {"title": name, "at": "groups"}

    def parked(self, request: Request) -> tuple[Rendering, dict[str, Any]]:
        name, first = request.path_params["group"], number_of(request, "first") or 0
        look = self._site.watches.parked(name)
        rendering = self._site.live(look, "parked.html", lambda now: _of_parked(name, now, first), name, first)
        return rendering, {"title": f"Parked in {name}", "at": "groups"}

    # -- topics

    def topics(self, _: Request) -> tuple[Rendering, dict[str, Any]]:
        return self._site.live(self._site.watches.topics(), "topics.html", _of_topics), {"title": "Topics", "at": "topics"}

    def topic(self, request: Request) -> tuple[Rendering, dict[str, Any]]:
        name, first = request.path_params["topic"], number_of(request, "first") or 0
        look = self._site.watches.topic(name)
        return self._site.live(look, "topic.html", lambda now: _of_topic(now, first), name, first), {
            "title": name,
            "at": "topics",
        }


def number_of(request: Request, name: str) -> int | None:
    """Return a number from the URL's query, or None if it has no such parameter. Raises OptionError INVALID if it is not a number."""
    text = request.query_params.get(name, "").strip()
    if not text:
        return None
    number = whole_number(text)
    if number is None:
        raise OptionError(OptionCondition.INVALID, f"{name} is {shown(text)}, which is not a whole number")
    return number


def _of_groups(groups: Sequence[GroupNow]) -> dict[str, Any]:
    return {"groups": groups, "most": max((group.lag for group in groups), default=0)}


def _of_group(now: GroupNow, lags: LagHistory, first: int | None) -> dict[str, Any]:
    queues = _shown(now.queues, first)
    return {
        "group": now,
        "names": short_names(now.names),
        "queues": queues,
        "history": {queue.queue: lags.of(now.when, queue.queue) for queue in queues},
        "total": lags.total(now.when),
        "first": first,
        "rows": ROWS,
        "with_parked": any(queue.lot is not None for queue in now.queues),
        "named": _NAMED,
        "most": max((queue.state.lag for queue in now.queues), default=0),
    }


def _shown(queues: Sequence[QueueNow], first: int | None) -> Sequence[QueueNow]:
    """Return one page of queues, starting at ``first``. If that is None, return at most `ROWS` queues: those with the greatest lag."""
    if first is not None:
        return queues[first : first + ROWS]
    if len(queues) <= ROWS:
        return queues
    behind = sorted(range(len(queues)), key=lambda place: (-queues[place].state.lag, place))[:ROWS]
    return [queues[place] for place in sorted(behind)]


def _of_parked(group: str, now: ParkedNow, first: int) -> dict[str, Any]:
    keys = now.keys[first : first + ROWS]
    return {"group": group, "now": now, "keys": [(identity(key), key) for key in keys], "first": first, "rows": ROWS}


def identity(key: ParkedKey) -> str:
    """Return a text that identifies a parked key: its queue and the key, or for a message that is parked alone, the offset.

    The text is a value in a form and must come back unchanged. Pages escape invisible characters, so the key is percent-encoded.
    """
    alone = key.key is None or key.ticket.alone
    return f"{key.queue}/{'o' if alone else 'k'}/{key.offset if alone else quote(key.key or '', safe='')}"


def _of_topics(topics: Sequence[TopicNow]) -> dict[str, Any]:
    own = [topic for topic in topics if not topic.topic.name.startswith(RESERVED_PREFIXES)]
    # Every RocketMQ group has a retry topic, and most of these topics are empty.
    others = [
        topic
        for topic in topics
        if topic.topic.name.startswith(RESERVED_PREFIXES) and (topic.messages or not topic.topic.name.startswith(RETRY_PREFIX))
    ]
    return {"topics": own, "others": others, "most": max((topic.messages for topic in topics), default=0)}


def _of_topic(now: tuple[float, TopicInfo, list[QueueInfo]], first: int) -> dict[str, Any]:
    when, topic, details = now
    oldest = min((queue.first_timestamp for queue in details if queue.first_timestamp is not None), default=None)
    return {
        "topic": topic,
        "when": when,
        "queues": details[first : first + ROWS],
        "count": len(details),
        "first": first,
        "rows": ROWS,
        "messages": sum(queue.bounds.max_offset - queue.bounds.min_offset for queue in details),
        "stored_bytes": sum(queue.stored_bytes for queue in details),
        "oldest": oldest,
        "most": max((queue.bounds.max_offset - queue.bounds.min_offset for queue in details), default=0),
    }
