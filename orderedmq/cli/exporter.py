"""``orderedmq exporter``: serves metrics of a broker for Prometheus."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from orderedmq.cli.serving import METRICS_TOKEN, MetricsToken, check_token, require_packages
from orderedmq.cli.shell import Shell, command


def add_to(app: typer.Typer) -> None:
    command(app, "exporter")(exporter)


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
