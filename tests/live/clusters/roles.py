"""What sources, sinks, listeners and commands do under an account: the calls that the product makes, but without Spark."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable
from typer.testing import CliRunner

from ordered_source.columns import LotPlan
from ordered_source.listener.settled import Settled
from ordered_source.plan import planned_schema
from ordered_source.stream_reader import StreamReader
from orderedmq.broker import PullSettings, SinkBatch
from orderedmq.cli import app
from orderedmq.endpoint import Credentials, Endpoint
from orderedmq.ownership.lock import LockToken
from orderedmq.ownership.membership import Subscription
from orderedmq.parking import AT_ONCE, HELD, Parking, Ticket, lot_token, parked_topic
from orderedmq.rocketmq.broker import RocketMQBroker
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.schema import concat_batches
from tests.contract.support import locked
from tests.stopped_readers import stopped

_numbers = itertools.count()


class Through(NamedTuple):
    """A Proxy through which the account connects, and the cluster to which the Proxy forwards."""

    address: str
    cluster: Cluster


#: An account connects to either of these.
Place = Cluster | Through


def behind(place: Place) -> Cluster:
    """Return the cluster without the Proxy, because the cluster's administrator does not use the Proxy."""
    return place.cluster if isinstance(place, Through) else place


class Refused(Exception):
    """The command ended with this error."""


def row(body: bytes = b"x") -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array([body]), "sharding_key": ["k"]})


def connect(cluster: Place, account: Credentials) -> RocketMQBroker:
    return RocketMQBroker(Endpoint(None, cluster.address, credentials=account))


def source(cluster: Place, account: Credentials, **options: str | None) -> int:
    """Run a query's first two batches. Return how many rows they had."""
    wanted = {
        "namesrvAddr": cluster.address,
        "accessKey": account.access_key,
        "secretKey": account.secret_key,
        "topic": "orders",
        "startingOffsets": "earliest",
        **options,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    reader = StreamReader(given, planned_schema(given))
    count = 0
    with stopped(reader):
        start = reader.initialOffset()
        for _ in range(2):
            end = reader.latestOffset(start, ReadAllAvailable())
            for partition in reader.partitions(start, end):
                count += sum(rows.num_rows for rows in reader.read(partition))
            start = end
    return count


def sink(cluster: Place, account: Credentials, topic: str, group: str | None = None, name: str | None = None) -> str:
    """Write a query's first two batches, the first one twice, and one batch without identity. Return the query's id."""
    name = name or f"query-{next(_numbers)}"
    for number in (0, 0, 1):
        with connect(cluster, account) as broker:
            batch = SinkBatch(name, number, None, group)
            staging = broker.outbox.open(batch, 0)
            try:
                for queue in broker.log.targets(topic):
                    staging.add(queue, row(f"{name}-{number}".encode()))
                broker.outbox.publish(batch, [staging.receipt()])
            except BaseException:
                staging.abandon()
                raise
    return name


def write(cluster: Place, account: Credentials, topic: str) -> None:
    with connect(cluster, account) as broker:
        staging = broker.outbox.open(SinkBatch(None), 0)
        staging.add(broker.log.targets(topic)[0], row())
        broker.outbox.publish(SinkBatch(None), [staging.receipt()])


@contextlib.contextmanager
def owner(
    cluster: Place, account: Credentials, group: str, name: str, topic: str = "orders"
) -> Iterator[tuple[RocketMQBroker, LockToken]]:
    """Yield the connection and the token of a group member that has locked the queue of a topic."""
    with connect(cluster, account) as broker:
        queue = broker.log.queues(topic)[0]
        me = broker.groups.join(name)
        broker.groups.heartbeat(group, me, Subscription("shared", topic, "AVG"))
        [token] = locked(broker, group, me, [queue])
        yield broker, token


def put_aside(cluster: Place, account: Credentials, group: str) -> int:
    """Write two dead letters twice, as a listener's task does. The second attempt must write nothing."""
    letters = concat_batches([row(), row()])
    put = []
    with owner(cluster, account, group, "listener") as (_, token):
        for _ in range(2):
            with connect(cluster, account) as task:
                put.append(task.groups.dead_letter(token, letters, [0, 1]))
    assert put[1] == 0
    return put[0]


def park(cluster: Place, account: Credentials, group: str, topic: str = "orders") -> None:
    """Run a listener with order per key: two tasks park the same message, then a source reads and commits it."""
    with owner(cluster, account, group, "listener", topic) as (broker, token):
        for _ in range(2):
            with connect(cluster, account) as task:
                assert task.groups.park(token, [Parking(token.queue, 0, Ticket(0, 1, 1, AT_ONCE))]) == [True]
                lot = lot_token(token)
                assert list(Settled.read(task, token, lot.queue, LotPlan(0, 0, 0, 10)).view().parked_offsets) == [0]
        assert broker.log.bounds([lot.queue])[lot.queue].max_offset == 1
        assert broker.log.reading(PullSettings(group)).pull(lot.queue, 0, 10, 10, ("body",)).num_rows == 1
        broker.groups.commit({token: 1, lot: 1})


def hold(cluster: Place, admin: Credentials, group: str) -> None:
    """Park a message on hold, so that it is never due."""
    with owner(cluster, admin, group, "listener") as (broker, token):
        assert broker.groups.park(token, [Parking(token.queue, 0, Ticket(0, 1, 1, HELD))]) == [True]
        broker.groups.commit({token: 1})


def make_lots(cluster: Place, account: Credentials, group: str) -> None:
    """Create the parking lots, as the first task that parks a message also does."""
    with connect(cluster, account) as broker:
        [queue] = broker.log.queues("orders")
        lots = parked_topic(group, queue.topic)
        broker.groups._parking_lots._make_at(queue.broker_name, queue.topic, lots, 1, 25.0)


def command(cluster: Place, account: Credentials, *arguments: str, given: str | None = None) -> str:
    """Return the command's output. Raises Refused if it fails."""
    variables = {"ORDEREDMQ_ACCESS_KEY": account.access_key, "ORDEREDMQ_SECRET_KEY": account.secret_key}
    done = CliRunner().invoke(app, ["--namesrv", cluster.address, *arguments], input=given, env=variables)
    if done.exit_code:
        raise Refused(done.stderr)
    return done.stdout


def held(cluster: Place, admin: Credentials, group: str, account: Credentials, *arguments: str) -> str:
    """Run a command while a query holds the group's queue."""
    with owner(behind(cluster), admin, group, "holder"):
        return command(cluster, account, *arguments)


def commit(cluster: Place, admin: Credentials, group: str) -> None:
    with owner(cluster, admin, group, "earlier") as (broker, token):
        broker.groups.commit({token: 0})
