"""``orderedmq ui`` and ``orderedmq exporter``: serve a web page that shows a broker, and its metrics for Prometheus."""

from __future__ import annotations

import contextlib
import os
import sys
import webbrowser
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from orderedmq.cli.shell import Shell, command, commands
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError, missing_package

app = commands("")

#: The minimum length of a token.
LEAST_TOKEN: Final = 16
#: The environment variable of the scraper's token.
METRICS_TOKEN: Final = "ORDEREDMQ_METRICS_TOKEN"
#: The option for the scraper's token.
MetricsToken = Annotated[
    str | None,
    typer.Option(
        help=f"The token that a scraper of /metrics has to send as Authorization: Bearer, at least {LEAST_TOKEN} characters. Set the variable "
        f"{METRICS_TOKEN} instead, because everyone on a machine can see arguments.",
        show_default=False,
        envvar=METRICS_TOKEN,
        show_envvar=False,
    ),
]
#: The environment variable of the page's token.
TOKEN: Final = "ORDEREDMQ_UI_TOKEN"
_PACKAGES: Final = ("jinja2", "starlette", "uvicorn", "prometheus_client")


@command(app, "ui")
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


@command(app, "exporter")
def exporter(
    shell: Shell,
    host: Annotated[str, typer.Option(help="Address to serve at. 0.0.0.0 means all addresses of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve at. 0 means any free port.")] = 9405,
    metrics_token: MetricsToken = None,
) -> None:
    """Serve metrics of all groups for Prometheus: lag in messages and seconds, locks, parked messages. Press Ctrl-C to end.

    The metrics are at /metrics. They name groups, topics and queries, but contain no messages. While the broker is unreachable,
    orderedmq_up is 0, and each scrape tries again. The guide to monitoring has alert rules and a dashboard.
    """
    require_packages("exporter", ("prometheus_client", "starlette", "uvicorn"), "exporter")
    from orderedmq.connections import reach
    from orderedmq.ui.guard import LOOPBACK, METRICS_PATH, Rules
    from orderedmq.ui.metrics import BrokerCollector, Reached, exporter_app
    from orderedmq.ui.server import listen, serve, url_of

    if metrics_token is not None:
        check_token(metrics_token, METRICS_TOKEN)
    local = host.strip("[]").lower() in LOOPBACK
    # Check the host name. Otherwise a website that is open in a browser here could read the metrics through a name that resolves to this
    # machine.
    rules = Rules(hosts=LOOPBACK if local and metrics_token is None else None, scrape_token=metrics_token)
    endpoint = shell.endpoint
    with listen(host, port) as listening, contextlib.closing(Reached(lambda: reach(endpoint))) as reached:
        collector = BrokerCollector(reached.watches, reached.close, shell.note)
        url = url_of(host, listening.getsockname()[1]).removesuffix("/") + METRICS_PATH
        shell.done({"url": url}, f"{url}  has the metrics of {shell.address} (press Ctrl-C to end)")
        sys.stdout.flush()
        serve(exporter_app(collector, rules), listening)


def require_packages(command: str, packages: Sequence[str], extra: str) -> None:
    """Raise OptionError MISSING if a package that the command needs is not installed. ``extra``: the extra that has the packages."""
    try:
        for name in packages:
            import_module(name)
    except ImportError as error:
        raise missing_package(f"orderedmq {command}", str(error.name), extra) from error


def check_token(token: str, variable: str) -> None:
    """Raise OptionError INVALID if a token is too easy to guess, or if a client could not send it unchanged."""
    if token != token.strip():
        why = "begins or ends with blanks or line ends" if token.strip() else "consists of blanks"
    elif not token.isprintable():
        why = "has characters that cannot be typed into a field"
    elif len(token) < LEAST_TOKEN:
        why = "is too short to be a secret"
    else:
        return
    raise OptionError(
        OptionCondition.INVALID,
        f"the token {why}. Set {variable} to {LEAST_TOKEN} characters or more, without blanks at its ends",
    )
