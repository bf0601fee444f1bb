"""Pipelines on YARN: Hadoop's own mini cluster on this machine, with Spark's driver and executors in its containers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa
import pyspark
import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway

import orderedmq
from orderedmq.broker import Broker
from orderedmq.java import ensure_java
from orderedmq.rocketmq.local.jars import fetch_packages
from tests.jars import jars_required
from tests.quick_spark import QUICK_JVM
from tests.waits import until

pytestmark = [pytest.mark.nightly, pytest.mark.spark, pytest.mark.timeout(900)]

ROOT: Final = Path(__file__).resolve().parents[3]
SPARK: Final = Path(pyspark.__file__).parent
#: The release of Hadoop whose client this Spark contains.
HADOOP: Final = next((SPARK / "jars").glob("hadoop-client-api-*.jar")).stem.removeprefix("hadoop-client-api-")
#: Hadoop's mini cluster, and packages that it needs without declaring them.
PACKAGES: Final = (
    f"org.apache.hadoop:hadoop-client-minicluster:{HADOOP}",
    "org.bouncycastle:bcpkix-jdk18on:1.81",
    "org.junit.jupiter:junit-jupiter-api:5.13.4",
)
#: The number of messages. Their bodies are numbers from 0 on, and the keys alternate.
MESSAGES: Final = 100
KEYS: Final = 7
#: The messages of each key, in order.
SENT: Final = {f"order-{key}": list(range(key, MESSAGES, KEYS)) for key in range(KEYS)}
#: The setting for Python in the guide's command for cluster mode.
PYTHON: Final = ("--conf", "spark.yarn.appMasterEnv.PYSPARK_PYTHON=./environment/bin/python")

SETTINGS: Final = {
    # Hadoop's defaults file has these settings, but the mini cluster's jar lacks that file.
    "yarn.scheduler.capacity.root.queues": "default",
    "yarn.scheduler.capacity.root.default.capacity": "100",
    "yarn.scheduler.capacity.maximum-am-resource-percent": "1.0",
    "yarn.scheduler.minimum-allocation-mb": "256",
    "yarn.minicluster.yarn.nodemanager.resource.memory-mb": "8192",
    # YARN ends a container that uses too much memory. Virtual addresses must not count, because a store maps 1 TiB of them.
    "yarn.minicluster.control-resource-monitoring": "true",
    "yarn.nodemanager.resource.memory.enforced": "false",
    "yarn.nodemanager.vmem-check-enabled": "false",
    # Do not refuse to start containers on a disk that is nearly full.
    "yarn.nodemanager.disk-health-checker.enable": "false",
}

#: A query from topic to topic. Each message that it writes names the container in which its row was processed.
JOB: Final = """
import os, sys, time
from pathlib import Path
from pyspark.sql import SparkSession, functions

store, checkpoint, place, seconds = sys.argv[1:]
spark = SparkSession.builder.appName("orderedmq").getOrCreate()

@functions.udf("string")
def container():
    time.sleep(float(seconds))
    return os.environ["CONTAINER_ID"]

orders = (spark.readStream.format("orderedmq").option("path", store).option("topic", "orders")
          .option("consumerGroup", "billing").option("maxOffsetsPerTrigger", 20).load())
properties = functions.create_map(functions.lit("container"), container()).alias("properties")
query = (orders.select("sharding_key", "body", properties).writeStream.format("orderedmq").option("path", store)
         .option("topic", "invoices").option("checkpointLocation", checkpoint).trigger(availableNow=True).start())
query.awaitTermination()
Path(place).write_text(os.environ.get("CONTAINER_ID", "none"))
"""


class Yarn:
    """A ResourceManager and a NodeManager in a separate JVM. All their files, and those of containers, are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        jars = fetch_packages(f"Hadoop's mini cluster {HADOOP}", PACKAGES, f"hadoop-minicluster-{HADOOP}")
        java = ensure_java()
        # Containers inherit the NodeManager's variables. None of these may tell Spark where Python is, or Python where orderedmq is.
        self.environment = {"PATH": os.defpath, "JAVA_HOME": str(java.resolve().parents[1]), "HOME": str(folder)}
        (folder / "tmp").mkdir()
        command = [
            *(str(java), "-Xmx512m", *QUICK_JVM, f"-Djava.io.tmpdir={folder}/tmp"),
            *("-cp", f"{SPARK}/jars/*:{jars}/*", "py4j.GatewayServer", "--enable-auth", "--die-on-broken-pipe", "0"),
        ]
        with (folder / "yarn.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        self._gateway: Any = None
        try:
            assert self._process.stdout is not None
            port, token = (self._process.stdout.readline().decode().strip() for _ in range(2))
            assert token, (folder / "yarn.log").read_text()[-3000:]
            self._gateway = JavaGateway(gateway_parameters=GatewayParameters(port=int(port), auth_token=token))
            self._hadoop: Any = self._gateway.jvm.org.apache.hadoop
            self.conf = self._start({**SETTINGS, "hadoop.tmp.dir": f"{folder}/tmp"})
        except BaseException:
            self.close()
            raise

    def _start(self, settings: dict[str, str]) -> Path:
        """Start both servers, and return the folder with the settings for their clients."""
        conf = self._hadoop.yarn.conf.YarnConfiguration()
        for name, value in settings.items():
            conf.set(name, value)
        cluster = self._hadoop.yarn.server.MiniYARNCluster("yarn", 1, 1, 1)
        cluster.init(conf)
        cluster.start()
        used = cluster.getConfig()
        # The cluster counts as started a moment before its configuration has the port on which it listens.
        until(lambda: not used.get("yarn.resourcemanager.address").endswith(":0"), "the ResourceManager listens")
        assert cluster.waitForNodeManagersToConnect(60_000)
        folder = self._folder / "conf"
        folder.mkdir()
        used.writeXml(self._gateway.jvm.java.io.FileOutputStream(str(folder / "yarn-site.xml")))
        return folder

    def processes(self) -> list[psutil.Process]:
        """The processes in containers and the scripts that start them. They have separate sessions; their working directory is
        that of a container.
        """
        home = f"{self._folder}/target/"
        return [process for process in psutil.process_iter(["cwd"]) if (process.info["cwd"] or "").startswith(home)]

    def driver(self) -> psutil.Process:
        """The JVM of the driver of the only application, in cluster mode."""
        java = (process for process in self.processes() if process.name() == "java")
        (driver,) = (process for process in java if process.environ()["CONTAINER_ID"].endswith("_000001"))
        return driver

    def output(self) -> str:
        """The end of the output of each container."""
        files = sorted(self._folder.glob("target/**/container_*/std*"))
        return "\n".join(f"== {file.parent.name} {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def close(self) -> None:
        if self._gateway is not None:
            # Without this, py4j would continue to tell the JVM which objects are no longer needed.
            self._gateway.shutdown()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, 10)


class Pipeline:
    """A store with messages in the topic ``orders``, and a job that copies them to ``invoices``, in a separate folder."""

    def __init__(self, yarn: Yarn, folder: Path) -> None:
        self.yarn = yarn
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        (folder / "job.py").write_text(JOB)
        # This file replaces a packed environment of some hundred MB, because Spark uses no other file of that environment.
        python = folder / "environment" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}:$PYTHONPATH" exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        with tarfile.open(folder / "environment.tar.gz", "w:gz") as archive:
            archive.add(python.parent, "bin")
        with self.broker() as broker:
            broker.admin.create_topic("orders", 4)
            broker.admin.create_topic("invoices", 4)
            bodies = [str(number).encode() for number in range(MESSAGES)]
            keys = [f"order-{number % KEYS}" for number in range(MESSAGES)]
            orderedmq.Producer(broker.log, "orders").send(pa.record_batch({"sharding_key": keys, "body": bodies}))

    def broker(self) -> Broker:
        return orderedmq.connect(self.folder / "store")

    def submit(
        self, mode: str, options: Sequence[str], variables: Mapping[str, str], seconds: float = 0.0
    ) -> subprocess.Popen[bytes]:
        """Start spark-submit. Users set ``options`` and ``variables``; the other settings are for a small machine."""
        settings = {
            # Otherwise, all jars of Spark are copied into each container.
            "spark.yarn.jars": f"local:{SPARK}/jars/*",
            "spark.yarn.stagingDir": str(self.folder / "staging"),
            "spark.executor.instances": "2",
            # Wait for both executors before the first batch.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
            **{f"spark.{name}.memory": "512m" for name in ("driver", "executor", "yarn.am")},
            **{f"spark.{name}.memoryOverhead": "1g" for name in ("driver", "executor")},
            **{f"spark.{name}.extraJavaOptions": " ".join(QUICK_JVM) for name in ("driver", "executor", "yarn.am")},
            "spark.ui.enabled": "false",
        }
        if mode == "cluster":
            del settings["spark.yarn.am.extraJavaOptions"]
        command = [
            *(str(SPARK / "bin" / "spark-submit"), "--master", "yarn", "--deploy-mode", mode),
            *(word for name, value in settings.items() for word in ("--conf", f"{name}={value}")),
            *("--archives", "environment.tar.gz#environment", *options),
            *("job.py", str(self.folder / "store"), str(self.checkpoint), str(self.folder / "place"), str(seconds)),
        ]
        (self.folder / "tmp").mkdir(exist_ok=True)
        environment = {
            **self.yarn.environment,
            "HADOOP_CONF_DIR": str(self.yarn.conf),
            "SPARK_HOME": str(SPARK),
            "SPARK_LOCAL_DIRS": str(self.folder / "tmp"),
            "SPARK_SUBMIT_OPTS": " ".join((*QUICK_JVM, f"-Djava.io.tmpdir={self.folder}/tmp")),
            **variables,
        }
        with (self.folder / "submit.log").open("wb") as log:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def said(self) -> str:
        return f"{(self.folder / 'submit.log').read_text()[-5000:]}\n{self.yarn.output()}"

    def run(self, mode: str, *options: str, **variables: str) -> str:
        """Run the job to its end, and return the container of the driver."""
        process = self.submit(mode, options, variables)
        try:
            assert process.wait(600) == 0, self.said()
        finally:
            process.kill()
            process.wait()
        return (self.folder / "place").read_text()

    @contextlib.contextmanager
    def half_way(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the job in cluster mode with slow rows, and wait until it has written a batch and works on the next one."""
        process = self.submit("cluster", PYTHON, {}, seconds=0.2)
        try:
            until(
                lambda: (self.checkpoint / "offsets" / "1").exists() or process.poll() is not None,
                "the job is half-way through",
                300,
            )
            assert process.poll() is None, self.said()
            yield process
        finally:
            process.kill()
            process.wait()

    def written(self) -> tuple[dict[str, list[int]], set[str]]:
        """The numbers of each key's messages in ``invoices``, in order, and the containers that processed them."""
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        containers = set()
        with self.broker() as broker:
            for queue in broker.log.queues("invoices"):
                batch = broker.log.pull(queue, 0, MESSAGES, 1 << 20, ("sharding_key", "body", "properties"))
                for row in batch.to_pylist():
                    numbers[row["sharding_key"]].append(int(row["body"]))
                    containers.add(dict(row["properties"])["container"])
        return numbers, containers


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yarn]:
    with jars_required():
        yarn = Yarn(tmp_path_factory.mktemp("yarn"))
    yield yarn
    yarn.close()


@pytest.fixture
def pipeline(yarn: Yarn, tmp_path: Path) -> Pipeline:
    return Pipeline(yarn, tmp_path)


def test_driver_and_executors_run_in_containers_in_cluster_mode(pipeline: Pipeline) -> None:
    driver = pipeline.run("cluster", *PYTHON)
    numbers, containers = pipeline.written()
    assert numbers == SENT
    assert len({driver, *containers}) == 3, (driver, containers)


def test_executors_run_in_containers_in_client_mode(pipeline: Pipeline) -> None:
    assert pipeline.run("client", PYSPARK_PYTHON="./environment/bin/python") == "none"
    numbers, containers = pipeline.written()
    assert numbers == SENT
    assert len(containers) == 2


def test_a_driver_that_dies_is_started_again_and_goes_on_without_a_gap(pipeline: Pipeline) -> None:
    with pipeline.half_way() as application:
        pipeline.yarn.driver().kill()
        assert application.wait(300) == 0, pipeline.said()
    # The attempt's number, and the number of the container in the attempt.
    assert (pipeline.folder / "place").read_text().endswith("_02_000001")
    assert pipeline.written()[0] == SENT
