"""``orderedmq ui``: a web page of a broker."""

from __future__ import annotations

import os
import sys
import webbrowser
from importlib import import_module
from typing import Annotated, Final

import typer

from orderedmq.cli.shell import Shell, command
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError

#: The environment variable of the token, and its least length.
TOKEN: Final = "ORDEREDMQ_UI_TOKEN"
_LEAST_TOKEN: Final = 16
_PACKAGES: Final = ("jinja2", "starlette", "uvicorn")


def add_to(app: typer.Typer) -> None:
    command(app, "ui")(ui)


def ui(
    shell: Shell,
    host: Annotated[str, typer.Option(help="Address to serve at. Any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve at; 0: a free one.")] = 8686,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Let the page replay, retry, hold, drop and seek. Without it, it is read-only."),
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(
            help=f"What a user of the page has to know, at least {_LEAST_TOKEN} characters. Set the variable {TOKEN} instead: everyone on a "
            "machine sees arguments.",
            show_default=False,
            envvar=TOKEN,
            show_envvar=False,
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the page in a browser.")] = False,
) -> None:
    """Serve a web page that shows groups, topics, messages, parked messages and dead letters. Ends with Ctrl-C.

    The page shows lag, owners and locks as they change, and finds messages by queue, offset, time and key. With --allow-changes it
    also replays dead letters, gives orders for parked keys and sets offsets. It is served on loopback unless --host says otherwise.
    Anyone who reaches it sees all messages, so another address needs a token.
    """
    _require_packages()
    from orderedmq.ui.app import make_app
    from orderedmq.ui.guard import LOOPBACK, Rules
    from orderedmq.ui.server import listen, server, url_of

    local = host.strip("[]").lower() in LOOPBACK
    if token is None and not local:
        raise OptionError(
            OptionCondition.MISSING,
            f"--host {host} lets other machines reach the page, and so all messages: set {TOKEN} to a secret of {_LEAST_TOKEN} characters or "
            "more, or leave --host out and come through ssh -L",
        )
    if token is not None:
        _check_token(token)
    # Whoever comes under another name has no cookie for it.
    rules = Rules(hosts=LOOPBACK if token is None else None, token=token, allow_changes=allow_changes)
    with shell.broker() as broker, listen(host, port) as listening:
        # Fails here if there is no such broker.
        broker.log.topics()
        app = make_app(broker, shell.address, rules, shell.note)
        url = url_of(host, listening.getsockname()[1])
        may = "changes are allowed" if allow_changes else "read-only"
        shell.done({"url": url, "allow_changes": allow_changes}, f"{url}  shows {shell.address}, {may} (Ctrl-C ends it)")
        sys.stdout.flush()
        if not no_open and sys.stdout.isatty() and _has_screen():
            # It waits in the socket's queue until the server answers.
            webbrowser.open(url)
        try:
            server(app).run(sockets=[listening])
        except KeyboardInterrupt:
            # The usual end.
            return


def _check_token(token: str) -> None:
    """Raises OptionError INVALID if a token is no secret, or if a browser could not send it as it is."""
    if token != token.strip():
        why = "begins or ends with blanks or line ends" if token.strip() else "has nothing but blanks"
    elif not token.isprintable():
        why = "has characters that cannot be typed into a field"
    elif len(token) < _LEAST_TOKEN:
        why = "is too short to be a secret"
    else:
        return
    raise OptionError(
        OptionCondition.INVALID,
        f"the token {why}; set {TOKEN} to {_LEAST_TOKEN} characters or more, without blanks at its ends",
    )


def _require_packages() -> None:
    """Raises OptionError MISSING if the packages of the page are not installed."""
    try:
        for name in _PACKAGES:
            import_module(name)
    except ImportError as error:
        raise OptionError(
            OptionCondition.MISSING,
            f"orderedmq ui needs the package {error.name}: pip install 'orderedmq[ui]'; the other commands work without it",
        ) from error


def _has_screen() -> bool:
    """Whether a browser would open in a window, and not in this terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
