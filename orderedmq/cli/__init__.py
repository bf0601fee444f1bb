"""The command ``orderedmq``, which shows and changes the data of a broker, serves its web page, audits pipelines, and plays the demo.

Rule: the module of a command, with pyarrow and its other imports, is loaded only to run that command, to show its help or to
complete its options. ``--version``, ``--help`` and the completion of a command's name load no such module.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

import orderedmq
from orderedmq.cli.shell import (
    EXIT_CODES,
    ConnectionOption,
    JsonOption,
    NamespaceOption,
    NamesrvOption,
    PathOption,
    ProfileOption,
    Shell,
    commands,
    open_closed_streams,
)

#: The groups of commands, each with its module and help text.
GROUPS: Final = {
    "topic": ("topics", "Create, inspect, alter, trim and delete topics."),
    "group": ("groups", "Show the offsets and lag of consumer groups; seek, copy and delete."),
    "lock": ("locks", "Show the owners of queues; release locks."),
    "parked": (
        "parked",
        "List, retry and hold parked keys, which wait because one of their messages failed. Drop one message, make it a dead letter, or "
        "replace its body.",
    ),
    "dlq": ("dlq", "List and replay dead letters: messages whose retries all failed."),
    "rocketmq": ("rocketmq", "Run RocketMQ on this machine."),
    "spark": ("spark", "Make Spark start sooner."),
}
#: The other commands, each with its module and the first paragraph of its help text.
COMMANDS: Final = {
    "produce": ("produce", "Write each line of a file or of standard input as a message."),
    "peek": (
        "messages",
        "Show the first or last messages of a topic, or messages from an offset on. Messages of several queues are in the order of arrival.",
    ),
    "top": ("top", "Watch the queues of consumer groups: offset, lag, speed, owner. Press q or Ctrl-C to end."),
    "ui": (
        "ui",
        "Serve a web page that shows groups, topics, messages, parked messages and dead letters. Press Ctrl-C to end.",
    ),
    "exporter": (
        "ui",
        "Serve metrics of all groups for Prometheus: lag in messages and seconds, locks, parked messages. Press Ctrl-C to end.",
    ),
    "audit": (
        "audit",
        "Compare two topics, or a topic and a table, per sharding key. The exit code is 1 if anything is lost, duplicated or out of order.",
    ),
    "check": (
        "store",
        "Check a whole store of the embedded broker and list all damage. The exit code is 0 only if the store is sound.",
    ),
    "snapshot": ("store", "Copy a store of the embedded broker while it is in use."),
    "demo": (
        "demo",
        "Send a year of real flights through ordered queues, kill the job half-way, resume it, and audit the result.",
    ),
}


def load(name: str) -> Any:
    """Import the module of the command or group ``name``, and return the command."""
    module, _ = (GROUPS | COMMANDS)[name]
    group = typer.main.get_group(import_module(f"orderedmq.cli.{module}").app)
    return group if name in GROUPS else group.commands[name]


class _Lazy(TyperGroup):
    """A group that knows only the names and help texts of its commands until a command is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load(str(name)), rest


app = commands(
    "Ordered message queues for Spark: inspect a broker, write messages, check what a pipeline did.",
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
    version: Annotated[  # noqa: ARG001 (its callback uses it)
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    open_closed_streams()
    context.obj = Shell(path, as_json, namesrv, namespace, profile, option)
