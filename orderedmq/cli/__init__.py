"""The command ``orderedmq``: topics, messages, groups, locks, parked messages and dead letters of a broker, its web page, audit, demo.

Rule: a command's module, with pyarrow and its other imports, is loaded only for that command, its own help or its own
completion. ``--version``, ``--help`` and the completion of a command's name load no command's module.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

import orderedmq
from orderedmq.cli.shared_options import ConnectionOption, JsonOption, NamespaceOption, NamesrvOption, PathOption, ProfileOption
from orderedmq.cli.shell import EXIT_CODES, Shell, commands

#: Groups of commands: module and help text.
GROUPS: Final = {
    "topic": ("topics", "Create, inspect, alter, trim and delete topics."),
    "group": ("groups", "Show the offsets and lag of consumer groups; seek, copy and delete."),
    "lock": ("locks", "Show the owners of queues; release locks."),
    "parked": ("parked", "Parked messages: keys that wait because a message of them failed. List, retry, drop and hold."),
    "dlq": ("dlq", "Dead letters: messages that a listener gave up. List and replay."),
    "rocketmq": ("rocketmq", "Run RocketMQ on this machine."),
    "spark": ("spark", "Let Spark start sooner."),
}
#: The other commands: module and first paragraph of the help text.
COMMANDS: Final = {
    "produce": ("produce", "Write a message per line of a file or of standard input: the line is the body."),
    "peek": (
        "messages",
        "Show the first or last messages of a topic, or those from an offset on. Several queues: in the order of arrival.",
    ),
    "top": ("top", "Watch the queues of consumer groups: offset, lag, speed, owner. Ends with q or Ctrl-C."),
    "ui": (
        "ui",
        "Serve a web page that shows groups, topics, messages, parked messages and dead letters. Ends with Ctrl-C.",
    ),
    "exporter": (
        "exporter",
        "Serve metrics of all groups for Prometheus: lag in messages and seconds, locks, parked messages. Ends with Ctrl-C.",
    ),
    "audit": (
        "audit",
        "Compare two topics, or a topic and a table, per sharding key. Exit code 1 if anything is lost, duplicated or out of order.",
    ),
    "check": (
        "check",
        "Check a whole store of the embedded broker and list all damage. Exit code 0 only if it is sound.",
    ),
    "snapshot": ("snapshot", "Copy a store of the embedded broker while it is in use."),
    "demo": (
        "demo",
        "Play a year of real flights through ordered queues, kill the job half-way, resume it, and audit the result.",
    ),
}


def load(name: str) -> Any:
    """Import the module of the command ``name`` and return the command."""
    if name in GROUPS:
        return typer.main.get_group(import_module(f"orderedmq.cli.{GROUPS[name][0]}").app)
    app = commands("")
    import_module(f"orderedmq.cli.{COMMANDS[name][0]}").add_to(app)
    return typer.main.get_command(app)


class _Lazy(TyperGroup):
    """A group that has only the names and help texts of its commands until one is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and load(str(name)), rest


app = commands(
    "Ordered message queues for Spark: look into a broker, fill it, check what a pipeline did.",
    name="orderedmq",
    epilog=EXIT_CODES,
    cls=_Lazy,
    add_completion=True,
)


def _not_loaded() -> None:
    raise AssertionError("a command is loaded before it is called")


for _name, (_, _help) in (COMMANDS | GROUPS).items():
    app.command(_name, help=_help)(_not_loaded)


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
    namespace: NamespaceOption = None,
    profile: ProfileOption = None,
    option: ConnectionOption = None,
    version: Annotated[  # noqa: ARG001 (its callback does it)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    context.obj = Shell(path, as_json, namesrv, namespace, profile, option)
