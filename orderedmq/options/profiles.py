"""Reads profiles: named sets of options that name a broker and the connection to it, in a private TOML file.

The command selects a profile with ``--profile``. Option names are those of the source and the sink.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Final

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.options.declared import names_of
from orderedmq.options.endpoint import BrokerOptions
from orderedmq.options.values import shown
from orderedmq.secret_files import read_secret_file

#: The environment variable that replaces the file's default path.
FILE_VARIABLE: Final = "ORDEREDMQ_CONFIG"
_WHAT: Final = "the file of profiles"


def profiles_file() -> Path:
    """Return the path of the file of profiles. The file may not exist."""
    if named := os.environ.get(FILE_VARIABLE):
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder) / "orderedmq" / "config.toml"


def read_profile(name: str) -> dict[str, str]:
    """Return the options of a profile as texts, with their names in camelCase.

    Raises OptionError MISSING if the file or the profile does not exist; INVALID if other users may read the file, if it is not
    TOML, or if the profile contains anything except broker options. Errors show no value, because it may be a secret.
    """
    file = profiles_file()
    try:
        found = tomllib.loads(read_secret_file(str(file), _WHAT))
    except tomllib.TOMLDecodeError as error:
        raise OptionError(OptionCondition.INVALID, f"{_WHAT} {file} is not TOML: {error}") from None
    profile = found.get(name)
    if not isinstance(profile, dict):
        known = ", ".join(one for one, options in found.items() if isinstance(options, dict)) or "no profile"
        raise OptionError(
            OptionCondition.MISSING,
            f"{_WHAT} {file} has no profile {shown(name)}, only {known}. Write a table [{name}] with the options of the connection",
        )
    spelling = names_of(BrokerOptions)
    options: dict[str, str] = {}
    for given, value in profile.items():
        if given.lower() not in spelling:
            why, remedy = (
                f"has {shown(given)}, which is not an option of the connection",
                f"Use only {', '.join(spelling.values())}",
            )
        elif not isinstance(value, str | bool):
            why, remedy = "has a value that is neither a text nor true or false", f'Write {given} = "..."'
        else:
            options[spelling[given.lower()]] = value if isinstance(value, str) else str(value).lower()
            continue
        raise OptionError(OptionCondition.INVALID, f"profile {name} in {file} {why}. {remedy}")
    return options
