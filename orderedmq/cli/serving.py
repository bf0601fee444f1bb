"""Helpers for the commands that serve over HTTP: checks of tokens and of installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError, missing_package

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
