"""``orderedmq spark``: what can be done before a session of Spark, so that it starts sooner."""

from __future__ import annotations

import time

from orderedmq.cli.shell import Shell, command, commands
from orderedmq.conditions import JavaCondition
from orderedmq.errors import JavaError
from orderedmq.startup.archive import fitting_archive, make_archive
from orderedmq.startup.tuning import prepare as prepare_session
from orderedmq.tools.readable import size

app = commands("Let Spark start sooner.")


@command(app, "prepare")
def prepare(shell: Shell) -> None:
    """Make an archive of the classes that Spark's driver loads, unless there is one that fits.

    Sessions of `orderedmq.tuned` use it and start sooner. It is in the user's cache and fits the Java and the PySpark that are
    installed now: prepare again after an update of one of them. Making it takes about half a minute, in which a few small queries
    run in a folder of their own.
    """
    place = prepare_session({"spark.master": "local"})
    if place.home is None:
        raise JavaError(JavaCondition.NO_ARCHIVE, "there is no Spark here; install PySpark, or set SPARK_HOME")
    began = time.monotonic()
    archive = fitting_archive(place.java, place.home)
    made = archive is None
    if archive is None:
        shell.note("making an archive of Spark's classes, which takes about half a minute")
        archive = make_archive(place.java, place.home)
    shell.done(
        {
            "archive": str(archive),
            "bytes": archive.stat().st_size,
            "made": made,
            "java": str(place.java.path),
            "spark_home": str(place.home),
        },
        f"{archive} ({size(archive.stat().st_size)})"
        + (f", made in {time.monotonic() - began:.0f} s" if made else " is there and fits"),
    )
