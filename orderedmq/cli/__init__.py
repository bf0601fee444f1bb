"""The command ``orderedmq``: topics, messages, groups, locks and dead letters of a broker, the audit, and the demo."""

from __future__ import annotations

from typing import Annotated

import typer

import orderedmq
from orderedmq.cli import audit, demo, dlq, groups, locks, messages, produce, rocketmq, top, topics
from orderedmq.cli.shell import EXIT_CODES, JsonOption, NamesrvOption, PathOption, Shell, commands

app = commands(
    "Ordered message queues for Spark: look into a broker, fill it, check what a pipeline did.",
    name="orderedmq",
    epilog=EXIT_CODES,
)
app.add_typer(topics.app, name="topic")
app.add_typer(groups.app, name="group")
app.add_typer(locks.app, name="lock")
app.add_typer(dlq.app, name="dlq")
app.add_typer(rocketmq.app, name="rocketmq")
for module in (produce, messages, top, audit, demo):
    module.add_to(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"orderedmq {orderedmq.__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    path: PathOption = None,
    as_json: JsonOption = None,
    namesrv: NamesrvOption = None,
    version: Annotated[  # noqa: ARG001 (its callback does it)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    context.obj = Shell(path, as_json, namesrv)
