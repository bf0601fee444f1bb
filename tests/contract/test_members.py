"""Members of a group, what is put aside for it, and what may be done to it from outside while somebody is a member."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from orderedmq.broker import Broker, SinkBatch, SourceRun
from orderedmq.lock import LOCK_LIFE, UNLOCK_DELAY, Client, LockToken, Refusal
from orderedmq.membership import Subscription
from orderedmq.model import DEAD_LETTER_PREFIX, MAX_NAME_LENGTH, MessageQueue
from tests.contract.support import BIG, FakeClock, Place, bodies, locked, needs, queues_of, read, refused, rows, span, state

ROOT = Path(__file__).parents[2]
SHARED = Subscription("shared", "orders", "averagely")
LONGEST = MAX_NAME_LENGTH - len(DEAD_LETTER_PREFIX)


def beat(broker: Broker, client: Client, group: str = "g", subscription: Subscription = SHARED) -> list[str]:
    return [member.client_id for member in broker.groups.heartbeat(group, client, subscription)]


def ids(broker: Broker, group: str = "g") -> list[str]:
    return [member.client_id for member in broker.groups.members(group)]


def known(*clients: Client) -> list[str]:
    return sorted(client.client_id for client in clients)


def joined(broker: Broker, client: Client, group: str = "g") -> int:
    [one] = [member for member in broker.groups.members(group) if member.client_id == client.client_id]
    return one.joined


# -- members ----------------------------------------------------------------------------------------------------------------------


def test_a_heartbeat_makes_a_member_that_everyone_sees(place: Place, broker: Broker, clock: FakeClock):
    me = broker.groups.join("me")
    assert ids(broker) == []
    subscription = Subscription("shared", "orders,invoices", "machine room", "red || blue")
    [member] = broker.groups.heartbeat("g", me, subscription, "room-1")
    assert (member.owner, member.client_id, member.subscription, member.room) == ("me", me.client_id, subscription, "room-1")
    if "clock" not in place.lacks:
        assert member.renewed == clock.instant()
    assert place.connect().groups.members("g") == [member]


def test_members_come_by_client_id_from_every_connection(place: Place, broker: Broker):
    other = place.connect()
    clients = []
    for number in range(6):
        one = (broker, other)[number % 2]
        clients.append(one.groups.join(f"{'zebra' if number < 3 else 'ant'}-{number}"))
        assert beat(one, clients[-1]) == known(*clients)
    assert ids(broker) == ids(other) == known(*clients)


def test_who_only_joined_is_no_member_and_a_member_needs_no_lock(broker: Broker):
    one, two = broker.groups.join("one"), broker.groups.join("two")
    locked(broker, "g", one, queues_of(broker))
    assert beat(broker, two) == known(two)


@needs("membership age")
def test_a_member_counts_for_as_long_as_a_lock_lives(broker: Broker, clock: FakeClock):
    one, two = broker.groups.join("one"), broker.groups.join("two")
    beat(broker, one)
    clock.pass_(LOCK_LIFE)
    assert ids(broker) == known(one)
    assert beat(broker, two) == known(one, two)
    clock.pass_(0.001)
    assert ids(broker) == known(two)


def test_heartbeats_keep_a_member_for_as_long_as_they_come(broker: Broker, clock: FakeClock):
    me = broker.groups.join("me")
    for _ in range(5):
        assert beat(broker, me) == known(me)
        clock.pass_(59)
    assert ids(broker) == known(me)


@needs("reboot")
def test_after_a_reboot_nobody_is_a_member(broker: Broker, clock: FakeClock):
    me = broker.groups.join("me")
    beat(broker, me)
    clock.reboot()
    assert ids(broker) == []
    assert beat(broker, me) == known(me)


def test_the_wall_clock_ends_no_membership(broker: Broker, clock: FakeClock):
    me = broker.groups.join("me")
    beat(broker, me)
    clock.micros += 10**12
    assert ids(broker) == known(me)


def test_who_leaves_is_gone_at_once_from_all_its_groups(place: Place, broker: Broker):
    one, two = broker.groups.join("one"), broker.groups.join("two")
    for group in ("g", "h"):
        beat(broker, one, group)
        beat(broker, two, group)
    broker.groups.leave(one)
    assert ids(place.connect()) == ids(broker, "h") == known(two)
    broker.groups.leave(one)
    broker.groups.leave(two)
    assert ids(broker) == ids(broker, "h") == []
    if "unused groups" not in place.lacks:
        assert broker.admin.groups() == [], "nothing is left of them"


def test_a_heartbeat_that_comes_after_leaving_brings_nobody_back(broker: Broker):
    one, two = broker.groups.join("one"), broker.groups.join("two")
    beat(broker, one)
    broker.groups.leave(one)
    beat(broker, one)
    assert ids(broker) == []
    assert beat(broker, two) == known(two)


def test_a_connection_that_was_closed_has_no_members_and_its_clients_can_still_leave(place: Place, broker: Broker):
    other = place.connect()
    groups, them = other.groups, other.groups.join("them")
    beat(other, them)
    other.close()
    assert ids(broker) == []
    groups.leave(them)


def test_groups_have_members_of_their_own(broker: Broker):
    """Also where one's name begins with the other's."""
    one, two = broker.groups.join("one"), broker.groups.join("two")
    beat(broker, one, "g")
    beat(broker, two, "g2")
    assert (ids(broker, "g"), ids(broker, "g2"), ids(broker, "G")) == (known(one), known(two), [])
    beat(broker, one, "g2")
    assert (ids(broker, "g"), ids(broker, "g2")) == (known(one), known(one, two))


@pytest.mark.parametrize("group", ["", "a b", "x" * 128, "x" * 600, "ä", "g\0h"])
def test_a_name_that_is_no_groups_has_no_members(broker: Broker, group: str):
    me = broker.groups.join("me")
    for call in (lambda: beat(broker, me, group), lambda: broker.groups.members(group)):
        with refused("GROUP.BAD_NAME"):
            call()


@pytest.mark.parametrize("owner", ["x" * 300, "../../x", "", "ä\n\u202e", "a\0b", "😀" * 100, '"{}\\'])
def test_any_client_id_is_a_members(place: Place, broker: Broker, owner: str):
    me, other = broker.groups.join(owner), broker.groups.join(owner + "2")
    assert beat(broker, me) == known(me)
    assert beat(broker, other) == known(me, other)
    assert [(member.owner, member.client_id) for member in place.connect().groups.members("g") if member.owner == owner] == [
        (owner, me.client_id)
    ]
    broker.groups.leave(me)
    assert ids(broker) == known(other)


def test_long_client_ids_that_begin_alike_are_two_members(broker: Broker):
    clients = [broker.groups.join("x" * 600) for _ in range(2)]
    for client in clients:
        beat(broker, client)
    assert ids(broker) == known(*clients)


def test_a_renewed_heartbeat_brings_the_subscription_and_the_room_up_to_date(place: Place, broker: Broker, clock: FakeClock):
    me = broker.groups.join("me")
    broker.groups.heartbeat("g", me, SHARED, "room-1")
    clock.pass_(20)
    new = Subscription("exclusive", "invoices")
    [member] = broker.groups.heartbeat("g", me, new)
    assert (member.subscription, member.room) == (new, None)
    if "clock" not in place.lacks:
        assert member.renewed == clock.instant()
    assert broker.groups.members("g") == [member]


def test_members_are_ordered_by_their_first_heartbeat_which_repeats_do_not_change(broker: Broker, clock: FakeClock):
    first, second = broker.groups.join("z"), broker.groups.join("a")
    beat(broker, first)
    beat(broker, second)
    numbers = joined(broker, first), joined(broker, second)
    assert 0 < numbers[0] < numbers[1]
    for client in (second, first, second):
        clock.pass_(25)
        beat(broker, client)
    assert (joined(broker, first), joined(broker, second)) == numbers


@needs("membership age")
@pytest.mark.parametrize("swept", [False, True])
def test_who_comes_back_after_its_membership_expired_has_joined_anew(broker: Broker, clock: FakeClock, swept: bool):
    first, second = broker.groups.join("one"), broker.groups.join("two")
    beat(broker, first)
    before = joined(broker, first)
    clock.pass_(61)
    if swept:
        beat(broker, second)
        beat(broker, first)
        assert joined(broker, first) > joined(broker, second)
    beat(broker, first)
    assert joined(broker, first) > before


def test_a_heartbeat_prolongs_no_lock_and_a_renewal_no_membership(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    me, them = broker.groups.join("me"), broker.groups.join("them")
    [token] = locked(broker, "g", me, [queue])
    beat(broker, me)
    clock.pass_(40)
    beat(broker, me)
    clock.pass_(21)
    locked(broker, "g", them, [queue])
    assert broker.groups.stale([token]) == [token]
    assert ids(broker) == known(me)


# -- the death of a process -------------------------------------------------------------------------------------------------------

MEMBER = """
import sys
from orderedmq.membership import Subscription
client = broker.groups.join("them")
broker.groups.heartbeat("g", client, Subscription("shared", "orders", "averagely"))
broker.groups.lock("g", client, broker.log.queues("orders"))
print(client.client_id, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def start(place: Place) -> Iterator[Callable[[], tuple[subprocess.Popen, Client]]]:
    """Starts a process that is a member of the group ``g`` and owns all queues."""
    started: list[subprocess.Popen] = []

    def make() -> tuple[subprocess.Popen, Client]:
        process = subprocess.Popen(
            [sys.executable, "-c", place.connecting() + MEMBER],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        client_id = process.stdout.readline().strip()
        assert client_id, "the member failed to start"
        return process, Client("them", client_id)

    yield make
    for process in started:
        process.kill()
        process.communicate()


def kill(process: subprocess.Popen) -> None:
    """Dead, and not reaped: a zombie."""
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_killed_process_is_no_member_at_once(broker: Broker, start):
    me = broker.groups.join("me")
    process, them = start()
    assert beat(broker, me) == known(me, them)
    kill(process)
    assert ids(broker) == known(me)
    assert beat(broker, me) == known(me)


@needs("owners")
def test_the_first_ask_after_a_kill_is_granted(broker: Broker, start):
    """Though asking in vain writes nothing."""
    queues = queues_of(broker)
    me = broker.groups.join("me")
    process, _ = start()
    before = broker.log.change()
    assert all(isinstance(answer, Refusal) for answer in broker.groups.lock("g", me, queues).values())
    assert broker.log.change() == before
    kill(process)
    locked(broker, "g", me, queues)


@needs("unused groups")
@pytest.mark.parametrize("how", ["dead", "expired"])
def test_the_next_heartbeat_sweeps_the_records_of_those_that_are_gone(place: Place, broker: Broker, clock: FakeClock, how: str):
    """A group is listed while there is a record of a member."""
    other = place.connect()
    beat(other, other.groups.join("them"))
    if how == "dead":
        other.close()
    else:
        clock.pass_(61)
    assert (ids(broker), broker.admin.groups()) == ([], ["g"])
    me = broker.groups.join("me")
    assert beat(broker, me) == known(me)
    broker.groups.leave(me)
    assert broker.admin.groups() == []


# -- locks ------------------------------------------------------------------------------------------------------------------------


@needs("epochs")
def test_stale_names_exactly_the_tokens_whose_queue_is_not_theirs(broker: Broker, clock: FakeClock):
    broker.admin.create_topic("more", 3)
    queues = [*queues_of(broker), *queues_of(broker, "more")]
    me = broker.groups.join("me")
    kept, taken, back, lingering, sought, released = tokens = locked(broker, "g", me, queues)
    assert broker.groups.stale(tokens) == broker.groups.stale([]) == []
    clock.pass_(50)
    assert broker.groups.renew([kept, back, lingering, sought, released]) == []
    clock.pass_(11)
    locked(broker, "g", broker.groups.join("them"), [taken.queue])
    broker.groups.unlock([back])
    broker.groups.unlock([lingering], UNLOCK_DELAY)
    broker.admin.seek("g", {sought.queue: 0}, force=True)
    broker.admin.release("g", [released.queue], force=True)
    before = broker.log.change()
    assert broker.groups.stale(tokens) == [taken, back, sought, released]
    assert broker.groups.stale(tokens[::-1]) == [released, sought, back, taken]
    assert broker.log.change() == before
    clock.pass_(1000)
    assert broker.groups.stale([kept]) == [], "expired, and nobody took it"
    broker.admin.delete_topic("orders")
    assert broker.groups.stale([kept]) == [kept]


@needs("epochs")
def test_to_ask_whether_tokens_are_stale_prolongs_nothing(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    for _ in range(3):
        clock.pass_(20)
        assert broker.groups.stale([token]) == []
    clock.pass_(1)
    locked(broker, "g", broker.groups.join("them"), [queue])


@needs("linger")
def test_asking_in_vain_writes_nothing(broker: Broker, clock: FakeClock):
    queues = queues_of(broker)
    them = broker.groups.join("them")
    tokens = locked(broker, "g", them, queues)
    broker.groups.unlock(tokens[2:], UNLOCK_DELAY)
    me = broker.groups.join("me")
    before = broker.log.change()
    for _ in range(3):
        clock.pass_(5)
        answers = broker.groups.lock("g", me, queues)
        assert [answer.queue for answer in answers.values() if isinstance(answer, Refusal)] == queues
        assert broker.groups.lock("g", me, []) == {}
    assert broker.log.change() == before
    assert broker.groups.stale(tokens) == []


@pytest.mark.parametrize("how", ["left", "expired", "given back", pytest.param("rebooted", marks=needs("reboot"))])
def test_a_lock_that_is_free_by_now_is_granted_by_the_same_call(broker: Broker, clock: FakeClock, how: str):
    queues = queues_of(broker)
    me, them = broker.groups.join("me"), broker.groups.join("them")
    tokens = locked(broker, "g", them, queues)
    assert all(isinstance(answer, Refusal) for answer in broker.groups.lock("g", me, queues).values())
    if how == "left":
        broker.groups.leave(them)
    elif how == "expired":
        clock.pass_(60.001)
    elif how == "given back":
        broker.groups.unlock(tokens)
    else:
        clock.reboot()
    locked(broker, "g", me, queues)


def test_one_free_queue_among_refused_ones_is_granted(broker: Broker):
    queues = queues_of(broker)
    them = broker.groups.join("them")
    tokens = locked(broker, "g", them, queues[:2])
    answers = broker.groups.lock("g", broker.groups.join("me"), queues)
    assert [type(answers[queue]) for queue in queues] == [Refusal, Refusal, LockToken]
    assert broker.groups.stale(tokens) == []


# -- dead letters -----------------------------------------------------------------------------------------------------------------


def letters(offsets: Sequence[int], **columns: Any) -> pa.RecordBatch:
    return rows([f"body {offset}" for offset in offsets], **columns)


@pytest.fixture
def token(broker: Broker) -> LockToken:
    """The first queue, of ten messages, in the group ``g``."""
    queue = queues_of(broker)[0]
    broker.log.append(queue, rows(range(10)))
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    return token


def aside(broker: Broker, group: str = "g") -> list[str]:
    [queue] = queues_of(broker, DEAD_LETTER_PREFIX + group)
    return bodies(broker, queue)


def test_the_first_dead_letter_makes_its_groups_topic_of_one_queue(broker: Broker, token: LockToken):
    assert [topic.name for topic in broker.log.topics()] == ["orders"]
    assert broker.groups.dead_letter(token, letters([3, 4]), [3, 4]) == 2
    topic = broker.log.topic("%DLQ%g")
    assert (topic.queues, topic.retention_seconds, topic.retention_bytes) == (1, None, None)
    assert aside(broker) == ["body 3", "body 4"]
    assert len(bodies(broker, token.queue)) == 10, "what is put aside stays where it was as well"
    assert broker.groups.offsets("g", [token.queue]) == {}


def test_what_was_put_aside_before_is_left_as_it_is(broker: Broker, token: LockToken):
    broker.groups.dead_letter(token, letters([3, 4]), [3, 4])
    before, change = state(broker, ["%DLQ%g"]), broker.log.change()
    for again in ([3, 4], [4], [4, 3]):
        assert broker.groups.dead_letter(token, rows(["other"] * len(again)), again) == 0
    assert state(broker, ["%DLQ%g"]) == before
    assert broker.log.change() == change


def test_of_a_batch_that_is_partly_new_only_that_is_added_in_its_order(broker: Broker, token: LockToken):
    broker.groups.dead_letter(token, letters([3, 5]), [3, 5])
    assert broker.groups.dead_letter(token, letters([2, 3, 4, 5, 6], tags=list("abcde")), [2, 3, 4, 5, 6]) == 3
    assert aside(broker) == [f"body {offset}" for offset in (3, 5, 2, 4, 6)]
    [queue] = queues_of(broker, "%DLQ%g")
    assert [row["tags"] for row in read(broker, queue, 2, ("tags",))] == ["a", "c", "e"]


def test_an_offset_that_is_given_twice_is_one_letter(broker: Broker, token: LockToken):
    assert broker.groups.dead_letter(token, rows(["first", "second"]), [3, 3]) == 1
    assert aside(broker) == ["first"]


def test_no_letters_make_no_topic(broker: Broker, token: LockToken):
    assert broker.groups.dead_letter(token, letters([]), []) == 0
    assert [topic.name for topic in broker.log.topics()] == ["orders"]


def test_a_letter_is_known_by_group_queue_and_offset(broker: Broker, token: LockToken):
    queues = queues_of(broker)
    me = broker.groups.join("other")
    tokens = [token, locked(broker, "g", me, queues[1:2])[0], locked(broker, "h", me, queues[:1])[0]]
    for one in tokens:
        assert broker.groups.dead_letter(one, letters([3]), [3]) == 1
        assert broker.groups.dead_letter(one, letters([3]), [3]) == 0
    assert (len(aside(broker, "g")), len(aside(broker, "h"))) == (2, 1)


@needs("empty values")
def test_a_letter_comes_back_with_all_its_columns_and_where_it_is_from(broker: Broker, token: LockToken):
    """Also with the properties that RocketMQ has for that, and no other producer may set."""
    properties = [
        {"own": "x", "REAL_TOPIC": "orders", "REAL_QID": "0", "ORIGIN_MESSAGE_ID": "ABC", "RECONSUME_TIME": "16"},
        {"ORDEREDMQ_ERROR": "ä\u202e " * 100},
    ]
    columns = {
        "tags": ["t", None],
        "keys": [None, "k"],
        "sharding_key": ["s", ""],
        "properties": [[*one.items()] for one in properties],
    }
    given = rows([b"\0\xff", b""], **columns)
    assert broker.groups.dead_letter(token, given, [0, 9]) == 2
    [queue] = queues_of(broker, "%DLQ%g")
    [one, two] = read(broker, queue, 0, ("body", "tags", "keys", "sharding_key", "topic", "queue_offset", "properties"))
    assert (one["body"], one["tags"], one["keys"], one["sharding_key"], one["topic"]) == (b"\0\xff", "t", None, "s", "%DLQ%g")
    assert (two["body"], two["tags"], two["keys"], two["sharding_key"], two["queue_offset"]) == (b"", None, "k", "", 1)
    assert [dict(one["properties"]), dict(two["properties"])] == properties


@needs("chunks")
def test_more_letters_than_a_chunk_has_come_back_in_order(broker: Broker, token: LockToken):
    offsets = range(3 * BIG)
    assert broker.groups.dead_letter(token, letters(offsets), offsets) == 3 * BIG
    assert aside(broker) == [f"body {offset}" for offset in offsets]
    assert broker.groups.dead_letter(token, letters(offsets), offsets) == 0


def test_letters_that_are_no_messages_are_refused_whole(broker: Broker, token: LockToken):
    before = state(broker, ["orders"])
    with refused("MESSAGE.NULL_BODY"):
        broker.groups.dead_letter(token, pa.record_batch({"body": pa.array([b"a", None])}), [3, 4])
    assert state(broker, ["orders"]) == before
    assert broker.groups.dead_letter(token, letters([3]), [3]) == 1


@pytest.mark.parametrize("repeat", [False, True])
def test_a_stale_token_puts_nothing_aside(broker: Broker, clock: FakeClock, token: LockToken, repeat: bool):
    if not broker.capabilities.fenced:
        pytest.skip("this kind of broker does not fence")
    if repeat:
        broker.groups.dead_letter(token, letters([3]), [3])
    clock.pass_(61)
    them = broker.groups.join("them")
    locked(broker, "g", them, [token.queue])
    topics = [topic.name for topic in broker.log.topics()]
    before, change = state(broker, topics), broker.log.change()
    with refused("LOCK.LOST", token.queue, "'g'", them.client_id):
        broker.groups.dead_letter(token, letters([3]), [3])
    assert state(broker, topics) == before
    assert broker.log.change() == change


@needs("epochs")
def test_a_lock_that_nobody_took_still_puts_aside(broker: Broker, clock: FakeClock, token: LockToken):
    clock.pass_(61)
    assert broker.groups.dead_letter(token, letters([3]), [3]) == 1
    broker.groups.unlock([token])
    assert broker.groups.dead_letter(token, letters([4]), [4]) == 1


def test_a_dead_letter_topic_that_is_deleted_takes_what_was_known_with_it(place: Place, broker: Broker, token: LockToken):
    [other] = locked(broker, "g2", broker.groups.join("other"), [token.queue])
    for one in (token, other):
        broker.groups.dead_letter(one, letters([3]), [3])
    incarnation = broker.log.topic("%DLQ%g").incarnation
    broker.admin.delete_topic("%DLQ%g")
    assert broker.groups.dead_letter(token, letters([3]), [3]) == 1
    assert aside(broker) == ["body 3"]
    if "empty recreation" not in place.lacks:
        assert broker.log.topic("%DLQ%g").incarnation != incarnation
    assert broker.groups.dead_letter(other, letters([3]), [3]) == 0, "that is another group's"


@needs("empty recreation")
def test_a_source_topic_that_is_deleted_takes_what_was_known_of_it_and_leaves_the_letters(broker: Broker, token: LockToken):
    broker.admin.create_topic("more", 1)
    me = broker.groups.join("other")
    [other] = locked(broker, "g", me, queues_of(broker, "more"))
    for one in (token, other):
        broker.groups.dead_letter(one, letters([3]), [3])
    broker.admin.delete_topic("orders")
    assert aside(broker) == ["body 3"] * 2
    assert broker.groups.dead_letter(other, letters([3]), [3]) == 0
    broker.admin.create_topic("orders", 3)
    [again] = locked(broker, "g", me, [token.queue])
    assert broker.groups.dead_letter(again, letters([3]), [3]) == 1
    assert aside(broker) == ["body 3"] * 3


@needs("trim")
def test_dead_letters_that_were_trimmed_are_known_still(broker: Broker, token: LockToken):
    broker.groups.dead_letter(token, letters([3]), [3])
    [queue] = queues_of(broker, "%DLQ%g")
    assert broker.admin.trim("%DLQ%g", {queue: 1}) == {queue: 1}
    assert broker.groups.dead_letter(token, letters([3]), [3]) == 0
    assert broker.groups.dead_letter(token, letters([4]), [4]) == 1
    assert aside(broker) == ["body 4"]


def test_a_dead_letter_topic_that_grew_goes_on_in_its_first_queue(broker: Broker, token: LockToken):
    broker.groups.dead_letter(token, letters([3]), [3])
    broker.admin.add_queues("%DLQ%g", 2)
    assert broker.groups.dead_letter(token, letters([3, 4]), [3, 4]) == 1
    assert bodies(broker, queues_of(broker, "%DLQ%g")[0]) == ["body 3", "body 4"]


def test_dead_letters_can_be_consumed_and_their_group_has_dead_letters_too(broker: Broker, token: LockToken):
    broker.groups.dead_letter(token, letters([3]), [3])
    [queue] = queues_of(broker, "%DLQ%g")
    [again] = locked(broker, "%DLQ%g", broker.groups.join("replay"), [queue])
    assert broker.groups.dead_letter(again, letters([0]), [0]) == 1
    assert aside(broker, "%DLQ%g") == ["body 0"]
    broker.admin.delete_topic("%DLQ%g")
    assert broker.groups.dead_letter(token, letters([3]), [3]) == 1


@needs("long groups")
def test_a_group_whose_dead_letter_topic_could_not_be_read_is_refused_before_anything_is_made(broker: Broker):
    """A group's name may have as many characters as a topic's, and the topic of its dead letters has five more."""
    queue = queues_of(broker)[0]
    me = broker.groups.join("me")
    [fits, long] = [locked(broker, "x" * length, me, [queue])[0] for length in (LONGEST, LONGEST + 1)]
    assert broker.groups.dead_letter(fits, letters([3]), [3]) == 1
    assert aside(broker, fits.group) == ["body 3"]
    before = broker.log.topics()
    with refused("GROUP.BAD_NAME", long.group, f"has {LONGEST + 1} characters", f"at most {LONGEST}", "%DLQ%"):
        broker.groups.dead_letter(long, letters([3]), [3])
    assert broker.log.topics() == before


# -- from outside: release --------------------------------------------------------------------------------------------------------


def late_publish(broker: Broker, token: LockToken) -> None:
    """What a task that read under the token staged, published now."""
    run = SourceRun("query", 0, "run")
    broker.outbox.register(run, token.queue, span(0, 1), token)
    staging = broker.outbox.open(SinkBatch("sink", 0, run), 0)
    staging.add(token.queue, rows(["late"]))
    broker.outbox.publish(SinkBatch("sink", 0, run), [staging.receipt()])


@needs("owners")
@pytest.mark.parametrize("how", ["left", "expired"])
def test_a_lock_whose_holder_is_gone_is_released_without_force(broker: Broker, clock: FakeClock, token: LockToken, how: str):
    if how == "left":
        client = Client(token.owner, token.client_id)
        broker.groups.leave(client)
    else:
        clock.pass_(61)
    assert broker.admin.release("g", [token.queue]) == [token.queue]
    [lock] = broker.admin.locks("g")
    assert (lock.held, lock.owner, lock.tenure) == (False, "me", token.tenure)
    assert lock.epoch > token.epoch


@needs("owners")
def test_a_lingering_lock_of_a_process_that_is_gone_is_released_and_free_at_once(broker: Broker, token: LockToken):
    broker.groups.unlock([token], UNLOCK_DELAY)
    broker.groups.leave(Client(token.owner, token.client_id))
    assert broker.admin.release("g", [token.queue]) == [token.queue]
    locked(broker, "g", broker.groups.join("them"), [token.queue])
    with refused("LOCK.LOST"):
        broker.groups.commit({token: 1})


@needs("owners")
def test_a_lock_that_is_held_to_its_last_second_is_not_released(broker: Broker, clock: FakeClock, token: LockToken):
    clock.pass_(LOCK_LIFE)
    for call in (
        lambda: broker.admin.release("g", [token.queue]),
        lambda: broker.admin.seek("g", {token.queue: 0}),
        lambda: broker.admin.delete_group("g"),
    ):
        with refused("GROUP.IN_USE", token.client_id):
            call()
    clock.pass_(0.001)
    assert broker.admin.release("g", [token.queue]) == [token.queue]


@needs("owners")
def test_a_living_holder_keeps_all_its_queues_unless_it_is_forced(broker: Broker, token: LockToken):
    free, dead = queues_of(broker)[1:]
    other = broker.groups.join("other")
    locked(broker, "g", other, [dead])
    broker.groups.leave(other)
    before = state(broker, ["orders"])
    with refused("GROUP.IN_USE", "'g'", token.client_id, token.queue):
        broker.admin.release("g", [dead, token.queue])
    assert state(broker, ["orders"]) == before, "not even the dead one's was taken"
    assert broker.groups.stale([token]) == []
    assert broker.admin.release("g", [free, dead, token.queue], force=True) == [dead, token.queue]


@needs("owners")
def test_a_forced_release_makes_the_holders_token_stale_for_everything(broker: Broker, token: LockToken):
    broker.groups.commit({token: 2})
    broker.admin.release("g", [token.queue], force=True)
    assert broker.groups.stale([token]) == broker.groups.renew([token]) == [token]
    assert not broker.groups.check(token)
    before = state(broker, ["orders"])
    for call in (
        lambda: broker.groups.commit({token: 1}),
        lambda: broker.groups.commit({token: 3}),
        lambda: broker.groups.reset({token: 0}),
        lambda: broker.groups.dead_letter(token, letters([3]), [3]),
        lambda: late_publish(broker, token),
    ):
        with refused("LOCK.LOST", token.queue, "nobody else had it"):
            call()
        broker.groups.unlock([token])
    assert state(broker, ["orders"]) == before
    assert broker.groups.offsets("g", [token.queue]) == {token.queue: 2}, "offsets stay"
    assert broker.groups.reset_number("g") == 0


@needs("owners")
def test_after_a_release_the_same_owners_tenure_goes_on_and_anothers_begins(broker: Broker, token: LockToken):
    broker.admin.release("g", [token.queue], force=True)
    [again] = locked(broker, "g", broker.groups.join("me"), [token.queue])
    assert again.tenure == token.tenure
    assert again.epoch > token.epoch
    broker.admin.release("g", [token.queue], force=True)
    [other] = locked(broker, "g", broker.groups.join("them"), [token.queue])
    assert other.tenure == other.epoch > again.epoch
    assert broker.groups.stale([token, again, other]) == [token, again]


def test_what_is_not_held_is_not_released(place: Place, broker: Broker, token: LockToken):
    broker.groups.unlock([token])
    assert broker.admin.release("g", queues_of(broker), force=True) == []
    if "epochs" not in place.lacks:
        broker.groups.commit({token: 1})
    with refused("GROUP.MISSING", "'nobody'"):
        broker.admin.release("nobody", queues_of(broker))
    with refused("GROUP.BAD_NAME"):
        broker.admin.release("a b", [])


# -- from outside: delete and seek ------------------------------------------------------------------------------------------------


def outside(broker: Broker, queue: MessageQueue) -> list[Callable[[], object]]:
    """What is refused while a group is in use."""
    return [
        lambda: broker.admin.require_unused("g"),
        lambda: broker.admin.delete_group("g"),
        lambda: broker.admin.seek("g", {queue: 0}),
    ]


@needs("membership age")
def test_a_group_is_in_use_while_a_member_lives_without_any_lock(broker: Broker, clock: FakeClock):
    queue = queues_of(broker)[0]
    me = broker.groups.join("me")
    beat(broker, me)
    for call in outside(broker, queue):
        with refused("GROUP.IN_USE", "'g'", me.client_id, "member"):
            call()
    clock.pass_(LOCK_LIFE)
    for call in outside(broker, queue):
        with refused("GROUP.IN_USE"):
            call()
    assert broker.groups.offsets("g", [queue]) == {}
    clock.pass_(0.001)
    broker.admin.require_unused("g")
    assert broker.admin.seek("g", {queue: 0}) == 1
    beat(broker, me)
    assert broker.admin.seek("g", {queue: 0}, force=True) == 2
    assert ids(broker) == known(me), "it stays a member"
    broker.groups.leave(me)
    assert broker.admin.seek("g", {queue: 0}) == 3


@needs("owners")
def test_a_group_is_in_use_while_an_owner_lives_that_is_no_member(broker: Broker, token: LockToken):
    for call in outside(broker, token.queue):
        with refused("GROUP.IN_USE", "'g'", token.client_id, token.queue):
            call()
    assert broker.groups.stale([token]) == []
    broker.groups.leave(Client(token.owner, token.client_id))
    for call in outside(broker, token.queue)[::-1]:
        call()


def test_a_group_of_a_killed_member_is_not_in_use(broker: Broker, start):
    process, them = start()
    with refused("GROUP.IN_USE", them.client_id):
        broker.admin.delete_group("g")
    kill(process)
    broker.admin.delete_group("g")
    assert broker.admin.groups() == []


def test_members_of_one_group_do_not_hold_another(broker: Broker, token: LockToken):
    beat(broker, broker.groups.join("them"), "g2")
    broker.groups.unlock([token])
    for call in outside(broker, token.queue)[::-1]:
        call()
    assert broker.admin.groups() == ["g2"]
    assert len(ids(broker, "g2")) == 1


@needs("unused groups")
def test_a_deleted_group_is_forgotten_but_for_its_dead_letters(broker: Broker, token: LockToken):
    me = broker.groups.join("other")
    beat(broker, me)
    broker.groups.commit({token: 4})
    broker.groups.dead_letter(token, letters([3]), [3])
    with refused("GROUP.IN_USE"):
        broker.admin.delete_group("g")
    broker.admin.delete_group("g", force=True)
    assert (broker.admin.groups(), ids(broker), broker.admin.locks("g")) == ([], [], [])
    assert broker.groups.offsets("g", queues_of(broker)) == {}
    with refused("GROUP.MISSING", "'g'"):
        broker.admin.group_offsets("g")
    with refused("GROUP.MISSING", "'g'"):
        broker.admin.delete_group("g")
    assert aside(broker) == ["body 3"]
    [again] = locked(broker, "g", broker.groups.join("me"), [token.queue])
    assert broker.groups.dead_letter(again, letters([3]), [3]) == 0, "it is known still, as the letter is there"
    assert beat(broker, me) == known(me), "who lives can go on"


@needs("unused groups")
def test_tokens_of_a_deleted_group_stay_fenced_off_also_when_it_is_there_again(broker: Broker, token: LockToken):
    def stale() -> None:
        assert broker.groups.stale([token]) == broker.groups.renew([token]) == [token]
        for call in (
            lambda: broker.groups.commit({token: 0}),
            lambda: broker.groups.reset({token: 0}),
            lambda: broker.groups.dead_letter(token, letters([3]), [3]),
            lambda: late_publish(broker, token),
        ):
            with refused("LOCK.LOST", token.queue):
                call()
        broker.groups.unlock([token])

    broker.admin.delete_group("g", force=True)
    stale()
    assert broker.admin.groups() == []
    [again] = locked(broker, "g", broker.groups.join("me"), [token.queue])
    assert again.tenure == again.epoch > token.epoch, "the lineage is gone too"
    stale()
    assert broker.groups.stale([again]) == []


@needs("unused groups")
def test_the_reset_number_outlives_a_deleted_group(broker: Broker, token: LockToken):
    """A checkpoint that is older than the last seek is still told so."""
    broker.groups.unlock([token])
    assert broker.admin.seek("g", {token.queue: 5}) == 1
    broker.admin.delete_group("g")
    assert broker.groups.reset_number("g") == 1
    assert broker.admin.seek("g", {token.queue: 5}) == 2


def test_a_group_of_members_only_is_listed_and_has_no_offsets(broker: Broker):
    me = broker.groups.join("me")
    beat(broker, me, "m")
    assert broker.admin.groups() == ["m"]
    assert broker.admin.group_offsets("m") == {}
    with refused("GROUP.BAD_NAME"):
        broker.admin.delete_group("a b")
