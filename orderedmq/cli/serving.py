"""What the commands share that serve over HTTP: tokens, and the packages that they need."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError

#: The least length of a token.
LEAST_TOKEN: Final = 16
#: The environment variable of the token of a scraper.
METRICS_TOKEN: Final = "ORDEREDMQ_METRICS_TOKEN"
#: The option of that token.
MetricsToken = Annotated[
    str | None,
    typer.Option(
        help=f"What a scraper of /metrics has to send as Authorization: Bearer, at least {LEAST_TOKEN} characters. Set the variable "
        f"{METRICS_TOKEN} instead: everyone on a machine sees arguments.",
        show_default=False,
        envvar=METRICS_TOKEN,
        show_envvar=False,
    ),
]


def require_packages(command: str, packages: Sequence[str], extra: str) -> None:
    """Raises OptionError MISSING if a package that the command needs is not installed."""
    try:
        for name in packages:
            import_module(name)
    except ImportError as error:
        raise OptionError(
            OptionCondition.MISSING,
            f"orderedmq {command} needs the package {error.name}: pip install 'orderedmq[{extra}]'; the other commands work without it",
        ) from error


def check_token(token: str, variable: str) -> None:
    """Raises OptionError INVALID if a token is no secret, or if a client could not send it as it is."""
    if token != token.strip():
        why = "begins or ends with blanks or line ends" if token.strip() else "has nothing but blanks"
    elif not token.isprintable():
        why = "has characters that cannot be typed into a field"
    elif len(token) < LEAST_TOKEN:
        why = "is too short to be a secret"
    else:
        return
    raise OptionError(
        OptionCondition.INVALID,
        f"the token {why}; set {variable} to {LEAST_TOKEN} characters or more, without blanks at its ends",
    )
