"""The store's directory: when it is created, who may open it, and how threads, connections and processes share it.

This module is long because each way of sharing a directory has its own refusals.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from orderedmq import connect
from orderedmq.broker import Broker
from orderedmq.embedded.broker import EmbeddedBroker
from orderedmq.embedded.check import check
from orderedmq.embedded.store import database, filesystem, wal
from orderedmq.embedded.store.database import Store
from orderedmq.embedded.store.filesystem import file_system
from orderedmq.embedded.store.schema import FORMAT
from orderedmq.embedded.store.store_file import FILE
from orderedmq.model import DEAD_LETTER_PREFIX, MAX_NAME_LENGTH, MessageQueue
from tests.contract.support import bodies, queues_of, refused, rows
from tests.waits import until

ROOT = Path(__file__).parents[3]


@pytest.fixture
def broker(path: Path) -> Iterator[Broker]:
    with connect(path) as broker:
        broker.admin.create_topic("orders", 2)
        yield broker


def script(code: str, *arguments: object) -> str:
    """Run Python code in a separate process, and return its output. The arguments are in ``sys.argv[1:]``."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python code in separate processes, which are killed after the test. The arguments are in ``sys.argv[1:]``."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: object) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


# -- creating and opening ---------------------------------------------------------------------------------------------------------


def test_a_reader_creates_no_store_and_names_its_path(path: Path):
    with connect(path) as broker:
        for look in (
            lambda: broker.log,
            lambda: broker.groups.offsets("g", []),
            lambda: broker.identity,
            broker.admin.groups,
            lambda: broker.admin.delete_topic("t"),
        ):
            with refused("STORE.MISSING", path, "namesrvAddr", "path"):
                look()
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "\udcff", "a\0b", "x" * 600])
def test_a_name_that_no_topic_can_have_is_refused_wherever_it_is_used(broker: Broker, name: str):
    queue = MessageQueue(name, "embedded", 0)
    uses: list[Callable[[], object]] = [
        lambda: broker.log.topic(name),
        lambda: broker.log.bounds([queue]),
        lambda: broker.log.pull(queue, 0, 1, 1, ("body",)),
        lambda: broker.admin.describe_topic(name),
        lambda: broker.admin.alter_topic(name, retention_seconds=1),
        lambda: broker.admin.resize_topic(name, 2),
        lambda: broker.admin.trim(name),
        lambda: broker.admin.kept_for([name]),
        lambda: broker.admin.delete_topic(name),
    ]
    for use in uses:
        with refused("TOPIC.BAD_NAME", repr(name)):
            use()


@pytest.mark.parametrize("number", [-1, 1 << 32])
def test_a_number_that_no_queue_can_have_is_refused_by_name(broker: Broker, number: int):
    queue = MessageQueue("orders", "embedded", number)
    for use in (lambda: broker.log.bounds([queue]), lambda: broker.log.pull(queue, 0, 1, 1, ("body",))):
        with refused("TOPIC.NO_SUCH_QUEUE", "'orders'", number):
            use()


def test_a_group_with_the_longest_name_has_no_dead_letters(broker: Broker):
    with refused("TOPIC.MISSING", "first dead letter"):
        broker.log.queues(DEAD_LETTER_PREFIX + "g" * MAX_NAME_LENGTH)


def test_a_relative_path_is_made_absolute_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with EmbeddedBroker(Path("here")) as broker:
        monkeypatch.chdir("/")
        broker.admin.create_topic("t", 1)
    assert (tmp_path / "here" / "index.db").is_file()


@pytest.mark.parametrize(("version", "remedy"), [(FORMAT + 1, "Upgrade"), (FORMAT - 1, "make a new store")])
def test_a_store_of_another_format_is_refused(path: Path, broker: Broker, version: int, remedy: str):
    broker.close()
    with contextlib.closing(sqlite3.connect(path / FILE, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA user_version={version}")
        connection.execute("UPDATE settings SET number = ? WHERE name = 'format'", (version,))
    for look in (lambda: broker.log, lambda: broker.admin.create_topic("t", 1)):
        with refused("STORE.OTHER_FORMAT", path, version, remedy):
            look()


@pytest.mark.parametrize("content", [b"", b"hello", os.urandom(20_000), b"\0" * 8192])
def test_a_file_that_is_no_store_is_refused_and_left_alone(path: Path, content: bytes):
    path.mkdir()
    (path / "index.db").write_bytes(content)
    with connect(path) as broker:
        for look in (lambda: broker.log, lambda: broker.admin.create_topic("t", 1)):
            with refused("STORE.NOT_A_STORE", path):
                look()
    assert (path / "index.db").read_bytes() == content


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_a_database_of_another_program_is_refused_and_left_alone(path: Path, mode: str):
    path.mkdir()
    with contextlib.closing(sqlite3.connect(path / FILE, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA journal_mode={mode}")
        connection.execute("CREATE TABLE settings (name TEXT PRIMARY KEY, number, text, seal)")
        connection.execute("INSERT INTO settings VALUES ('format', 1, NULL, 1)")
    before = (path / "index.db").read_bytes()
    with connect(path) as broker:
        for look in (lambda: broker.log, lambda: broker.admin.create_topic("t", 1)):
            with refused("STORE.NOT_A_STORE", path):
                look()
    assert (path / "index.db").read_bytes() == before


def test_a_path_that_is_a_file_is_refused_by_name(path: Path):
    path.write_text("a file")
    with connect(path) as broker:
        with refused("STORE.MISSING", path):
            broker.log.topics()
        with refused("STORE.NOT_A_STORE", path):
            broker.admin.create_topic("t", 1)


@pytest.mark.parametrize("name", ["x" * 300, "loop"])
def test_a_path_that_no_directory_can_have_is_refused_by_name(tmp_path: Path, name: str):
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / name
    with connect(path) as broker:
        for use in (lambda: broker.log, lambda: broker.admin.create_topic("t", 1), lambda: check(path)):
            with refused("STORE.NOT_A_STORE", repr(str(path)), "another path"):
                use()


def test_windows_is_refused_by_name(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with connect(path) as broker, refused("STORE.PLATFORM", "Windows"):
        broker.log.topics()


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "fuse.glusterfs", "9p"])
def test_a_network_file_system_is_refused_before_anything_is_made(path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setattr(database, "file_system", lambda where: kind)
    with connect(path) as broker, refused("STORE.NETWORK_FILE_SYSTEM", kind, path):
        broker.admin.create_topic("t", 1)
    assert not path.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(tmp_path: Path):
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(tmp_path / "not" / "there") == file_system(tmp_path) not in ("", "proc")


@pytest.mark.parametrize("name", [b"donn\xc3\xa9es", b"usb-\xe9t\xe9", b"a b\tc\nd\\e", b"x\x0by\xc2\x85z\r"])
def test_mounts_are_recognised_whatever_characters_their_names_have(tmp_path: Path, name: bytes):
    mount, mounts = os.fsencode(tmp_path) + b"/" + name, tmp_path / "mountinfo"
    escaped = re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % found[0][0], mount)
    lines = [b"1 1 0:1 / / rw - ext4 /dev/a rw", b"2 1 0:2 / %b rw shared:1 - nfs4 server:/a rw" % escaped]
    mounts.write_bytes(b"".join(line + b"\n" for line in lines))
    assert file_system(Path(os.fsdecode(mount)) / "store", mounts) == "nfs4"
    assert file_system(tmp_path, mounts) == "ext4"


def test_another_store_than_the_expected_one_is_refused(path: Path, broker: Broker):
    identity = broker.identity
    with connect(path, identity=identity) as same:
        assert same.identity == identity
    with connect(path, identity="0" * 32) as other, refused("STORE.OTHER_MACHINE", path, "another store"):
        other.log.topics()
    with (
        connect(path / "elsewhere", identity=identity) as other,
        refused("STORE.OTHER_MACHINE", path / "elsewhere", "no store"),
    ):
        other.log.topics()
    assert broker.log.topics()


# -- permissions ------------------------------------------------------------------------------------------------------------------

AS_NOBODY = """
    import os, sys
    from orderedmq import connect
    from orderedmq.errors import OrderedMQError
    import orderedmq.embedded.broker, pyarrow
    if os.getuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    for path in sys.argv[1:]:
        with connect(path) as broker:
            for call in (lambda: broker.log.topics(), lambda: broker.admin.create_topic("t", 1)):
                try:
                    call()
                    print("nothing")
                except OrderedMQError as error:
                    print(error.condition, path in str(error))
    from typer.testing import CliRunner
    from orderedmq.cli import app
    listing = CliRunner().invoke(app, ["--path", sys.argv[1], "topic", "list"])
    print(listing.stderr.split("]")[0].split("[")[1], sys.argv[1] in listing.stderr)
"""


def test_a_store_that_may_not_be_used_is_refused_by_name():
    """If root runs the test, a child process takes another user's id. Any other user removes the rights to its own files."""
    with tempfile.TemporaryDirectory() as above:
        os.chmod(above, 0o755)
        closed, readable, unwritable = (Path(above) / name for name in ("closed", "readable", "unwritable"))
        for path in (closed, readable):
            with connect(path) as broker:
                broker.admin.create_topic("orders", 1)
        unwritable.mkdir()
        closed.chmod(0o000)
        readable.chmod(0o555)
        unwritable.chmod(0o555)
        for file in readable.iterdir():
            if file.is_file():
                file.chmod(0o400)
        try:
            said = script(AS_NOBODY, closed, readable, unwritable).splitlines()
        finally:
            for path in (closed, readable, unwritable):
                path.chmod(0o700)
    refusal = "ORDEREDMQ_STORE.PERMISSION True"
    assert said == [refusal] * 4 + ["ORDEREDMQ_STORE.MISSING True", refusal, refusal]


WITH_RIGHTS_TAKEN = """
    import os, subprocess, sys
    from pathlib import Path
    from orderedmq import connect
    from orderedmq.errors import OrderedMQError
    from tests.contract.support import bodies, locked, queues_of, rows
    import orderedmq.embedded.broker, pyarrow

    path, how = Path(sys.argv[1]), sys.argv[2]
    if how == "mode" and os.getuid() == 0:
        os.chown(path.parent, 65534, 65534)
        os.setgroups([]); os.setgid(65534); os.setuid(65534)

    def run(*command):
        subprocess.run(command, check=True)

    def call(name, work):
        try:
            found = work()
            print(name, found if name == "read" else "ok")
        except OrderedMQError as error:
            print(name, error.condition, str(error).partition("nothing was changed: ")[2])

    with connect(path) as broker:
        broker.admin.create_topic("orders", 1)
        [queue] = queues_of(broker)
        broker.log.append({queue: rows(["a"])})
        me, other = broker.groups.join("me"), broker.groups.join("other")
        tokens = locked(broker, "g", me, [queue])
        for name in ("owners", "segments"):
            if how == "mode":
                (path / name).chmod(0)
            else:
                run("mount", "--bind", path / name, path / name)
                run("mount", "-o", "remount,bind,ro", path / name)
        call("append", lambda: broker.log.append({queue: rows(["b"])}))
        call("large", lambda: broker.log.append({queue: rows([os.urandom(100_000).hex()])}))
        call("join", lambda: broker.groups.join("third"))
        call("locks", lambda: broker.admin.locks())
        call("leave", lambda: broker.groups.leave(other))
    if how == "mode":
        (path / "index.db").chmod(0o400)
    else:
        run("umount", path / "owners")
        run("umount", path / "segments")
        run("mount", "-o", "remount,ro", path.parent)
    with connect(path) as broker:
        call("read", lambda: bodies(broker, queue))
    with connect(path.with_name("new")) as broker:
        if how != "mode":
            call("create", lambda: broker.admin.create_topic("orders", 1))
    if how == "mode":
        run("chmod", "-R", "u+rwX", path)
        with connect(path) as broker:
            broker.admin.create_topic("large", 1)
            [other] = queues_of(broker, "large")
            broker.log.append({other: rows([os.urandom(100_000).hex()])})
            [segment] = (path / "segments").glob("*.segment")
            segment.chmod(0)
            call("segment", lambda: bodies(broker, other))
            segment.chmod(0o600)
    else:
        run("mount", "-o", "remount,rw", path.parent)
    with connect(path) as broker:
        call("append", lambda: broker.log.append({queue: rows(["c"])}))
        call("read", lambda: bodies(broker, queue))
        print([lock.alive for lock in broker.admin.locks()])
"""


@pytest.mark.holds("lost rights")
def test_a_store_without_rights_is_a_named_error_until_they_are_back():
    with tempfile.TemporaryDirectory() as above:
        path = Path(above) / "store"
        said = re.sub("[0-9a-f]{32}", "TOKEN", script(WITH_RIGHTS_TAKEN, path, "mode")).splitlines()
    user = pwd.getpwuid(os.getuid() or 65534).pw_name
    refused_ = "ORDEREDMQ_STORE.PERMISSION"
    owners = f"{path}/owners belongs to user {user} and has mode 0000. Allow its owner to use it: chmod -R u+rwX {path}"
    data = f"{path}/index.db belongs to user {user} and has mode 0400. Allow its owner to use it: chmod -R u+rwX {path}"
    segment = f"{path}/segments/TOKEN.segment belongs to user {user} and has mode 0000. Allow its owner to use it: chmod -R u+rwX {path}"
    assert said == [
        "append ok", f"large {refused_} {owners}", f"join {refused_} {owners}",
        f"locks {refused_} {owners}", "leave ok", f"read {refused_} {data}",
        f"segment {refused_} {segment}", "append ok", "read ['a', 'b', 'c']", "[False]",
    ]  # fmt: skip


@pytest.mark.holds("lost rights")
def test_a_store_on_a_read_only_file_system_is_a_named_error_until_it_is_writable(tmp_path: Path):
    """The test runs in a mount namespace that ends with its process."""
    alone = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mount = 'mount -t tmpfs tmpfs "$1" && exec "$0" -c "$2" "$1/store" mount'
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow users to create a mount namespace")
    done = subprocess.run(
        [*alone, "sh", "-c", mount, sys.executable, str(tmp_path), textwrap.dedent(WITH_RIGHTS_TAKEN)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    remedy = "Mount it writable. If a disk error made it read-only, repair the disk first (see dmesg)"
    read_only = f"ORDEREDMQ_STORE.PERMISSION the store's file system is read-only. {remedy}"
    assert done.stdout.splitlines() == [
        "append ok", f"large {read_only}", f"join {read_only}", "locks ok", "leave ok", f"read {read_only}", f"create {read_only}",
        "append ok", "read ['a', 'b', 'c']", "[False]",
    ]  # fmt: skip


def test_two_containers_with_one_process_number_share_a_store(path: Path, broker: Broker):
    alone = ["unshare", "--pid", "--fork", *([] if os.getuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow users to create a namespace of processes")
    code = """
        import sys, pyarrow as pa, orderedmq
        broker = orderedmq.connect(sys.argv[1])
        for number in range(50):
            broker.log.append({broker.log.queues("orders")[0]: pa.record_batch({"body": [b"x"]})})
        print("written", flush=True)
        sys.stdin.read()
    """
    command = [*alone, sys.executable, "-c", textwrap.dedent(code), str(path)]
    writers = [subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "written\n"
    for writer in writers:
        writer.communicate(timeout=60)
    assert len(bodies(broker, queues_of(broker)[0])) == 100
    assert check(path) == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_of_a_store_are_private_whatever_the_umask(path: Path, umask: int):
    script(
        """
        import os, sys
        os.umask(int(sys.argv[2]))
        import pyarrow as pa
        from orderedmq import connect
        from orderedmq.broker import SinkBatch
        from orderedmq.ownership.micro_batch import SourceRun
        from orderedmq.model import OffsetRange
        broker = connect(sys.argv[1])
        broker.admin.create_topic("t", 1)
        [queue] = broker.log.queues("t")
        client = broker.groups.join("me")
        token = broker.groups.lock("g", client, [queue])[queue]
        broker.outbox.register(SourceRun("query", 0, "run"), queue, OffsetRange(0, 0), token)
        staging = broker.outbox.open(SinkBatch("s", 0), 0)
        staging.add(queue, pa.record_batch({"body": [b"a"]}))
        staging.receipt()
        os._exit(0)
        """,
        path,
        umask,
    )
    seen = 0
    for entry in [path, *path.rglob("*")]:
        assert entry.stat().st_mode & 0o777 == (0o700 if entry.is_dir() else 0o600), entry
        seen += 1
    assert seen >= 8


# -- sharing ----------------------------------------------------------------------------------------------------------------------


def test_connections_of_one_process_share_one_environment(path: Path, broker: Broker):
    with connect(path) as second:
        second.log.append({queues_of(broker)[0]: rows("ab")})
        [opened] = [store for store in Store._process().stores.values() if store.path == path]
        assert opened._users == 2
    assert bodies(broker, queues_of(broker)[0]) == ["a", "b"]
    broker.close()
    assert opened not in Store._process().stores.values()
    assert broker.log.topics(), "a closed connection must open again when used"


def test_objects_of_a_closed_connection_say_that_it_is_closed(broker: Broker):
    log, queue = broker.log, queues_of(broker)[0]
    broker.close()
    with refused("STORE.IO", "closed"):
        log.append({queue: rows("a")})
    broker.close()


def test_threads_share_a_connection(broker: Broker):
    queue, other = queues_of(broker)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                broker.log.append({queue: rows([f"{number}.{turn}"])})
                assert bodies(broker, queue)
                broker.log.append({other: rows(["x"])})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    got = bodies(broker, queue)
    for number in range(4):
        assert [body for body in got if body.startswith(f"{number}.")] == [f"{number}.{turn}" for turn in range(20)]
    assert len(bodies(broker, other)) == 80


def test_a_connection_that_threads_use_first_at_once_is_closed_once(path: Path, broker: Broker):
    broker.close()

    def use(shared: Broker, part: str, start: threading.Barrier) -> object:
        start.wait()
        return getattr(shared, part)

    for _ in range(20):
        shared, start = connect(path), threading.Barrier(3)
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(use, [shared] * 3, ("log", "groups", "outbox"), [start] * 3))
        shared.close()
        assert path not in [store.path for store in Store._process().stores.values()]


def test_a_store_made_by_many_processes_at_once_is_one_store(path: Path, start):
    code = """
        import sys
        from orderedmq import connect
        import orderedmq.embedded.broker
        print("ready", flush=True)
        sys.stdin.readline()
        broker = connect(sys.argv[1])
        broker.admin.create_topic(sys.argv[2], 1)
        print(broker.identity)
    """
    makers = [start(code, path, f"t{number}") for number in range(4)]
    for maker in makers:
        assert maker.stdout.readline() == "ready\n"
    for maker in makers:
        say(maker, "go")
    said = [maker.communicate(timeout=30)[0] for maker in makers]
    assert len(set(said)) == 1
    with connect(path) as broker:
        assert [topic.name for topic in broker.log.topics()] == ["t0", "t1", "t2", "t3"]


#: Creates the topic "theirs" when it has read a line, and tries once more after an error. After its look at the path and before it opens
#: the files, it waits for another line, but at most a second.
OTHER_MAKER = """
    import select, sys
    from orderedmq import connect
    from orderedmq.embedded.store.database import Store
    from orderedmq.errors import StoreError

    def late(self, made=Store._create):
        print("looked", flush=True)
        select.select([sys.stdin], [], [], 1)
        made(self)

    Store._create = late
    print("ready", flush=True)
    sys.stdin.readline()
    for last in (False, True):
        try:
            connect(sys.argv[1]).admin.create_topic("theirs", 1)
            break
        except StoreError:
            if last:
                raise
"""


@pytest.mark.holds("loss of power")
@pytest.mark.parametrize("module", [filesystem, database], ids=["the name of the folder", "the names of the files"])
def test_a_failed_sync_of_one_of_two_makers_loses_no_topic(
    path: Path, start, monkeypatch: pytest.MonkeyPatch, module: ModuleType
):
    """While another process wants to make the same store, a sync fails. The maker tries again before the other process continues."""
    other = start(OTHER_MAKER, path)
    assert other.stdout.readline() == "ready\n"

    def failing(folder: Path) -> None:
        monkeypatch.undo()
        say(other, "go")
        until(lambda: waits_for_a_lock(other.pid), "the other process waits for the folder")
        other.send_signal(signal.SIGSTOP)
        # The signal stops the process a moment later. Until then, it could still get the lock, and would keep it while it is stopped.
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module, "sync_folder", failing)
    with connect(path) as broker:
        with refused("STORE.IO", path):
            broker.admin.create_topic("ours", 1)
        broker.admin.create_topic("ours", 1)
    other.send_signal(signal.SIGCONT)
    assert_both_made_a_topic(path, other)


def test_while_a_process_makes_a_store_no_other_makes_its_files(path: Path, start, monkeypatch: pytest.MonkeyPatch):
    """A process that has seen no files would otherwise open files that another process removes after a failed sync."""
    other = start(OTHER_MAKER, path)
    say(other, "go")
    assert [other.stdout.readline() for _ in range(2)] == ["ready\n", "looked\n"]
    monkeypatch.setattr(Store, "_create", lambda self: pytest.fail("two processes make a store"))
    with connect(path) as broker:
        broker.admin.create_topic("ours", 1)
    assert_both_made_a_topic(path, other)


def assert_both_made_a_topic(path: Path, other: subprocess.Popen[str]) -> None:
    other.communicate(timeout=30)
    assert other.returncode == 0
    with connect(path) as broker:
        assert [topic.name for topic in broker.log.topics()] == ["ours", "theirs"]
    assert check(path) == []


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def waits_for_a_lock(process: int) -> bool:
    """Whether a process waits for a lock on a file or folder."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(words[1] == "->" and words[5] == str(process) for words in locks)


def test_a_child_of_a_process_with_a_read_under_way_cannot_open_the_store(path: Path, broker: Broker):
    said = script(
        """
        import os, sys, threading
        from orderedmq import connect
        from orderedmq.errors import StoreError
        broker = connect(sys.argv[1])
        broker.log.topics()
        inside, done = threading.Event(), threading.Event()
        def hold():
            with broker.log._store.read():
                inside.set()
                done.wait()
        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            try:
                connect(sys.argv[1]).log.topics()
            except StoreError as error:
                print(error.condition, "forked" in str(error), flush=True)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        done.set()
        thread.join()
        print(len(broker.log.topics()))
        """,
        path,
    )
    assert said.splitlines() == ["ORDEREDMQ_STORE.IO True", "1"]


@pytest.mark.parametrize("end", ["killed", "continued"])
def test_a_reader_that_is_stopped_keeps_the_log_only_while_it_is_stopped(
    path: Path, broker: Broker, start, monkeypatch: pytest.MonkeyPatch, end: str
):
    """A reader is stopped inside its transaction, so the log cannot begin anew. Writers do not wait for it."""
    monkeypatch.setattr(wal, "LIMIT", 256 * 1024)
    store = Store.open(path)
    store._long_log = wal.LIMIT
    code = """
        import sys
        from orderedmq import connect
        broker = connect(sys.argv[1])
        with broker.log._store.read() as txn:
            txn.number()
            print("reading", flush=True)
            sys.stdin.readline()
        print("read", flush=True)
        sys.stdin.readline()
    """
    reader = start(code, path)
    assert reader.stdout.readline() == "reading\n"
    reader.send_signal(signal.SIGSTOP)
    queue = queues_of(broker)[0]

    def write(bytes_written: int) -> None:
        for _ in range(bytes_written // 20_000):
            broker.log.append({queue: rows([b"x" * 20_000])})

    write(5 * wal.LIMIT)
    assert wal.size(path) > 4 * wal.LIMIT
    if end == "killed":
        reader.kill()
        reader.wait()
    else:
        reader.send_signal(signal.SIGCONT)
        say(reader, "go")
        assert reader.stdout.readline() == "read\n"
    write(2 * wal.size(path))
    assert wal.size(path) <= 2 * wal.LIMIT
    store.close()


def test_the_change_number_is_never_ahead_of_the_messages(path: Path):
    """A read that follows a read of the change number must see that change. Otherwise an idle query or peek --follow would wait
    for the next write.
    """
    with connect(path) as broker:
        broker.admin.create_topic("t", 1)
        script = (
            "import sys, pyarrow as pa, orderedmq\n"
            "with orderedmq.connect(sys.argv[1]) as broker:\n"
            "    [queue] = broker.log.queues('t')\n"
            "    for number in range(200): broker.log.append({queue: pa.record_batch({'body': [b'x']})})\n"
        )
        writer = subprocess.Popen([sys.executable, "-c", script, str(path)])
        [queue] = broker.log.queues("t")
        seen: dict[int | None, set[int]] = {}
        while writer.poll() is None:
            before = broker.log.change()
            end = broker.log.bounds([queue])[queue].max_offset
            if broker.log.change() == before:
                seen.setdefault(before, set()).add(end)
        assert writer.returncode == 0
        # Each number belongs to exactly one state.
        assert [ends for ends in seen.values() if len(ends) > 1] == []
        assert len(seen) > 1
