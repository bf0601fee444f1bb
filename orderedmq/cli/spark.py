"""``orderedmq spark``: prepares this machine so that Spark sessions start sooner."""

from __future__ import annotations

import time

from orderedmq.cli.shell import Shell, command, commands
from orderedmq.conditions import JavaCondition
from orderedmq.errors import JavaError
from orderedmq.spark_support import require_pyspark
from orderedmq.startup.archive import fitting_archive, make_archive
from orderedmq.startup.tuning import prepare as prepare_session
from orderedmq.tools.readable import size

app = commands("Make Spark start sooner.")


@command(app, "prepare")
def prepare(shell: Shell) -> None:
    """Make an archive of the classes that Spark's driver loads, unless a valid archive exists.

    Sessions of `orderedmq.tuned` use the archive and start sooner. It is in the user's cache and is valid only for the installed versions
    of Java and PySpark, so run this command again after you update one of them. The command takes about half a minute, because it runs a
    few small queries in a temporary folder.
    """
    require_pyspark("orderedmq spark prepare")
    place = prepare_session({"spark.master": "local"})
    if place.home is None:
        raise JavaError(
            JavaCondition.NO_ARCHIVE, "the installed PySpark is only a client, without Spark itself. Set SPARK_HOME"
        )
    began = time.monotonic()
    archive = fitting_archive(place.java, place.home)
    is_new = archive is None
    if archive is None:
        shell.note("making an archive of Spark's classes, which takes about half a minute")
        archive = make_archive(place.java, place.home)
    shell.done(
        {
            "archive": str(archive),
            "bytes": archive.stat().st_size,
            "made": is_new,
            "java": str(place.java.path),
            "spark_home": str(place.home),
        },
        f"{archive} ({size(archive.stat().st_size)})"
        + (f", made in {time.monotonic() - began:.0f} s" if is_new else " exists and is valid"),
    )
