"""The command: what it prints, where, and with which exit code.

This module is long because each command has tests.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import orderedmq
from orderedmq import cli
from orderedmq.broker import Broker
from orderedmq.cli import app, queue_names
from orderedmq.cli.shell import FILE_VARIABLE
from orderedmq.cli.topics import parse_retention
from orderedmq.embedded.admin import EmbeddedAdmin
from orderedmq.embedded.log import EmbeddedLog
from orderedmq.errors import OptionError
from orderedmq.model import MAX_BODY_BYTES
from orderedmq.ownership.lock import LockToken
from orderedmq.schema import PRODUCER_SCHEMA
from orderedmq.tools import readable
from orderedmq.tools.producer import Producer
from tests.command import COMMAND, ENVIRONMENT, Run, bodies, on_terminal
from tests.waits import until


@pytest.fixture
def broker(store: Path) -> Iterator[Broker]:
    with orderedmq.connect(store) as broker:
        yield broker


# General.


def test_version_and_help(run: Run) -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"orderedmq {orderedmq.__version__}\n"
    for arguments in ([], ["topic"], ["topic", "trim"], ["group"], ["lock"], ["produce"], ["peek"], ["audit"], ["demo"]):
        result = CliRunner().invoke(app, [*arguments, "--help"])
        assert result.exit_code == 0
    assert "Exit codes" in CliRunner().invoke(app, ["--help"]).stdout


HEAVY = ("numpy", "pandas", "pyarrow", "pyspark")


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], HEAVY),
        (["peek", "--help"], ("pandas",)),
    ],
)
def test_help_imports_no_large_package(arguments: list[str], heavy: tuple[str, ...]) -> None:
    code = (
        "import sys; from orderedmq.cli import app; app(sys.argv[1:], standalone_mode=False); "
        f"print('loaded:', sorted(set({heavy}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("loaded: []"), done.stdout + done.stderr


def test_help_has_the_first_paragraph_of_each_command() -> None:
    for name, (_, said) in (cli.COMMANDS | cli.GROUPS).items():
        assert (cli.load(name).help or "").partition("\n\n")[0].replace("\n", " ") == said


def completed(store: Path | None, *words: str) -> list[str]:
    """Return the words that bash would offer to complete the last word."""
    line = ["orderedmq", *(["--path", str(store)] if store else []), *words]
    environment = {"_ORDEREDMQ_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
    result = CliRunner().invoke(app, [], prog_name="orderedmq", env=environment)
    assert result.exit_code == 0
    assert result.stderr == ""
    return result.stdout.split()


def test_completion_knows_commands_topics_and_groups(store: Path, broker: Broker) -> None:
    assert "peek" in completed(store, "pe")
    for name in ("orders", "orders-2", "bills"):
        broker.admin.create_topic(name, 1)
    client = broker.groups.join("q")
    broker.groups.lock("billing", client, broker.log.queues("orders"))
    broker.groups.leave(client)
    for words in (["peek"], ["topic", "describe"], ["audit", "bills"], ["group", "seek", "billing", "--topic"]):
        assert completed(store, *words, "ord") == ["orders", "orders-2"]
    for words in (["group", "describe"], ["lock", "release"], ["lock", "list", "--group"], ["top"], ["dlq", "list"]):
        assert completed(store, *words, "b") == ["billing"]
    assert completed(store, "topic", "describe", "--path", "/no/such/store", "ord") == []


def test_completion_asks_the_broker_of_a_profile_or_of_options(
    store: Path, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.admin.create_topic("orders", 1)
    profiles = tmp_path / "config.toml"
    profiles.write_text(f'[prod]\npath = "{store}"\n')
    profiles.chmod(0o600)
    monkeypatch.setenv(FILE_VARIABLE, str(profiles))
    for given in (["--profile", "prod"], ["-o", f"path={store}"]):
        assert completed(None, *given, "peek", "ord") == completed(None, "peek", *given, "ord") == ["orders"]
    assert completed(None, "--profile", "none", "peek", "ord") == []


def test_completion_without_a_store_prints_nothing_and_creates_none(store: Path) -> None:
    assert completed(store, "topic", "describe", "o") == completed(store, "group", "delete", "b") == []
    assert not store.exists()


def test_completion_does_not_wait_for_a_cluster_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_names, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        assert completed(None, "peek", "--namesrv", address, "o") == []
        # Without this limit, a request to a nameserver that does not answer is given up only after 30 s.
        assert time.monotonic() - began < 15


def test_lists_leave_out_groups_and_topics_that_are_deleted_meanwhile(
    run: Run, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        broker.admin.create_topic(name, 1)
        client = broker.groups.join("q")
        [token] = broker.groups.lock(name, client, broker.log.queues(name)).values()
        assert isinstance(token, LockToken)
        broker.groups.commit({token: 0})
        broker.groups.unlock([token])
        broker.groups.leave(client)

    def listed(kind: type, method: str, then: Callable[[], object]) -> None:
        real = getattr(kind, method)
        monkeypatch.setattr(kind, method, lambda *args, **named: (real(*args, **named), then())[0])

    listed(EmbeddedAdmin, "groups", lambda: broker.admin.delete_group("a"))
    assert [row["group"] for row in run("group", "list")] == ["b"]
    listed(EmbeddedLog, "topics", lambda: broker.admin.delete_topic("a"))
    assert [row["topic"] for row in run("topic", "list")] == ["b"]


def test_a_store_is_created_only_in_an_empty_folder(run: Run, text: Run, store: Path) -> None:
    create = ("topic", "create", "a", "--queues", "1")
    store.mkdir()
    run(*create)
    # A store whose file is gone still has its folders.
    (store / "owners").mkdir(exist_ok=True)
    (store / "index.db").unlink()
    run(*create)
    (store / "index.db").unlink()
    # TensorBoard writes into a folder of this name.
    theirs = store / "runs" / "experiment"
    theirs.mkdir(parents=True)
    said = text(*create, code=1)
    assert "STORE.NOT_EMPTY" in said
    assert "runs/experiment" in said
    assert not (store / "index.db").exists()
    theirs.rmdir()
    (store / "passwd").write_text("root")
    before = sorted(store.iterdir())
    said = text(*create, code=1)
    assert "STORE.NOT_EMPTY" in said
    assert "passwd" in said
    assert str(store / "orderedmq-data") in said
    assert sorted(store.iterdir()) == before
    assert "STORE.NOT_EMPTY" in text("produce", "a", "--queues", "1", input="x", code=1)


def test_servers_are_started_only_in_an_empty_folder(store: Path) -> None:
    store.mkdir()
    (store / "passwd").write_text("root")
    for path, says in ((store, "has other files (passwd)"), (store / "passwd", "cannot be used (Not a directory)")):
        result = CliRunner().invoke(app, ["rocketmq", "up", "--path", str(path)])
        assert result.exit_code == 1
        assert "SERVERS.FOLDER_IN_USE" in result.stderr
        assert says in result.stderr
    assert [path.name for path in store.iterdir()] == ["passwd"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["topic", "list"], 3, "STORE.MISSING"),
        (["topic", "describe", "none"], 3, "STORE.MISSING"),
        (["group", "list"], 3, "STORE.MISSING"),
        (["produce", "none"], 3, "STORE.MISSING"),
        (["audit", "a", "b"], 3, "STORE.MISSING"),
        (["topic", "create", "a b", "--queues", "2"], 2, "TOPIC.BAD_NAME"),
        (["topic", "create", "%RETRY%g", "--queues", "2"], 2, "TOPIC.RESERVED"),
        (["topic", "create", "a", "--queues", "2", "--retention-time", "7w"], 2, "OPTION.INVALID"),
        (["topic", "create", "a", "--queues", "2", "--retention-size", "much"], 2, "OPTION.INVALID"),
        (["topic", "create", "a", "--queues", "0"], 2, "--queues"),
        (["topic", "create", "a"], 2, "--queues"),
        (["topic", "create", "a", "--queues", "2", "--compression", "zip"], 2, "compression"),
        (["nonsense"], 2, "nonsense"),
        (["group", "describe", "a b"], 2, "GROUP.BAD_NAME"),
        (["topic", "list", "--path", "~/data"], 2, "~, which is not expanded"),
        (["topic", "list", "--path", "s3://bucket/x"], 2, "s3: addresses are not supported|MISSING"),
    ],
)
def test_a_refused_command_creates_no_store(run: Run, store: Path, arguments: list[str], code: int, says: str) -> None:
    assert re.search(says, run(*arguments, code=code))
    assert not store.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "condition"),
    [
        (["topic", "describe", "none"], 3, "TOPIC.MISSING"),
        (["topic", "delete", "none"], 3, "TOPIC.MISSING"),
        (["peek", "none"], 3, "TOPIC.MISSING"),
        (["peek", "a", "-q", "2"], 3, "TOPIC.NO_SUCH_QUEUE"),
        (["audit", "a", "none"], 3, "TOPIC.MISSING"),
        (["topic", "create", "a", "--queues", "2"], 1, "TOPIC.EXISTS"),
        (["topic", "resize", "none", "--queues", "1"], 3, "TOPIC.MISSING"),
        (["group", "delete", "g"], 1, "GROUP.IN_USE"),
        (["topic", "list", "--path", "no"], 3, "STORE.MISSING"),
        (["topic", "create", "a", "--queues", "1", "--path", __file__], 1, "STORE.NOT_A_STORE"),
        (["topic", "list", "--namesrv", "here"], 2, "OPTION.CONFLICT"),
        (["topic", "list", "--namespace", "acme"], 2, "OPTION.CONFLICT"),
        (["demo", "--namesrv", "h:1", "--namespace", "acme"], 2, "OPTION.UNSUPPORTED"),
    ],
)
def test_a_refusal_has_a_condition_and_an_exit_code(
    run: Run, broker: Broker, arguments: list[str], code: int, condition: str
) -> None:
    broker.admin.create_topic("a", 2)
    broker.groups.lock("g", broker.groups.join("query"), broker.log.queues("a"))
    assert f"[ORDEREDMQ_{condition}]" in run(*arguments, code=code)


def _options() -> list[tuple[list[str], str]]:
    """Every option of every command, except commands that start servers or Spark and options that name a broker."""
    options = []
    for first in ({*cli.COMMANDS} | {*cli.GROUPS}) - {"check", "demo", "rocketmq", "spark", "ui"}:
        group: Any = cli.load(first)
        for name, command in group.commands.items() if first in cli.GROUPS else [("", group)]:
            for option in command.params:
                if option.param_type_name == "option" and option.name not in ("path", "namesrv", "namespace", "follow"):
                    options.append(([first, name] if name else [first], max(option.opts, key=len)))
    return sorted(options)


@pytest.mark.parametrize("text", ["9" * 19, "9" * 5000], ids=["64 bits", "5000 digits"])
def test_a_number_that_is_too_large_ends_no_command_with_a_traceback(store: Path, broker: Broker, text: str) -> None:
    broker.admin.create_topic("a", 1)
    [queue] = broker.log.queues("a")
    broker.log.append({queue: pa.record_batch({"body": [b"x"]})})
    broker.groups.lock("g", broker.groups.join("q"), [queue])
    codes = {}
    for words, option in _options():
        names = {"audit": ["a", "a"], "parked": ["g"], "dlq": ["g"], "group": ["g"], "top": []}.get(words[0], ["a"])
        # An offset needs a queue.
        more = ["--queue", "0"] if words == ["peek"] and option == "--offset" else []
        done = CliRunner().invoke(app, ["--path", str(store), *words, *names, *more, option, text], input="y\n")
        assert isinstance(done.exception, SystemExit | None), (words, option, done.exception)
        codes[" ".join([*words, option])] = done.exit_code
    assert set(codes.values()) <= {0, 1, 2, 3}
    refused = {
        "peek --queue": 3,
        "topic create --queues": 2,
        "topic create --retention-time": 2,
        # A name may have 127 characters.
        "parked list --topic": 2 if len(text) > 127 else 3,
        "group seek --to": 2,
    }
    assert {name: codes[name] for name in refused} == refused, codes


def test_a_topic_is_created_if_it_does_not_exist(run: Run, text: Run) -> None:
    create = ("topic", "create", "a", "--queues", "2", "--if-not-exists")
    assert [run(*create)[0]["created"] for _ in range(2)] == [True, False]
    assert "keeps its settings" in text(*create, "--retention-time", "7d")
    assert run("topic", "list")[0]["retention_seconds"] is None
    assert "exists with 2 queues, not 3" in text("topic", "create", "a", "--queues", "3", "--if-not-exists", code=1)


def test_the_path_may_come_before_or_after_the_command(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["topic", "create", "a", "--queues", "1", "--path", str(store)]).exit_code == 0
    for arguments in (["--path", str(store), "topic", "list"], ["--path", "elsewhere", "topic", "list", "--path", str(store)]):
        assert json.loads(runner.invoke(app, arguments).stdout)["topic"] == "a"
    monkeypatch.chdir(tmp_path)
    store.rename("orderedmq-data")
    assert json.loads(runner.invoke(app, ["topic", "list"]).stdout)["topic"] == "a"


def test_sizes_and_durations_are_readable() -> None:
    assert [readable.size(value) for value in (0, 1023, 1024, 5_000_000, 3 << 40)] == [
        "0 B",
        "1,023 B",
        "1.0 KiB",
        "4.8 MiB",
        "3.0 TiB",
    ]
    assert [readable.duration(value) for value in (0.25, 59, 600, 7200, 604_800)] == ["0.2 s", "59.0 s", "10 m", "2 h", "7 d"]
    assert readable.moment(1_700_000_000_123_456) == "2023-11-14T22:13:20.123456Z"
    assert [parse_retention(value) for value in ("7d", "12h", " 500ms ")] == [604_800, 43_200, 0.5]
    for bad in ("d", "-1d", "1.5d", "٣d", ""):
        with pytest.raises(OptionError):
            parse_retention(bad)


# Topics.


def test_a_store_is_copied_while_it_is_used(store: Path, run: Run, tmp_path: Path):
    run("topic", "create", "t", "--queues", "2", "--compression", "none")
    with orderedmq.connect(store) as broker:
        queues = broker.log.queues("t")
        broker.log.append({queue: pa.record_batch({"body": [b"x" * 100_000]}) for queue in queues})
        [said] = run("snapshot", str(tmp_path / "copy"))
        assert (said["copy"], said["segments"], said["links"]) == (str(tmp_path / "copy"), 1, 1)
        with orderedmq.connect(tmp_path / "copy") as copy:
            assert bodies(copy, "t") == [[(None, b"x" * 100_000)]] * 2
    refused = CliRunner().invoke(app, ["--namesrv", "127.0.0.1:1", "snapshot", str(tmp_path / "other")])
    assert (refused.exit_code, "snapshot is for a store of the embedded broker" in refused.stderr) == (2, True)


def test_a_topics_life(run: Run, text: Run, broker: Broker) -> None:
    (topic,) = run(
        "topic", "create", "a", "--queues", "2", "--retention-time", "7d", "--retention-size", "10g", "--compression", "none"
    )
    assert topic["incarnation"] == broker.log.topic("a").incarnation
    run("topic", "create", "b", "--queues", "1")
    run("produce", "a", input="1\n2\n3\n")
    listed = run("topic", "list")
    assert [(row["topic"], row["queues"], row["messages"], row["compression"]) for row in listed] == [
        ("a", 2, 3, "none"),
        ("b", 1, 0, "lz4"),
    ]
    assert (listed[0]["retention_seconds"], listed[0]["retention_bytes"]) == (604_800, 10 << 30)
    assert "7 d" in text("topic", "list")
    rows = run("topic", "describe", "a")
    assert [(row["queue_id"], row["min_offset"], row["max_offset"], row["chunks"]) for row in rows] == [
        (0, 0, 2, 1),
        (1, 0, 1, 1),
    ]
    assert rows[0]["first_stored"] <= rows[0]["last_stored"]
    assert run("topic", "describe", "b")[0]["first_stored"] is None
    shown = text("topic", "describe", "a")
    assert "a: 2 queues, 3 messages, " in shown
    assert "kept up to 10.0 GiB" in shown
    (grown,) = run("topic", "resize", "a", "--queues", "3")
    assert (grown["queues"], grown["closed"]) == (3, 0)
    (shrunk,) = run("topic", "resize", "a", "--queues", "1")
    assert (shrunk["queues"], shrunk["closed"]) == (1, 2)
    assert "Give --yes" in run("topic", "delete", "a", code=2)
    assert run("topic", "delete", "a", "--yes") == [{"topic": "a", "deleted": 3}]
    assert [row["topic"] for row in run("topic", "list")] == ["b"]
    run("topic", "delete", "b", "-y")
    assert run("topic", "list") == []
    assert "no topics" in text("topic", "list")


def test_trim(run: Run, text: Run) -> None:
    run("produce", "a", "--queues", "3", input="1\n2\n3\n4\n5\n")
    gone = run("topic", "trim", "a", "--before", '{"a": {"embedded": {"0": -1, "1": 1, "2": -2}}}')
    # Only whole chunks are deleted. In queue 1, offset 1 is in the middle of a chunk of two messages.
    assert [(row["queue_id"], row["deleted"], row["min_offset"]) for row in gone] == [(0, 2, 2), (1, 0, 0), (2, 0, 0)]
    assert "forever" in text("topic", "trim", "a")
    for before in ('{"a": {"embedded": {"9": 1}}}', '{"b": {"embedded": {"0": 1}}}', '{"a": {"embedded": {"0": 99}}}', "{"):
        assert "option --before" in run("topic", "trim", "a", "--before", before, code=2)


# Messages.


def test_lines_go_round_and_keys_go_to_their_queue(run: Run, broker: Broker) -> None:
    assert run("produce", "a", "--queues", "2", input=b"1\n\n3\r\n\xff")[0]["messages"] == 4
    assert bodies(broker, "a") == [[(None, b"1"), (None, b"3")], [(None, b""), (None, b"\xff")]]
    run("produce", "k", "--queues", "4", "--key-separator", "::", input="x::1\ny::2::3\nx::4")
    assert sorted(filter(None, bodies(broker, "k"))) == [[("x", b"1"), ("x", b"4")], [("y", b"2::3")]]
    # As in Java, "x".hashCode() is 120 and "y".hashCode() is 121.
    assert [len(queue) for queue in bodies(broker, "k")] == [2, 1, 0, 0]


def test_bodies_of_any_bytes_come_in_base64_with_or_without_a_key(run: Run, broker: Broker) -> None:
    body = bytes(range(256))
    run("produce", "a", "--queues", "1", "--format", "base64", input=b64encode(body) + b"\n\n")
    run("produce", "a", "--format", "base64", "--key-separator", ":", input=b"order-1:" + b64encode(body))
    assert bodies(broker, "a") == [[(None, body), (None, b""), ("order-1", body)]]


def test_a_key_that_is_a_number_goes_as_a_java_producer_sends_it(run: Run, broker: Broker) -> None:
    # As a Long, 2^32 + 2 has the hash 3. The hash of the text "4294967298" is a multiple of 8.
    broker.admin.create_topic("n", 8)
    for arguments in ([], ["--sharding-key-type", "long"], ["--selector", "mod"], ["--sharding-key-type", "text"]):
        run("produce", "n", "--key", "id", *arguments, input='{"id": 4294967298}')
        run("produce", "n", "--key-separator", ":", *arguments, input="4294967298:x")
    assert [len(queue) for queue in bodies(broker, "n")] == [4, 0, 2, 2, 0, 0, 0, 0]


def test_json_objects_have_their_key_in_a_field(run: Run, broker: Broker, tmp_path: Path) -> None:
    objects = ['{"user": {"id": 7}, "n": 1}', "", '{"user": {"id": "x"}, "n": 2}', '{"user": {"id": 7}}']
    (tmp_path / "in.json").write_text("\n".join(objects))
    (done,) = run("produce", "a", "--queues", "2", "--file", str(tmp_path / "in.json"), "--key", "user.id")
    assert (done["topic"], done["messages"], done["bytes"]) == ("a", 3, sum(map(len, objects)))
    assert bodies(broker, "a") == [[("x", objects[2].encode())], [("7", objects[0].encode()), ("7", objects[3].encode())]]
    run("produce", "a", "--format", "json", input='{"n": 1}')
    assert bodies(broker, "a")[0][1] == (None, b'{"n": 1}')


@pytest.mark.parametrize(
    ("arguments", "given", "code", "says"),
    [
        (["--key", "k"], '{"k": 1}\n\n{"v": 2}\n', 1, "line 3 of the input"),
        (["--key", "k"], '{"k": 1}\n\nfoo\n', 1, "line 3 of the input"),
        (["--format", "json"], b'{"a":1}\n\xff\n', 1, "line 2 of the input"),
        (["--key-separator", ":"], "a:1\nb\n", 1, "line 2 of the input"),
        ([], "small\n" + "x" * (5 << 20) + "\n", 1, "TOO_LARGE.*line 2 of the input"),
        (["--key-separator", ":"], "a:1\n" + "k" * 5000 + ":1\n", 1, "KEY_TOO_LONG.*line 2 of the input"),
        (["--format", "base64"], b"YQ==\n\xff\n", 1, "line 2 of the input has no body in Base64"),
        (["--format", "base64", "--key", "k"], "", 2, "CONFLICT"),
        (["--tags", "A", "--tags-field", "t"], "", 2, "CONFLICT"),
        (["--format", "lines", "--property-field", "t"], "", 2, "CONFLICT"),
        (["--property", "region"], "", 2, "INVALID"),
        (["--property", "TAGS=x"], "", 2, "INVALID"),
        (["--property", "a=1", "--property", "a=2"], "", 2, "INVALID"),
        ([], "x" * (9 << 20), 1, "longer than any message"),
        (["--key", "k", "--key-separator", ":"], "", 2, "CONFLICT"),
        (["--key-separator", ""], "", 2, "INVALID"),
        (["--file", "/no/such/file"], "", 2, "No such file"),
        (["--key", "k", "--sharding-key-type", "long"], '{"k": 1}\n\n{"k": "x"}\n', 1, "BAD_KEY.*line 3 of the input"),
        (["--selector", "mod", "--sharding-key-type", "text"], "", 2, "CONFLICT"),
        (["--queues", "3"], "", 1, "QUEUE_COUNT"),
    ],
)
def test_rows_that_cannot_be_produced_are_refused(
    store: Path, broker: Broker, arguments: list[str], given: str | bytes, code: int, says: str
) -> None:
    broker.admin.create_topic("a", 2)
    result = CliRunner().invoke(app, ["produce", "a", "--path", str(store), *arguments], input=given)
    assert result.exit_code == code, result.output
    assert re.search(says, result.stderr)
    assert result.stdout == ""
    assert bodies(broker, "a") == [[], []]


def pulled(broker: Broker, topic: str, *columns: str) -> list[tuple[Any, ...]]:
    """Return these columns of all messages of a topic with one queue."""
    [queue] = broker.log.queues(topic)
    batch = broker.log.pull(queue, 0, 1000, 1 << 24, columns)
    return list(zip(*(batch[name].to_pylist() for name in columns), strict=True))


def test_every_message_gets_tags_and_properties(run: Run, broker: Broker) -> None:
    run("produce", "a", "--queues", "1", "--tags", "red", "--property", "region=eu", "--property", "q=a=b", input="1\n2\n")
    given = ("red", [("region", "eu"), ("q", "a=b")])
    assert pulled(broker, "a", "body", "tags", "properties") == [(b"1", *given), (b"2", *given)]
    assert [(row["tags"], row["properties"]) for row in run("peek", "a")] == [("red", {"region": "eu", "q": "a=b"})] * 2


def test_tags_that_are_lists_are_noted_once_with_their_count(store: Path, broker: Broker) -> None:
    broker.admin.create_topic("a", 1)
    for arguments, given, noted in (
        (["--tags", "A,B"], "1\n2\n", "2 messages have a tag with a comma or ||"),
        (["--tags-field", "t"], '{"t": "A || B"}\n{"t": "A"}\n', "1 messages have a tag"),
        (["--tags", "A"], "1\n", None),
    ):
        result = CliRunner().invoke(app, ["produce", "a", "--path", str(store), *arguments], input=given)
        assert result.exit_code == 0, result.output
        assert result.stderr.count("have a tag") == (noted is not None)
        assert (noted or "") in result.stderr


def test_fields_of_objects_are_tags_and_properties(run: Run, broker: Broker) -> None:
    objects = [
        '{"k": "x", "t": "A", "geo": {"land": "de"}, "n": 7}',
        "",
        '{"k": "y", "t": "", "n": ""}',
        '{"k": "z", "n": 1.5}',
    ]
    fields = ("--tags-field", "t", "--property-field", "land=geo.land", "--property-field", "n", "--property", "src=test")
    run("produce", "a", "--queues", "1", "--key", "k", *fields, input="\n".join(objects))
    assert pulled(broker, "a", "sharding_key", "tags", "properties") == [
        ("x", "A", [("src", "test"), ("land", "de"), ("n", "7")]),
        ("y", None, [("src", "test")]),
        ("z", None, [("src", "test"), ("n", "1.5")]),
    ]
    # The options that name fields imply that lines are JSON objects, even without --key.
    assert "not JSON" in CliRunner().invoke(app, ["produce", "a", *fields, "--path", str(broker.path)], input="no").stderr  # type: ignore[attr-defined]


def test_no_progress_is_drawn_over_typed_lines(store: Path, broker: Broker) -> None:
    broker.admin.create_topic("a", 1)
    [queue] = broker.log.queues("a")
    ours, theirs = pty.openpty()
    command = [*COMMAND, "produce", "a", "--path", str(store)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT, close_fds=True)
    os.close(theirs)
    said = b""

    def read_until(done: Callable[[], bool]) -> None:
        nonlocal said
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, said
            if select.select([ours], [], [], 0.05)[0]:
                said += os.read(ours, 4096)

    read_until(lambda: b"Ctrl-D" in said)
    for number, line in enumerate((b"hello\n", b"world\n"), 1):
        os.write(ours, line)
        # A progress bar would be drawn ten times a second, so it would have appeared by the time the line is written.
        read_until(lambda number=number: broker.log.bounds([queue])[queue].max_offset == number)  # type: ignore[misc]
    os.write(ours, b"\x04")
    read_until(lambda: b"wrote 2 messages" in said)
    assert process.wait(60) == 0
    os.close(ours)
    # The output has no control character, and the typed lines follow each other.
    assert b"\x1b" not in said
    assert said.startswith(b"reading lines from the terminal. Press Ctrl-D to end\r\nhello\r\nworld\r\nwrote 2 messages")


def test_lines_written_before_an_error_stay_and_are_counted(store: Path, broker: Broker, tmp_path: Path) -> None:
    broker.admin.create_topic("a", 1)
    lines = [json.dumps({"k": number, "fill": "x" * 1000}) for number in range(20_000)]
    (tmp_path / "in").write_text("\n".join([*lines, "broken", ""]))
    result = CliRunner().invoke(app, ["produce", "a", "--path", str(store), "--file", str(tmp_path / "in"), "--key", "k"])
    assert result.exit_code == 1
    assert "line 20001 of the input: the text is not JSON" in result.stderr
    (written,) = bodies(broker, "a")
    assert 0 < len(written) < 20_000
    assert f"{len(written):,} messages were written before" in result.stderr
    assert [body for _, body in written] == [line.encode() for line in lines[: len(written)]]


def test_peek(run: Run, text: Run) -> None:
    run("produce", "a", "--queues", "2", "--key-separator", ":", input=b"x:1\ny:2\nx:[3]\ny:4\nx:5")
    assert [row["body"] for row in run("peek", "a", "-q", "0")] == ["1", "[3]", "5"]
    assert [row["body"] for row in run("peek", "a", "-q", "0", "--offset", "1", "-n", "1")] == ["[3]"]
    assert [row["body"] for row in run("peek", "a", "-q", "0", "--last", "2")] == ["[3]", "5"]
    assert [row["body"] for row in run("peek", "a", "--key", "y")] == ["2", "4"]
    assert [row["body"] for row in run("peek", "a", "--key", "y", "--last", "1")] == ["4"]
    assert len(run("peek", "a", "-n", "4")) == 4
    assert len(run("peek", "a")) == 5
    assert run("peek", "a", "--key", "z") == []
    assert "no messages" in text("peek", "a", "--key", "z")
    assert "[3]" in text("peek", "a")
    later = run("peek", "a", "-q", "0")[1]["store_timestamp"]
    since = [row["body"] for row in run("peek", "a", "-q", "0", "--since", later)]
    assert since == [row["body"] for row in run("peek", "a", "-q", "0") if row["store_timestamp"] >= later]
    assert run("peek", "a", "--since", "2100-01-01T00:00:00") == []
    assert len(run("peek", "a", "--since", "5m")) == 5
    assert "more messages follow" in text("peek", "a", "-n", "4")
    assert "more messages follow" not in text("peek", "a", "-n", "5")
    assert "INVALID" in run("peek", "a", "--since", "yesterday", code=2)
    (row,) = run("peek", "a", "-q", "1", "-n", "1")
    assert (row["topic"], row["queue_id"], row["queue_offset"], row["sharding_key"]) == ("a", 1, 0, "y")
    assert row["store_timestamp"].endswith("Z")
    for arguments in (["--offset", "1"], ["--last", "3", "-n", "2"]):
        assert "CONFLICT" in run("peek", "a", *arguments, code=2)
    assert "BEYOND_END" in run("peek", "a", "-q", "0", "--offset", "4", code=1)
    run("produce", "bytes", "--queues", "1", input=b"\xff\x00")
    assert run("peek", "bytes")[0]["body_hex"] == "ff00"
    assert "0xff00" in text("peek", "bytes")


class Following:
    """``peek --follow`` in a separate process."""

    def __init__(self, store: Path, *arguments: str) -> None:
        command = [*COMMAND, "peek", "a", "--follow", "--path", str(store), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)

    def rows(self, count: int) -> list[tuple[int, str]]:
        assert self.process.stdout is not None
        rows = [json.loads(self.process.stdout.readline()) for _ in range(count)]
        return [(row["queue_id"], row["body"]) for row in rows]

    def end(self) -> str:
        """Send Ctrl-C, assert that the process ends normally, and return its standard error."""
        self.process.send_signal(signal.SIGINT)
        left, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        assert left == b""
        return said.decode()


def test_follow_shows_what_comes_until_ctrl_c(store: Path, broker: Broker) -> None:
    broker.admin.create_topic("a", 2)
    first, second = broker.log.queues("a")
    rows = {body: pa.record_batch({"body": [body], "sharding_key": [body[0]]}) for body in ("x0", "x1", "y0", "x2", "y1")}
    for body in ("x0", "x1"):
        broker.log.append({first: rows[body]})
    all_of_it, of_key = Following(store, "--last", "1"), Following(store, "--queue", "0", "--offset", "1", "--key", "x")
    assert all_of_it.rows(1) == of_key.rows(1) == [(0, "x1")]
    broker.log.append({second: rows["y0"]})
    assert all_of_it.rows(1) == [(1, "y0")]
    broker.log.append({first: rows["x2"]})
    assert all_of_it.rows(1) == of_key.rows(1) == [(0, "x2")]
    # A queue that is added later is followed.
    broker.admin.resize_topic("a", 3)
    broker.log.append({broker.log.queues("a")[2]: rows["y1"]})
    assert all_of_it.rows(1) == [(2, "y1")]
    assert all_of_it.end() == of_key.end() == ""


def test_follow_ends_after_a_count_and_says_when_the_topic_is_another(store: Path, broker: Broker) -> None:
    broker.admin.create_topic("a", 1)
    [queue] = broker.log.queues("a")
    for body in ("0", "1", "2"):
        broker.log.append({queue: pa.record_batch({"body": [body]})})
    result = CliRunner().invoke(app, ["peek", "a", "-f", "-q", "0", "--offset", "1", "-n", "2", "--path", str(store)])
    assert [json.loads(line)["body"] for line in result.stdout.splitlines()] == ["1", "2"]
    result = CliRunner().invoke(app, ["peek", "a", "-f", "--since", "2020-01-01", "-n", "3", "--path", str(store)])
    assert [json.loads(line)["body"] for line in result.stdout.splitlines()] == ["0", "1", "2"]
    result = CliRunner().invoke(app, ["peek", "a", "-f", "--last", "2", "-n", "2", "--no-json", "--path", str(store)])
    assert [line.split()[-1] for line in result.stdout.splitlines()] == ["1", "2"]
    following = Following(store, "--last", "1")
    assert following.rows(1) == [(0, "2")]
    broker.admin.delete_topic("a")
    broker.admin.create_topic("a", 1)
    _, said = following.process.communicate(timeout=60)
    # The command may notice that the topic was deleted, or only that it was created again.
    assert following.process.returncode in (1, 3)
    assert b"DATA_LOSS.TOPIC_RECREATED" in said or b"TOPIC.MISSING" in said
    assert len(said.splitlines()) == 1


def test_escape_sequences_of_a_message_are_shown_as_text(run: Run, text: Run, store: Path, broker: Broker) -> None:
    """Escape sequences can set the terminal's title, clear its screen, or make it send an answer as if the user had typed it."""
    broker.admin.create_topic("a", 1)
    body, key = "\x1b]0;title\x07\tend\x9b2J\r\nnext\u202egnp.exe\u2066\u200f", "k\x1b[2J\r"
    broker.log.append({broker.log.queues("a")[0]: pa.record_batch({"body": [body], "sharding_key": [key], "tags": ["\x7f"]})})
    (row,) = run("peek", "a")
    assert (row["body"], row["sharding_key"], row["tags"]) == (body, key, "\x7f")
    followed = CliRunner().invoke(app, ["peek", "a", "-f", "--last", "1", "-n", "1", "--no-json", "--path", str(store)]).stdout
    json_lines = CliRunner().invoke(app, ["peek", "a", "--json", "--path", str(store)]).stdout
    obeyed = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
    assert not obeyed.search(json_lines)
    for shown in (text("peek", "a"), text("peek", "a", "--full"), followed):
        for said in (r"\x1b]0;title\x07", r"end\x9b2J", r"next\u202egnp.exe\u2066\u200f", r"k\x1b[2J\r", r"\x7f"):
            # The table folds long cells, so compare without white space.
            assert said in re.sub(r"\s", "", shown)
        assert not obeyed.search(shown)


def test_a_terminal_gets_a_screen_of_a_long_value_its_length_and_how_to_see_all_of_it(
    run: Run, text: Run, store: Path, broker: Broker
) -> None:
    """Escaped, 4 MiB of NULs are 16 million characters, which rich takes a minute to fold."""
    broker.admin.create_topic("a", 1)
    [queue] = broker.log.queues("a")
    for row in (
        {"body": b"\0" * MAX_BODY_BYTES},
        {"body": b"\xff" * 5000},
        {"body": "\u202e".encode() * 1500},
        {"body": b"x", "sharding_key": "k" * 4000},
        {"body": b"x", "tags": "t" * 3000},
    ):
        broker.log.append({queue: pa.RecordBatch.from_pylist([row], schema=PRODUCER_SCHEMA)})
    followed = ("peek", "a", "-f", "--last", "5", "-n", "5")
    table, lines = text("peek", "a"), text(*followed)
    # A table has the beginning of a body.
    for shown, lengths in ((table, ("4,000", "3,000")), (lines, ("4,194,304", "10,002", "1,500", "4,000", "3,000"))):
        # A screen has 80 times 24 characters. A table needs more, because it folds values.
        assert len(shown) < 10 * 5 * 1920
        # The table folds long cells, so compare without white space.
        said = re.sub(r"\s", "", shown)
        for length in lengths:
            assert said.count(f"…({length}characters,--fullshowsall)") == 1
    for whole in (text("peek", "a", "--full"), text(*followed, "--full")):
        assert whole.count(r"\x00") == MAX_BODY_BYTES
        assert "0x" + "ff" * 5000 in whole
        assert r"\u202e" * 1500 in whole
        assert "k" * 4000 in whole
        assert "t" * 3000 in whole
        assert "--full" not in whole
    bodies = [row["body"] or row["body_hex"] for row in run("peek", "a")]
    assert bodies == ["\0" * MAX_BODY_BYTES, "ff" * 5000, "\u202e" * 1500, "x", "x"]


def test_alter(run: Run, text: Run) -> None:
    run("topic", "create", "a", "--queues", "1", "--retention-time", "7d")
    [row] = run("topic", "alter", "a", "--retention-size", "10g")
    assert (row["retention_seconds"], row["retention_bytes"]) == (604_800, 10 << 30)
    assert "keeps messages 12 h and up to 10.0 GiB" in text("topic", "alter", "a", "--retention-time", "12h")
    assert "keeps messages forever" in text("topic", "alter", "a", "--retention-time", "none", "--retention-size", "NONE")
    assert run("topic", "list")[0]["retention_seconds"] is None
    assert "the command does not say what to change. Give --retention-time" in run("topic", "alter", "a", code=2)
    assert "for example 7d" in run("topic", "alter", "a", "--retention-time", "soon", code=2)
    assert "topic 'b' does not exist. Run orderedmq topic list" in run("topic", "alter", "b", "--retention-time", "1d", code=3)


# Groups and locks.


# Audit.


def test_audit(run: Run, text: Run, tmp_path: Path) -> None:
    run("produce", "one", "--queues", "2", "--key", "k", input='{"k":"x","id":1}\n{"k":"x","id":2}\n{"k":"y","id":3}\n')
    run("produce", "two", "--queues", "3", "--key", "k", input='{"k":"x","id":2}\n{"k":"x","id":1}\n{"k":"y","id":3,"v":0}\n')
    (good,) = run("audit", "one", "one")
    assert good["ok"] is True
    (bad,) = run("audit", "one", "two", "--id-field", "id", code=1)
    assert (bad["ok"], bad["out_of_order"], bad["lost"], bad["expected"]["messages"]) == (False, 1, 0, 3)
    assert bad["examples"] == [{"kind": "out_of_order", "side": "two", "where": "queue 0 offset 1", "key": "x", "id": "1"}]
    assert run("audit", "one", "two", "--examples", "0", code=1)[0]["examples"] == []
    assert "once and in the order of its key" in text("audit", "one", "one")
    shown = text("audit", "one", "two", code=1)
    assert "2 of 2 keys are affected" in shown
    assert "queue 0 offset 1" in shown
    table = pa.table({"k": ["y", "x", "x"], "id": [3, 1, 2]})
    pq.write_table(table, tmp_path / "t.parquet")
    columns = ["--key-column", "k", "--id-column", "id"]
    assert run("audit", "one", str(tmp_path / "t.parquet"), "--id-field", "id", *columns)[0]["ok"]
    assert "the Parquet file or directory" in run("audit", "one", "./none", code=3)
    assert "CONFLICT" in run("audit", "one", "two", "--id-column", "id", code=2)
    assert run("audit", "one", "two", "--since", "2100-01-01")[0]["expected"]["messages"] == 0
    assert "--since is for topics" in run("audit", "one", str(tmp_path / "t.parquet"), "--since", "2100-01-01", code=2)
    assert "no field 'v'" in run("audit", "one", "two", "--id-field", "v", code=2)


# In separate processes.


def spawn(*arguments: str, **settings: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, **settings)


@pytest.mark.parametrize("form", ["--json", "--no-json"])
def test_a_reader_of_the_output_may_stop(store: Path, broker: Broker, form: str) -> None:
    broker.admin.create_topic("a", 1)
    broker.log.append({broker.log.queues("a")[0]: pa.record_batch({"body": [b"x" * 1000] * 1500})})
    peek = spawn("peek", "a", "-n", "1500", "--path", str(store), form)
    assert peek.stdout is not None
    assert peek.stderr is not None
    peek.stdout.read(10)
    peek.stdout.close()
    assert peek.wait() == 141
    assert peek.stderr.read() == b""
    peek.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "redirected", "code", "says"),
    [
        (["produce", "a"], "<&-", 0, '"messages": 0'),
        (["topic", "delete", "a"], "<&-", 2, "nobody can answer. Give --yes"),
        (["topic", "list"], ">&-", 0, ""),
        (
            ["topic", "list"],
            ">/dev/full",
            1,
            "orderedmq: the output or a temporary file cannot be written: No space left on device",
        ),
    ],
)
def test_closed_streams_and_a_full_disk(
    store: Path, broker: Broker, arguments: list[str], redirected: str, code: int, says: str
) -> None:
    broker.admin.create_topic("a", 1)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *COMMAND, *arguments, "--path", str(store)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if redirected == "<&-" else subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    said = done.stdout + (done.stderr or "")
    assert (done.returncode, says in said, len(said.splitlines())) == (code, True, 1 if says else 0), said


def test_slow_lines_are_written_immediately_and_ctrl_c_ends_with_two_lines(store: Path, broker: Broker) -> None:
    broker.admin.create_topic("a", 1)
    produce = spawn("produce", "a", "--path", str(store), stdin=subprocess.PIPE)
    assert produce.stdin is not None
    produce.stdin.write(b"one\ntwo\nhalf a li")
    produce.stdin.flush()
    until(lambda: len(bodies(broker, "a")[0]) >= 2, "two lines are written")
    assert bodies(broker, "a") == [[(None, b"one"), (None, b"two")]]
    produce.send_signal(signal.SIGINT)
    out, error = produce.communicate(timeout=60)
    assert (produce.returncode, out) == (130, b"")
    assert error.decode().splitlines() == ["2 messages were written before this", "orderedmq: interrupted"]


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_while_lines_are_written_counts_them_and_a_second_one_does_not_wait(
    run: Run, broker: Broker, monkeypatch: pytest.MonkeyPatch, interrupts: int
) -> None:
    send, ended = Producer.send, []

    def interrupted(self: Producer, rows: pa.RecordBatch) -> None:
        for _ in range(interrupts):
            os.kill(os.getpid(), signal.SIGINT)
        send(self, rows)
        ended.append(rows.num_rows)

    monkeypatch.setattr(Producer, "send", interrupted)
    broker.admin.create_topic("a", 1)
    said = run("produce", "a", input=b"one\ntwo\n", code=130)
    written = 2 if interrupts == 1 else 0
    assert sum(ended) == written
    assert said.splitlines() == [f"{written} messages were written before this", "orderedmq: interrupted"]


def test_ctrl_c_stays_ignored_where_it_was_when_the_command_started(
    run: Run, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Producer.send

    def interrupted(self: Producer, rows: pa.RecordBatch) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        send(self, rows)

    monkeypatch.setattr(Producer, "send", interrupted)
    broker.admin.create_topic("a", 1)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        [said] = run("produce", "a", input=b"one\ntwo\n")
    finally:
        signal.signal(signal.SIGINT, before)
    assert said["messages"] == 2


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, 1), ("y", 0, 0)])
def test_on_a_terminal_there_are_tables_and_questions(store: Path, broker: Broker, answer: str, code: int, left: int) -> None:
    broker.admin.create_topic("a", 2)
    said, status = on_terminal(["topic", "list", "--path", str(store)])
    assert "queues" in said
    assert "{" not in said
    assert status == 0
    said, status = on_terminal(["topic", "delete", "a", "--path", str(store)], (b"[y/N]", f"{answer}\n".encode()))
    assert "Delete topic a with 0 messages" in said
    assert (status, len(broker.log.topics())) == (code, left)
