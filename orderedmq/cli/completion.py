"""Names for the shell's completion: the topics and groups of the broker that the line names so far.

Rules: it is quick (a cluster gets two seconds), silent where the broker cannot be reached, and makes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import typer

from orderedmq.cli.shell import Shell
from orderedmq.errors import OrderedMQError

if TYPE_CHECKING:
    from orderedmq.broker import Broker

#: Seconds that somebody who pressed TAB waits at most.
PATIENCE: Final = 2.0


def topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """The topics that begin so."""
    return _names(ctx, incomplete, lambda broker: [topic.name for topic in broker.log.topics()])


def groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """The consumer groups that begin so."""
    return _names(ctx, incomplete, lambda broker: broker.admin.groups())


def _names(ctx: typer.Context, incomplete: str, look: Callable[[Broker], list[str]]) -> list[str]:
    shell, found = _shell(ctx), list[str]()

    def ask() -> None:
        try:
            with shell.broker() as broker:
                found.extend(look(broker))
        except (OrderedMQError, OSError):
            return

    # A daemon: one that still waits for a cluster does not keep the shell waiting.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return [name for name in found if name.startswith(incomplete)]


def _shell(ctx: typer.Context) -> Shell:
    """The broker's options of the line, the innermost first."""
    above = Shell() if ctx.parent is None else _shell(ctx.parent)  # type: ignore[arg-type]
    return Shell(ctx.params.get("path") or above.path, namesrv=ctx.params.get("namesrv") or above.namesrv)
