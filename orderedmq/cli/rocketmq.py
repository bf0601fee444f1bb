"""``orderedmq rocketmq``: runs RocketMQ servers on this machine, for experiments."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from orderedmq.cli.shell import Shell, command, commands
from orderedmq.conditions import ServersCondition
from orderedmq.errors import ServersError
from orderedmq.rocketmq.local.jars import DEFAULT_VERSION, VERSIONS, fetch_jars

app = commands("Run RocketMQ on this machine.")

#: The default folder. It is in the working directory, so that the user sees it.
DEFAULT_FOLDER: Final = "rocketmq-data"


@command(app, "up", path_help=f"Folder of the servers' data (default: {DEFAULT_FOLDER}).")
def up(
    shell: Shell,
    port: Annotated[int, typer.Option(min=1024, max=65535, help="Port of the nameserver.")] = 9876,
    brokers: Annotated[int, typer.Option(min=1, max=4, help="Number of brokers.")] = 1,
    release: Annotated[
        str, typer.Option("--release", help=f"The release of RocketMQ. Tested releases: {', '.join(VERSIONS)}.")
    ] = DEFAULT_VERSION,
) -> None:
    """Run a nameserver and a broker until Ctrl-C, and keep their data.

    Topics, messages and groups stay in the folder `rocketmq-data`, or in the folder given with --path. The first start downloads
    RocketMQ's jars (80 MB) with Spark's resolver. All servers listen on loopback only, except the broker of release 4.9.
    """
    from orderedmq.rocketmq.local.servers import TIME_WHEEL, Cluster

    folder = shell.path or Path(DEFAULT_FOLDER)
    _require_own(folder)
    shell.note(f"RocketMQ {release} in {folder.absolute()}: downloading jars if necessary, then starting")
    fetch_jars(release)
    cluster = Cluster(folder, release, brokers=brokers, properties=TIME_WHEEL, port=port)
    interrupts: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    try:
        # While servers start and end, only count Ctrl-C. A KeyboardInterrupt inside Popen can leave its lock held, so that the next wait
        # never ends.
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        try:
            cluster.start(lambda: bool(interrupts))
        finally:
            # This replaces any other error, because Ctrl-C also ends the Java process that reports Java's version.
            if interrupts:
                raise KeyboardInterrupt
        shell.done(
            {"namesrvAddr": cluster.address, "brokers": [broker.address for broker in cluster.brokers]},
            f"namesrvAddr {cluster.address}  (press Ctrl-C to end)",
        )
        while not interrupts:
            if dead := [server for server in cluster.servers if not server.running]:
                raise ServersError(
                    ServersCondition.DIED, f"{dead[0].home.name} ended. See the end of {dead[0].log} for the cause"
                )
            time.sleep(0.5)
        shell.note("stopping the servers in order, which takes up to 12 s. Press Ctrl-C again to end immediately")
        cluster.shut_down(lambda: len(interrupts) > 1)
        if len(interrupts) > 1:
            raise KeyboardInterrupt
    finally:
        cluster.stop()
        signal.signal(signal.SIGINT, before)


def _require_own(folder: Path) -> None:
    """Check that the folder is missing, empty, or from an earlier run.

    Raises ServersError FOLDER_IN_USE.
    """
    try:
        others = [] if (folder / "namesrv").is_dir() else sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ServersError(
            ServersCondition.FOLDER_IN_USE, f"{folder} cannot be used ({error.strerror}). Give another --path"
        ) from error
    if others:
        raise ServersError(
            ServersCondition.FOLDER_IN_USE,
            f"{folder} has other files ({', '.join(others[:3])}{', …' if others[3:] else ''}). Give --path with an empty or missing directory, "
            "or with the directory of an earlier rocketmq up",
        )
