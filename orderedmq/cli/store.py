"""``orderedmq check`` and ``orderedmq snapshot``: say whether a whole store is sound, and copy it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orderedmq.cli.shell import REFUSED, Column, Shell, command, commands
from orderedmq.embedded.check import examine
from orderedmq.embedded.snapshot import snapshot as copy_store
from orderedmq.options.values import DEFAULT_DIRECTORY
from orderedmq.tools.readable import number, size

app = commands("")


@command(app, "check")
def check(
    shell: Shell,
    store: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PATH]",
            help=f"Directory of the store (default: --path, or {DEFAULT_DIRECTORY}).",
            show_default=False,
            readable=False,
        ),
    ] = None,
) -> None:
    """Check a whole store of the embedded broker and list all damage. The exit code is 0 only if the store is sound.

    Checks the pages of the file, the checksum of every entry and payload, and that the entries agree with each other and with the
    segment files. It reads all messages and changes nothing. It can run while queries are at work, because it reads a snapshot. It also
    names segment files that no entry needs. Such files are not damage: running tasks write them, and those of killed tasks are deleted later.
    """
    path = shell.store("check") if store is None else store.absolute()
    report = examine(path)
    shell.show(
        [{"finding": finding} for finding in report.findings], (Column("finding", "finding"),), none="nothing is damaged"
    )
    for names, what in (
        (report.unused, "are not needed by any entry"),
        (report.foreign, "do not belong to the store and are never deleted"),
    ):
        if names:
            shell.say(
                f"{number(len(names))} files in the segment folder {what}: {', '.join(names[:3])}{', …' if names[3:] else ''}"
            )
    looked = f"{number(report.entries)} entries and {number(report.payloads)} payloads ({size(report.payload_bytes)}) were read"
    shell.done(
        {
            "path": str(path),
            "sound": not report.findings,
            **{name: value for name, value in vars(report).items() if name != "findings"},
        },
        f"{path} is damaged: {number(len(report.findings))} findings. {looked}"
        if report.findings
        else f"{path} is sound. {looked}",
    )
    if report.findings:
        raise typer.Exit(REFUSED)


@command(app, "snapshot")
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
