"""The template environment: how values look in pages, and the URLs of pages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.tools.readable import body_fields, body_text, duration, escaped, moment, number, preview, short_moment, size
from orderedmq.ui import lag_history

HERE: Final = Path(__file__).parent
#: Maximum characters of a body, key or error in a table, and maximum bytes of a body on the page that shows one message.
PREVIEW: Final = 120
MOST_BODY: Final = 1 << 18


def environment(shared: Mapping[str, Any]) -> Environment:
    """Return the environment of all templates. Every template can use the names in ``shared``."""
    jinja = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(
        number=number,
        size=size,
        duration=duration,
        plain=escaped,
        quoted=lambda text: quote(text, safe=""),
        preview=lambda text: preview(text, PREVIEW),
        stored=stored,
        clock=clock,
        queue=queue_name,
        body=lambda body: preview(body_text(body_fields(body[: 2 * PREVIEW])), PREVIEW) if body else "",
        small_chart=lag_history.small,
        large_chart=lag_history.large,
    )
    jinja.globals.update(
        shared, topic_url=topic_url, group_url=group_url, messages_url=messages_url, until=until, now=time.time
    )
    return jinja


def _finalize(value: Any) -> Any:
    """Return the text that a template prints for a value. Templates pass every text to it, so no page contains control characters.

    Markup is built from texts that were passed to this function. A value that a form must send back unchanged is encoded first, because
    escaping would change it: see the filter ``quoted`` and `pages.identity`.
    """
    return value if isinstance(value, Markup | int | float) else escaped(str(value))


def stored(micros: int | None) -> str:
    """Return a broker's time (µs since 1970) as text in UTC, to the second."""
    return "-" if micros is None else short_moment(moment(micros) or "")


def clock(seconds: float) -> str:
    """Return the time of day in UTC at a moment that is given in seconds since 1970."""
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def queue_name(queue: MessageQueue) -> str:
    """Return the short name of a queue. It leaves out the embedded broker's name, which is always the same."""
    return f"{queue.topic}/{queue.queue_id}" if queue.broker_name == EMBEDDED_BROKER else str(queue)


def until(when: float, seconds: float) -> Markup:
    """Return an element with the time left of a period of ``seconds`` that began at ``when``. The script counts the time down."""
    return Markup('<time data-until="{}">{}</time>').format(round((when + seconds) * 1000), duration(seconds))


def topic_url(topic: str, what: str = "", **query: Any) -> str:
    return _url("/topics/", topic, what, query)


def group_url(group: str, what: str = "", **query: Any) -> str:
    return _url("/groups/", group, what, query)


def messages_url(queue: MessageQueue, offset: int | None = None) -> str:
    """Return the URL of the page that shows a queue's messages from an offset on."""
    at = {} if offset is None else {"offset": offset}
    return topic_url(queue.topic, "/messages", broker=queue.broker_name, queue=queue.queue_id, **at)


def _url(room: str, name: str, what: str, query: Mapping[str, Any]) -> str:
    given = {field: value for field, value in query.items() if value not in (None, "")}
    return f"{room}{quote(name, safe='')}{what}{'?' if given else ''}{urlencode(given)}"
