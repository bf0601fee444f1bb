"""The options that every command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from orderedmq.errors import ACCOUNT
from orderedmq.options.declared import DEFAULT_DIRECTORY

PATH_HELP: Final = f"Directory of the embedded broker (default: {DEFAULT_DIRECTORY})."


def path_option(text: str) -> Any:
    return typer.Option("--path", help=text, show_default=False, metavar="DIR")


PathOption = Annotated[Path | None, path_option(PATH_HELP)]
NamesrvOption = Annotated[
    str | None,
    typer.Option(
        "--namesrv",
        help="Nameservers of a RocketMQ cluster, host:port;host:port, in place of --path; an account is read from the variables "
        f"{' and '.join(list(ACCOUNT.values())[:2])}.",
        show_default=False,
        metavar="ADDR",
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", help="With --namesrv: the namespace of topics and groups.", show_default=False, metavar="NAME"),
]
JsonOption = Annotated[
    bool | None,
    typer.Option(
        "--json/--no-json", help="One JSON object per line, or tables (default: tables on a terminal).", show_default=False
    ),
]
