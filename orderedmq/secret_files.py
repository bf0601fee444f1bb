"""Reads files that may have secrets: an account's credentials and the command's profiles. Refuses secrets that every user may read."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from typing import Final

from orderedmq.conditions import OptionCondition
from orderedmq.endpoint import Credentials
from orderedmq.errors import OptionError

_FIELDS: Final = {"accessKey": "access_key", "secretKey": "secret_key", "securityToken": "security_token"}
_EXAMPLE: Final = '{"accessKey": "...", "secretKey": "...", "securityToken": "..."}'


def read_secret_file(path: str, what: str, has_secrets: Callable[[str], bool] = lambda _: True) -> str:
    """Return the text of a file that only its owner and the owner's group may read and write.

    ``what`` names the file in errors: "the credentials file". Every user may read, but not write, a text without secrets.
    Raises OptionError MISSING or INVALID.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read()
            if mode & stat.S_IWOTH or (mode & stat.S_IROTH and has_secrets(text)):
                raise OptionError(
                    OptionCondition.INVALID,
                    f"{what} {path} may be read or written by every user of this machine. Run chmod 600 {path}, or in "
                    "Kubernetes set defaultMode: 0440 for the volume of the secret",
                )
            return text
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OptionError(
            OptionCondition.MISSING, f"{what} {path} cannot be read on this machine: {why}. Check the path and its permissions"
        ) from None


def read_credentials(path: str) -> Credentials:
    """Return the account in a credentials file: a JSON object with accessKey, secretKey and, for a temporary account, securityToken.

    Raises OptionError MISSING or INVALID, whose messages never show the content of the file.
    """
    what = "the credentials file"
    text = read_secret_file(path, what)
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    required = ("accessKey", "secretKey")
    if (
        not isinstance(fields, dict)
        or not fields.keys() >= set(required)
        or not fields.keys() <= _FIELDS.keys()
        or not all(isinstance(value, str) and value for value in fields.values())
    ):
        raise OptionError(
            OptionCondition.INVALID, f"{what} {path} does not have the form {_EXAMPLE}, where securityToken is optional"
        )
    return Credentials(**{_FIELDS[name]: value for name, value in fields.items()})
