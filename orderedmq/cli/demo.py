"""``orderedmq demo``: a year of flights, a killed job, and the proof that no event was lost, duplicated or reordered."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from orderedmq.cli.shell import REFUSED, Shell, command, commands
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.options.endpoint import to_environment
from orderedmq.tools.readable import size

if TYPE_CHECKING:
    from orderedmq.demo.play import Demo, Progress
    from orderedmq.tools.audit import Audit

app = commands("")

T = TypeVar("T")


@command(app, "demo", path_help="Folder of the demo's store, checkpoint and log (default: a new temporary one).")
def demo(
    shell: Shell,
    events: Annotated[
        int | None,
        typer.Option(
            min=1000, help="Number of events, beginning with the first (default: the whole year 2013).", show_default=False
        ),
    ] = None,
    queues: Annotated[int, typer.Option(min=1, max=64, help="Number of queues of each topic.")] = 8,
    batches: Annotated[int, typer.Option(min=3, max=1000, help="Number of micro-batches for all events.")] = 10,
) -> None:
    """Send a year of real flights through ordered queues, kill the job half-way, resume it, and audit the result.

    Every departure from New York in 2013 and every landing is an event, whose sharding key is the aircraft. A Spark query reads the
    events and computes a result that depends on their order: how much of a delay an aircraft brought along from its previous flight.
    The query is killed with SIGKILL in the middle of a batch. The demo runs in a new temporary folder, or in the folder given with
    --path. The store, the checkpoint and the log stay there. With --namesrv, the demo creates its topics, flights and turnarounds, in
    that cluster.
    """
    from orderedmq.demo.play import Demo

    if shell.namespace is not None:
        raise OptionError(
            OptionCondition.UNSUPPORTED, "the demo creates topics with fixed names, outside of namespaces. Drop --namespace"
        )
    # For this command, --path is the folder of the demo, not of the broker.
    broker = replace(shell, path=None)
    cluster = None if broker.endpoint.embedded else broker.endpoint
    folder = shell.path or Path(tempfile.mkdtemp(prefix="orderedmq-demo-"))
    play = Demo(folder, events, queues, batches, cluster, to_environment(broker.broker_options))
    shell.say(f"A year of flights from New York, in {play.folder}\n")
    produced = _step(shell, "producing", play.produce)
    speed = produced.events / produced.seconds
    _tell(
        shell,
        "produced",
        asdict(produced) | {"events_per_second": round(speed), "queues": queues},
        f"{produced.events:,} departures and landings of {produced.aircraft:,} aircraft in {queues} queues: {speed:,.0f} events/s",
        produced.seconds,
    )
    first = _step(shell, "Spark is running", lambda progress: play.process(progress, kill=True))
    in_flight = "" if first.killed_in is None else f" in the middle of batch {first.killed_in}"
    _tell(
        shell,
        "killed",
        asdict(first),
        f"first batch after {first.first_batch_after:.1f} s; SIGKILL to the job{in_flight}, after {first.committed} batches and "
        f"{first.events:,} events"
        if first.killed_in is not None
        else "the job ended before it could be killed",
        first.seconds,
    )
    second = _step(shell, "Spark resumes", lambda progress: play.process(progress, kill=False))
    _tell(
        shell,
        "resumed",
        asdict(second),
        f"from its checkpoint: first batch after {second.first_batch_after:.1f} s, then to the end",
        second.seconds,
    )
    play.tidy()
    audit = _step(shell, "auditing", play.audit)
    _tell(
        shell,
        "audited",
        audit.to_dict(),
        f"{audit.lost + audit.not_yet:,} lost, {audit.duplicated:,} duplicated, {audit.out_of_order:,} out of order, "
        f"of {audit.expected.messages:,} events",
        None,
    )
    _close(shell, play, audit)
    if not audit.ok:
        raise typer.Exit(REFUSED)


def _step(shell: Shell, what: str, run: Callable[[Progress], T]) -> T:
    """Run a step with a progress bar that shows the progress that the step reports."""
    with shell.progress(what) as bar:
        return run(bar.at)


def _tell(shell: Shell, step: str, facts: dict[str, Any], text: str, seconds: float | None) -> None:
    took = "" if seconds is None else f" ({seconds:.1f} s)"
    shell.done({"step": step, **facts}, f"  {step:<10}{text}{took}")


def _close(shell: Shell, play: Demo, audit: Audit) -> None:
    size_on_disk = sum(file.stat().st_size for file in play.folder.rglob("*") if file.is_file())
    examples = "".join(
        f"{' ' * 12}{each.kind}: {each.side} {each.where}, key {each.key}, {each.id}\n" for each in audit.examples
    )
    endpoint = play.endpoint
    command_line = f"orderedmq --path '{endpoint}'" if endpoint.embedded else f"orderedmq --namesrv '{endpoint}'"
    # The aircraft has the most events, and is among the first thousand.
    shell.say(
        f"{examples}\n"
        f"Look further:\n"
        f"  {command_line} topic list\n"
        f"  {command_line} peek turnarounds --key N725MQ --last 20\n"
        f"  {command_line} group describe turnarounds\n"
        f"  {command_line} audit flights turnarounds --id-field id\n"
        f"Spark's log is {play.log}. All files are in {play.folder} ({size(size_on_disk)}). Remove it when you are done."
    )
