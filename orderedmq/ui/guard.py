"""The checks that every request has to pass, and the headers that every answer gets.

Rules: without a token the Host header must name this machine. Otherwise a page of another site could reach this server under the
other site's name (DNS rebinding). With a token, every request except those for the login, its style and the health needs the cookie that
the login sets. A request that changes something must come from a page of this server: its Origin is this host, and its form contains
the mark, a random value of this process. URLs never contain a secret.

A scraper of the metrics sends a separate token as ``Authorization: Bearer``. That token opens only the metrics, which name groups,
topics and queries but show no messages, because more people can read Prometheus's configuration than may see messages.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK: Final = frozenset(("localhost", "127.0.0.1", "::1"))
LOGIN: Final = "/login"
STATIC: Final = "/static/"
#: Prefix of the paths of live parts, which the script fetches. Such requests are not redirected, because a script cannot log in.
LIVE: Final = "/live/"
#: The path that Prometheus scrapes.
METRICS_PATH: Final = "/metrics"
#: The path that supervisors probe. It is open to everyone, because it says nothing about the broker but whether it can be read.
HEALTH_PATH: Final = "/healthz"
#: The name of the hidden form field with the mark.
MARK: Final = "mark"
_COOKIE: Final = "orderedmq-ui"
#: Maximum size of a form in bytes, enough for a seek of many thousand queues.
_MOST_FORM: Final = 4 << 20
#: Seconds in which a form has to arrive.
FORM_SECONDS: Final = 30.0
#: Seconds by which the answer to a wrong token is delayed. Only one token is checked at a time.
_WRONG_TOKEN: Final = 0.5
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # With no-referrer, the Origin header of the forms would be null.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True)
class Rules:
    """Who may use the server, and for what. ``hosts`` None: any host name is accepted. ``token`` None: no login is needed.

    ``scrape_token`` opens the metrics. Without it, whoever may see the pages may also see the metrics.
    """

    hosts: frozenset[str] | None = LOOPBACK
    token: str | None = field(default=None, repr=False)
    scrape_token: str | None = field(default=None, repr=False)
    allow_changes: bool = False
    mark: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    #: Held while a token is checked.
    login: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False, compare=False)

    @property
    def cookie(self) -> str:
        """The value of the login cookie, a hash from which the token cannot be derived."""
        return hmac.new((self.token or "").encode(), b"orderedmq ui", sha256).hexdigest()

    def knows(self, headers: Headers) -> bool:
        """Whether a request comes from a logged-in user, or no login is needed."""
        if self.token is None:
            return True
        cookie = Request({"type": "http", "headers": headers.raw}).cookies.get(_COOKIE, "")
        return hmac.compare_digest(cookie.encode(), self.cookie.encode())

    def may_scrape(self, headers: Headers) -> bool:
        """Whether a request may read the metrics."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        if self.scrape_token is not None and kind.lower() == "bearer":
            return hmac.compare_digest(token.strip().encode("latin-1"), self.scrape_token.encode())
        return (self.scrape_token is None or self.token is not None) and self.knows(headers)


class Guard:
    """The outermost application: refuses requests that `Rules` does not allow, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-cache" if path.startswith(STATIC) else "no-store")
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refusal(headers, scope["method"], path)
        if refusal is not None and path == METRICS_PATH and "authorization" in headers:
            async with self._rules.login:
                await asyncio.sleep(_WRONG_TOKEN)
        await (refusal or self.app)(scope, receive, answer)

    def _refusal(self, headers: Headers, method: str, path: str) -> Response | None:
        host = headers.get("host", "")
        if self._rules.hosts is not None and _name(host) not in self._rules.hosts:
            return PlainTextResponse(f"This page is not served under the name {_name(host)[:100]!r}.\n", 421)
        if method not in ("GET", "HEAD") and not _from_our_page(headers, host):
            return PlainTextResponse("Refused: the request comes from a page of another site.\n", 403)
        if path == METRICS_PATH:
            return None if self._rules.may_scrape(headers) else _no_scraper(self._rules)
        if path in (LOGIN, HEALTH_PATH) or path.startswith(STATIC) or self._rules.knows(headers):
            return None
        if method in ("GET", "HEAD") and not path.startswith(LIVE):
            return RedirectResponse(LOGIN, 303)
        return PlainTextResponse("Log in first.\n", 401)


def _no_scraper(rules: Rules) -> Response:
    how = (
        "send the token of the metrics" if rules.scrape_token is not None else "start the command with ORDEREDMQ_METRICS_TOKEN"
    )
    return PlainTextResponse(
        f"The metrics need a token: {how} (Authorization: Bearer ...).\n", 401, headers={"www-authenticate": "Bearer"}
    )


def _name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _place(origin: str) -> str:
    """Return the name and port in an Origin header."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _from_our_page(headers: Headers, host: str) -> bool:
    """Whether the browser says that a request comes from a page of this host. Other clients send no such headers, so they pass
    this check, but they also need the mark."""
    origin = headers.get("origin")
    if origin is not None:
        # The scheme is not compared, because a proxy in front of this server may add TLS.
        return _place(origin) == host.lower() != ""
    return headers.get("sec-fetch-site", "same-origin") == "same-origin"


class FormFields:
    """The fields of a form. A field may occur several times."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        self.fields = fields

    def all(self, name: str) -> list[str]:
        return [value for field, value in self.fields if field == name]

    def one(self, name: str) -> str:
        """Return a field's value without spaces around it, "" if it is missing."""
        return next(iter(self.all(name)), "").strip()


async def read_form(request: Request) -> FormFields:
    """Return a submitted form. Raises HTTPException if it is too large, does not arrive in time, or is malformed."""
    body = bytearray()
    try:
        async with asyncio.timeout(FORM_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > _MOST_FORM:
                    raise HTTPException(413, "the form is too large")
    except TimeoutError as error:
        raise HTTPException(408, "the form did not arrive in time") from error
    try:
        return FormFields(parse_qsl(body.decode("ascii"), keep_blank_values=True, strict_parsing=bool(body), errors="strict"))
    except ValueError as error:
        raise HTTPException(400, "the request is not a form of these pages") from error


async def read_change(request: Request, rules: Rules) -> FormFields:
    """Return the form of a request that changes something. Raises HTTPException 403 without --allow-changes or for a form without the mark."""
    if not rules.allow_changes:
        raise HTTPException(403, "this page is read-only. Start orderedmq ui with --allow-changes to change something here")
    form = await read_form(request)
    if not hmac.compare_digest(form.one(MARK).encode(), rules.mark.encode()):
        raise HTTPException(
            403, "orderedmq ui was restarted after it made this form. Go back, reload the page and repeat the change"
        )
    return form


async def log_in(request: Request, rules: Rules) -> Response | None:
    """Return the answer that sets the cookie, or None for a wrong token, after a delay."""
    # The input is not stripped, because a token has no blanks at its ends.
    token = next(iter((await read_form(request)).all("token")), "")
    async with rules.login:
        if rules.token is None or not hmac.compare_digest(token.encode(), rules.token.encode()):
            await asyncio.sleep(_WRONG_TOKEN)
            return None
    answer = RedirectResponse("/", 303)
    answer.set_cookie(_COOKIE, rules.cookie, httponly=True, samesite="strict", path="/")
    return answer
