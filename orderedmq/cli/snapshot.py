"""``orderedmq snapshot``: copies a store while it is in use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orderedmq.cli.shell import Shell, command
from orderedmq.embedded.snapshot import snapshot as copy_store
from orderedmq.tools.readable import number, size


def add_to(app: typer.Typer) -> None:
    command(app, "snapshot")(snapshot)


def snapshot(
    shell: Shell,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for the copy, which must be empty or missing.")],
) -> None:
    """Copy a store of the embedded broker while it is in use.

    The copy is consistent and has everything that was acknowledged before the command. On the store's file system, the copy has links to
    the segment files, so it takes almost no space. For a backup, copy it to another disk. To restore, put the copy where the store was.
    """
    path = shell.store("snapshot")
    copied = copy_store(path, target)
    shell.done(
        {"path": str(path), "copy": str(target), **vars(copied)},
        f"{path} is copied to {target}: {number(copied.segments)} segments, {number(copied.links)} of them links, {size(copied.bytes)}",
    )
