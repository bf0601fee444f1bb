"""The dead letters of a group."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from ordered_source.listener.task_rows import Columns, Rows, write_letters
from orderedmq.broker import Broker, QueueBounds
from orderedmq.listening.engine import Message
from orderedmq.model import DEAD_LETTER_PREFIX, MAX_NAME_LENGTH, MAX_OFFSET, MessageQueue, OffsetRange
from orderedmq.ownership.lock import LockToken
from orderedmq.rows.dead_letters import REPLAYS, dead_letter_properties
from orderedmq.tools.dead_letters import ALL, REPLAY_GROUP, LetterFilter
from orderedmq.tools.replay import Replayed, replay
from tests.contract.support import (
    BIG,
    FakeClock,
    Place,
    aside,
    bodies,
    letters,
    locked,
    needs,
    pull,
    queues_of,
    read,
    refused,
    rows,
    state,
    users_properties,
)
from tests.grow import grow

LONGEST = MAX_NAME_LENGTH - len(DEAD_LETTER_PREFIX)


def test_the_first_dead_letter_makes_its_groups_topic_of_one_queue(broker: Broker, token: LockToken):
    assert [topic.name for topic in broker.log.topics()] == ["orders"]
    assert broker.groups.dead_letter(token, letters([3, 4]), [3, 4]) == 2
    topic = broker.log.topic("%DLQ%g")
    assert (topic.queues, topic.retention_seconds, topic.retention_bytes) == (1, None, None)
    assert aside(broker) == ["body 3", "body 4"]
    assert len(bodies(broker, token.queue)) == 10, "a message with a dead letter also stays in its queue"
    assert broker.groups.offsets("g", [token.queue]) == {}


@pytest.mark.holds("dead letter by condition")
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


@needs("topic settings")
def test_a_retention_of_the_dead_letters_counts_from_the_next_letter(broker: Broker, clock: FakeClock, token: LockToken):
    broker.groups.dead_letter(token, letters(range(BIG)), range(BIG))
    broker.admin.alter_topic("%DLQ%g", retention_seconds=100.0)
    clock.pass_(101)
    assert len(aside(broker, "g")) == BIG
    assert broker.groups.dead_letter(token, letters([BIG]), [BIG]) == 1
    [at] = broker.log.bounds(broker.log.queues("%DLQ%g")).values()
    assert at == QueueBounds(BIG, BIG + 1)
    assert broker.groups.dead_letter(token, letters([0]), [0]) == 0, "message 0 has a letter, although retention deleted it"


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
    """The columns include RocketMQ's properties for dead letters, which no other producer may set."""
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
        pytest.skip("this kind of broker does not check epochs")
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
    assert broker.groups.dead_letter(other, letters([3]), [3]) == 0, "this letter belongs to another group and must stay"


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


def told(queue: MessageQueue, offsets: Sequence[int]) -> pa.RecordBatch:
    """Return letters with properties that name their origin, as listeners write them."""
    origins = [
        dead_letter_properties(queue, offset, message_id="", reconsume_times=3, error="bad", properties={})
        for offset in offsets
    ]
    return letters(offsets, properties=[[*one.items()] for one in origins])


def known(broker: Broker, token: LockToken, *spans: tuple[int, int]) -> list[int]:
    return sorted(broker.groups.letters(token, [OffsetRange(*span) for span in spans or [(0, MAX_OFFSET)]]))


@pytest.mark.holds("final dead letter")
def test_who_repeats_a_range_finds_which_of_its_messages_have_letters(place: Place, broker: Broker, token: LockToken):
    assert known(broker, token) == [], "no message has a dead letter yet, and the topic does not exist"
    broker.groups.dead_letter(token, told(token.queue, [3, 4, 7]), [3, 4, 7])
    for one in (broker, place.connect()):
        assert known(one, token) == [3, 4, 7]
        assert known(one, token, (4, 7)) == [4]
        assert known(one, token, (0, 4), (5, 6), (7, 8)) == [3, 7]
        assert known(one, token, (8, MAX_OFFSET)) == known(one, token, (5, 5)) == []
    other = place.connect()
    assert known(other, token) == [3, 4, 7]
    broker.groups.dead_letter(token, told(token.queue, [5]), [5])
    assert known(other, token) == [3, 4, 5, 7], "letters written since the last call must be included"
    assert [topic.name for topic in broker.log.topics()] == ["%DLQ%g", "orders"]


def test_letters_of_other_queues_and_groups_are_not_this_queues(broker: Broker, token: LockToken):
    queues = queues_of(broker)
    me = broker.groups.join("other")
    others = [locked(broker, "g", me, queues[1:2])[0], locked(broker, "h", me, queues[:1])[0]]
    for offset, one in enumerate((token, *others)):
        broker.groups.dead_letter(one, told(one.queue, [offset]), [offset])
    assert [known(broker, one) for one in (token, *others)] == [[0], [1], [2]]


def test_letters_of_a_topic_that_was_deleted_are_not_found(broker: Broker, token: LockToken):
    broker.groups.dead_letter(token, told(token.queue, [3, 4]), [3, 4])
    broker.admin.delete_topic("%DLQ%g")
    assert known(broker, token) == []
    broker.groups.dead_letter(token, told(token.queue, [4]), [4])
    assert known(broker, token) == [4]


@pytest.mark.holds("final dead letter")
def test_after_a_seek_messages_have_no_letters_and_may_get_others(broker: Broker, token: LockToken):
    """A user who seeks back wants the listener to receive the messages again. The letters stay in their topic."""
    first, second = queues_of(broker)[:2]
    [other] = locked(broker, "g", broker.groups.join("other"), [second])
    for one in (token, other):
        broker.groups.dead_letter(one, told(one.queue, [3]), [3])
    broker.groups.unlock([token])
    broker.admin.seek("g", {first: 2}, force=True)
    [token] = locked(broker, "g", broker.groups.join("again"), [first])
    assert (known(broker, token), known(broker, other)) == ([], [3]), "the seek must not affect the other queue"
    assert broker.groups.dead_letter(token, told(first, [3]), [3]) == 1
    assert known(broker, token) == [3]
    assert broker.groups.dead_letter(token, told(first, [3]), [3]) == 0
    broker.groups.reset({token: 0})
    assert known(broker, token) == []
    assert aside(broker) == ["body 3"] * 3


@pytest.mark.holds("replay once")
def test_letters_of_a_topic_that_was_deleted_and_created_again_are_replayed(broker: Broker, token: LockToken):
    """RocketMQ before 5.0 keeps the offsets in the deleted topic."""
    chosen = (LetterFilter(quarantined=False), LetterFilter(offsets=frozenset([1])), LetterFilter(quarantined=False))
    for offsets, counts in (([3, 4, 5], [3, 1, 0]), ([6, 7], [2, 1, 0])):
        broker.groups.dead_letter(token, told(token.queue, offsets), offsets)
        queues = queues_of(broker, "%DLQ%g")
        if broker.groups.offsets(REPLAY_GROUP, queues).get(queues[0], 0) > len(offsets):
            with refused("OFFSET.BEYOND_END", "group seek dlq-replay --topic %DLQ%g --to earliest"):
                replay(broker, queues, chosen[0], Replayed())
            broker.admin.seek(REPLAY_GROUP, dict.fromkeys(queues, 0))
        sent = []
        for one in chosen:
            done = Replayed()
            replay(broker, queues, one, done)
            sent.append(done.letters)
        assert sent == counts
        broker.admin.delete_topic("%DLQ%g")


@pytest.mark.holds("replay once")
@pytest.mark.parametrize("chosen", [ALL, LetterFilter(since=0, quarantined=False)], ids=["all", "chosen"])
def test_a_replay_that_was_paused_and_taken_over_sends_no_letter_again(
    broker: Broker, place: Place, token: LockToken, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, chosen: LetterFilter
):
    """It is paused after it has renewed its locks, before it sends the letters."""
    broker.groups.dead_letter(token, told(token.queue, [3, 4]), [3, 4])
    queues, rival, renew = queues_of(broker, "%DLQ%g"), place.connect(), broker.groups.renew
    late, other = Replayed(), Replayed()

    def pause(tokens: Sequence[LockToken]) -> list[LockToken]:
        lost = renew(tokens)
        clock.pass_(61)
        replay(rival, queues, chosen, other)
        return lost

    monkeypatch.setattr(broker.groups, "renew", pause)
    with refused("LOCK.LOST", "another replay has begun"):
        replay(broker, queues, chosen, late)
    assert (late.letters, other.letters) == (0, 2)
    assert sum(len(bodies(broker, queue)) for queue in queues_of(broker)) == 12


@pytest.mark.holds("replay once")
def test_a_second_replay_is_refused_until_the_first_has_ended(broker: Broker, place: Place, token: LockToken):
    broker.groups.dead_letter(token, told(token.queue, [3, 4]), [3, 4])
    queues, rival, done = queues_of(broker, "%DLQ%g"), place.connect(), Replayed()

    def replay_beside(sent: int, of: int) -> None:
        assert (sent, of) == (2, 2)
        with refused("LOCK.HELD_BY_OTHER", "the dead letters of %DLQ%g are being replayed by"):
            replay(rival, queues, ALL, Replayed())

    replay(broker, queues, ALL, done, progress=replay_beside)
    assert done.letters == 2
    replay(rival, queues, ALL, Replayed())


@pytest.mark.holds("quarantine")
def test_a_message_takes_the_count_of_its_replays_through_the_letters_of_listeners(broker: Broker):
    """The count is kept even if the listener does not read properties, because the count is then read from the queue."""
    broker.admin.create_topic("poison", 1)
    [queue] = queues_of(broker, "poison")
    [token] = locked(broker, "g", broker.groups.join("me"), [queue])
    broker.log.append({queue: rows(["poison"], sharding_key=["k"], properties=[[("colour", "red")]])})
    counts = []
    for at in range(3):
        taken = pull(broker, queue, at, ("queue_offset", "body"), messages=1)
        write_letters(broker, token, [Message(at, None, Rows(Columns(taken), 0))], ["bad"])
        done = Replayed()
        replay(broker, queues_of(broker, "%DLQ%g"), LetterFilter(quarantined=False, max_replays=2), done)
        counts.append((done.letters, done.quarantined))
    assert counts == [(1, 0), (1, 0), (0, 1)]
    sent = users_properties(read(broker, queue, 0, ("body", "sharding_key", "properties")))
    own = [("colour", "red")]
    assert [dict(row["properties"]) for row in sent] == [dict(own), dict(own) | {REPLAYS: "g=1"}, dict(own) | {REPLAYS: "g=2"}]
    assert {(row["body"], row["sharding_key"]) for row in sent} == {(b"poison", "k")}


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
    grow(broker, "%DLQ%g", 2)
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
    """A group's name may be as long as a topic's, but the name of its dead-letter topic is five characters longer."""
    queue = queues_of(broker)[0]
    me = broker.groups.join("me")
    [fits, long] = [locked(broker, "x" * length, me, [queue])[0] for length in (LONGEST, LONGEST + 1)]
    assert broker.groups.dead_letter(fits, letters([3]), [3]) == 1
    assert aside(broker, fits.group) == ["body 3"]
    before = broker.log.topics()
    with refused("GROUP.BAD_NAME", long.group, f"has {LONGEST + 1} characters", f"at most {LONGEST}", "%DLQ%"):
        broker.groups.dead_letter(long, letters([3]), [3])
    assert broker.log.topics() == before
