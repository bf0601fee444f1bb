"""`orderedmq.testing` without Spark: the messages that a test produces and compares, and functions that fail once."""

from __future__ import annotations

import asyncio
import functools
import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orderedmq.errors import GroupError, OptionError, SchemaError, StoreError, TopicError
from orderedmq.listening.listener import is_async
from orderedmq.testing import FailedOnce, QueryTestError, TemporaryStore
from orderedmq.testing.queries import checkpoint_of, writer_of
from tests.contract.support import locked

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TemporaryStore]:
    with TemporaryStore(tmp_path / "pipeline") as made:
        yield made


# -- messages --------------------------------------------------------------------------------------------------------------------


def test_returns_produced_messages_by_key_in_their_order(store: TemporaryStore) -> None:
    store.produce("orders", ("a", "1"), ("b", b"2"), ("a", {"id": "ä"}), (None, "no key"))
    table = pa.table({"sharding_key": ["b"], "body": ["3"], "tags": ["t"]})
    store.produce("orders", ("b", "2½"), table, {"sharding_key": "b", "body": "4", "properties": {"colour": "red"}})
    assert store.by_key("orders") == {"a": ["1", '{"id": "ä"}'], "b": ["2", "2½", "3", "4"], None: ["no key"]}
    found = {message["body"]: message for message in store.messages("orders")}
    assert found[b"3"]["tags"] == "t"
    assert found[b"4"]["properties"]["colour"] == "red"
    assert len(store.broker.log.queues("orders")) == 4


def test_a_wrong_name_is_not_an_empty_topic(store: TemporaryStore) -> None:
    store.produce("orders", ("a", "1"))
    with pytest.raises(TopicError, match="topic 'ordrs' does not exist"):
        store.by_key("ordrs")
    with pytest.raises(GroupError, match="consumer group 'leger' does not exist"):
        store.messages("%DLQ%leger")
    [queue, *_] = store.broker.log.queues("orders")
    client = store.broker.groups.join("query")
    [token] = locked(store.broker, "ledger", client, [queue])
    store.broker.groups.commit({token: 0})
    assert store.messages("%DLQ%ledger") == []


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("created", "row 1 for topic 'orders' is 'created'. Give (key, body)"),
        (("a", "b", "c"), "Give (key, body)"),
        (("a", 7), "row 1 for topic 'orders' has a body of type int. Give text, bytes, or a dict or list, which becomes JSON"),
        ({"sharding_key": "a"}, "row 1 for topic 'orders' has no column body, only sharding_key"),
        ((2, "created"), "column sharding_key of the rows for topic 'orders'"),
        ({"body": "a", "tags": 5}, "column tags of the rows for topic 'orders'"),
        ({"body": "a", "properties": {"n": 1}}, "Give a dict of texts"),
        ({"body": "a", "sharding_key": "\udcff"}, "Give either texts or whole numbers of 64 bits as keys"),
        (
            ("a", {"at": datetime(2026, 1, 1)}),
            "row 1 for topic 'orders' has a body that cannot be written as JSON or UTF-8: Object of",
        ),
        (("a", "\udcff"), "surrogates not allowed. Convert it before"),
    ],
)
def test_a_row_that_is_no_message_is_refused_before_any_is_written(store: TemporaryStore, row: Any, says: str) -> None:
    with pytest.raises(SchemaError) as caught:
        store.produce("orders", ("a", "1"), row)
    assert says in str(caught.value)
    with pytest.raises(StoreError, match=r"STORE\.MISSING"):
        store.messages("orders")


# -- comparisons -----------------------------------------------------------------------------------------------------------------


def test_topics_rows_and_tables_with_the_same_messages_are_the_same(store: TemporaryStore, tmp_path: Path) -> None:
    rows = [("a", "1"), ("b", "2"), ("a", "3")]
    store.produce("one", *rows)
    store.produce("two", ("b", "2"), ("a", "1"), ("a", "3"), queues=2)
    pq.write_table(pa.table({"sharding_key": ["b", "a", "a"], "body": ["2", "1", "3"]}), tmp_path / "t.parquet")
    table = pa.table({"sharding_key": ["a", "b", "a"], "body": ["1", "2", "3"]})
    for actual in ("two", rows, tmp_path / "t.parquet", [table], table, SimpleNamespace(toArrow=lambda: table)):
        store.assert_same("one", actual)
        store.assert_same(actual, "one")


def test_a_side_that_cannot_be_compared_says_what_to_pass(store: TemporaryStore, tmp_path: Path) -> None:
    store.produce("one", ("a", "1"))
    pq.write_table(pa.table({"order": ["a"], "events": [1]}), tmp_path / "t.parquet")
    with pytest.raises(OptionError, match="For a Parquet file or directory, pass Path"):
        store.assert_same("one", str(tmp_path / "t.parquet"))
    with pytest.raises(OptionError, match="Name its columns with key_column, id_column and order_column"):
        store.assert_same("one", tmp_path / "t.parquet")
    with pytest.raises(OptionError, match="actual has no column 'body', only sharding_key"):
        store.assert_same("one", pa.table({"sharding_key": ["a"]}))
    for nested in ("sharding_key", "body"):
        with pytest.raises(OptionError, match=f"column '{nested}' of actual is list<.*, which cannot be compared"):
            store.assert_same("one", pa.table({"sharding_key": ["a"], "body": ["1"]} | {nested: [["1"]]}))
    store.assert_same("one", pa.table({"sharding_key": ["a"], "body": [1]}))
    store.assert_same("one", pa.table({"sharding_key": pa.array(["a"]).dictionary_encode(), "body": ["1"]}))


def test_bodies_may_differ_where_a_field_identifies_the_message(store: TemporaryStore) -> None:
    store.produce("one", ("a", {"id": 1}), ("a", {"id": 2}))
    store.assert_same("one", [("a", {"id": 1, "more": "x"}), ("a", {"id": 2})], id_field="id")
    with pytest.raises(OptionError, match="actual row 1: there is no field 'id'"):
        store.assert_same("one", [("a", {"id": 1}), ("a", {"name": 2})], id_field="id")


def test_a_difference_says_what_is_wrong_and_where_it_is_first_seen(store: TemporaryStore) -> None:
    store.produce("sent", *((f"k{n % 3}", f"{n}") for n in range(12)), queues=1)
    # The messages of k0 are 0 3 6 9, those of k1 are 1 4 7 10, and those of k2 are 2 5 8 11.
    received = [("k0", "0"), ("k0", "6"), ("k0", "3"), ("k1", "1"), ("k1", "1"), ("k1", "7"), ("k1", "10"), ("k2", "99")]
    with pytest.raises(AssertionError) as caught:
        store.assert_same("sent", received)
    assert str(caught.value).splitlines() == [
        "actual does not have the messages of sent, each once and in the order of its key: 3 of 3 keys are affected.",
        "lost: 5 (1 gaps)",
        *(f"  sent, queue 0 offset {n}: key k{n % 3}, {n}" for n in (2, 4, 5, 8, 9)),
        "not yet: 1 (at the ends of queues)",
        "  sent, queue 0 offset 11: key k2, 11",
        "duplicated: 1",
        "  actual, row 4: key k1, 1",
        "out of order: 1",
        "  actual, row 2: key k0, 3",
        "unexpected: 1",
        "  actual, row 7: key k2, 99",
    ]


def test_a_key_in_several_queues_is_a_difference(store: TemporaryStore) -> None:
    store.produce("one", ("a", "1"), ("a", "2"))
    store.produce("two", queues=2)
    for queue, body in zip(store.broker.log.queues("two"), ("1", "2"), strict=True):
        store.broker.log.append({queue: pa.record_batch({"body": [body.encode()], "sharding_key": ["a"]})})
    with pytest.raises(AssertionError, match="1 keys are in several queues of two, so their messages have no order"):
        store.assert_same("one", "two")


# -- functions that fail once ----------------------------------------------------------------------------------------------------


class Calls:
    """A listener that records the keys that it gets. The record belongs to the class, because a pickled copy would have its own."""

    made: list[list[str]] = []  # noqa: RUF012

    def __call__(self, messages: Any, context: Any) -> str:
        self.made.append([message.sharding_key for message in messages])
        return "done"


@pytest.fixture
def calls() -> list[list[str]]:
    Calls.made.clear()
    return Calls.made


def of(*keys: str) -> list[Any]:
    return [SimpleNamespace(sharding_key=key) for key in keys]


def again(function: Any) -> Any:
    """The function as another process receives it."""
    return pickle.loads(pickle.dumps(function))


def test_a_function_fails_at_its_first_call_in_any_process(store: TemporaryStore, calls: list[list[str]]) -> None:
    failing = store.fails_once(Calls())
    with pytest.raises(FailedOnce, match="fails_once made the first call of Calls fail"):
        again(failing)(of("a"), None)
    assert calls == []
    for function in (failing, again(failing), store.fails_once(Calls())):
        assert function(of("b"), None) == "done"
    assert calls == [["b"]] * 3


def test_a_listener_may_fail_once_for_each_key(store: TemporaryStore, calls: list[list[str]]) -> None:
    failing = store.fails_once(Calls(), per_key=True)
    with pytest.raises(FailedOnce, match="the first call of Calls for the key a fail"):
        failing(of("a"), None)
    failing(of("a"), None)
    with pytest.raises(FailedOnce, match="for the key b"):
        again(failing)(of("a", "b", "c"), None)
    failing(of("c", "b"), None)
    assert calls == [["a"], ["c", "b"]]


def test_a_function_without_messages_has_no_keys(store: TemporaryStore) -> None:
    def write(batch: Any, number: int) -> None:
        pass

    failing = store.fails_once(write, per_key=True)
    with pytest.raises(OptionError, match=r"write was called with SimpleNamespace, int. Leave per_key out"):
        failing(SimpleNamespace(), 0)


def test_a_listener_that_is_a_class_stays_one(store: TemporaryStore, calls: list[list[str]]) -> None:
    failing: Any = store.fails_once(Calls)
    assert isinstance(failing, type)
    first, second = failing(), failing()
    with pytest.raises(FailedOnce):
        first(of("a"), None)
    assert second(of("a"), None) == "done"


@pytest.mark.parametrize("after", [False, True])
def test_an_async_listener_stays_async(store: TemporaryStore, after: bool) -> None:
    called = []

    async def listener(messages: Any, context: Any) -> str:
        called.append(context)
        return "done"

    class Listener:
        async def __call__(self, messages: Any, context: Any) -> str:
            return await listener(messages, context)

    for number, given in enumerate((listener, Listener)):
        failing: Any = store.fails_once(cast(Any, given), after=after)
        assert is_async(failing)
        call = failing() if given is Listener else failing
        with pytest.raises(FailedOnce):
            asyncio.run(call(of("a"), f"first of {number}"))
        assert asyncio.run(call(of("a"), number)) == "done"
    assert called == (["first of 0", 0, "first of 1", 1] if after else [0, 1])


# -- queries ---------------------------------------------------------------------------------------------------------------------


def invoices(spark: Any, broker: dict[str, str], what: str = "") -> Any:
    return 7


def test_a_checkpoint_has_the_name_of_the_querys_function() -> None:
    assert checkpoint_of(functools.partial(functools.partial(invoices), what="x")) == "invoices"
    assert checkpoint_of(lambda spark, broker: invoices(spark, broker, "x")) == "lambda"
    assert checkpoint_of(SimpleNamespace(foreachBatch=None, trigger=None)) == "query"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("query", "spark", "says"),
    [
        (7, None, "7 is no query. Pass a function of a session and the broker's options"),
        (invoices, None, "invoices needs a session. Pass one as the next argument, such as the fixture orderedmq_spark"),
        (invoices, "spark", "invoices returned int. Return the writer that df.writeStream makes"),
    ],
)
def test_refuses_a_value_that_is_not_a_query(query: Any, spark: Any, says: str) -> None:
    with pytest.raises(QueryTestError) as caught:
        writer_of(query, spark, {})
    assert caught.value.condition == "ORDEREDMQ_TESTING.NOT_A_QUERY"
    assert says in caught.value.message


# -- what an import loads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "not_loaded"),
    [("pytest_orderedmq", ("orderedmq", "pyarrow", "pyspark")), ("orderedmq.testing.store", ("pyspark", "pytest"))],
)
def test_an_import_loads_no_more_than_it_needs(module: str, not_loaded: tuple[str, ...]) -> None:
    """pytest imports the plugin every time it starts."""
    code = f"import sys, {module}; print(sorted({set(not_loaded)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
