"""Servers that ``orderedmq rocketmq up`` or a test starts: how they begin and end, and what is said if they cannot start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
from tests.waits import until

GET_CONFIG = 26
GET_CLUSTERS = 106


def test_a_server_inherits_no_file_descriptor(cluster: Cluster, tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as ours:
        os.set_inheritable(ours.fileno(), True)
        cluster.broker.restart()
        opened = {file.path for file in psutil.Process(cluster.broker.pid).open_files()}
    assert ours.name not in opened
    assert os.getsid(cluster.broker.pid) != os.getsid(0)


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


def test_ctrl_c_during_the_start_leaves_no_server(cluster: Cluster, tmp_path: Path) -> None:
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


def test_an_error_of_one_line_says_that_the_jars_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_existing_jars_are_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jars, "_fetch", None)
    folder = tmp_path / "orderedmq" / "rocketmq-1.2"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    assert jars.fetch_jars("1.2") == folder


def test_an_unknown_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not a release"):
        jars.fetch_jars("../5")


def test_an_error_says_why_a_server_has_ended(cluster: Cluster, tmp_path: Path) -> None:
    """The port is in use by the time the server starts."""
    second = Cluster(tmp_path, brokers=0)
    second.namesrv.port = cluster.namesrv.port
    second.namesrv.address = "127.0.0.1:1"
    with pytest.raises(ServersError, match="DIED.*namesrv of RocketMQ 5.3.3 ended: .+out.log") as raised:
        second.start()
    assert "\n" not in str(raised.value)


def test_an_error_says_that_a_server_is_not_ready_in_time(tmp_path: Path) -> None:
    slow = Cluster(tmp_path, brokers=0)
    try:
        with pytest.raises(ServersError, match="NOT_READY.*namesrv of RocketMQ 5.3.3 at .* did not serve clients within 0 s"):
            slow.namesrv.start(timeout=0)
    finally:
        slow.stop()


def test_a_port_in_use_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    assert not is_free(cluster.namesrv.port)
    done = CliRunner().invoke(app, ["--path", str(tmp_path), "rocketmq", "up", "--port", str(cluster.namesrv.port)])
    assert done.exit_code == 1
    assert "SERVERS.PORT_IN_USE" in done.stderr
