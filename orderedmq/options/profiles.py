"""Profiles: named sets of the options that say which broker is meant and how to connect to it, in a private TOML file.

The command takes them with ``--profile``. Option names are those of the source and the sink.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Final

from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError, Remedy
from orderedmq.options.declared import BROKER_OPTIONS
from orderedmq.options.values import shown
from orderedmq.secret_files import read_secret_file

#: The environment variable that names another file.
FILE_VARIABLE: Final = "ORDEREDMQ_CONFIG"
_WHAT: Final = "the file of profiles"


def profiles_file() -> Path:
    """Return the path of the file of profiles, which may not exist."""
    if named := os.environ.get(FILE_VARIABLE):
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder) / "orderedmq" / "config.toml"


def read_profile(name: str) -> dict[str, str]:
    """Return the options of a profile as texts, with their names in the usual spelling.

    Raises OptionError MISSING without the file or the profile, INVALID for a file that other users may read, that is not TOML, or whose
    profile has anything but options of a broker. No value is shown, since it may be a secret.
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
            f"{_WHAT} {file} has no profile {shown(name)}, only {known}; write a table [{name}] with the options of the connection",
        )
    spelling = {option.name.lower(): option.name for option in BROKER_OPTIONS}
    options: dict[str, str] = {}
    for given, value in profile.items():
        if given.lower() not in spelling:
            why, remedy = (
                f"has {shown(given)}, which does not say how to connect",
                f"a profile may have {', '.join(spelling.values())}",
            )
        elif not isinstance(value, str | bool):
            why, remedy = "has a value that is neither a text nor true or false", f'write {given} = "..."'
        else:
            options[spelling[given.lower()]] = value if isinstance(value, str) else str(value).lower()
            continue
        # The names are those of the file in both wordings.
        raise OptionError(OptionCondition.INVALID, f"profile {name} in {file} {why}", Remedy(remedy, remedy))
    return options
