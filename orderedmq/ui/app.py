"""The application: which handler answers each address, and how errors are shown."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from orderedmq.broker import Broker
from orderedmq.conditions import GroupCondition, TopicCondition
from orderedmq.errors import Kind, OrderedMQError, kind_of
from orderedmq.tools.readable import escaped
from orderedmq.ui.guard import HEALTH_PATH, LIVE, LOGIN, METRICS_PATH, Guard, Rules, log_in
from orderedmq.ui.messages import Browser
from orderedmq.ui.metrics import BrokerCollector, Metrics
from orderedmq.ui.pages import Pages
from orderedmq.ui.repairs import Repairs
from orderedmq.ui.site import HERE, Site

#: A wrong request ("usage") gets the same status as a request that was refused.
_STATUS: Final[dict[Kind, HTTPStatus]] = {
    "usage": HTTPStatus.CONFLICT,
    "missing": HTTPStatus.NOT_FOUND,
    "refused": HTTPStatus.CONFLICT,
}


def make_app(broker: Broker, address: str, rules: Rules, say: Callable[[str], None] = lambda _: None) -> ASGIApp:
    """Return the application for a broker. ``address``: the broker's address as pages show it. ``say`` gets a line for each change."""
    site = Site(broker, address, rules, say)
    pages, browser, repairs = Pages(site), Browser(site), Repairs(site)
    metrics = Metrics(BrokerCollector(lambda: site.watches))
    watched = {
        "/": pages.groups,
        "/groups/{group}": pages.group,
        "/groups/{group}/parked": pages.parked,
        "/topics": pages.topics,
        "/topics/{topic}": pages.topic,
    }

    async def login(request: Request) -> Response:
        if rules.token is None:
            return RedirectResponse("/", 303)
        if request.method != "POST":
            return site.page(request, "login.html", title="Log in", at="", wrong=False)
        return await log_in(request, rules) or site.page(request, "login.html", 403, title="Log in", at="", wrong=True)

    def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, OrderedMQError):
            status: int = _status(error)
            text, condition = error.message, error.condition
        else:
            assert isinstance(error, HTTPException)
            status, text, condition = error.status_code, error.detail, ""
        if request.scope["path"].startswith(LIVE):
            return PlainTextResponse(escaped(text), status)
        return site.page(request, "error.html", status, title=HTTPStatus(status).phrase, at="", text=text, condition=condition)

    app = Starlette(
        routes=[
            *(Route(path, pages.page(part)) for path, part in watched.items()),
            *(Route(f"/live{path}", pages.live(part)) for path, part in watched.items()),
            Route("/topics/{topic}/messages", browser.messages),
            Route("/topics/{topic}/message", browser.message),
            Route("/topics/{topic}/body", browser.body),
            Route("/groups/{group}/dead", repairs.letters),
            Route("/groups/{group}/seek", repairs.plan_seek),
            Route("/groups/{group}/copy", repairs.plan_copy),
            Route("/groups/{group}/dead/replay", repairs.change(repairs.replay), methods=["POST"]),
            Route("/groups/{group}/parked/order", repairs.change(repairs.command), methods=["POST"]),
            Route("/groups/{group}/seek", repairs.change(repairs.set_offsets), methods=["POST"]),
            Route("/groups/{group}/copy", repairs.change(repairs.copy_offsets), methods=["POST"]),
            Route(METRICS_PATH, metrics.page),
            Route(HEALTH_PATH, metrics.health),
            Route(LOGIN, login, methods=["GET", "POST"]),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ],
        exception_handlers={OrderedMQError: failed, HTTPException: failed},
    )
    return Guard(app, rules)


def _status(error: OrderedMQError) -> HTTPStatus:
    if error.retriable:
        return HTTPStatus.SERVICE_UNAVAILABLE
    # A URL may contain any text. If it is not a valid name, nothing of this name exists.
    if error.sub in (TopicCondition.BAD_NAME, GroupCondition.BAD_NAME):
        return HTTPStatus.NOT_FOUND
    return _STATUS[kind_of(error)]
