"""Shell completion of topics and groups, from the broker that the incomplete command line names.

Rules: completion takes at most two seconds, prints nothing if the broker cannot be reached, and creates nothing.
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

#: Maximum seconds that a user waits after TAB.
PATIENCE: Final = 2.0


def topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the topics whose names begin with ``incomplete``."""
    return _names(ctx, incomplete, lambda broker: [topic.name for topic in broker.log.topics()])


def groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the consumer groups whose names begin with ``incomplete``."""
    return _names(ctx, incomplete, lambda broker: broker.admin.groups())


def _names(ctx: typer.Context, incomplete: str, look: Callable[[Broker], list[str]]) -> list[str]:
    shell, found = _shell(ctx), list[str]()

    def ask() -> None:
        try:
            with shell.broker() as broker:
                found.extend(look(broker))
        except (OrderedMQError, OSError):
            return

    # A daemon thread, so that it does not keep the process alive while it waits for a cluster.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return [name for name in found if name.startswith(incomplete)]


def _shell(ctx: typer.Context) -> Shell:
    """Return the broker options of the command line. Options of an inner command override those of an outer command."""
    above = Shell() if ctx.parent is None else _shell(ctx.parent)  # type: ignore[arg-type]
    given = {name: ctx.params.get(name) or getattr(above, name) for name in ("path", "namesrv", "namespace", "profile")}
    # The parameter of --option is called option before the command, and options after it.
    options = [*(above.options or ()), *(ctx.params.get("option") or ctx.params.get("options") or ())]
    return Shell(**given, options=options)
