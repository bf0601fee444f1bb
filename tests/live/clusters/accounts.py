"""Accounts of a cluster with access control, with the rights that the table in docs/guides/rocketmq.md lists."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from orderedmq.endpoint import Credentials
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.wire.codes import RequestCode
from orderedmq.rocketmq.wire.request import Request, ignore_answer
from tests.waits import soon

ROOT = Path(__file__).parents[3]
_UPDATE_ACL_CONFIG, _DELETE_ACL_CONFIG, _CREATE_USER, _DELETE_USER, _CREATE_ACL = 50, 51, 3001, 3003, 3006

#: Access keys and secrets must have more than six characters.
ADMIN = Credentials("administrator", "secret-of-admin")

_AUTH = "org.apache.rocketmq.auth."
#: Settings of a broker that refuses unsigned requests.
_SECOND: dict[str, object] = {
    "authenticationEnabled": True,
    "authenticationProvider": f"{_AUTH}authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{_AUTH}authentication.provider.LocalAuthenticationMetadataProvider",
    "authorizationEnabled": True,
    "authorizationProvider": f"{_AUTH}authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{_AUTH}authorization.provider.LocalAuthorizationMetadataProvider",
    "initAuthenticationUser": f'{{"username":"{ADMIN.access_key}","password":"{ADMIN.secret_key}"}}',
    "innerClientAuthenticationCredentials": f'{{"accessKey":"{ADMIN.access_key}","secretKey":"{ADMIN.secret_key}"}}',
}
PROPERTIES: dict[str, dict[str, object]] = {"4.9.7": {"aclEnable": True}, "5.3.3": _SECOND, "5.4.0": _SECOND, "5.5.0": _SECOND}
#: Settings of a Proxy in front of such brokers.
BEHIND_PROXY: dict[str, object] = {
    **{name: value for name, value in _SECOND.items() if name != "initAuthenticationUser"},
    # The Proxy uses its own account both for its requests to the brokers and for the clients' requests that it forwards.
    "enableAclRpcHookForClusterMode": True,
    "authenticationMetadataProvider": "org.apache.rocketmq.proxy.auth.ProxyAuthenticationMetadataProvider",
    "authorizationMetadataProvider": "org.apache.rocketmq.proxy.auth.ProxyAuthorizationMetadataProvider",
}
PLAIN_ACL = f"""\
accounts:
  - accessKey: {ADMIN.access_key}
    secretKey: {ADMIN.secret_key}
    admin: true
"""


class Right(NamedTuple):
    """A right in ACL 2.0: ("Topic:orders", "Sub"). In ACL 1.0: ("topicPerms orders", "SUB"), ("defaultGroupPerm", "SUB"),
    ("admin", "true").
    """

    resource: str
    action: str

    @property
    def pattern(self) -> str:
        """Return a regular expression for the form in which a broker names this right's resource."""
        if self.resource == "admin":
            # Earlier requests need only SUB, so the broker may miss that right instead.
            return r"Need admin permission|No default permission for (topic|group):"
        if self.resource.startswith("default"):
            return f"No default permission for {self.resource[7:].removesuffix('Perm').lower()}:"
        name = re.escape(self.resource).replace(r"\*", r"\S+")
        if " " in self.resource:
            return f"No default permission for {name.replace('Perms', '').replace(re.escape(' '), ':')}, "
        return f"has no permission to access {name} from "

    @property
    def is_of_topic(self) -> bool:
        return self.resource.lower().startswith("topic")


def rights(version: str, *rows: str, **names: str) -> list[Right]:
    """Return the rights in the table rows that begin with ``rows``. ``names`` maps the table's names to the names to use."""
    named = [right for row in rows for right in _rights(row, version)]
    for name, other in names.items():
        named = [Right(resource.replace(name, other), action) for resource, action in named]
    return list(dict.fromkeys(named))


def _rights(who: str, version: str) -> list[Right]:
    block = (ROOT / "docs/guides/rocketmq.md").read_text().partition("<!-- rights -->")[2].partition("<!-- /rights -->")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.strip().splitlines()[2:]]
    [row] = [row for row in rows if row[0].strip().startswith(who)]
    parsed = []
    for entry in re.findall(r"`([^`]+)`", row[1 if version.startswith("5") else 2].replace("\\|", "|")):
        resource, _, actions = entry.rpartition("=" if "=" in entry else " ")
        parsed += [Right(resource, action) for action in re.split(r"[,|]", actions)]
    return parsed


class Accounts:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._numbers = itertools.count()
        self._client = Client(cluster.address, credentials=ADMIN)

    def close(self) -> None:
        self._client.close()

    def make(self, given: Sequence[Right]) -> Credentials:
        """Return a new account that has exactly these rights."""
        number = next(self._numbers)
        account = Credentials(f"account-{number}", f"never-shown-{number}")
        for code, ext, body in _second(account, given) if self.cluster.version.startswith("5") else _first(account, given):
            self._ask(code, account, ext, body)
        return account

    def end(self, account: Credentials) -> None:
        """Delete the account, so that its requests are refused, as when a temporary account expires."""
        if self.cluster.version.startswith("5"):
            self._ask(_DELETE_USER, account, {"username": account.access_key})
        else:
            self._ask(_DELETE_ACL_CONFIG, account, {"accessKey": account.access_key})

    def _ask(self, code: int, account: Credentials, ext: Mapping[str, str], body: bytes = b"") -> None:
        request = Request(cast(RequestCode, code), "change of an account", account.access_key, ignore_answer, ext, body)
        for broker in self.cluster.brokers:
            self._client.call_address(broker.address, request, soon())


def _second(account: Credentials, given: Sequence[Right]) -> Iterator[tuple[int, Mapping[str, str], bytes]]:
    user = {"password": account.secret_key, "userType": "Normal", "userStatus": "enable"}
    yield _CREATE_USER, {"username": account.access_key}, json.dumps(user).encode()
    actions: dict[str, list[str]] = {}
    for right in given:
        actions.setdefault(right.resource, []).append(right.action)
    entries: list[dict[str, Any]] = [
        {"resource": resource, "actions": allowed, "decision": "Allow"} for resource, allowed in actions.items()
    ]
    if entries:
        subject = f"User:{account.access_key}"
        acl = {"subject": subject, "policies": [{"policyType": "Custom", "entries": entries}]}
        yield _CREATE_ACL, {"subject": subject}, json.dumps(acl).encode()


def _first(account: Credentials, given: Sequence[Right]) -> Iterator[tuple[int, Mapping[str, str], bytes]]:
    lists: dict[str, dict[str, list[str]]] = {"topicPerms": {}, "groupPerms": {}}
    fields = {"accessKey": account.access_key, "secretKey": account.secret_key, "admin": "false"}
    fields |= {"defaultTopicPerm": "DENY", "defaultGroupPerm": "DENY"}
    for resource, action in given:
        kind, _, name = resource.partition(" ")
        if name:
            lists[kind].setdefault(name, []).append(action)
        else:
            fields[kind] = action
    for kind, names in lists.items():
        if names:
            fields[kind] = ",".join(f"{name}={'|'.join(actions)}" for name, actions in names.items())
    yield _UPDATE_ACL_CONFIG, fields, b""
