"""Runs RocketMQ on this machine for trials and tests: a nameserver and brokers, each in its own process.

Rules: clients get loopback addresses, although RocketMQ 4.9 listens on all interfaces. All data is in one folder. A server does not
outlive the process that started it, however that process ends. Signals are sent only to processes that were started here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from orderedmq.conditions import ServersCondition
from orderedmq.errors import ServersError
from orderedmq.java import ensure_java
from orderedmq.rocketmq.local.jars import DEFAULT_VERSION, fetch_jars
from orderedmq.rocketmq.local.probe import HOST, answers, ask, find_free_port, is_free

#: Seconds allowed for a start, which takes some seconds, and longer on a busy machine.
_READY_TIMEOUT: Final = 90.0
#: Seconds for an orderly shutdown. A broker flushes and unregisters for up to 12 s.
_SHUT_DOWN_TIMEOUT: Final = 30.0

#: RocketMQ 4.9 uses the JDK's internals to unmap its files. Without access to them, it does not start again after a crash.
_OPENS: Final = (
    *("--add-opens", "java.base/java.nio=ALL-UNNAMED", "--add-opens", "java.base/sun.nio.ch=ALL-UNNAMED"),
    *("--add-exports", "java.base/jdk.internal.ref=ALL-UNNAMED"),
)
#: Logs warnings to standard output. RocketMQ 5.x has its own copy of logback in another package. The status listener suppresses
#: logback's reports about its configuration. Pop consumption, which is not set up here, would log a warning several times a second.
_LOGBACK: Final = """\
<configuration>
  <statusListener class="{prefix}ch.qos.logback.core.status.NopStatusListener"/>
  <appender name="out" class="{prefix}ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d{{ISO8601}} %-5level %logger{{20}} %msg%n</pattern></encoder>
  </appender>
  <logger name="RocketmqPop" level="ERROR"/>
  <root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""
#: Settings of a broker (5.0 or later) that can deliver each message at a chosen time, with small files.
TIME_WHEEL: Final[Mapping[str, object]] = {"timerWheelEnable": True, "mappedFileSizeTimerLog": 1 << 20}
#: Kills a server when the process that started it has ended, even by kill -9, because this closes the pipe from that process.
_GUARD: Final = 'read -r _; kill -9 "$1"'

_GET_ROUTE: Final = 105
_GET_CLUSTERS: Final = 106
_UPDATE_BROKER_CONFIG: Final = 25


class Server:
    """One RocketMQ process. ``home`` has its configuration, its data and its output (``out.log``)."""

    #: The name of the software in errors.
    product = "RocketMQ"
    main: str
    kind: str
    heap: tuple[str, ...]

    def __init__(self, home: Path, version: str, port: int, jvm: Sequence[str] = ()) -> None:
        self.home = home.absolute()
        self.version = version
        self.port = port
        self.address = f"{HOST}:{port}"
        self.log = self.home / "out.log"
        self._jvm = tuple(jvm)
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ValueError(f"{self.home.name} was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists. This is also true for a paused server."""
        return self._process is not None and self._process.poll() is None

    @property
    def broken(self) -> bool:
        """Whether the server was paused or killed, or died."""
        return self._paused or not self.running

    def start(self, timeout: float = _READY_TIMEOUT) -> None:
        """Start the server and wait until it serves clients. Raises ServersError NOT_READY or DIED, and the errors of `jars`."""
        self.launch()
        self.wait(timeout)

    def launch(self) -> None:
        """Start the server without waiting until it serves clients."""
        if self.running:
            return
        self._reap()
        self.home.mkdir(parents=True, exist_ok=True)
        command = self.command()
        with open(self.log, "ab") as output:
            self._printed = output.tell()
            # In a separate session, the server does not get Ctrl-C from the terminal. Only this process gets it, and shuts the server down.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(self.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self, timeout: float = _READY_TIMEOUT, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the server serves clients, or until ``given_up()`` is true. Raises ServersError NOT_READY or DIED."""
        deadline = time.monotonic() + timeout
        while not given_up() and not self.ready():
            if not self.running:
                raise ServersError(
                    ServersCondition.DIED,
                    f"{self.home.name} of {self.product} {self.version} ended: {self._last_words()} ({self.log})",
                )
            if time.monotonic() > deadline:
                raise ServersError(
                    ServersCondition.NOT_READY,
                    f"{self.home.name} of {self.product} {self.version} at {self.address} did not serve clients within {timeout:.0f} s: "
                    f"{self._last_words()} ({self.log})",
                )
            time.sleep(0.1)

    def command(self) -> list[str]:
        """Write the files that the server reads when it starts, and return the command that starts it."""
        conf = self.home / "conf"
        conf.mkdir(exist_ok=True)
        old = self.version.startswith("4.")
        logback = conf / f"logback_{self.kind}.xml"
        logback.write_text(_LOGBACK.format(prefix="" if old else "org.apache.rocketmq.logging."))
        return [
            *(str(ensure_java()), *self.heap, "-XX:+UseSerialGC", *_OPENS),
            *(f"-Drocketmq.home.dir={self.home}", f"-Duser.home={self.home}", f"-Drmq.logback.configurationFile={logback}"),
            *self._jvm,
            *("-cp", f"{self.jars()}/*", self.main, *self.configure()),
        ]

    def jars(self) -> Path:
        return fetch_jars(self.version)

    def configure(self) -> list[str]:
        """Write the configuration, and return the arguments that name it."""
        file = self.home / f"{self.kind}.properties"
        # Java's Properties.load reads Latin-1 and knows the escapes of JSON. The name of a folder may need them.
        lines = (f"{name}={json.dumps(str(value))[1:-1]}\n" for name, value in self.properties().items())
        file.write_text("".join(lines), "ascii")
        return ["-c", str(file)]

    def ready(self) -> bool:
        raise NotImplementedError

    def properties(self) -> dict[str, object]:
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the server (kill -9)."""
        self._signal(signal.SIGKILL)
        self._paused = False
        self._reap()

    stop = kill

    def pause(self) -> None:
        """Pause the process and return when all its threads are stopped. Its sockets stay open, but it does not answer.

        The system stops the threads of a process one after another. On a busy machine, some of them could still serve a request that
        is sent right after the signal.
        """
        self._signal(signal.SIGSTOP)
        self._paused = True
        # macOS does not report when the process has stopped.
        if self.running and hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self._paused = False

    def restart(self, timeout: float = _READY_TIMEOUT) -> None:
        """Kill the server (kill -9) and start it again with the same port and data."""
        self.kill()
        self.start(timeout)

    def shut_down(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Shut the server down so that no data is lost, which takes some seconds. Kill it as soon as ``hurried()`` is true."""
        self.resume()
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _SHUT_DOWN_TIMEOUT
        while self.running and time.monotonic() < deadline and not hurried():
            time.sleep(0.05)
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        # Popen does not signal a process that was already waited for, so the pid cannot belong to another process.
        if self._process is not None:
            self._process.send_signal(number)

    def _reap(self) -> None:
        """End the guard, and then wait for the dead or dying process. After the wait, its pid may belong to another process."""
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            if self._guard.stdin is not None:
                self._guard.stdin.close()
            self._guard = None
        if self._process is not None:
            self._process.wait()

    def _output(self) -> str:
        """Return what the server printed since its last start."""
        with open(self.log, "rb") as file:
            file.seek(self._printed)
            return file.read().decode(errors="replace")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._output().splitlines() if line.strip() and not line.startswith(("\t", " "))]
        return lines[-1] if lines else "it printed nothing"


class NameServer(Server):
    main = "org.apache.rocketmq.namesrv.NamesrvStartup"
    kind = "namesrv"
    # The nameserver does so little that full compilation would be most of its work.
    heap = ("-Xms64m", "-Xmx128m", "-XX:TieredStopAtLevel=1")

    def properties(self) -> dict[str, object]:
        return {
            "listenPort": self.port,
            "bindAddress": HOST,
            "kvConfigPath": self.home / "kvConfig.json",
            "configStorePath": self.home / "namesrv.stored.properties",
        }

    def ready(self) -> bool:
        return answers(self.address, _GET_CLUSTERS)


class BrokerServer(Server):
    """A broker on the ports P-2, P and P+1."""

    main = "org.apache.rocketmq.broker.BrokerStartup"
    kind = "broker"
    heap = ("-Xms256m", "-Xmx512m")

    def __init__(
        self,
        home: Path,
        version: str,
        port: int,
        namesrv: str,
        cluster: str,
        properties: Mapping[str, object] | None = None,
        jvm: Sequence[str] = (),
    ) -> None:
        super().__init__(home, version, port, jvm)
        self.name = home.name
        self._namesrv = namesrv
        self._cluster = cluster
        self._properties = dict(properties or {})
        self._registered = 0.0

    def properties(self) -> dict[str, object]:
        return {
            "brokerClusterName": self._cluster,
            "brokerName": self.name,
            "brokerId": 0,
            "namesrvAddr": self._namesrv,
            "listenPort": self.port,
            "bindAddress": HOST,
            "brokerIP1": HOST,
            "brokerIP2": HOST,
            "storePathRootDir": self.home / "store",
            "storePathCommitLog": self.home / "store" / "commitlog",
            "autoCreateTopicEnable": True,
            "autoCreateSubscriptionGroup": True,
            "enablePropertyFilter": True,
            # The files are small, because the defaults would take gigabytes.
            "mappedFileSizeCommitLog": 64 << 20,
            "mappedFileSizeConsumeQueue": 600_000,
            "maxHashSlotNum": 4000,
            "maxIndexNum": 1000,
            "messageIndexEnable": False,
            "timerWheelEnable": False,
            # A broker of 5.3 runs a busy loop for this many ms after its start (TransactionMetricsFlushService).
            "transactionMetricFlushInterval": 300,
            **self._properties,
        }

    def ready(self) -> bool:
        """Whether the nameserver sends clients to this broker. A broker that reports its boot may not have registered yet."""
        try:
            code, body = ask(self._namesrv, _GET_ROUTE, {"topic": self.name})
            if code == 0 and self.address.encode() in body:
                return True
            # A 5.x broker tries to register before it can reach the nameserver, and again only 10 s later. Setting its permission to
            # the present value makes it register now.
            if time.monotonic() > self._registered + 0.5 and "boot success" in self._output():
                self._registered = time.monotonic()
                ask(self.address, _UPDATE_BROKER_CONFIG, body=b"brokerPermission=6\n")
        except OSError:
            pass
        return False


class Cluster:
    """A nameserver and its brokers in one folder. The brokers are called ``broker-a``, ``broker-b``, ..., or as in ``names``.

    ``properties``: settings of the brokers, which override the defaults. ``jvm``: Java options of all servers. ``lock_life``:
    seconds that a queue lock lives without renewal. ``port``: the port of the nameserver, or None for a free one.
    """

    def __init__(
        self,
        folder: Path,
        version: str = DEFAULT_VERSION,
        *,
        brokers: int = 1,
        properties: Mapping[str, object] | None = None,
        jvm: Sequence[str] = (),
        lock_life: float | None = None,
        port: int | None = None,
        name: str = "local",
        names: Sequence[str] = (),
    ) -> None:
        if lock_life is not None:
            jvm = (*jvm, f"-Drocketmq.broker.rebalance.lockMaxLiveTime={lock_life * 1000:.0f}")
        if port is not None and not is_free(port):
            raise ServersError(
                ServersCondition.PORT_IN_USE, f"port {port} is in use: is another nameserver running? Choose another port"
            )
        self.name = name
        self.version = version
        self.namesrv = NameServer(folder / "namesrv", version, find_free_port() if port is None else port, jvm)
        self.brokers = [
            BrokerServer(folder / broker, version, find_free_port(-2, 0, 1), self.address, name, properties, jvm)
            for broker in names or [f"broker-{letter}" for letter in "abcdefgh"[:brokers]]
        ]

    @property
    def address(self) -> str:
        """The nameserver's address, which is the option namesrvAddr of clients."""
        return self.namesrv.address

    @property
    def broker(self) -> BrokerServer:
        """The first broker, for clusters with only one broker."""
        return self.brokers[0]

    @property
    def servers(self) -> list[Server]:
        return [self.namesrv, *self.brokers]

    def start(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Start all servers in parallel, including servers that were killed. After an error of `Server.start`, kill all and raise it.

        As soon as ``given_up()`` is true, this starts no more servers and returns without waiting. Started servers keep running.
        """
        try:
            for server in self.servers:
                if not given_up():
                    server.launch()
            for server in self.servers:
                server.wait(given_up=given_up)
        except BaseException:
            self.stop()
            raise

    def heal(self) -> None:
        """Resume the paused servers and start the dead ones again."""
        broken = [server for server in self.servers if server.broken]
        for server in broken:
            server.resume()
        if broken:
            self.start()

    def stop(self) -> None:
        """Kill all servers (kill -9)."""
        for server in self.servers:
            server.kill()

    def shut_down(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """Shut all servers down, the nameserver last. Kill the remaining ones as soon as ``hurried()`` is true."""
        for server in reversed(self.servers):
            server.shut_down(hurried)

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
