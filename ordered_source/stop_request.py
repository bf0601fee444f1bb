"""An application's requests to stop a query between two micro-batches, for the source's process on the same machine.

A request is a file in a folder that only this user can write, named after the query's owner id. The application writes the file. The
source looks for it at each boundary, gives its queues back, and answers by writing into it. Spark offers no other way for an application
to reach its source.

Rules: a source ignores a file that was there before it started, because an application that is killed does not remove its request. It
compares files, not times, because the clock may be set. A file is replaced in one step, so that no process reads half of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from orderedmq.ownership.offsets import Checkpoint

_ANSWER: Final = {"given_back": True}


class StopRequest:
    """The request to stop the query ``owner_id``. The application and the source each have a separate object for it."""

    def __init__(self, owner_id: str) -> None:
        # This package creates owner ids, but reads them from a checkpoint or a query's progress, so they cannot be trusted in a path.
        self._name = f"stop-{owner_id.encode().hex()[:128]}.json"
        self._written = False
        self._before = self._file()

    @property
    def _path(self) -> Path:
        return _folder() / self._name

    # -- the application's side

    def write(self, processed: Mapping[str, Any] | None = None) -> None:
        """Ask the source to plan no further micro-batch. ``processed``: the source's offset up to which Spark has committed everything.

        With ``processed``, the source can give its queues back when it is stopped, without another call of ``latestOffset``. An answer to
        this request is kept. An answer to an earlier request, whose application was killed, is overwritten. Raises OSError.
        """
        if not (self._written and self.answered):
            _replace(self._path, {"processed": processed})
        self._written = True

    @property
    def answered(self) -> bool:
        """Whether the source has given its queues back."""
        return self._read() == _ANSWER

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    # -- the source's side

    @property
    def is_made(self) -> bool:
        """Whether the query was asked to stop since this object was created."""
        return self._file() not in (None, self._before)

    @property
    def processed(self) -> Checkpoint | None:
        """The offset up to which Spark has committed everything, if the request says so."""
        offset = (self._read() or {}).get("processed")
        return None if offset is None else Checkpoint.from_spark(offset)

    def answer(self) -> None:
        """Tell the application that the queues are given back. Without an answer, the application waits until its timeout."""
        with contextlib.suppress(OSError):
            _replace(self._path, _ANSWER)

    # -- the file. In a folder of another user there is none, because this application cannot have made a request there.

    def _file(self) -> tuple[int, int] | None:
        """Return what distinguishes the file from those that replace it; None if there is no file."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _read(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        return found


def _folder() -> Path:
    """Return a folder that only this user can write. It is the same in the application and in the processes that Spark starts for it."""
    folder = Path(tempfile.gettempdir()) / f"orderedmq-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a folder that only this user can write. Remove it, or set TMPDIR")
    return folder


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(content))
    os.replace(new, path)
