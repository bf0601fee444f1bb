"""Records everything that a process does to the files below a folder, with all data, in order, by running it under strace.

An event is a system call that succeeded, or a sync that failed. The process also writes marks to the file `MARKS` in the folder.
The marks show what the process knew at that point of the recording.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MARKS: Final = "marks"
#: The name of the recording's own file.
_OUTPUT: Final = "strace.txt"
_CALLS: Final = (
    "openat,close,lseek,pwrite64,pwritev,pwritev2,write,writev,ftruncate,fallocate,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,"
    "rmdir,mkdir,link,linkat"
)
_LINE: Final = re.compile(rb"^(\d+) +(.*)$")
_RESUMED: Final = re.compile(rb"^<\.\.\. \w+ resumed>")
_CALL: Final = re.compile(rb"^(\w+)\((.*)\) = (-?\d+|\?)(.*)$")
_TEXT: Final = re.compile(rb'"((?:\\x[0-9a-f]{2})*)"')
_FILE: Final = re.compile(rb"^(\d+)<((?:\\x[0-9a-f]{2})*)>(?:\(deleted\))?")


@dataclass(frozen=True)
class Write:
    """Bytes written at a position. ``synced``: the file was open for synchronous writes, so the bytes are on the disk."""

    path: Path
    position: int
    data: bytes
    synced: bool
    call: str = ""


@dataclass(frozen=True)
class Truncate:
    path: Path
    size: int


@dataclass(frozen=True)
class Sync:
    """A sync of a file or a folder. ``failed``: it reported an error, and the data that it should have written are lost."""

    path: Path
    failed: bool = False
    data_only: bool = False


@dataclass(frozen=True)
class Make:
    """The creation of a file or a folder."""

    path: Path
    folder: bool = False


@dataclass(frozen=True)
class Rename:
    path: Path
    to: Path


@dataclass(frozen=True)
class Link:
    path: Path
    to: Path


@dataclass(frozen=True)
class Unlink:
    path: Path


@dataclass(frozen=True)
class Mark:
    text: str


Event = Write | Truncate | Sync | Make | Rename | Link | Unlink | Mark


def record(command: Sequence[str | Path], folder: Path, *, failing: str | None = None) -> list[Event]:
    """Run a command, and return the events below ``folder``.

    ``failing``: a sync or write that fails, as for strace's option inject ("fdatasync:error=EIO:when=3"). The failing call has no
    effect.
    """
    inject = [] if failing is None else ["-e", f"inject={failing}"]
    output = folder / _OUTPUT
    options = [
        "-f",
        "--seccomp-bpf",
        "-y",
        "-qq",
        "-xx",
        "-s",
        "100000000",
        "-e",
        f"trace={_CALLS}",
        "-e",
        "signal=none",
        *inject,
    ]
    done = subprocess.run(["strace", *options, "-o", str(output), *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"the workload failed: {done.stderr[-3000:]}")
    try:
        return list(_Parser(folder).events(output))
    finally:
        output.unlink()


def _decode(text: bytes) -> bytes:
    return bytes.fromhex(text.replace(b"\\x", b"").decode())


class _Parser:
    """Turns the lines of strace into events. It tracks the position and mode of each open file of one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._existing: set[Path] = set()
        self._synced: dict[int, bool] = {}
        self._positions: dict[int, int] = {}

    def events(self, output: Path) -> Iterator[Event]:
        unfinished: dict[bytes, bytes] = {}
        with open(output, "rb") as lines:
            for line in lines:
                found = _LINE.match(line.rstrip())
                assert found is not None, line[:200]
                thread, text = found[1], found[2]
                if text.endswith(b"<unfinished ...>"):
                    unfinished[thread] = text.removesuffix(b"<unfinished ...>").rstrip()
                    continue
                if _RESUMED.match(text):
                    text = unfinished.pop(thread) + _RESUMED.sub(b"", text).lstrip()
                call = _CALL.match(text)
                if call is not None:
                    yield from self._call(call[1].decode(), call[2], call[3], call[4])

    def _inside(self, path: Path) -> bool:
        # A file without a name (O_TMPFILE) is shown as a number.
        return self._folder in path.parents and path.name not in (MARKS, _OUTPUT) and not path.name.startswith("#")

    def _call(self, name: str, arguments: bytes, result: bytes, rest: bytes) -> Iterator[Event]:
        failed = result.startswith(b"-") or result == b"?"
        file = _FILE.match(arguments)
        texts = [_decode(text) for text in _TEXT.findall(arguments)]
        if name in ("fsync", "fdatasync") and file is not None:
            path = Path(_decode(file[2]).decode())
            if self._inside(path) or path == self._folder:
                yield Sync(path, failed, name == "fdatasync")
        elif failed:
            return
        elif name == "unlinkat" and file is not None:
            yield from self._names(name, [Path(_decode(file[2]).decode()) / texts[0].decode()])
        elif name == "openat":
            opened = _FILE.match(result + rest)
            assert opened is not None, rest
            path = Path(_decode(opened[2]).decode())
            number = int(opened[1])
            self._synced[number] = b"O_DSYNC" in arguments or b"O_SYNC" in arguments
            self._positions[number] = 0
            if b"O_CREAT" in arguments and self._inside(path) and path not in self._existing:
                self._existing.add(path)
                yield Make(path)
        elif file is not None:
            path, number = Path(_decode(file[2]).decode()), int(file[1])
            if name == "lseek":
                self._positions[number] = int(result)
            elif name in ("write", "writev", "pwrite64", "pwritev", "pwritev2"):
                yield from self._write(name, path, number, b"".join(texts), arguments, int(result))
            elif name == "ftruncate" and self._inside(path):
                yield Truncate(path, int(arguments.rsplit(b", ", 1)[1]))
            elif name == "fallocate" and self._inside(path):
                raise AssertionError("fallocate is not modelled")
        elif texts:
            yield from self._names(name, [Path(text.decode()) for text in texts])

    def _write(self, name: str, path: Path, number: int, data: bytes, arguments: bytes, done: int) -> Iterator[Event]:
        data = data[:done]
        if name.startswith("p"):
            # The last argument of pwritev2 is its flags, so the position is the one before.
            position = int(arguments.rsplit(b", ", 2)[-2 if name == "pwritev2" else -1])
        else:
            position = self._positions.get(number, 0)
            self._positions[number] = position + done
        if path == self._folder / MARKS:
            yield Mark(data.decode().rstrip("\n"))
        elif self._inside(path):
            yield Write(path, position, data, self._synced.get(number, False), name)

    def _names(self, name: str, paths: list[Path]) -> Iterator[Event]:
        if not any(self._inside(path) for path in paths):
            return
        if name == "mkdir":
            self._existing.add(paths[0])
            yield Make(paths[0], folder=True)
        elif name.startswith("rename"):
            self._existing.discard(paths[0])
            self._existing.add(paths[1])
            yield Rename(paths[0], paths[1])
        elif name.startswith("link"):
            self._existing.add(paths[1])
            yield Link(paths[0], paths[1])
        elif name in ("unlink", "unlinkat", "rmdir"):
            self._existing.discard(paths[0])
            yield Unlink(paths[0])
