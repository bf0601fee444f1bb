"""The state that all pages share: the broker, the rules, the watches, the templates, and notes about changes just made."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from orderedmq.broker import Broker
from orderedmq.model import EMBEDDED_BROKER, MessageQueue
from orderedmq.tools.readable import body_fields, body_text, duration, escaped, moment, number, preview, short_moment, size
from orderedmq.ui import lag_history
from orderedmq.ui.guard import MARK, Rules
from orderedmq.ui.shared_look import SharedLook
from orderedmq.ui.watches import Watches

T = TypeVar("T")

#: Maximum number of renderings and maximum number of notes that are kept in memory.
_MOST: Final = 200


@dataclass(frozen=True)
class Rendering:
    """The rendered live part of a page. ``tag`` changes with the text.

    ``next``: seconds until a newer rendering may exist. ``age``: seconds for which the broker has not confirmed this one.
    """

    text: str
    tag: str
    next: float
    age: float


class Site:
    """The shared state of one server. ``say`` writes a line about each change to the command's standard error."""

    def __init__(self, broker: Broker, address: str, rules: Rules, say: Callable[[str], None]) -> None:
        self.broker = broker
        self.rules = rules
        self.watches = Watches(broker)
        self._say = say
        self._templates: Environment = environment(
            {
                "address": address,
                "allow_changes": rules.allow_changes,
                "mark_field": Markup('<input type="hidden" name="{}" value="{}">').format(MARK, rules.mark),
            }
        )
        self._guard = Lock()
        self._rendered: OrderedDict[tuple[Any, ...], tuple[object, Rendering]] = OrderedDict()
        self._numbers = itertools.count(1)
        self._notes: OrderedDict[str, str] = OrderedDict()

    def live(self, look: SharedLook[T], template: str, view: Callable[[T], dict[str, Any]], *key: Any) -> Rendering:
        """Return the result of ``look``, rendered once for all viewers of the same ``key``. Raises the errors of `SharedLook.get`."""
        state = look.get()
        place = (template, *key)
        with self._guard:
            rendered = self._rendered.get(place)
        if rendered is not None and rendered[0] is state:
            return replace(rendered[1], next=look.due_in, age=look.age)
        spent = time.thread_time()
        text = self._templates.get_template(template).render(view(state))
        tag = f'"{blake2b(text.encode(), digest_size=12).hexdigest()}"'
        look.spend(time.thread_time() - spent)
        rendering = Rendering(text, tag, look.due_in, look.age)
        with self._guard:
            self._rendered[place] = state, rendering
            self._rendered.move_to_end(place)
            while len(self._rendered) > _MOST:
                self._rendered.popitem(last=False)
        return rendering

    def live_page(self, request: Request, title: str, rendering: Rendering, **names: Any) -> Response:
        """Return the page around a live part. The script fetches this part again from the same address below /live."""
        query = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "done"])
        live = f"/live{quote(request.scope['path'], safe='/')}{'?' if query else ''}{query}"
        return self.page(request, "live.html", title=title, part=Markup(rendering.text), live=live, tag=rendering.tag, **names)

    def page(self, request: Request, template: str, status: int = 200, **names: Any) -> Response:
        """Return a page. A note about a change that was just made is shown once."""
        with self._guard:
            note = self._notes.pop(request.query_params.get("done", ""), None)
        return HTMLResponse(
            self._templates.get_template(template).render(note=note, path=request.scope["path"], **names), status
        )

    def tell(self, text: str) -> None:
        """Report a change to the person who started the command."""
        self._say(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}")

    def done(self, text: str, url: str) -> Response:
        """Redirect to the page ``url``, which shows ``text`` as a note."""
        with self._guard:
            number = str(next(self._numbers))
            self._notes[number] = text
            while len(self._notes) > _MOST:
                self._notes.popitem(last=False)
        return RedirectResponse(f"{url}{'&' if '?' in url else '?'}done={number}", 303)


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


def stored(time: int | datetime | None) -> str:
    """Return a broker's time (aware, or µs since 1970) as text in UTC, to the second."""
    return "-" if time is None else short_moment(moment(time) or "")


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
    values = {field: value for field, value in query.items() if value not in (None, "")}
    return f"{room}{quote(name, safe='')}{what}{'?' if values else ''}{urlencode(values)}"
