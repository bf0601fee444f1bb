"""A PostgreSQL server for tests. Its binaries come in a jar from Maven Central, so it needs no package manager and no root rights."""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psycopg

from orderedmq.rocketmq.local.jars import fetch_packages
from tests.waits import until

VERSION: Final = "17.5.0"


def binaries() -> Path:
    """Return the jar with the server for this machine. Raises ServersError NO_JARS if it cannot be fetched."""
    machine = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}[platform.machine().lower()]
    artifact = f"embedded-postgres-binaries-{platform.system().lower()}-{machine}"
    folder = fetch_packages(f"PostgreSQL {VERSION}", [f"io.zonky.test.postgres:{artifact}:{VERSION}"], f"postgres-{VERSION}")
    (jar,) = folder.glob(f"*{artifact}*.jar")
    return jar


class Postgres:
    """A server on a free port of 127.0.0.1, with the user postgres and no password."""

    def __init__(self) -> None:
        jar = binaries()
        # This folder is not below the tests' folder. The server refuses to run as root, so root's tests run it as another user,
        # who may not enter the tests' folder.
        self._folder = Path(tempfile.mkdtemp(prefix="orderedmq-postgres-"))
        with zipfile.ZipFile(jar) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".txz"))
            with archive.open(name) as packed, tarfile.open(fileobj=packed, mode="r|xz") as tar:
                tar.extractall(self._folder / "server", filter="data")
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(self._folder, nobody.pw_uid, nobody.pw_gid)
        data = self._folder / "data"
        options = ["-U", "postgres", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"]
        self._run("initdb", "-D", str(data), *options).check_returncode()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.database = f"postgresql://postgres@{self.address}/postgres"
        self._log = (self._folder / "log.txt").open("wb")
        settings = [f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories="]
        self._process = subprocess.Popen(
            [str(self._binary("postgres")), "-D", str(data), *(word for one in settings for word in ("-c", one))],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, cwd=self._folder, **self._user,
        )  # fmt: skip
        until(self._answers, "PostgreSQL answers")

    def query(self, text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database) as connection:
            return connection.execute(text.encode()).fetchall()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # SIGINT means a fast shutdown, which does not wait for clients.
        self._process.send_signal(signal.SIGINT)
        self._process.wait(30)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log.txt").read_text()
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.database, connect_timeout=5):
            return True
        return False

    def _binary(self, name: str) -> Path:
        return self._folder / "server" / "bin" / name

    def _run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [str(self._binary(name)), *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=self._folder, **self._user)
