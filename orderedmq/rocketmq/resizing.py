"""Resizes a topic at its broker: a write pause, because each producer learns the number of queues at another time, from a route.

Producers ask for routes every 30 s (``pollNameServerInterval``), and a broker stores what a producer sends by an old route. So the
command takes the topic's permission to write, waits until no producer can have an old route and the ends of the queues stand still,
records the resize (`messages.resizes`), and sets the number of queues and the permission in one request. Until that request, every error
and Ctrl-C gives the permission back. A resize that was recorded and did not happen only lets queues wait once.

The broker writes settings to disk at once. They include the mark `PAUSED`, by which a command that was killed is recognised: the next
command, with this or another number, begins the pause again. Beside the mark is a random number, so that of two commands that run at
the same time the earlier one notices the other, and leaves the topic to it. The broker writes the record to disk within
``flushConsumerOffsetInterval``, so the command reads it again after that.

Only a topic with queues at one broker is resized. Brokers change their parts of a route one after the other, and a producer that asked in
between would choose among the queues of some of them.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from typing import Final, NoReturn, TypeVar

from orderedmq.conditions import GroupCondition, OptionCondition, RocketMQCondition, UnavailableCondition
from orderedmq.errors import GroupError, OptionError, OrderedMQError, RocketMQError, RocketMQUnavailableError
from orderedmq.model import MessageQueue
from orderedmq.rocketmq.messages.log import RocketMQLog
from orderedmq.rocketmq.messages.resizes import AGE, GROUP, Resizes
from orderedmq.rocketmq.messages.topic_changes import await_registration
from orderedmq.rocketmq.net.client import NAMESERVER_TIMEOUT, ROUTE_AGE, Client
from orderedmq.rocketmq.net.deadline import REQUEST_TIMEOUT, Deadline
from orderedmq.rocketmq.sink.batch_queues import Record
from orderedmq.rocketmq.wire import admin_requests, group_requests, message_requests, registers
from orderedmq.rocketmq.wire.admin_requests import TopicConfig
from orderedmq.rocketmq.wire.request import Request
from orderedmq.rocketmq.wire.route import PAUSED, RESIZED, WRITE, QueueData
from orderedmq.routing.generations import Resize

T = TypeVar("T")

logger = logging.getLogger("orderedmq")

#: Seconds for which no nameserver has given out an old route when the resize is recorded: the interval at which producers ask, and a margin
#: for an answer that is late and for a message that is on its way.
PAUSE: Final = ROUTE_AGE + 10.0
#: Seconds for which the ends of the queues must stand still, and after which the record is on the broker's disk, beyond the interval at
#: which it writes. Readers know the record by then.
SETTLED: Final = 2.0
#: The bits of topicSysFlag for a number that stands for one run of the command.
_RUNS: Final = 0xFF * 2 * PAUSED
#: Seconds beyond the pause to wait for the ends of the queues and for batches of sinks.
PATIENCE: Final = 120.0


class TopicResize:
    """One run of the command for one topic."""

    def __init__(self, client: Client, log: RocketMQLog, topic: str, queues: int) -> None:
        self._client = client
        self._log = log
        self._topic = topic
        self._queues = queues
        self._resizes = Resizes(client)
        self._place = MessageQueue(topic, "", 0)

    def run(self) -> None:
        """Resize the topic. Raises OptionError UNSUPPORTED before any side effect, GroupError IN_USE for an unfinished batch of a sink."""
        config, interval = self._check()
        perm, flag = config.perm | WRITE, config.sys_flag & ~(PAUSED | _RUNS)
        if config.write_queues == self._queues:
            # A former command was killed, and this one cancels it.
            if config.sys_flag & PAUSED:
                self._put(config._replace(perm=perm, sys_flag=flag))
            return
        settled = max(interval, AGE) + SETTLED
        logger.warning(
            "topic %s now takes no messages for about %.0f s: producers that ask for its route get none of its queues, and have to send "
            "again until then. Ctrl-C ends the pause. If this command is killed, run it again",
            self._topic,
            PAUSE + settled,
        )
        mark = PAUSED | secrets.randbits(30) & _RUNS
        paused = config._replace(perm=config.perm & ~WRITE, sys_flag=flag | mark)
        try:
            self._put(paused)
            self._record(paused, settled)
        except BaseException:
            self._abort(paused, config._replace(perm=perm, sys_flag=flag))
            raise
        read = max(config.read_queues, self._queues)
        self._put(config._replace(read_queues=read, write_queues=self._queues, perm=perm, sys_flag=flag | RESIZED))

    def _check(self) -> tuple[TopicConfig, float]:
        """Return the topic's settings, and the seconds within which its broker writes offsets to disk. Raises OptionError UNSUPPORTED."""
        self._client.refuse_proxy("a resize of a topic")
        route = self._log.route(self._topic, fresh=True)
        if route.order_conf:
            self._refuse(
                "it has an order configuration at the nameserver, so producers ignore its permission. Remove the configuration"
            )
        if len(route.queues) != 1:
            self._refuse(
                f"it has queues at {len(route.queues)} brokers, which cannot change their routes at the same time. Create a topic with "
                f"{self._queues} queues and write to it"
            )
        [data] = route.queues
        self._place = MessageQueue(self._topic, data.broker_name, 0)
        try:
            config = self._call(admin_requests.topic_config(self._topic))
        except RocketMQError as error:
            if error.sub != RocketMQCondition.NOT_SUPPORTED:
                raise
            self._refuse(f"broker {data.broker_name!r} is older than RocketMQ 5.0, and forgets numbers of a topic too late")
        if config.message_type == "TRANSACTION":
            self._refuse(
                "the broker stores its messages when their transactions are committed, whatever its permission is then"
            )
        if not (config.perm & WRITE or config.sys_flag & PAUSED):
            self._refuse("it is read-only, and would not be so afterwards. Set its permission to 6 first")
        if self._resizes.count(self._place) >= registers.MOST_RESIZES:
            self._refuse(f"it was resized {registers.MOST_RESIZES} times")
        _, settings = self._call(message_requests.broker_config())
        if self._routes_differ(config):
            self._refuse("the nameservers have other numbers for it than its broker. Try again in a minute")
        interval = settings.get("flushConsumerOffsetInterval", "")
        return config._replace(message_type=None), int(interval) / 1000 if interval.isdecimal() else AGE

    def _refuse(self, why: str) -> NoReturn:
        raise OptionError(OptionCondition.UNSUPPORTED, f"topic {self._topic!r} cannot be resized: {why}")

    def _record(self, paused: TopicConfig, settled: float) -> None:
        """Wait until no message can be on its way, and record the resize where it survives the death of the broker."""
        every = [self._place._replace(queue_id=number) for number in range(max(paused.read_queues, paused.write_queues))]
        former = tuple(every[: paused.write_queues])
        after = tuple(self._place._replace(queue_id=number) for number in range(self._queues))
        deadline = Deadline.after(PAUSE + PATIENCE)
        time.sleep(max(0.0, PAUSE - settled))
        self._call(admin_requests.create_group(GROUP))
        while True:
            ends = self._ends(every)
            time.sleep(settled)
            error = self._restless(paused, every, ends)
            if error is None:
                resize = Resize(former, after, ends, by_key=False, number=self._resizes.count(self._place))
                self._resizes.record(resize, every)
                time.sleep(settled)
                error = self._restless(paused, every, ends)
                if error is None and self._resizes.is_recorded(resize, self._place):
                    return
            if time.monotonic() >= deadline:
                raise error or self._unquiet("its broker has forgotten what was recorded")

    def _ends(self, queues: list[MessageQueue]) -> dict[MessageQueue, int]:
        return {queue: at.max_offset for queue, at in self._log.bounds(queues).items()}

    def _restless(
        self, paused: TopicConfig, queues: list[MessageQueue], ends: dict[MessageQueue, int]
    ) -> OrderedMQError | None:
        """Return why messages may still arrive in the former queues; None if they do not."""
        if self._config() != paused:
            raise RocketMQUnavailableError(
                UnavailableCondition.TIMEOUT,
                f"topic {self._topic!r} was not resized: another command resizes it, or has changed its settings",
            )
        if self._ends(queues) != ends:
            return self._unquiet("a producer sends to it without regard to its permission. Stop that producer")
        offsets = self._call(group_requests.all_consumer_offsets())
        batches, committed = (
            register(self._place)._replace(broker_name="") for register in (registers.queues, registers.committed)
        )
        for group, numbers in sorted(offsets.items()):
            record = Record.parse(numbers.get(batches, 0))
            if record.value and not record.is_of(numbers.get(committed, 0) - 1):
                return GroupError(
                    GroupCondition.IN_USE,
                    f"topic {self._topic!r} was not resized: a batch of a sink is not committed, and its rows belong to the former queues (the "
                    f"sink's numbers are in group {group!r}). Start the sink's query, or if it is gone for good, delete that group "
                    f"(orderedmq group delete {group})",
                )
        return None

    def _unquiet(self, why: str) -> RocketMQUnavailableError:
        return RocketMQUnavailableError(
            UnavailableCondition.TIMEOUT, f"topic {self._topic!r} was not resized, and takes messages again: {why}"
        )

    def _put(self, config: TopicConfig) -> None:
        """Change the topic's settings at its broker, and wait until every nameserver has them."""
        self._call(admin_requests.put_topic(self._topic, config))
        await_registration(lambda: not self._routes_differ(config), self._topic)

    def _routes_differ(self, config: TopicConfig) -> bool:
        """Return whether a nameserver does not have these settings. Raises the error of one that does not answer."""
        expected = (QueueData(self._place.broker_name, config.read_queues, config.write_queues, config.perm, config.sys_flag),)
        for address in self._client.nameservers:
            limit = Deadline.after(NAMESERVER_TIMEOUT)
            route = self._client.connection(address, limit, wait=False).call(message_requests.topic_route(self._topic), limit)
            if route.queues != expected:
                return True
        self._log.forget(self._topic)
        return False

    def _config(self) -> TopicConfig:
        return self._call(admin_requests.topic_config(self._topic))._replace(message_type=None)

    def _abort(self, paused: TopicConfig, config: TopicConfig) -> None:
        with contextlib.suppress(OrderedMQError):
            if self._config() == paused:
                self._put(config)
            return
        logger.warning("topic %s may still take no messages. Run orderedmq topic resize again", self._topic)

    def _call(self, request: Request[T]) -> T:
        deadline = Deadline.after(REQUEST_TIMEOUT)
        return self._client.call(request, deadline, topic=self._topic, broker_name=self._place.broker_name)
