"""Which broker and account the command uses: first its options, then a profile, then the environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orderedmq.cli.shell import Shell
from orderedmq.endpoint import Credentials, CredentialsFile, Endpoint, TlsOptions
from orderedmq.errors import OptionError
from orderedmq.options.endpoint import ADDRESS_VARIABLES, VARIABLES, from_environment, to_environment

PROFILES = """
[prod]
namesrvAddr = "prod:9876"
useTLS = true
tlsTrustCertPath = "/ca.pem"
credentialsFile = "/account.json"

[keys]
NAMESRVADDR = "keys:9876"
accessKey = "profile"
secretKey = "of-profile"

[laptop]
path = "/laptop"

[wrong]
topic = "hidden-value"

[number]
namesrvAddr = 9876
"""


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "orderedmq" / "config.toml"
    file.parent.mkdir()
    file.write_text(PROFILES)
    file.chmod(0o600)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for variable in (*VARIABLES.values(), *ADDRESS_VARIABLES.values(), "ORDEREDMQ_CONFIG", "ORDEREDMQ_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    return file


def test_a_profile_names_broker_account_and_tls() -> None:
    assert Shell(profile="prod").endpoint == Endpoint(
        namesrv_addr="prod:9876", credentials=CredentialsFile("/account.json"), tls=TlsOptions(ca_file="/ca.pem")
    )
    assert Shell(profile="keys").endpoint.credentials == Credentials("profile", "of-profile")
    assert Shell(profile="laptop").endpoint == Endpoint("/laptop")


def test_options_come_before_the_profile_and_the_profile_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDEREDMQ_ACCESS_KEY", "environment")
    monkeypatch.setenv("ORDEREDMQ_SECRET_KEY", "of-environment")
    monkeypatch.setenv("ORDEREDMQ_USE_TLS", "true")
    assert Shell(namesrv="h:1").endpoint == Endpoint(
        namesrv_addr="h:1", credentials=Credentials("environment", "of-environment"), tls=TlsOptions()
    )
    # All parts of an account come from the same place.
    assert Shell(profile="prod").endpoint.credentials == CredentialsFile("/account.json")
    assert Shell(profile="keys").endpoint.credentials == Credentials("profile", "of-profile")
    typed = Shell(profile="prod", namesrv="h:1", options=["credentialsfile=/other.json", "useTLS=false", "tlsTrustCertPath=/x"])
    with pytest.raises(OptionError, match="tlsTrustCertPath needs useTLS=true"):
        typed.endpoint  # noqa: B018
    assert Shell(profile="keys", options=["credentialsfile=/other.json"]).endpoint.credentials == CredentialsFile("/other.json")
    # An address replaces an address of the other kind. A store needs no account, so the account of the environment is ignored.
    assert Shell(profile="laptop", namesrv="h:1").endpoint.namesrv_addr == "h:1"
    assert Shell(profile="laptop").endpoint == Endpoint("/laptop")
    with pytest.raises(OptionError, match="option credentialsFile belongs to a RocketMQ cluster"):
        Shell(profile="prod", path=Path("/store")).endpoint  # noqa: B018


@pytest.mark.parametrize(
    ("shell", "says"),
    [
        (Shell(profile="none"), r"config\.toml has no profile 'none', only prod, keys, laptop"),
        (Shell(profile="wrong"), r"profile wrong in .*config\.toml has 'topic', which is not an option of the connection"),
        (
            Shell(profile="number"),
            r"profile number in .* has a value that is neither a text nor true or false. Write namesrvAddr =",
        ),
        (Shell(options=["useTLS"]), "Give NAME=VALUE"),
        (
            Shell(options=["topic=orders"]),
            "--option topic does not set a connection option. Give NAME=VALUE with one of the names path, ",
        ),
        (Shell(options=["secretKey=hidden"]), "would show a secret to everyone on this machine. Set ORDEREDMQ_SECRET_KEY"),
        (Shell(options=["useTLS=true", "usetls=false"]), "--option useTLS is given twice"),
        (
            Shell(namesrv="a:1", options=["namesrvAddr=b:1"]),
            "--namesrv and an --option with the same meaning have different values",
        ),
        (Shell(namespace="n", profile="laptop"), "--namespace needs --namesrv"),
        (
            Shell(namesrv="a:1", options=["credentialsFile=/f", "accessKey=a"]),
            r"credentialsFile and accessKey \(ORDEREDMQ_ACCESS_KEY\) exclude",
        ),
    ],
)
def test_refuses_contradictory_options_of_the_command(shell: Shell, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        shell.endpoint  # noqa: B018
    assert re.search(says, caught.value.message)
    assert "hidden" not in str(caught.value)


def test_the_address_in_the_environment_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDEREDMQ_PATH", "/store")
    assert Shell().endpoint == Endpoint("/store")
    assert Shell(profile="prod").endpoint.namesrv_addr == "prod:9876"
    assert Shell(namesrv="h:1").endpoint == Endpoint(namesrv_addr="h:1")
    monkeypatch.setenv("ORDEREDMQ_NAMESRV", "env:9876")
    assert Shell(path=Path("/typed")).endpoint == Endpoint("/typed")
    with pytest.raises(OptionError, match="ORDEREDMQ_PATH and ORDEREDMQ_NAMESRV exclude each other"):
        Shell().endpoint  # noqa: B018
    monkeypatch.delenv("ORDEREDMQ_PATH")
    assert Shell(namespace="n").endpoint == Endpoint(namesrv_addr="env:9876", namespace="n")


@pytest.mark.parametrize(("mode", "secret", "refused"), [(0o644, True, True), (0o644, False, False), (0o666, False, True)])
def test_refuses_secrets_that_others_may_read_and_profiles_that_they_may_write(
    profiles: Path, mode: int, secret: bool, refused: bool
) -> None:
    if not secret:
        profiles.write_text(PROFILES.replace('secretKey = "of-profile"', ""))
    profiles.chmod(mode)
    if refused:
        with pytest.raises(OptionError, match=r"the file of profiles .*config\.toml may be read or written by every user"):
            Shell(profile="prod").endpoint  # noqa: B018
    else:
        assert Shell(profile="prod").endpoint.namesrv_addr == "prod:9876"


def test_a_file_that_is_not_toml_says_where(profiles: Path) -> None:
    profiles.write_text("[prod\n")
    with pytest.raises(OptionError, match=r"config\.toml is not TOML: .*line 1"):
        Shell(profile="prod").endpoint  # noqa: B018


def test_another_file_is_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDEREDMQ_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(OptionError, match=r"the file of profiles .*none\.toml cannot be read on this machine: No such file"):
        Shell(profile="prod").endpoint  # noqa: B018


def test_another_process_reads_the_same_options_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Shell(profile="prod").broker_options
    for variable, value in to_environment(options).items():
        monkeypatch.setenv(variable, value)
    assert {**from_environment(), "namesrvAddr": "prod:9876"} == options
