"""A client's namespaces: version 1 puts a prefix before names of topics and groups, and version 2 adds fields to requests. Pure.

Version 1: the servers know topic ``orders`` and group ``billing`` of namespace ``acme`` as ``acme%orders`` and ``acme%billing``, and
the group's topics as ``%RETRY%acme%billing`` and ``%DLQ%acme%billing``. A parking lot is prefixed like any other topic. The names of
the servers' own topics and groups, and names that already have the prefix, do not change. This module adds the prefix to requests and
removes it from answers, so the layers above a connection use names without it. Lists do not contain names of other namespaces.

Version 2: each request has the fields ``nsd`` and ``ns``, and names do not change.

Source: NamespaceUtil, NamespaceRpcHook, ClientConfig.withNamespace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import GroupCondition
from orderedmq.errors import GroupError
from orderedmq.model import DEAD_LETTER_PREFIX, RETRY_PREFIX, MessageQueue
from orderedmq.rocketmq.wire.codes import RequestCode, ResponseCode
from orderedmq.rocketmq.wire.fastjson import field, loads_object
from orderedmq.rocketmq.wire.frame import RemotingCommand
from orderedmq.rocketmq.wire.message_requests import PRODUCER_GROUP
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.rights import TOOLS_GROUP
from orderedmq.rocketmq.wire.route import SYSTEM_GROUP_PREFIX, SYSTEM_PREFIXES, SYSTEM_TOPICS, string_tuple

T = TypeVar("T")

_SEPARATOR: Final = "%"
#: The prefixes of topics that belong to a group. The namespace follows them.
_OF_GROUPS: Final = (RETRY_PREFIX, DEAD_LETTER_PREFIX)
#: The servers' own groups in whose names this client pulls and sends. Unlike those of `SYSTEM_GROUP_PREFIX`, Java's client puts the prefix
#: before them if a user names them.
_OWN_GROUPS: Final = frozenset((TOOLS_GROUP, PRODUCER_GROUP))
#: The header fields that contain a topic or a group. In a send, ``a`` is the producer's group, and ``b`` and ``c`` are topics.
_FIELDS: Final = frozenset(("topic", "consumerGroup", "groupName"))
_SEND_FIELDS: Final = frozenset(("a", "b", "c"))
_OTHER_FIELDS: Final[Mapping[RequestCode, frozenset[str]]] = {
    RequestCode.SEND_MESSAGE_V2: _SEND_FIELDS,
    RequestCode.SEND_BATCH_MESSAGE: _SEND_FIELDS,
}
#: The maximum length of a group's name in 5.x, in characters (Validators.CHARACTER_MAX_LENGTH).
_MOST: Final = 120


@dataclass(frozen=True)
class Namespaces:
    """``prefix`` is the namespace of version 1, and ``field`` is that of version 2. None means no namespace."""

    prefix: str | None = None
    field: str | None = None

    # -- names

    def spelled(self, name: str) -> str:
        """Return the name by which servers know a topic or group. Raises GroupError BAD_NAME if it is too long."""
        if self.prefix is None or not name or _is_systems(name):
            return name
        of_group, bare = _split(name)
        if bare.startswith(self.prefix + _SEPARATOR):
            return name
        text = f"{of_group}{self.prefix}{_SEPARATOR}{bare}"
        if len(text) - len(of_group) > _MOST + 7:
            raise GroupError(
                GroupCondition.BAD_NAME,
                f"the name {bare!r} is too long with namespace {self.prefix!r} before it: RocketMQ allows {_MOST} characters for a group "
                f"and {_MOST + 7} for a topic",
            )
        return text

    def spelled_queue(self, queue: MessageQueue) -> MessageQueue:
        """Return a queue with the name by which servers know its topic. They also store its messages under this name."""
        return queue if self.prefix is None else queue._replace(topic=self.spelled(queue.topic))

    def bare(self, name: str) -> str:
        """Return a name without the prefix of version 1."""
        of_group, rest = _split(name)
        return of_group + rest.removeprefix(f"{self.prefix}{_SEPARATOR}") if self.prefix is not None else name

    def has(self, name: str) -> bool:
        """Whether a topic or group of a server is in this namespace or is one of the servers' own."""
        return self.prefix is None or _is_systems(name) or _split(name)[1].startswith(self.prefix + _SEPARATOR)

    def bare_column(self, topics: pa.Array) -> pa.Array:
        """Return a column of topics without the prefix of version 1."""
        if self.prefix is None:
            return topics
        pattern = f"^({'|'.join(map(re.escape, _OF_GROUPS))})?{re.escape(self.prefix)}{_SEPARATOR}"
        return pc.replace_substring_regex(topics, pattern, r"\1")

    # -- requests

    def request(self, request: Request[T]) -> Request[T]:
        """Return a request with the names that servers know. Its parsed answer has names without the prefix."""
        if self.field is not None:
            request = replace(request, ext={**request.ext, "nsd": "true", "ns": self.field})
        if self.prefix is None:
            return request
        fields = _OTHER_FIELDS.get(request.code, _FIELDS)
        ext = {name: self.spelled(value) if name in fields else value for name, value in request.ext.items()}
        body = _BODIES.get(request.code)
        answer = _ANSWERS.get(request.code)
        return replace(
            request,
            ext=ext,
            body=request.body if body is None or not len(request.body) else _changed(request.body, body, self),
            parse=request.parse if answer is None else self._parse(request.parse, answer),
        )

    def _parse(self, parse: Callable[[RemotingCommand], T], change: _Change) -> Callable[[RemotingCommand], T]:
        def translated(response: RemotingCommand) -> T:
            if response.code == ResponseCode.SUCCESS and len(response.body):
                response = replace(response, body=_changed(response.body, change, self))
            return parse(response)

        return translated


NO_NAMESPACES: Final = Namespaces()

#: Changes the fields of a JSON body in place. A change of an answer raises ProtocolError for a value of another type.
_Change = Callable[[Namespaces, dict[str, Any]], None]


def _is_systems(name: str) -> bool:
    return name in SYSTEM_TOPICS or name in _OWN_GROUPS or name.startswith((*SYSTEM_PREFIXES, SYSTEM_GROUP_PREFIX))


def _split(name: str) -> tuple[str, str]:
    """Return the prefix of a topic that belongs to a group ("" for all other names), and the rest of the name."""
    of_group = next((prefix for prefix in _OF_GROUPS if name.startswith(prefix)), "")
    return of_group, name[len(of_group) :]


def _changed(body: Any, change: _Change, names: Namespaces) -> bytes:
    fields = loads_object(body)
    change(names, fields)
    return json.dumps(fields, separators=(",", ":")).encode()


def _heartbeat(names: Namespaces, fields: dict[str, Any]) -> None:
    for consumer in fields["consumerDataSet"]:
        consumer["groupName"] = names.spelled(consumer["groupName"])
        for subscription in consumer["subscriptionDataSet"]:
            subscription["topic"] = names.spelled(subscription["topic"])


def _lock(names: Namespaces, fields: dict[str, Any]) -> None:
    fields["consumerGroup"] = names.spelled(fields["consumerGroup"])
    for queue in fields["mqSet"]:
        queue["topic"] = names.spelled(queue["topic"])


def _check(names: Namespaces, fields: dict[str, Any]) -> None:
    fields["group"] = names.spelled(fields["group"])
    fields["subscriptionData"]["topic"] = names.spelled(fields["subscriptionData"]["topic"])


def _group(names: Namespaces, fields: dict[str, Any]) -> None:
    fields["groupName"] = names.spelled(fields["groupName"])


def _locked(names: Namespaces, fields: dict[str, Any]) -> None:
    for queue in field(fields, "lockOKMQSet", list, []):
        if isinstance(queue, dict):
            queue["topic"] = names.bare(field(queue, "topic", str))


def _table(table: str) -> _Change:
    """Return a change that removes the prefix from a map's keys and drops keys of other namespaces."""

    def change(names: Namespaces, fields: dict[str, Any]) -> None:
        entries = field(fields, table, dict, {})
        fields[table] = {names.bare(name): value for name, value in entries.items() if names.has(name)}

    return change


def _offsets(names: Namespaces, fields: dict[str, Any]) -> None:
    out = {}
    for key, value in field(fields, "offsetTable", dict, {}).items():
        topic, _, group = key.partition("@")
        if names.has(topic) and names.has(group):
            out[f"{names.bare(topic)}@{names.bare(group)}"] = value
    fields["offsetTable"] = out


def _topics(names: Namespaces, fields: dict[str, Any]) -> None:
    fields["topicList"] = [names.bare(name) for name in string_tuple(fields.get("topicList")) if names.has(name)]


_BODIES: Final[Mapping[RequestCode, _Change]] = {
    RequestCode.HEART_BEAT: _heartbeat,
    RequestCode.LOCK_BATCH_MQ: _lock,
    RequestCode.UNLOCK_BATCH_MQ: _lock,
    RequestCode.CHECK_CLIENT_CONFIG: _check,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _group,
}
_ANSWERS: Final[Mapping[RequestCode, _Change]] = {
    RequestCode.LOCK_BATCH_MQ: _locked,
    RequestCode.GET_ALL_CONSUMER_OFFSET: _offsets,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _table("subscriptionGroupTable"),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: _table("subscriptionTable"),
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _topics,
}
