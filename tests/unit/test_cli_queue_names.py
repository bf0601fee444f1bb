"""How the command reads and shows queues, with one broker and with several."""

from __future__ import annotations

import pytest

from orderedmq.cli import queue_names
from orderedmq.cli.shell import USAGE, code_of
from orderedmq.errors import OptionError, TopicError
from orderedmq.model import MessageQueue
from orderedmq.options.values import find_queue

ONE = [MessageQueue("orders", "embedded", number) for number in range(4)]
#: The queues of one broker come after those of the other: the third in the list is queue 0 of broker-b.
TWO = [MessageQueue("orders", broker, number) for broker in ("broker-a", "broker-b") for number in range(2)]
#: A queue number that only one broker has.
LONELY = MessageQueue("orders", "broker-b", 2)


@pytest.mark.parametrize(
    ("text", "queues", "found"),
    [
        ("2", ONE, ONE[2]),
        ("embedded/2", ONE, ONE[2]),
        ("orders/embedded/2", ONE, ONE[2]),
        ("broker-b/0", TWO, TWO[2]),
        ("orders/broker-b/0", TWO, TWO[2]),
        ("2", [*TWO, LONELY], LONELY),
        ("orders/2", [*TWO, LONELY], LONELY),
    ],
)
def test_a_queue_has_a_short_name_where_it_is_unique(text: str, queues: list[MessageQueue], found: MessageQueue) -> None:
    assert find_queue(text, queues) == found
    if text.startswith("orders/"):
        assert queue_names.find_all(text, queues) == [found]


def test_a_number_that_several_brokers_have_is_refused_with_the_choices() -> None:
    with pytest.raises(TopicError, match="AMBIGUOUS.*orders/broker-a/1, orders/broker-b/1") as caught:
        find_queue("1", TWO)
    assert code_of(caught.value) == USAGE
    many = [MessageQueue("orders", f"broker-{number:02}", 0) for number in range(50)]
    with pytest.raises(TopicError, match="50 brokers .* orders/broker-07/0, …$"):
        queue_names.find_all("orders/0", many)


@pytest.mark.parametrize(
    ("text", "queues", "says"),
    [
        ("4", ONE, "its queues are 0 to 3"),
        ("broker-a/0", ONE, "its queues are 0 to 3"),
        # The number is never an index into the list, although there are four queues.
        ("2", TWO, "its queues are broker-a/0 to broker-a/1, broker-b/0 to broker-b/1"),
        ("broker-b/2", [*TWO[:3]], "its queues are broker-a/0 to broker-a/1, broker-b/0$"),
    ],
)
def test_a_queue_that_is_not_there_is_refused_with_those_that_are(text: str, queues: list[MessageQueue], says: str) -> None:
    with pytest.raises(TopicError, match=f"NO_SUCH_QUEUE.*{says}"):
        find_queue(text, queues)


@pytest.mark.parametrize("text", ["", "x", "-1", "a/b/c/1", "1/x", "٣"])
def test_refuses_a_text_that_names_no_queue(text: str) -> None:
    with pytest.raises(OptionError, match="Write for example 3, broker-a/3 or orders/broker-a/0"):
        find_queue(text, TWO)


@pytest.mark.parametrize("text", ["", "/1", "orders/", "orders/x", "orders//1", "orders/a/b/1", "orders/a/x"])
def test_what_names_no_topic_or_queue(text: str) -> None:
    with pytest.raises(OptionError, match="neither TOPIC nor TOPIC/BROKER/QUEUE"):
        queue_names.topic_of(text)
