"""The message browser: finds messages by queue, offset, time and key, and shows a single message.

A search that has taken too long shows what it has found, which is complete up to a place where a later search resumes. (Near a time at which
a RocketMQ broker's clock went back, it may miss messages, because the place is found by a binary search.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from orderedmq.broker import Log, QueueBounds
from orderedmq.conditions import OffsetCondition
from orderedmq.errors import OffsetError, no_such_offset, no_such_queue
from orderedmq.model import MessageQueue, OffsetRange
from orderedmq.options.values import parse_timestamp, shown, whole_number
from orderedmq.schema import MESSAGE_SCHEMA
from orderedmq.tools.readable import body_fields, body_text, escaped
from orderedmq.tools.reader import PULL_ROWS, Arrival, Ranges, Row, Selection, batches, by_arrival, ranges, rows
from orderedmq.ui.pages import ROWS, number_of
from orderedmq.ui.site import MOST_BODY, Site, stored, topic_url

#: Seconds after which a search stops and shows the messages found so far.
PATIENCE: Final = 3.0
_ALL: Final = Selection(tuple(MESSAGE_SCHEMA.names))
#: The newest messages of all queues are shown together only if the topic has at most this many queues.
_TOGETHER: Final = 64


@dataclass(frozen=True)
class _Query:
    """The fields of the browser's form; None or "" if a field is empty."""

    queue: MessageQueue | None
    offset: int | None
    time: str
    key: str
    after: Arrival | None


class Browser:
    """The handlers of the browser's pages."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def messages(self, request: Request) -> Response:
        """Show messages: of one queue by offset, of all queues in the order of arrival, or of one key."""
        topic = request.path_params["topic"]
        log = self._site.broker.log
        queues = log.queues(topic)
        query = _query(request, topic, queues)
        names: dict[str, Any] = {
            "topic": topic,
            "queues": queues,
            "query": query,
            "earlier": None,
            "later": None,
            "note_of_search": "",
        }
        if query.queue is not None and not query.key:
            names |= _of_queue(log, query, query.queue)
        elif query.key or query.time or query.after is not None:
            names |= _searched(log, query, queues if query.queue is None else [query.queue])
        elif len(queues) <= _TOGETHER:
            names |= {
                "rows": _shown(log, ranges(log, topic), replace(_ALL, last=ROWS)),
                "what": f"The last messages of all queues, at most {ROWS}",
            }
        else:
            names |= {"rows": [], "what": f"{len(queues)} queues: choose a queue, a time or a key"}
        return self._site.page(request, "messages.html", title=f"Messages of {topic}", at="topics", **names)

    def message(self, request: Request) -> Response:
        """Show one message with all its fields."""
        row = self._row(request)
        queue, body = row["queue"], row["body"]
        text = body_text(body_fields(body[:MOST_BODY]))
        return self._site.page(
            request, "message.html", title=f"Message {row['queue_offset']} of {queue}", at="topics", row=row, body=text,
            size=len(body), cut=max(0, len(body) - MOST_BODY),
        )  # fmt: skip

    def body(self, request: Request) -> Response:
        """Return the whole body of one message as a file."""
        row = self._row(request)
        name = f"{row['queue_id']}-{row['queue_offset']}.bin"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(row["body"], headers=headers, media_type="application/octet-stream")

    def _row(self, request: Request) -> dict[str, Any]:
        """Return the message that the URL names."""
        topic, log = request.path_params["topic"], self._site.broker.log
        queues = log.queues(topic)
        query = _query(request, topic, queues)
        return message_at(log, query.queue or queues[0], query.offset or 0)


def _query(request: Request, topic: str, queues: Sequence[MessageQueue]) -> _Query:
    params = request.query_params
    after, number = number_of(request, "after"), number_of(request, "queue")
    broker = params.get("broker", "")
    chosen = None
    if params.get("of", ""):
        broker, _, text = params["of"].rpartition("/")
        number = whole_number(text)
        if number is None:
            raise no_such_queue(topic, shown(params["of"]))
    if number is not None:
        chosen = MessageQueue(topic, broker or queues[0].broker_name, number)
        if chosen not in queues:
            raise no_such_queue(topic, f"{chosen.broker_name}/{number}")
    place = None
    if after is not None:
        at = MessageQueue(topic, params.get("at_broker", ""), number_of(request, "at_queue") or 0)
        place = Arrival(after, at, number_of(request, "at_offset") or 0)
    return _Query(chosen, number_of(request, "offset"), params.get("time", "").strip(), _key(params), place)


def _key(params: Mapping[str, str]) -> str:
    """Return the key to search for. The visible field holds it as `escaped` text; ``exact`` holds the key itself, if they differ."""
    typed, exact = params.get("key", ""), unquote(params.get("exact", ""))
    return exact if escaped(exact) == typed else typed


def _since(text: str) -> int | None:
    """Return the time in a form field, in µs since 1970. Raises OptionError INVALID."""
    return parse_timestamp(text, "time") if text else None


def _shown(log: Log, spans: Ranges, chosen: Selection = _ALL) -> list[Row]:
    return [_with_queue(row) for batch in batches(log, spans, chosen) for row in rows(batch)]


def _with_queue(row: Row) -> Row:
    return {**row, "queue": MessageQueue(row["topic"], row["broker_name"], row["queue_id"])}


def message_at(log: Log, queue: MessageQueue, offset: int) -> Row:
    """Return one message. Raises OffsetError BEYOND_END or INVALID if the queue does not have it."""
    at = log.bounds([queue])[queue]
    if offset >= at.max_offset:
        raise no_such_offset(queue, at.max_offset, f"message {offset}")
    if offset < at.min_offset:
        raise OffsetError(OffsetCondition.INVALID, f"queue {queue} begins at {at.min_offset}: message {offset} was deleted")
    return _shown(log, {queue: OffsetRange(offset, offset + 1)})[0]


def _of_queue(log: Log, query: _Query, queue: MessageQueue) -> dict[str, Any]:
    at = log.bounds([queue])[queue]
    since = _since(query.time)
    if query.offset is not None:
        begin = query.offset
    else:
        begin = at.max_offset - ROWS if since is None else log.offset_at(queue, since)
    begin = min(max(begin, at.min_offset), at.max_offset)
    end = min(begin + ROWS, at.max_offset)
    url = {"broker": queue.broker_name, "queue": queue.queue_id}
    return {
        "rows": _shown(log, {queue: OffsetRange(begin, end)}),
        "what": f"Queue {queue.queue_id} has messages {at.min_offset:,} to {at.max_offset - 1:,}"
        if at.max_offset > at.min_offset
        else f"Queue {queue.queue_id} is empty",
        "earlier": topic_url(queue.topic, "/messages", **url, offset=max(at.min_offset, begin - ROWS))
        if begin > at.min_offset
        else None,
        "later": topic_url(queue.topic, "/messages", **url, offset=end) if end < at.max_offset else None,
    }


def _searched(log: Log, query: _Query, queues: Sequence[MessageQueue]) -> dict[str, Any]:
    until = time.monotonic() + PATIENCE
    since = query.after if query.after is not None else _since(query.time)
    matches, following = search(log, queues, query.key or None, since, ROWS, lambda: time.monotonic() < until)
    what = f"Messages of key {query.key!r}" if query.key else "Messages"
    where = f"queue {query.queue}" if query.queue else f"all {len(queues)} queues" if len(queues) > 1 else "the queue"
    return {
        "rows": matches,
        "what": f"{what} in {where}, in the order of arrival",
        "later": None if following is None else _later(query, following),
        "note_of_search": ""
        if following is None
        else f"Messages from {stored(following.stored)} UTC on were not searched yet.",
    }


def search(
    log: Log, queues: Sequence[MessageQueue], key: str | None, since: int | Arrival | None, most: int, go_on: Callable[[], bool]
) -> tuple[list[Row], Arrival | None]:
    """Return up to ``most`` messages of these queues in the order of their arrival, and where to resume (None at the end).

    ``key`` None: messages of all sharding keys. ``since``: a time in µs since 1970, or where an earlier search ended. ``go_on`` is called
    between two pulls: when it returns False, the search ends with the results that are complete so far.
    """
    spans = {queue: OffsetRange(_begin(log, queue, at, since), at.max_offset) for queue, at in log.bounds(list(queues)).items()}
    matches = list[Row]()
    for part in by_arrival(log, spans, replace(_ALL, key=key), most + 1 if key is None else PULL_ROWS):
        left = most - len(matches)
        messages = [_with_queue(row) for row in rows(part.rows.slice(0, left + 1))]
        matches += messages[:left]
        if len(messages) > left:
            following = messages[left]
            return matches, Arrival(int(part.stored[left]), following["queue"], following["queue_offset"])
        if part.next is None or not go_on():
            return matches, part.next
    return matches, None


def _begin(log: Log, queue: MessageQueue, at: QueueBounds, since: int | Arrival | None) -> int:
    """Return the offset of the first message of a queue that is not before ``since``."""
    if since is None:
        return at.min_offset
    if not isinstance(since, Arrival):
        return log.offset_at(queue, since)
    if queue == since.queue:
        return max(since.offset, at.min_offset)
    # Of several messages stored at the same time, those of a smaller queue come first.
    return log.offset_at(queue, since.stored + (queue < since.queue))


def _later(query: _Query, place: Arrival) -> str:
    queue = place.queue
    chosen = {} if query.queue is None else {"broker": query.queue.broker_name, "queue": query.queue.queue_id}
    where = {"after": place.stored, "at_broker": queue.broker_name, "at_queue": queue.queue_id, "at_offset": place.offset}
    return topic_url(queue.topic, "/messages", **chosen, key=query.key, **where)
