"""An account that is renewed while it is used by a shared connection, by a lane, and by a client's calls."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orderedmq.endpoint import Credentials, CredentialsFile
from orderedmq.errors import OptionError, RocketMQError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.net.account import Account
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.connection import Connection
from orderedmq.rocketmq.net.lane import Lane
from orderedmq.rocketmq.net.transport import connect
from orderedmq.rocketmq.wire.group_requests import unlock
from orderedmq.rocketmq.wire.message_requests import max_offset
from orderedmq.rocketmq.wire.pull_frames import PullTemplate
from orderedmq.secret_files import read_credentials
from tests.unit.rocketmq_peer import Link, Peer
from tests.waits import soon, until

QUEUE = MessageQueue("T", "a", 0)
LACKS_A_RIGHT = "User:old has no permission to access Topic:T from 127.0.0.1, decision:DENY"
OLD, NEW = Credentials("old", "secret-1"), Credentials("new", "secret-2", "token")


class File:
    """A credentials file that is replaced atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = CredentialsFile(str(path))

    def write(self, account: Credentials) -> None:
        fields = {"accessKey": account.access_key, "secretKey": account.secret_key}
        if account.security_token is not None:
            fields["securityToken"] = account.security_token
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(fields))
        new.chmod(0o600)
        os.replace(new, self.path)


@pytest.fixture
def file(tmp_path: Path) -> File:
    made = File(tmp_path / "account.json")
    made.write(OLD)
    return made


class Broker:
    """A server that accepts one account at a time, and remembers the account of each request."""

    def __init__(self) -> None:
        self.allowed = OLD
        self.asked: list[str] = []
        self.remark = "User:old is not found."
        self.peer = Peer(self._serve)

    def _serve(self, link: Link) -> None:
        for request in link.requests():
            self.asked.append(request.ext["AccessKey"])
            if request.ext["AccessKey"] != self.allowed.access_key:
                link.reply(request, 16, remark=self.remark)
            elif "maxMsgNums" in request.ext:
                # Nothing to pull: the queue ends at the requested offset.
                end = request.ext["queueOffset"]
                link.reply(request, 19, nextBeginOffset=end, minOffset="0", maxOffset=end, suggestWhichBrokerId="0")
            else:
                link.offset(request, 7)


@pytest.fixture
def broker() -> Iterator[Broker]:
    made = Broker()
    yield made
    made.peer.close()


@pytest.fixture
def client(file: File, broker: Broker) -> Iterator[Client]:
    with Client(broker.peer.address, credentials=file.source) as made:
        yield made


@pytest.mark.holds("renewed account")
def test_a_refused_request_is_sent_again_with_the_new_account(client: Client, broker: Broker, file: File) -> None:
    assert client.call_address(broker.peer.address, max_offset(QUEUE), soon()) == 7
    broker.allowed = NEW
    file.write(NEW)
    assert client.call_address(broker.peer.address, max_offset(QUEUE), soon()) == 7
    assert broker.asked == ["old", "old", "new"]
    assert broker.peer.accepted == 1
    assert client.account == "new"
    # A client with separate connections also uses the new account.
    with client.another() as other:
        assert other.account == "new"


@pytest.mark.holds("renewed account")
def test_a_refused_unlock_on_the_connection_of_its_lock_is_sent_again(file: File, broker: Broker) -> None:
    """The sink sends it without a client's retries. A lock that is not given back keeps other attempts waiting for 60 s."""
    account = Account(file.source)
    connection = Connection(broker.peer.address, connect(broker.peer.address, soon()), account=account)
    assert account.current == OLD
    broker.allowed = NEW
    file.write(NEW)
    connection.call(unlock("g", "attempt", [QUEUE]), soon())
    assert broker.asked == ["old", "new"]
    connection.close()


def test_a_pull_that_was_refused_can_be_repeated(file: File, broker: Broker) -> None:
    account = Account(file.source)
    lane = Lane(broker.peer.address, connect(broker.peer.address, soon()), account=account)
    broker.allowed = NEW
    old = PullTemplate(QUEUE, "g", None, account.current)
    lane.ask(old, [(5, 1), (6, 1)], soon())
    until(lambda: len(broker.asked) == 2, "the broker has received all requests")
    file.write(NEW)
    answers = []
    while lane.in_flight:
        answers += lane.receive(1.0)
    assert [getattr(result, "sub", result) for _, _, result in answers] == ["ACCOUNT_RENEWED"] * 2
    lane.ask(PullTemplate(QUEUE, "g", None, account.current), [(5, 1)], soon())
    [(_, _, result)] = lane.receive(5.0)
    assert not isinstance(result, Exception)
    lane.close()


def test_a_callable_is_asked_before_each_connection_and_seldom_after_refusals(broker: Broker) -> None:
    calls = []

    def find() -> Credentials:
        calls.append(time.monotonic())
        return OLD

    with Client(broker.peer.address, credentials=find) as client:
        client.call_address(broker.peer.address, max_offset(QUEUE), soon())
        assert len(calls) == 1
        client.connection(broker.peer.address, soon()).close()
        client.call_address(broker.peer.address, max_offset(QUEUE), soon())
        assert len(calls) == 2
        broker.allowed, broker.remark = NEW, LACKS_A_RIGHT
        for _ in range(10):
            with pytest.raises(RocketMQError, match="Topic:T"):
                client.call_address(broker.peer.address, max_offset(QUEUE), soon())
    assert len(calls) == 3


@pytest.mark.holds("renewed account")
def test_an_account_that_expires_just_after_it_lacked_a_right_is_renewed(client: Client, broker: Broker, file: File) -> None:
    broker.allowed, broker.remark = NEW, LACKS_A_RIGHT
    with pytest.raises(RocketMQError, match="Topic:T"):
        client.call_address(broker.peer.address, max_offset(QUEUE), soon())
    broker.remark = "User:old is not found."
    file.write(NEW)
    assert client.call_address(broker.peer.address, max_offset(QUEUE), soon()) == 7


def test_a_file_that_cannot_be_read_leaves_the_former_account_in_use(
    client: Client, broker: Broker, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    client.call_address(broker.peer.address, max_offset(QUEUE), soon())
    file.path.write_text('{"accessKey": "half')
    client.connection(broker.peer.address, soon()).close()
    assert client.call_address(broker.peer.address, max_offset(QUEUE), soon()) == 7
    [record] = caplog.records
    assert "the previous ones stay in use: [ORDEREDMQ_OPTION.INVALID] the credentials file" in record.getMessage()


def test_without_any_account_the_error_names_the_file(tmp_path: Path, broker: Broker) -> None:
    with (
        Client(broker.peer.address, credentials=CredentialsFile(str(tmp_path / "none.json"))) as client,
        pytest.raises(OptionError, match=r"none\.json cannot be read on this machine: No such file.*Check the path"),
    ):
        client.call_address(broker.peer.address, max_offset(QUEUE), soon())
    assert broker.asked == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '"text"',
        "not JSON",
        '{"accessKey": "a"}',
        '{"accessKey": "a", "secretKey": ""}',
        '{"accessKey": "a", "secretKey": 7}',
        '{"accessKey": "a", "secretKey": "hidden", "securityTokn": "t"}',
    ],
)
def test_a_file_of_another_form_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "account.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(OptionError, match=r"account\.json does not have the form \{\"accessKey\"") as caught:
        read_credentials(str(path))
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "account"),
    [
        ("accessKey", ("hidden\udcff", "s")),
        ("secretKey", ("me", "hidden\ud800")),
        ("securityToken", ("me", "s", "hidden\udcff")),
    ],
)
def test_an_account_that_cannot_be_sent_is_refused_without_showing_it(name: str, account: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match=rf"INVALID.*{name} contains half a character") as caught:
        Credentials(*account)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644])
def test_a_file_that_others_may_use_is_refused(file: File, mode: int) -> None:
    assert read_credentials(str(file.path)) == OLD
    file.path.chmod(mode)
    with pytest.raises(OptionError, match="every user of this machine. Run chmod 600"):
        read_credentials(str(file.path))
    file.path.chmod(0o640)
    read_credentials(str(file.path))
