"""Requests with their signatures and the parsers of their answers, and the errors for response codes. Pure.

No other module maps response codes to errors. Source: ResponseCode, RemotingSysResponseCode. ACL 1.0 and 2.0 use the same signature.
Source: AclClientRPCHook, AclUtils.combineRequestContent, AclSigner.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from orderedmq.conditions import GroupCondition, ProtocolCondition, RocketMQCondition, TopicCondition, UnavailableCondition
from orderedmq.endpoint import Credentials
from orderedmq.errors import (
    GroupError,
    OrderedMQError,
    ProtocolError,
    RocketMQError,
    RocketMQUnavailableError,
    TopicError,
)
from orderedmq.rocketmq.wire import rights
from orderedmq.rocketmq.wire.codes import FLAG_RESPONSE, RequestCode, ResponseCode
from orderedmq.rocketmq.wire.frame import Bytes, RemotingCommand
from orderedmq.rocketmq.wire.route import FORBIDDEN, not_readable

T = TypeVar("T")

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"
SIGNATURE: Final = "Signature"

_NUMBER = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_INT64 = range(-(2**63), 2**63)
#: The remark of a Proxy with enableTopicMessageTypeCheck, with the types of topic and message (DefaultTopicMessageTypeValidator).
_TYPES: Final = re.compile(r"TopicMessageType validate failed, the expected type is (\w+), but actual type is (\w+)")
_SUCCESS: Final = frozenset((ResponseCode.SUCCESS,))
#: The type of a topic whose settings a Proxy could not get (TopicMessageType).
_UNKNOWN_TYPE: Final = "UNSPECIFIED"
#: The remarks of a Proxy about a server that is away, which have the code SYSTEM_ERROR (RemotingConnectException,
#: RemotingSendRequestException, RemotingTimeoutException), and what each of them means.
_BEHIND: Final = (
    (re.compile(r"connect to \S+ failed"), UnavailableCondition.UNREACHABLE),
    (re.compile(r"send request to <\S+> failed"), UnavailableCondition.CONNECTION_LOST),
    (re.compile(r"wait response on the channel <\S+> timeout"), UnavailableCondition.TIMEOUT),
)


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """A request to send, and the parser of its answer.

    ``what`` and ``resource`` are for errors: "pull from queue t/a/0", "topic t". ``parse`` gets the answers with a code in
    ``accepts``. It also gets a refusal whose remark matches ``absent``, because some servers have no code for "does not exist".
    ``repeatable``: executing the request twice has the same effect as once, so it may be sent again if no answer came.
    """

    code: RequestCode
    what: str
    resource: str
    parse: Callable[[RemotingCommand], T]
    ext: Mapping[str, str] = field(default_factory=dict)
    body: Bytes = b""
    accepts: frozenset[ResponseCode] = _SUCCESS
    absent: re.Pattern[str] | None = None
    repeatable: bool = True

    def answer(self, response: RemotingCommand, server: str) -> T:
        """Return the parsed answer. Raises the error for its response code, or ProtocolError if it cannot be parsed."""
        is_absent = self.absent is not None and self.absent.search(response.remark or "") is not None
        if response.code in self.accepts or is_absent:
            try:
                return self.parse(response)
            except ProtocolError as error:
                raise ProtocolError(
                    error.sub, f"the answer of {server} to the {self.what} cannot be read: {error.message}"
                ) from None
        raise refusal(self, response, server)


def answer_to(command: RemotingCommand, answer: RemotingCommand | None = None) -> RemotingCommand | None:
    """Return the answer to a server's request; None if the server wants no answer.

    If ``answer`` is None, the answer says that this client does not support the request.
    """
    if command.is_oneway:
        return None
    if answer is None:
        remark = f"request code {command.code} is not supported"
        answer = RemotingCommand(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
    answer.opaque, answer.flag = command.opaque, FLAG_RESPONSE
    return answer


def ignore_answer(_response: RemotingCommand) -> None:
    """Parse an answer whose content does not matter."""


def int_field(response: RemotingCommand, name: str, missing: int | None = None) -> int:
    """Return a 64-bit integer field of an answer, or ``missing`` if it is absent. Raises ProtocolError PROTOCOL."""
    text = response.ext.get(name)
    if text is None and missing is not None:
        return missing
    if text is None or not _NUMBER.fullmatch(text) or (value := int(text)) not in _INT64:
        raise ProtocolError(
            ProtocolCondition.PROTOCOL,
            f"its field {name!r} is {text if text is None else text[:40]!r}, not a 64-bit integer",
        )
    return value


def types_in(remark: str) -> tuple[str, str] | None:
    """Return the topic's type and the message's type from a Proxy's remark that says that they differ; None for any other remark."""
    match = _TYPES.search(remark)
    return (match[1], match[2]) if match is not None else None


def require_type(resource: str, expected: str) -> str:
    """Return a topic's type. Raises RocketMQUnavailableError if the Proxy does not know it."""
    if expected == _UNKNOWN_TYPE:
        raise RocketMQUnavailableError(
            UnavailableCondition.UNAVAILABLE,
            f"the RocketMQ Proxy does not know the type of {resource}: the brokers of the topic are away, or it was deleted",
        )
    return expected


def wrong_type(resource: str, expected: str, actual: str, why: str, remedy: str = "") -> RocketMQError:
    """Return the error for messages of the type ``actual`` that a Proxy does not pass on to a topic of another type.

    ``why`` is a sentence without a full stop. ``remedy`` is put between the two usual remedies, so it has to end with a comma.
    """
    return RocketMQError(
        RocketMQCondition.NOT_SUPPORTED,
        f"{resource} has type {expected}, and the RocketMQ Proxy passes only messages of this type on to it, but {why}. Name the "
        f"nameserver's address instead of the Proxy's (usually port 9876), {remedy}or write to a topic of type {actual} or MIXED (mqadmin "
        "updateTopic -c CLUSTER -t TOPIC -a +message.type=MIXED, if brokers have enableMixedMessageType=true)",
    )


def refusal(request: Request[T], response: RemotingCommand, server: str) -> OrderedMQError:
    """Return the error for an answer's response code."""
    remark = " ".join((response.remark or "").split())[:300]
    answer = f"{server} answers the {request.what} with code {response.code}" + (f" ({remark})" if remark else "")
    code = response.code
    if code == ResponseCode.SYSTEM_ERROR:
        # ACL 1.0, a Proxy, and a nameserver that waits for its brokers have no specific code, so recognise them by their remarks.
        if "AclException" in remark or rights.is_refusal(remark):
            code = ResponseCode.NO_PERMISSION
        elif "name server not ready" in remark:
            code = ResponseCode.SERVICE_NOT_AVAILABLE
        elif "LocalMessageService" in remark:
            # A Proxy in local mode passes nothing on. It runs inside a broker that has its own port.
            code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    match code:
        case ResponseCode.NO_PERMISSION if FORBIDDEN.match(remark):
            return not_readable(request.what.removeprefix("pull from "), answer)
        case ResponseCode.NO_PERMISSION:
            return RocketMQError(
                RocketMQCondition.NO_PERMISSION,
                f"permission for {request.resource} was denied: {answer}. Check the account (accessKey and secretKey, or "
                "ORDEREDMQ_ACCESS_KEY and ORDEREDMQ_SECRET_KEY), the permissions of topic and broker, and the account's rights: the table "
                '"Rights of an account" in docs/guides/rocketmq.md lists what each program needs',
            )
        case ResponseCode.TOPIC_NOT_EXIST:
            return TopicError(TopicCondition.MISSING, f"{request.resource} does not exist: {answer}")
        case ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
            return GroupError(
                GroupCondition.MISSING,
                f"{request.resource}: the consumer group does not exist, and the broker does not create it: {answer}",
            )
        case ResponseCode.SYSTEM_BUSY | ResponseCode.FLOW_CONTROL:
            return RocketMQUnavailableError(UnavailableCondition.BUSY, f"{answer}. The server is overloaded at the moment")
        case ResponseCode.SERVICE_NOT_AVAILABLE:
            return RocketMQUnavailableError(
                UnavailableCondition.UNAVAILABLE,
                f"{answer}. A disk may be full, or the server is a replica, or it is starting or stopping",
            )
        case ResponseCode.GO_AWAY:
            return RocketMQUnavailableError(UnavailableCondition.GO_AWAY, f"{answer}. The server is being shut down")
        case ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            return RocketMQError(
                RocketMQCondition.NOT_SUPPORTED,
                f"{answer}. This server does not know the request. If it is a RocketMQ Proxy, or the port is a VIP port, name the "
                "nameserver's address instead (usually port 9876)",
            )
        case ResponseCode.MESSAGE_ILLEGAL if (types := types_in(remark)) is not None:
            require_type(request.resource, types[0])
            return wrong_type(request.resource, *types, f"this message is sent as type {types[1]}: {answer}")
        case ResponseCode.MESSAGE_ILLEGAL:
            return RocketMQError(
                RocketMQCondition.MESSAGE_ILLEGAL,
                f"{answer}. A message is larger than the broker's maxMessageSize, or has a property that is not allowed",
            )
        case ResponseCode.INVALID_PARAMETER:
            return RocketMQError(RocketMQCondition.INVALID_PARAMETER, answer)
        case ResponseCode.NOT_LEADER_FOR_QUEUE:
            return RocketMQError(RocketMQCondition.STATIC_TOPIC, f"{answer}. Static topics are not supported")
        case (
            ResponseCode.SUBSCRIPTION_PARSE_FAILED
            | ResponseCode.SUBSCRIPTION_NOT_EXIST
            | ResponseCode.SUBSCRIPTION_NOT_LATEST
            | ResponseCode.FILTER_DATA_NOT_EXIST
            | ResponseCode.FILTER_DATA_NOT_LATEST
        ):
            return RocketMQError(RocketMQCondition.FILTER, f"the subscription of {request.resource} is not usable: {answer}")
        case ResponseCode.SYSTEM_ERROR if remark.startswith("group not found"):
            # A Proxy of 5.5 sends this remark to members of a group if it cannot get the group's settings from a broker.
            return RocketMQUnavailableError(
                UnavailableCondition.UNAVAILABLE,
                f"{answer}. A RocketMQ Proxy does not find the group: its brokers are away, or may not create groups "
                "(autoCreateSubscriptionGroup), or check accounts and the Proxy has none (innerClientAuthenticationCredentials, "
                "enableAclRpcHookForClusterMode). Give the Proxy an account, or name the nameserver's address (usually port 9876)",
            )
        case ResponseCode.SYSTEM_ERROR if away := [sub for pattern, sub in _BEHIND if pattern.search(remark)]:
            return RocketMQUnavailableError(away[0], f"{answer}. The Proxy cannot reach that server")
        case _:
            return RocketMQError(RocketMQCondition.SERVER_ERROR, answer)


def signature(data: bytes, secret_key: str) -> str:
    """Return the HMAC-SHA1 of ``data`` in base64."""
    return base64.b64encode(hmac.digest(secret_key.encode(), data, hashlib.sha1)).decode()


def signed(ext: Mapping[str, str], body: Bytes, credentials: Credentials) -> dict[str, str]:
    """Return a request's fields, extended by the account and by a signature over all fields and the body.

    The signature does not cover code, opaque, flag and version. Adding a field afterwards invalidates it.
    """
    fields = {**ext, ACCESS_KEY: credentials.access_key}
    if credentials.security_token is not None:
        fields[SECURITY_TOKEN] = credentials.security_token
    fields.pop(SIGNATURE, None)
    # Java's TreeMap sorts by UTF-16 units. Field names are ASCII, so code points have the same order.
    values = "".join(fields[name] for name in sorted(fields)).encode()
    fields[SIGNATURE] = signature(b"".join((values, body)), credentials.secret_key)
    return fields
