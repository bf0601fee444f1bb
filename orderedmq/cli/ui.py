"""``orderedmq ui``: serves a web page that shows a broker."""

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
    host: Annotated[str, typer.Option(help="Address to serve at. Any address but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve at. 0 means any free port.")] = 8686,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes",
            help="Let users of the page replay, retry, hold, drop and seek. Without this option, the page is read-only.",
        ),
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(
            help=f"The secret that a user of the page has to enter, at least {LEAST_TOKEN} characters. Set the variable {TOKEN} instead, "
            "because everyone on a machine can see arguments.",
            show_default=False,
            envvar=TOKEN,
            show_envvar=False,
        ),
    ] = None,
    metrics_token: MetricsToken = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the page in a browser.")] = False,
) -> None:
    """Serve a web page that shows groups, topics, messages, parked messages and dead letters. Press Ctrl-C to end.

    The page shows lag, owners and locks as they change, and finds messages by queue, offset, time and key. With --allow-changes it
    can also replay dead letters, retry, hold or drop parked keys, and set offsets. It is served on loopback unless --host says otherwise.
    Everyone who can reach the page sees all messages, so another address needs a token. Metrics for Prometheus are at /metrics.
    """
    require_packages("ui", _PACKAGES, "ui")
    from orderedmq.ui.app import make_app
    from orderedmq.ui.guard import LOOPBACK, Rules
    from orderedmq.ui.server import listen, serve, url_of

    local = host.strip("[]").lower() in LOOPBACK
    if token is None and not local:
        raise OptionError(
            OptionCondition.MISSING,
            f"--host {host} lets other machines reach the page and thereby all messages. Set {TOKEN} to a secret of {LEAST_TOKEN} characters "
            "or more, or leave --host out and connect through ssh -L",
        )
    if token is not None:
        check_token(token, TOKEN)
    if metrics_token is not None:
        check_token(metrics_token, METRICS_TOKEN)
    # With a token, any host name is allowed, because a browser sends the cookie only to the host name that set it.
    rules = Rules(
        hosts=LOOPBACK if token is None else None, token=token, scrape_token=metrics_token, allow_changes=allow_changes
    )
    with shell.broker() as broker, listen(host, port) as listening:
        # Fail here, before serving, if the broker does not exist.
        broker.log.topics()
        app = make_app(broker, shell.address, rules, shell.note)
        url = url_of(host, listening.getsockname()[1])
        may = "changes are allowed" if allow_changes else "read-only"
        shell.done({"url": url, "allow_changes": allow_changes}, f"{url}  shows {shell.address}, {may} (press Ctrl-C to end)")
        sys.stdout.flush()
        if not no_open and sys.stdout.isatty() and _has_screen():
            # The browser's connection waits in the socket's queue until the server answers.
            webbrowser.open(url)
        serve(app, listening)


def _has_screen() -> bool:
    """Return whether a browser would open in a window, and not in this terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
