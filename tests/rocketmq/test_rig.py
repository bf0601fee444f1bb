"""The rig itself: servers of each version start, keep messages, and are broken and repaired by tests; Java peers talk to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from orderedmq.cli import app
from orderedmq.errors import OptionError, ServersError
from orderedmq.rocketmq.local import jars
from orderedmq.rocketmq.local.probe import ask, find_free_port, is_free
from orderedmq.rocketmq.local.servers import Cluster
from tests.command import COMMAND
from tests.quick_spark import QUICK_SERVER
from tests.rocketmq.peers import Peers, Received
from tests.rocketmq.proxy import Network
from tests.waits import until

GET_CONFIG = 26
GET_CLUSTERS = 106
GET_ROUTE = 105


@pytest.fixture
def topic(every_version: Cluster, peers: Peers) -> str:
    """A new topic of four queues."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    peers.admin(every_version.address).create_topic(every_version.broker.address, name, 4)
    return name


@pytest.mark.nightly
def test_ordered_messages_of_java_peers(every_version: Cluster, peers: Peers, topic: str) -> None:
    producer = peers.producer(every_version.address)
    sent = [producer.send(topic, b"%d" % i, f"key-{i % 7}", tags="a", keys=f"k{i}") for i in range(60)]
    assert {one.status for one in sent} == {"SEND_OK"}
    refused: list[Received] = []
    guard = threading.Lock()

    def once(batch: list[Received]) -> bool:
        """Refuse only the first batch, so that it is redelivered. Queues are consumed in parallel."""
        with guard:
            if refused:
                return True
            refused.extend(batch)
            return False

    consumer = peers.consumer(every_version.address, f"g-{topic}", topic, once, persistConsumerOffsetInterval=200)
    until(lambda: refused and len(consumer.received) >= 60 + len(refused), "all messages came, and the refused ones came again")
    received = list(consumer.received)
    until(lambda: consumer.queues == [("broker-a", queue) for queue in range(4)], "the consumer has all queues")
    admin = peers.admin(every_version.address)
    ends = {queue: end for queue, (_, end) in admin.ends(topic).items()}
    assert sum(ends.values()) == 60
    # A stopping consumer does not wait until its offsets are stored, so check them before it stops.
    until(lambda: admin.offsets(f"g-{topic}", topic) == ends, "the consumer's offsets are stored")
    consumer.stop()
    bodies: defaultdict[str | None, list[int]] = defaultdict(list)
    for message in received:
        if not any(message is one for one in refused):
            bodies[message.key].append(int(message.body))
    assert bodies == {f"key-{key}": list(range(key, 60, 7)) for key in range(7)}
    by_id = {message.id: message for message in received}
    assert {(one.id, one.queue, one.offset) for one in sent} == {(m.id, m.queue, m.offset) for m in by_id.values()}
    assert {(m.tags, m.properties["KEYS"] == m.keys) for m in received} == {("a", True)}


@pytest.mark.nightly
def test_a_killed_broker_comes_back_with_its_messages(every_version: Cluster, peers: Peers, topic: str) -> None:
    producer = peers.producer(every_version.address)
    for i in range(50):
        producer.send(topic, b"%d" % i, str(i))
    pid = every_version.broker.pid
    every_version.broker.kill()
    assert not psutil.pid_exists(pid)
    assert not every_version.broker.running
    every_version.broker.start()
    assert every_version.broker.pid != pid
    admin = peers.admin(every_version.address)
    until(lambda: sum(end for _, end in admin.ends(topic).values()) == 50, "all messages can be read")
    assert producer.send(topic, b"more", "key").status == "SEND_OK"


@pytest.mark.nightly
def test_a_paused_broker_says_nothing_until_it_is_resumed(every_version: Cluster) -> None:
    broker = every_version.broker
    broker.pause()
    with pytest.raises(TimeoutError):
        ask(broker.address, GET_CLUSTERS, timeout=0.5)
    assert broker.running
    broker.resume()
    broker.wait()
    # A broker does not support this request, but any answer shows that it has resumed.
    assert ask(broker.address, GET_CLUSTERS, timeout=30.0)[0] != 0


@pytest.mark.nightly
def test_a_killed_nameserver_learns_of_its_brokers_again(cluster: Cluster) -> None:
    cluster.namesrv.restart()
    cluster.broker.wait()
    assert cluster.broker.address.encode() in ask(cluster.address, GET_CLUSTERS)[1]


@pytest.mark.nightly
def test_what_a_test_breaks_is_healed(cluster: Cluster) -> None:
    cluster.namesrv.kill()
    cluster.broker.pause()
    cluster.heal()
    for server in (cluster.namesrv, cluster.broker):
        server.wait()
        assert not server.broken


def test_no_descriptor_of_ours_is_a_servers(cluster: Cluster, tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as ours:
        os.set_inheritable(ours.fileno(), True)
        cluster.broker.restart()
        opened = {file.path for file in psutil.Process(cluster.broker.pid).open_files()}
    assert ours.name not in opened
    assert os.getsid(cluster.broker.pid) != os.getsid(0)


@pytest.mark.nightly
def test_two_brokers(two_brokers: Cluster, peers: Peers) -> None:
    admin = peers.admin(two_brokers.address)
    for broker in two_brokers.brokers:
        admin.create_topic(broker.address, "wide", 2)
    producer = peers.producer(two_brokers.address)
    assert {producer.send("wide", b"x", str(i)).queue for i in range(30)} == {
        (f"broker-{letter}", queue) for letter in "ab" for queue in (0, 1)
    }
    two_brokers.brokers[1].kill()
    consumer = peers.consumer(two_brokers.address, "wide-group", "wide")
    assert {message.queue[0] for message in consumer.wait(10)} == {"broker-a"}
    consumer.stop()


@pytest.mark.nightly
def test_quick_locks(quick_locks: Cluster, peers: Peers) -> None:
    admin = peers.admin(quick_locks.address)
    where = quick_locks.broker.address
    admin.create_topic(where, "locked", 2)
    queues = [("broker-a", 0), ("broker-a", 1)]
    began = time.monotonic()
    assert admin.lock(where, "g", "one", "locked", queues) == queues
    admin.unlock(where, "g", "one", "locked", queues[:1])
    assert queues[0] in admin.lock(where, "g", "two", "locked", queues)
    until(lambda: admin.lock(where, "g", "two", "locked", queues[1:]), "the lock that lives 3 s has ended", 30.0)
    assert time.monotonic() - began > 2.9


@pytest.mark.nightly
def test_java_peers_behind_a_network_of_proxies(cluster: Cluster, peers: Peers) -> None:
    peers.admin(cluster.address).create_topic(cluster.broker.address, "behind", 2)
    with Network.before(cluster) as network:
        producer = peers.producer(network.address)
        assert producer.send("behind", b"x", "k").status == "SEND_OK"
        assert [e.fields["topic"] for e in network.namesrv.requests(GET_ROUTE)][:1] == ["behind"]
        # Request code 310 is a send with short field names.
        assert [e.fields["b"] for e in network.broker.requests(310)] == ["behind"]
        producer.stop()


# Servers that a test starts itself, and missing jars.


def test_servers_end_with_the_process_that_started_them(cluster: Cluster, tmp_path: Path) -> None:
    """The process is killed with kill -9. The server is only a nameserver, because that starts fastest."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom orderedmq.rocketmq.local.servers import Cluster\n"
        f"c = Cluster(Path({str(tmp_path)!r}), brokers=0)\nc.namesrv.launch()\nprint(c.namesrv.pid, flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([server], 60)[1] == []


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_up_serves_until_ctrl_c(cluster: Cluster, tmp_path: Path, times: int) -> None:
    """The first Ctrl-C stops the servers in order, which takes 12 s; a second one stops them immediately.

    The folder's name has characters that Java's properties must escape. ``cluster`` is requested so that the test is skipped if there are
    no jars.
    """
    folder = tmp_path / "données\\x"
    command = [*COMMAND, "--path", str(folder), "rocketmq", "up"]
    command += ["--port", str(find_free_port())]
    env = {**os.environ, "JAVA_TOOL_OPTIONS": " ".join(QUICK_SERVER)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = json.loads(process.stdout.readline())
        servers = [child for child in psutil.Process(process.pid).children() if "java" in child.name()]
        assert said["brokers"][0].encode() in ask(said["namesrvAddr"], GET_CLUSTERS)[1]
        # Messages can be delivered at a chosen time.
        assert b"timerWheelEnable=true" in ask(said["brokers"][0], GET_CONFIG)[1]
        process.send_signal(signal.SIGINT)
        if times > 1:
            while "stopping the servers in order" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
        assert (process.wait(60) == 0) is (times == 1)
    assert len(servers) == 2
    assert not [server for server in servers if server.is_running()]
    assert (folder / "broker-a" / "store").is_dir()


def test_ctrl_c_while_servers_start_leaves_none(cluster: Cluster, tmp_path: Path) -> None:
    """The first server is just starting. ``cluster`` is requested so that the test is skipped without jars."""
    port = Cluster(tmp_path / "unused", brokers=0).namesrv.port
    command = [sys.executable, "-m", "orderedmq", "--path", str(tmp_path), "rocketmq", "up", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until((tmp_path / "namesrv" / "out.log").exists, "the nameserver has an output file")
        process.send_signal(signal.SIGINT)
        said, noted = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
    assert noted.splitlines()[-1] == "orderedmq: interrupted"
    started = [
        process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(process.info["cmdline"] or ())
    ]
    assert started == []


def test_no_jars_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine that reaches no repository, by configuring an empty repository as Spark's only one."""
    (tmp_path / "ivysettings.xml").write_text(
        '<ivysettings><settings defaultResolver="none"/><resolvers><filesystem name="none" m2compatible="true">'
        f'<artifact pattern="{tmp_path}/none/[artifact]-[revision].[ext]"/></filesystem></resolvers></ivysettings>'
    )
    (tmp_path / "spark-defaults.conf").write_text(f"spark.jars.ivySettings {tmp_path}/ivysettings.xml\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(
        ServersError, match=r"RocketMQ 5\.3\.3 cannot be fetched.*unresolved dependency: org.apache.rocketmq"
    ) as raised:
        jars.fetch_jars("5.3.3")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "cache" / "orderedmq" / "rocketmq-5.3.3").exists()


def test_jars_that_are_there_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jars, "_fetch", None)
    folder = tmp_path / "orderedmq" / "rocketmq-1.2"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    assert jars.fetch_jars("1.2") == folder


def test_a_wrong_release(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not a release"):
        jars.fetch_jars("../5")


def test_a_server_that_does_not_come_up_says_why(cluster: Cluster, tmp_path: Path) -> None:
    """The port is in use by the time the server starts."""
    second = Cluster(tmp_path, brokers=0)
    second.namesrv.port = cluster.namesrv.port
    second.namesrv.address = "127.0.0.1:1"
    with pytest.raises(ServersError, match="DIED.*namesrv of RocketMQ 5.3.3 ended: .+out.log") as raised:
        second.start()
    assert "\n" not in str(raised.value)


def test_a_server_that_does_not_serve_clients_in_time_says_so(tmp_path: Path) -> None:
    slow = Cluster(tmp_path, brokers=0)
    try:
        with pytest.raises(ServersError, match="NOT_READY.*namesrv of RocketMQ 5.3.3 at .* did not serve clients within 0 s"):
            slow.namesrv.start(timeout=0)
    finally:
        slow.stop()


def test_up_on_a_port_in_use(cluster: Cluster, tmp_path: Path) -> None:
    assert not is_free(cluster.namesrv.port)
    done = CliRunner().invoke(app, ["--path", str(tmp_path), "rocketmq", "up", "--port", str(cluster.namesrv.port)])
    assert done.exit_code == 1
    assert "SERVERS.PORT_IN_USE" in done.stderr
