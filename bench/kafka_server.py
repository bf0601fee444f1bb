"""A Kafka server on this machine: one process is broker and controller. Spark's own resolver fetches its jars.

The server listens only on loopback. It has Kafka's defaults, except for settings that a single server needs and for how soon the files of a
deleted topic are removed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyspark

from orderedmq.conditions import ServersCondition
from orderedmq.errors import ServersError
from orderedmq.java import cache_folder, ensure_java
from orderedmq.rocketmq.local.jars import fetch_packages
from orderedmq.rocketmq.local.probe import HOST, find_free_port
from orderedmq.rocketmq.local.servers import Server

VERSION: Final = "4.3.1"
#: Other releases of Spark's connector that run on the pinned Spark, because not every repository has the pinned release.
EARLIER_CONNECTORS: Final = ("4.2.0",)
#: Jars of Spark that Kafka also needs: the resolver leaves out Scala, and Kafka's own package has no log4j.
_FROM_SPARK: Final = ("scala-library-2.13", "log4j-api-2", "log4j-core-2", "log4j-slf4j2-impl-2", "slf4j-api-2")
#: JVM options from Kafka's own start script.
_JVM: Final = (
    *("-Xms1g", "-Xmx1g", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35"),
    *("-XX:+ExplicitGCInvokesConcurrent", "-XX:MaxInlineLevel=15", "-Djava.awt.headless=true"),
)
#: Sixteen bytes in base64.
_CLUSTER_ID: Final = "b3JkZXJlZG1xLWJlbmNoIQ"
_FORMAT_TIMEOUT: Final = 120.0
#: The line in the server's output that says that it is ready.
_STARTED: Final = "Kafka Server started"
_LOG4J: Final = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %-5p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
logger.started.name = kafka.server.KafkaRaftServer
logger.started.level = info
"""


def fetch_connector() -> tuple[str, list[Path]]:
    """Return the release and the jars of Spark's Kafka connector: of Spark's own release, or of an earlier release if that
    release is not available.

    Raises ServersError NO_JARS, and JavaError MISSING or TOO_OLD.
    """
    releases = connector_releases(pyspark.__version__)
    # Prefer a release that was fetched before, because a repository that lacks a release takes long to answer.
    for release in releases:
        if (cache_folder() / _connector_folder(release)).is_dir():
            return release, _connector_jars(release)
    for release in releases[:-1]:
        try:
            return release, _connector_jars(release)
        except ServersError as error:
            if error.sub != ServersCondition.NO_JARS:
                raise
    return releases[-1], _connector_jars(releases[-1])


def connector_releases(spark: str, earlier: Sequence[str] = EARLIER_CONNECTORS) -> list[str]:
    """Return the releases of the connector to try for a release of Spark, best first."""
    return [spark, *(release for release in earlier if release != spark)]


def _connector_folder(release: str) -> str:
    return f"spark-kafka-{release}"


def _connector_jars(release: str) -> list[Path]:
    package = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{release}"
    folder = fetch_packages(f"Spark's Kafka connector {release}", [package], _connector_folder(release))
    return sorted(folder.glob("*.jar"))


class KafkaServer(Server):
    """Broker and controller in one process. ``home`` has its configuration, data and output (``out.log``)."""

    product = "Kafka"
    main = "kafka.Kafka"

    def __init__(self, home: Path) -> None:
        super().__init__(home, VERSION, find_free_port())
        self._controller = f"{HOST}:{find_free_port()}"

    def __enter__(self) -> KafkaServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def jars(self) -> Path:
        return fetch_packages(f"Kafka {self.version}", [f"org.apache.kafka:kafka_2.13:{self.version}"], f"kafka-{self.version}")

    def command(self) -> list[str]:
        log4j = self.home / "log4j2.properties"
        log4j.write_text(_LOG4J)
        spark = Path(pyspark.__file__).parent / "jars"
        shared = [str(jar) for name in _FROM_SPARK for jar in spark.glob(f"{name}*.jar")]
        java = [str(ensure_java()), f"-Dlog4j2.configurationFile={log4j}", "-cp", ":".join([*shared, f"{self.jars()}/*"])]
        configuration = self.configure()
        if not (self.home / "data" / "meta.properties").exists():
            self._format([*java, "kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", *configuration])
        return [*java[:1], *_JVM, *java[1:], self.main, *configuration]

    def _format(self, command: Sequence[str]) -> None:
        """Write the files by which a server recognises its data folder."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FORMAT_TIMEOUT, cwd=self.home)
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise ServersError(ServersCondition.DIED, f"{self.home.name} of Kafka {self.version} cannot be formatted: {said}")

    def configure(self) -> list[str]:
        file = self.home / "server.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in self.properties().items()))
        return [str(file)]

    def properties(self) -> dict[str, object]:
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{self._controller}",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{self._controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": self.home / "data",
            # No replicas, because there is one server.
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "auto.create.topics.enable": False,
            "log.segment.delete.delay.ms": 1000,
        }

    def ready(self) -> bool:
        return _STARTED in self._output()
