"""The context that a row carries to its listener: each context is restored from its text, and no other text is accepted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ordered_source.columns import LotPlan, ReadContext
from orderedmq.connections import cached
from orderedmq.endpoint import Credentials, CredentialsFile, Endpoint, TlsOptions
from orderedmq.errors import LockError, OptionError
from orderedmq.model import MessageQueue
from orderedmq.ownership.lock import LockToken

QUEUE = MessageQueue("orders", "embedded", 0)
TOKEN = LockToken("g", QUEUE, "me", "client", 7, 5)
ACCOUNT = Endpoint(None, "ns:9876", Credentials("key", "secret"))

NUMBERS = st.integers(0, 2**62)
TLS = st.builds(TlsOptions, *[st.none() | st.text()] * 3, st.none(), st.booleans(), st.booleans())
NAMES = st.none() | st.text()
ENDPOINTS = st.builds(Endpoint, st.text()) | st.builds(
    Endpoint, st.none(), st.text(), st.none() | st.builds(CredentialsFile, st.text()), st.none() | TLS, NAMES, NAMES
)


@given(
    NUMBERS,
    st.text(),
    st.text(),
    st.text(),
    ENDPOINTS,
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.none() | st.builds(LotPlan, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
)
def test_a_context_comes_back_from_its_text(
    epoch: int,
    group: str,
    client: str,
    identity: str,
    endpoint: Endpoint,
    flags: tuple[bool, bool, bool],
    lot: LotPlan | None,
) -> None:
    context = ReadContext(epoch, group, client, identity, endpoint, *flags, lot)
    assert ReadContext.from_text(context.to_text()) == context


def test_the_text_names_its_fields_and_has_no_key_of_an_account() -> None:
    text = ReadContext.of(ACCOUNT, "id", TOKEN, LotPlan(1, 2, 3, 4), 5).to_text()
    assert json.loads(text) == {
        "version": 2,
        "epoch": 7,
        "group": "g",
        "client_id": "client",
        "identity": "id",
        "endpoint": {"namesrv_addr": "ns:9876"},
        "account": True,
        "lot": {"q_begin": 1, "begin": 2, "end": 3, "capacity": 4},
        "attempt": 5,
    }


SOUND = json.loads(ReadContext.of(Endpoint("/s"), "id", TOKEN, LotPlan(1, 2, 3, 4)).to_text())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "7",
        "null",
        '"text"',
        *(json.dumps({name: value for name, value in SOUND.items() if name != left_out}) for left_out in ("version", "epoch", "endpoint")),
        *(
            json.dumps({**SOUND, name: value})
            for name, value in [
                ("epoch", "7"), ("epoch", True), ("group", 7), ("group", None), ("identity", []), ("path", "/s"), ("account", 1), ("more", 1),
                ("stored_in", 7), ("lot", [1, 2, 3, 4]), ("lot", {"begin": 2}), ("version", "1"),
                ("lot", {"q_begin": 1, "begin": 2, "end": 3, "room": "4"}), ("endpoint", {"path": 7}), ("endpoint", "/s"), ("endpoint", {}),
                ("endpoint", {"path": "/s", "namesrv_addr": "ns:9876"}), ("endpoint", {"path": "/s", "credentials": {"path": 7}}),
                ("endpoint", {"path": "/s", "credentials": {"access_key": "a", "secret_key": "s"}}), ("endpoint", {"path": "/s", "tls": []}),
                ("endpoint", {"path": "/s", "tls": {"verify": "no"}}), ("endpoint", {"path": "/s", "tls": {"key_password": "p"}}),
            ]
        ),
    ],
)  # fmt: skip
def test_a_text_that_the_source_did_not_write_is_refused(text: str) -> None:
    with pytest.raises(LockError, match=r"LOCK\.MALFORMED.*was not written by the source"):
        ReadContext.from_text(text)


def test_a_text_of_another_version_says_so() -> None:
    with pytest.raises(LockError, match=r"LOCK\.MALFORMED.*has version 3.*reads 2.*the same version of orderedmq"):
        ReadContext.from_text(json.dumps({**SOUND, "version": 3, "more": 1}))


def test_a_source_with_an_account_needs_its_keys_at_the_listener_too() -> None:
    context = ReadContext.of(ACCOUNT, "id", TOKEN)
    with pytest.raises(OptionError, match=r"MISSING.*consume_concurrently\(\.\.\., credentials="):
        context.lock(QUEUE, listener="consume_concurrently")


def test_a_listener_connects_as_its_source_does_but_for_secrets() -> None:
    source = Endpoint(None, "ns:9876", CredentialsFile("/account.json"), TlsOptions(verify_hostname=False))
    context = ReadContext.from_text(ReadContext.of(source, "id", TOKEN).to_text())
    assert context.lock(QUEUE).broker is cached(source, "id")
    tls = TlsOptions(key_password="hidden")
    text = ReadContext.of(replace(source, tls=tls), "id", TOKEN).to_text()
    assert "hidden" not in text
    with pytest.raises(OptionError, match=r"MISSING.*tlsKeyPassword.*consume_orderly\(\.\.\., tls="):
        ReadContext.from_text(text).lock(QUEUE)
    assert ReadContext.from_text(text).lock(QUEUE, tls=tls).broker is cached(replace(source, tls=tls), "id")
