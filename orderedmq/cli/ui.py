"""``orderedmq ui``: a web page of a broker."""

from __future__ import annotations

import os
import sys
import webbrowser
from typing import Annotated, Final

import typer

from orderedmq.cli.serving import LEAST_TOKEN, METRICS_TOKEN, MetricsToken, check_token, require_packages
from orderedmq.cli.shell import Shell, command
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError

#: The environment variable of the token.
TOKEN: Final = "ORDEREDMQ_UI_TOKEN"
_PACKAGES: Final = ("jinja2", "starlette", "uvicorn", "prometheus_client")


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
            help=f"What a user of the page has to know, at least {LEAST_TOKEN} characters. Set the variable {TOKEN} instead: everyone on a "
            "machine sees arguments.",
            show_default=False,
            envvar=TOKEN,
            show_envvar=False,
        ),
    ] = None,
    metrics_token: MetricsToken = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the page in a browser.")] = False,
) -> None:
    """Serve a web page that shows groups, topics, messages, parked messages and dead letters. Ends with Ctrl-C.

    The page shows lag, owners and locks as they change, and finds messages by queue, offset, time and key. With --allow-changes it
    also replays dead letters, gives orders for parked keys and sets offsets. It is served on loopback unless --host says otherwise.
    Anyone who reaches it sees all messages, so another address needs a token. Metrics for Prometheus are at /metrics.
    """
    require_packages("ui", _PACKAGES, "ui")
    from orderedmq.ui.app import make_app
    from orderedmq.ui.guard import LOOPBACK, Rules
    from orderedmq.ui.server import listen, serve, url_of

    local = host.strip("[]").lower() in LOOPBACK
    if token is None and not local:
        raise OptionError(
            OptionCondition.MISSING,
            f"--host {host} lets other machines reach the page, and so all messages: set {TOKEN} to a secret of {LEAST_TOKEN} characters or "
            "more, or leave --host out and come through ssh -L",
        )
    if token is not None:
        check_token(token, TOKEN)
    if metrics_token is not None:
        check_token(metrics_token, METRICS_TOKEN)
    # Whoever comes under another name has no cookie for it.
    rules = Rules(
        hosts=LOOPBACK if token is None else None, token=token, scrape_token=metrics_token, allow_changes=allow_changes
    )
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
        serve(app, listening)


def _has_screen() -> bool:
    """Whether a browser would open in a window, and not in this terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
