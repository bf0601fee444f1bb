"""RocketMQ's own Proxy in front of brokers of the newest release: what works through it, and which calls are refused with an
error that names them.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

import orderedmq
from ordered_source.columns import full_schema
from ordered_source.plan import planned_schema
from ordered_source.stream_reader import StreamReader
from orderedmq.broker import Broker
from orderedmq.conditions import RocketMQCondition
from orderedmq.endpoint import TlsOptions
from orderedmq.errors import RocketMQError, RocketMQUnavailableError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.parking import Parking, Ticket, lot_token, parked_queue, parked_topic
from orderedmq.pulls import pulls
from orderedmq.rocketmq.local.probe import ask
from orderedmq.rocketmq.local.servers import Cluster
from orderedmq.rocketmq.net.client import Client
from orderedmq.rocketmq.net.lane import Lane
from orderedmq.rocketmq.wire import admin_requests
from orderedmq.rocketmq.wire.codes import ResponseCode
from orderedmq.rocketmq.wire.pull_frames import PullTemplate
from orderedmq.rows.filters import Filter
from tests.contract.support import locked, rows
from tests.live.rocketmq.outbox_world import SHORT_SENDS, World, numbered
from tests.live.rocketmq.outbox_world import rows as sink_rows
from tests.live.rocketmq.peers import Peers
from tests.live.rocketmq.rocketmq_proxy import ProxyServer, bodies
from tests.live.rocketmq.test_spark import Rig, in_order, rigged, sender
from tests.micro_batches import MicroBatchLoop
from tests.stopped_readers import stopped
from tests.waits import soon, until

pytestmark = pytest.mark.spark

BACKLOG = 20_000


@pytest.fixture
def rig(
    spark: SparkSession, newest: Cluster, proxy: ProxyServer, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> Iterator[Rig]:
    """A rig whose queries go through the Proxy, while topics are created at the brokers."""
    for rigs in rigged(spark, newest, tmp_path, request):
        rigs.address = proxy.address
        yield rigs


@pytest.mark.holds("through a Proxy")
def test_a_query_reads_and_writes_through_a_proxy_also_after_a_restart(
    rig: Rig, newest: Cluster, proxy: ProxyServer, peers: Peers
) -> None:
    source, target = rig.topic("in"), rig.topic("out")
    send = sender(peers, newest.address)
    send(source, range(300))
    rig.write(rig.stream(source), target)
    in_order(bodies(rig.broker, target), 300)
    with orderedmq.connect(namesrv_addr=proxy.address) as broker:
        ends = {queue: at.max_offset for queue, at in broker.log.bounds(broker.log.queues(source)).items()}
        assert len({queue.broker_name for queue in ends}) == 2
        assert broker.groups.offsets(rig.group, list(ends)) == ends
    send(source, range(300, 400))
    rig.write(rig.stream(source), target)
    in_order(bodies(rig.broker, target), 400)


@pytest.mark.holds("unreadable is not lost")
def test_a_nameserver_that_restarts_behind_a_proxy_ends_no_query(
    newest: Cluster, proxy: ProxyServer, direct: Broker, query: Callable[..., MicroBatchLoop]
) -> None:
    """The Proxy then answers that the topic does not exist, until the brokers have reported again and its own routes are old."""
    for name in ("restarts", "not-asked-for"):
        direct.admin.create_topic(name, 2)
    queues = direct.log.queues("restarts")
    with orderedmq.connect(namesrv_addr=proxy.address) as through:
        until(lambda: _queues(through, "restarts"), "the Proxy knows the topic")
    read: list[bytes] = []
    source = {"namesrvAddr": proxy.address, "topic": "restarts", "consumerGroup": "restarts", "startingOffsets": "earliest"}
    run = query({**source, "failOnDataLoss": "false"}, lambda rows, number: read.extend(rows.column("body").to_pylist()))
    direct.log.append({queue: rows([b"before"]) for queue in queues})
    run.process_all_available()
    direct.log.append({queue: rows([b"after"]) for queue in queues})
    newest.namesrv.kill()
    with Client(proxy.address) as client, pytest.raises(RocketMQUnavailableError, match="UNREACHABLE"):
        client.route("not-asked-for", soon(2.0))
    newest.namesrv.start()

    def has_no_route() -> bool:
        return ask(proxy.address, 105, {"topic": "restarts"})[0] == ResponseCode.TOPIC_NOT_EXIST

    for _ in range(4):
        # If the brokers report before the Proxy asks again, it keeps its route, so restart the nameserver once more.
        with contextlib.suppress(AssertionError):
            until(has_no_route, timeout=22.0)
            break
        newest.namesrv.kill()
        newest.namesrv.start()
    assert has_no_route()

    def report() -> None:
        for broker in newest.brokers:
            ask(broker.address, 25, body=b"brokerPermission=6\n")

    timer = threading.Timer(3.0, report)
    timer.start()
    run.reader._quiet_until = 0.0
    run.process_all_available()
    timer.join()
    assert sorted(read) == [b"after"] * 2 + [b"before"] * 2


@pytest.mark.holds("backlog through a Proxy")
def test_a_backlog_is_read_through_a_proxy_without_a_pull_that_waits_for_its_timeout(
    direct: Broker, through: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane with an unanswered pull ends after 6 s, and all its pulls in flight are repeated over another lane."""
    direct.admin.create_topic("backlog", 2)
    queue = direct.log.queues("backlog")[0]
    direct.log.append({queue: rows([b"%0100d" % number for number in range(BACKLOG)])})
    until(lambda: _queues(through, "backlog"), "the Proxy knows the topic")
    lanes: list[Lane] = []
    asked: Counter[int] = Counter()
    repeated: list[int] = []
    ask, repeat = Lane.ask, Lane._repeat

    def counted_ask(lane: Lane, template: PullTemplate, ranges: Sequence[tuple[int, int]], deadline: float) -> None:
        lanes.append(lane)
        asked.update(begin for begin, _ in ranges)
        ask(lane, template, ranges, deadline)

    def counted_repeat(lane: Lane, numbers: Sequence[int]) -> None:
        repeated.extend(numbers)
        repeat(lane, numbers)

    monkeypatch.setattr(Lane, "ask", counted_ask)
    monkeypatch.setattr(Lane, "_repeat", counted_repeat)
    read = [
        body
        for batch in pulls(through.log, queue, 0, BACKLOG, 2000, 1 << 24, ("body",))
        for body in batch.column(0).to_pylist()
    ]
    assert read == [b"%0100d" % number for number in range(BACKLOG)]
    assert all(lane.proxied for lane in lanes)
    assert len(set(map(id, lanes))) == 1, "no lane may be given up"
    assert set(asked.values()) == {1}, "no pull may fail"
    assert len(repeated) < len(asked) / 10, "the Proxy must answer nearly all pulls immediately"


@pytest.mark.holds("features through a Proxy")
def test_a_connection_with_tls_reads_writes_and_locks_through_a_proxy(direct: Broker, proxy: ProxyServer) -> None:
    direct.admin.create_topic("encrypted", 2)
    queue = direct.log.queues("encrypted")[0]
    with orderedmq.connect(namesrv_addr=proxy.address, tls=TlsOptions(verify=False)) as broker:
        broker.log.append({queue: rows([b"a", b"b"])})
        assert broker.log.pull(queue, 0, 2, 1 << 20, ("body",)).column(0).to_pylist() == [b"a", b"b"]
        [token] = locked(broker, "encrypted-g", broker.groups.join("me"), [queue])
        broker.groups.commit({token: 2})
    assert direct.groups.offsets("encrypted-g", [queue]) == {queue: 2}
    with orderedmq.connect(namesrv_addr=proxy.address, tls=TlsOptions()) as broker, pytest.raises(RocketMQError) as error:
        broker.log.queues("encrypted")
    assert error.value.sub == RocketMQCondition.TLS, "no authority has signed the certificate that the Proxy generated"


@pytest.mark.holds("features through a Proxy")
def test_a_message_is_parked_through_a_proxy_where_the_parking_lot_exists(
    newest: Cluster, direct: Broker, through: Broker
) -> None:
    direct.admin.create_topic("parked-there", 2)
    queue = direct.log.queues("parked-there")[0]
    make_topic(newest, direct, parked_topic("parker-there", queue.topic), 1)
    direct.log.append({queue: rows([b"a", b"b"], sharding_key=["k", "k"])})
    [token] = locked(through, "parker-there", through.groups.join("me"), [queue])
    for _ in range(2):
        assert through.groups.park(token, [Parking(queue, 0, Ticket(0, 1, 1, 0)), Parking(queue, 1, Ticket(1, 1, 1, 0))]) == [
            True,
            True,
        ]
    lot = parked_queue("parker-there", queue)
    assert through.log.pull(lot, 0, 10, 1 << 20, ("body",)).column(0).to_pylist() == [b"a", b"b"]
    through.groups.commit({token: 2, lot_token(token): 2})
    assert direct.groups.offsets("parker-there", [queue, lot]) == {queue: 2, lot: 2}


def make_topic(cluster: Cluster, broker: Broker, topic: str, queues: int) -> None:
    """Create a topic at each broker, as an administrator does."""
    with Client(cluster.address) as client:
        for broker_data in client.cluster(soon()).brokers.values():
            client.call_address(str(broker_data.master), admin_requests.create_topic(topic, queues), soon())
    until(lambda: len(_queues(broker, topic)) == queues * len(cluster.brokers), "the topic exists at all brokers")


@pytest.mark.nightly
def test_a_java_consumer_and_this_package_divide_the_queues_through_a_proxy(
    rig: Rig, newest: Cluster, proxy: ProxyServer, peers: Peers
) -> None:
    source, target = rig.topic("in"), rig.topic("out")
    # Java sends to the brokers directly: a Proxy requires one type of topic for messages with keys, and another type for batches.
    send = sender(peers, newest.address)
    java = peers.consumer(proxy.address, rig.group, source, lambda _: True)
    until(lambda: len(java.queues) == 4, "the Java consumer has all queues")
    query = rig.write(rig.stream(source, assignment="shared"), target, now=False)
    until(lambda: len(java.queues) == 2, "the Java consumer has half of the queues")
    send(source, range(100))
    until(lambda: sum(map(len, bodies(rig.broker, target).values())) + len(java.received) == 100, "both have read their share")
    java.stop()
    query.stop()


@pytest.mark.holds("sink once")
def test_an_attempt_behind_a_proxy_whose_broker_restarted_sends_no_row_that_the_next_run_has_sent(
    newest: Cluster, proxy: ProxyServer
) -> None:
    """The connection to the Proxy survives the restart, but the broker has forgotten the attempt's lock."""
    names = numbered(40)
    with World(newest, SHORT_SENDS) as world:
        late = world.outbox(proxy.address).open(world.batch(job="dead"), 0)
        late.add(world.queue, sink_rows(names[:10]))
        late.start()
        until(lambda: world.bodies() == names[:10], "the first rows are there")
        [broker] = [broker for broker in newest.brokers if broker.name == world.queue.broker_name]
        broker.restart()
        until(lambda: world.bodies() == names[:10], "the broker is back")
        receipt = world.write(names, outbox=world.outbox(proxy.address), job="next")
        late.add(world.queue, sink_rows(names[10:]))
        late.receipt()
        assert world.bodies() == names
        assert not world.outbox().publish(world.batch(job="next"), [receipt]).replayed


#: Calls that a Proxy does not forward, or answers without performing them.
REFUSED: dict[str, Callable[[Broker, str], object]] = {
    "the list of topics": lambda broker, topic: broker.log.topics(),
    "the creation of topic new": lambda broker, topic: broker.admin.create_topic("new", 2),
    "the deletion of a topic": lambda broker, topic: broker.admin.delete_topic(topic),
    "the list of groups": lambda broker, topic: broker.admin.groups(),
    "a group": lambda broker, topic: broker.admin.delete_group("refused", force=True),
    "a seek": lambda broker, topic: broker.admin.seek("refused", dict.fromkeys(broker.log.queues(topic), 0)),
    "filterSql": lambda broker, topic: broker.log.require_filter(Filter(sql="a = 1"), [topic]),
}


@pytest.mark.holds("through a Proxy")
@pytest.mark.parametrize("what", REFUSED)
def test_calls_that_a_proxy_does_not_forward_are_refused_by_name(
    what: str, direct: Broker, through: Broker, refused: str
) -> None:
    before = direct.log.topics(), direct.log.queues(refused)
    with pytest.raises(RocketMQError) as error:
        REFUSED[what](through, refused)
    assert error.value.sub == RocketMQCondition.NOT_SUPPORTED
    assert (direct.log.topics(), direct.log.queues(refused)) == before


@pytest.mark.parametrize("how", [{}, {"assignment": "shared"}, {"parkingLot": "true"}], ids=str)
def test_a_topic_pattern_is_refused_by_name_through_a_proxy_before_anything_is_left_there(
    how: dict[str, str], direct: Broker, proxy: ProxyServer, refused: str
) -> None:
    """The pattern is refused when the DataFrame is built, and when a query resumes that had read by pattern from the nameserver."""
    given = {"namesrvAddr": proxy.address, "consumerGroup": "by-pattern", "topicPattern": f"{refused}.*", **how}
    with pytest.raises(RocketMQError, match="topicPattern") as error:
        planned_schema(given)
    assert error.value.sub == RocketMQCondition.NOT_SUPPORTED
    reader = StreamReader(given, full_schema())
    with stopped(reader), pytest.raises(RocketMQError, match="topicPattern") as error:
        reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert error.value.sub == RocketMQCondition.NOT_SUPPORTED
    assert direct.groups.members("by-pattern") == []
    assert "by-pattern" not in direct.admin.groups()


@pytest.fixture(scope="module")
def refused(newest: Cluster) -> str:
    with orderedmq.connect(namesrv_addr=newest.address) as broker:
        broker.admin.create_topic("refused", 2)
    return "refused"


def _queues(broker: Broker, topic: str) -> list[MessageQueue]:
    try:
        return broker.log.queues(topic)
    except TopicError:
        return []


def test_a_reset_is_known_to_every_broker_behind_a_proxy(direct: Broker, through: Broker) -> None:
    direct.admin.create_topic("resets", 4)
    queues = direct.log.queues("resets")
    for queue in queues:
        direct.log.append({queue: rows([b"a", b"b"])})
    tokens = locked(through, "resetter", through.groups.join("me"), queues)
    through.groups.commit(dict.fromkeys(tokens, 2))
    new = through.groups.reset(dict.fromkeys(tokens, 1))
    assert through.groups.offsets("resetter", queues) == dict.fromkeys(queues, 1)
    assert all(token.reset > former.epoch for token, former in zip(new, tokens))
    assert through.groups.stale([*tokens, *new]) == tokens
    through.groups.unlock(new)
    again = locked(direct, "resetter", direct.groups.join("me"), queues)
    assert [token.reset for token in again] == [token.reset for token in new]
