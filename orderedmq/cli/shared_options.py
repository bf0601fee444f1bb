"""The options that all commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from orderedmq.options.declared import DEFAULT_DIRECTORY
from orderedmq.options.profiles import FILE_VARIABLE

PATH_HELP: Final = f"Directory of the embedded broker (default: {DEFAULT_DIRECTORY})."


def path_option(text: str) -> Any:
    return typer.Option("--path", help=text, show_default=False, metavar="DIR")


PathOption = Annotated[Path | None, path_option(PATH_HELP)]
NamesrvOption = Annotated[
    str | None,
    typer.Option(
        "--namesrv",
        help="Nameservers of a RocketMQ cluster, host:port;host:port, instead of --path.",
        show_default=False,
        metavar="ADDR",
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", help="With --namesrv: the namespace of topics and groups.", show_default=False, metavar="NAME"),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help=f"Take the options of broker, account and TLS from this table of ~/.config/orderedmq/config.toml (or of the file "
        f"in {FILE_VARIABLE}).",
        show_default=False,
        metavar="NAME",
        envvar="ORDEREDMQ_PROFILE",
        show_envvar=False,
    ),
]
ConnectionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        help="A connection option with the same name as in Spark, such as useTLS=true or credentialsFile=FILE. May be repeated. Secrets belong "
        "in a profile, a credentials file or the environment.",
        show_default=False,
        metavar="NAME=VALUE",
    ),
]
JsonOption = Annotated[
    bool | None,
    typer.Option(
        "--json/--no-json",
        help="Print one JSON object per line, or tables (default: tables on a terminal, else JSON).",
        show_default=False,
    ),
]
