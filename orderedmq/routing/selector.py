"""Selectors, which choose the queue of a row: RocketMQ's MessageQueueSelectors. Pure.

Rules: selectors are vectorised, without Python loops over rows. Their choices depend only on their arguments, so that a retry chooses
the same queues. Selectors count the rows that they have seen, so each writing task needs its own object. On a broker where sent
messages cannot be withdrawn, a retry must choose the same queues even if its rows are in another order. Therefore, on such a broker, a
row without a key goes to a queue that its content determines (``by_content``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from orderedmq.conditions import MessageCondition, OptionCondition, SchemaCondition, SinkCondition, TopicCondition
from orderedmq.errors import MessageError, OptionError, SchemaError, SinkError, TopicError
from orderedmq.model import MAX_QUEUES, MessageQueue
from orderedmq.routing.content_hash import Words, content_hash64
from orderedmq.routing.sharding_key import HashedKeys, HashedNumbers, KeyType, hashed_keys

#: The index of each row's queue. 16 bits hold every queue number, and numpy sorts 16-bit numbers fastest.
Queues: TypeAlias = npt.NDArray[np.uint16]
#: `HashedKeys` if the caller also needs the hashes, or if the keys are hashed as another type than the column's.
Keys: TypeAlias = pa.Array | HashedKeys
#: Selectors that choose by the key alone.
KeyedSelectorName: TypeAlias = Literal["hash", "mod"]
KEYED_SELECTORS: Final[tuple[KeyedSelectorName, ...]] = ("hash", "mod")


def select_by_hash(hashes: npt.NDArray[np.int32], n: int) -> Queues:
    """Return the queues that SelectMessageQueueByHash chooses: the absolute value of each hash's truncating remainder by ``n``.

    ``n`` is 1 to 65,536.
    """
    _check_count(n)
    # |h rem n| = |h| mod n. |-2^31| fits only an unsigned number. numpy divides by a scalar faster than it computes remainders.
    size = np.abs(hashes).view(np.uint32)
    return (size - size // np.uint32(n) * np.uint32(n)).astype(np.uint16)


def _check_count(n: int) -> None:
    if not 1 <= n <= MAX_QUEUES:
        raise ValueError(f"cannot choose among {n} queues")


def require_targets(topic: str, among: Collection[MessageQueue], now: Sequence[MessageQueue]) -> None:
    """Raise TopicError QUEUE_COUNT if ``now``, a topic's targets, are not those of ``among``, from which a caller chose queues."""
    then = [queue for queue in among if queue.topic == topic]
    if then != list(now):
        raise routed_before(topic, len(then), len(now))


def routed_before(topic: str, then: int, now: int) -> TopicError:
    """Return the error for rows whose queues were chosen when the topic had other queues."""
    return TopicError(
        TopicCondition.QUEUE_COUNT,
        f"topic {topic!r} has other queues now than when the queues of these rows were chosen ({then} then, {now} now), so a key "
        "could be in two queues. No row was stored. Send the rows again",
    )


def by_queue(
    rows: pa.RecordBatch, chosen: Queues, queues: Sequence[MessageQueue]
) -> Iterator[tuple[MessageQueue, pa.RecordBatch]]:
    """Yield each queue that gets rows, with its rows in their order. ``chosen``: the index of each row's queue."""
    if len(chosen) and (chosen == chosen[0]).all():
        yield queues[chosen[0]], rows
        return
    together = rows.take(pa.array(np.argsort(chosen, kind="stable")))
    begin = 0
    for number, count in enumerate(np.bincount(chosen, minlength=len(queues)).tolist()):
        if count:
            yield queues[number], together.slice(begin, count)
            begin += count


class Selector(Protocol):
    """Chooses a queue for each row.

    ``rows`` has PRODUCER_COLUMNS as they will be stored, and queue_id if the input has that column. ``keys`` has the rows' sharding
    keys, null for a row without a key. It is None if no row has a key.
    """

    def select(self, rows: pa.RecordBatch, keys: Keys | None, n_queues: int) -> Queues:
        """Return the index, 0 to n_queues - 1, of each row's queue among the topic's queues."""
        ...


class HashSelector:
    """Chooses by the key's Java hash.

    For rows without a key, it chooses round-robin across batches, beginning with ``start``, or by the row's content (``by_content``).
    """

    def __init__(self, start: int = 0, *, by_content: bool = False) -> None:
        self._next = start
        self._by_content = by_content

    def select(self, rows: pa.RecordBatch, keys: Keys | None, n_queues: int) -> Queues:
        _check_count(n_queues)
        if keys is None:
            return self._without_key(rows, n_queues)
        hashed = _hashed(keys)
        queues = self.by_key(hashed, n_queues)
        if hashed.valid is not None:
            missing = ~hashed.valid
            queues[missing] = self._without_key(rows.filter(pa.array(missing)), n_queues)
        return queues

    def by_key(self, keys: HashedKeys, n: int) -> Queues:
        """Return the queue of each key. A null counts as hash 0."""
        return select_by_hash(keys.java, n)

    def _without_key(self, rows: pa.RecordBatch, n: int) -> Queues:
        if self._by_content:
            return _uniform(content_hash64(rows), n)
        first, self._next = self._next, self._next + rows.num_rows
        return ((first % n + np.arange(rows.num_rows, dtype=np.int64)) % n).astype(np.uint16)


class ModSelector(HashSelector):
    """Chooses as ``id % queues`` does in Java, for keys that are whole numbers. It treats rows without a key as HashSelector does."""

    def by_key(self, keys: HashedKeys, n: int) -> Queues:
        """Return the queue of each key. Raises SchemaError WRONG_TYPE for text keys, or MessageError BAD_KEY for a negative key."""
        if not isinstance(keys, HashedNumbers):
            raise SchemaError(
                SchemaCondition.WRONG_TYPE,
                "the selector mod needs sharding keys that are whole numbers, not text. Set shardingKeyType=long (--sharding-key-type long)",
            )
        if len(keys.numbers) and (least := int(keys.numbers.min())) < 0:
            raise MessageError(
                MessageCondition.BAD_KEY,
                f"a sharding key is {least}, but the selector mod accepts no negative numbers, because Java's id % queues is then negative "
                "or 0. Filter such rows out, or set messageQueueSelector=hash (--selector hash)",
            )
        return (keys.numbers % n).astype(np.uint16)


class Keying(NamedTuple):
    """A selector and a key type, which together determine the queue of a key without its row."""

    selector: KeyedSelectorName = "hash"
    key_type: KeyType = "text"

    def queues_of(self, keys: pa.Array, n: int, where: str) -> Queues:
        """Return the queue of each key. The result for a null is meaningless.

        Raises MessageError BAD_KEY for a key that the type or the selector does not allow.
        """
        return keyed(self.selector).by_key(hashed_keys(keys, self.key_type, where), n)


def keyed(name: KeyedSelectorName) -> HashSelector:
    """Return the selector of that name. It chooses round-robin for rows without a key."""
    return ModSelector() if name == "mod" else HashSelector()


def _hashed(keys: Keys) -> HashedKeys:
    return keys if isinstance(keys, HashedKeys) else hashed_keys(keys, "auto", "a batch")


def keying_of(selector: KeyedSelectorName | None, key_type: KeyType | None) -> Keying | None:
    """Return the keying that a user's two settings define, None if both are missing. Raises OptionError CONFLICT."""
    if selector is None and key_type is None:
        return None
    if selector == "mod" and key_type == "text":
        raise OptionError(
            OptionCondition.CONFLICT,
            'the selector mod needs keys that are whole numbers, not text. Drop selector="mod" (--selector) or sharding_key_type="text" '
            "(--sharding-key-type)",
        )
    return Keying(selector or "hash", key_type or ("long" if selector == "mod" else "text"))


class ContentSelector:
    """Chooses by a row's content, including its key. Rows with the same content go to the same queue."""

    def select(self, rows: pa.RecordBatch, keys: Keys | None, n_queues: int) -> Queues:  # noqa: ARG002
        _check_count(n_queues)
        return _uniform(content_hash64(rows), n_queues)


class RandomSelector:
    """Chooses uniformly at random. A choice depends only on ``seed`` (>= 0) and the row's number, not on the division into batches."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def select(self, rows: pa.RecordBatch, keys: Keys | None, n_queues: int) -> Queues:  # noqa: ARG002
        _check_count(n_queues)
        # numpy guarantees that its raw stream stays the same in later versions, but not that its distributions do.
        return _uniform(self._bits.random_raw(rows.num_rows), n_queues)


def _uniform(words: Words, n: int) -> Queues:
    """Return a queue index for each word of random bits, from its upper half."""
    queues: Queues = ((words >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)).astype(np.uint16)
    return queues


class QueueIdSelector:
    """Chooses the queue in the row's column ``queue_id``."""

    def __init__(self) -> None:
        self._seen = 0

    def select(self, rows: pa.RecordBatch, keys: Keys | None, n_queues: int) -> Queues:  # noqa: ARG002
        """See `Selector.select`.

        Raises SchemaError MISSING_COLUMN or WRONG_TYPE, or MessageError BAD_QUEUE_ID for a null or an unknown queue.
        """
        _check_count(n_queues)
        if "queue_id" not in rows.schema.names:
            what = "messageQueueSelector=queueId needs a column queue_id. Add the column, or choose another selector"
            raise SchemaError(SchemaCondition.MISSING_COLUMN, what)
        column = rows.column("queue_id")
        if not pa.types.is_integer(column.type):
            raise SchemaError(SchemaCondition.WRONG_TYPE, f"column queue_id is {column.type}, not int. Cast the column to int")
        bad = pc.fill_null(pc.or_(pc.less(column, 0), pc.greater_equal(column, n_queues)), True)
        row = pc.index(bad, True).as_py()
        if row >= 0:
            value = "null" if column[row].as_py() is None else column[row]
            what = f"row {self._seen + row} of its partition (the first is 0) has queue_id {value}"
            raise MessageError(MessageCondition.BAD_QUEUE_ID, f"{what}, but the topic's queues are 0 to {n_queues - 1}")
        self._seen += rows.num_rows
        queues: Queues = column.to_numpy(zero_copy_only=False).astype(np.uint16)
        return queues


#: (keys, number of queues) → the index of each key's queue, as a sequence, a numpy array or an Arrow array of integers.
SelectorFunction: TypeAlias = Callable[[pa.Array, int], Any]


class FunctionSelector:
    """Chooses by a user's ``function(keys, n)``. ``keys`` is one Arrow array of a batch's keys, null for a row without a key."""

    def __init__(self, function: SelectorFunction, name: str) -> None:
        """``name`` names the function in errors."""
        self._function = function
        self._name = name

    def select(self, rows: pa.RecordBatch, keys: Keys | None, n_queues: int) -> Queues:
        """See `Selector.select`. Raises SinkError SELECTOR_FAILED if the function fails or does not return a queue for each row."""
        _check_count(n_queues)
        plain = pa.nulls(rows.num_rows, pa.string()) if keys is None else keys.keys if isinstance(keys, HashedKeys) else keys
        try:
            result = np.asarray(self._function(plain, n_queues))
        except Exception as error:
            failed = self._failed(f"raised {type(error).__name__}: {error}")
            failed.from_users_code = True
            raise failed from error
        if result.shape != (rows.num_rows,):
            raise self._failed(f"returned a result of shape {result.shape} for {rows.num_rows} rows. Return one int per row")
        if not rows.num_rows:
            return np.zeros(0, dtype=np.uint16)
        if not np.issubdtype(result.dtype, np.integer):
            raise self._failed(f"returned {result.dtype} values. Return one int per row")
        bad = np.flatnonzero((result < 0) | (result >= n_queues))
        if len(bad):
            raise self._failed(
                f"chose queue {result[bad[0]]} for row {bad[0]} of a batch, but the queues are 0 to {n_queues - 1}"
            )
        return result.astype(np.uint16)

    def _failed(self, what: str) -> SinkError:
        return SinkError(SinkCondition.SELECTOR_FAILED, f"the queue selector {self._name} {what}".replace("\n", " "))


def load_function(path: str) -> SelectorFunction:
    """Return the function that ``path`` names (``package.module:function``). Raises OptionError INVALID."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise _invalid(path, "is not of the form package.module:function", "Name a module, a colon and a function")
    try:
        loaded: Any = importlib.import_module(module)
    except Exception as error:  # any error that the user's module raises at its import
        why = f"cannot be loaded: {type(error).__name__}: {error}"
        invalid = _invalid(path, why, "Make the module importable on the driver and on every executor")
        invalid.from_users_code = True
        raise invalid from error
    for part in name.split("."):
        if not hasattr(loaded, part):
            raise _invalid(path, f"cannot be loaded: {module} has no {name}", "Check the function's name")
        loaded = getattr(loaded, part)
    if not callable(loaded):
        raise _invalid(path, f"is not a function but {type(loaded).__name__}", "Name a function of (keys, number of queues)")
    function: SelectorFunction = loaded
    return function


def is_own(name: str) -> bool:
    """Return whether the option messageQueueSelector names a function of the user's own."""
    return ":" in name


def _invalid(path: str, why: str, remedy: str) -> OptionError:
    return OptionError(OptionCondition.INVALID, f"option messageQueueSelector: {path!r} {why}. {remedy}".replace("\n", " "))


def selector(name: str, seed: int, *, by_content: bool = False) -> Selector:
    """Return the selector that the option messageQueueSelector names.

    ``name`` is hash, mod, random, queueId, or package.module:function. ``seed`` (>= 0) is derived from the batch
    and the partition, so that a retry chooses the same queues. With ``by_content``, the content decides for rows without a key, and for
    all rows under random. Raises OptionError INVALID.
    """
    match name:
        case "hash":
            return HashSelector(seed, by_content=by_content)
        case "mod":
            return ModSelector(seed, by_content=by_content)
        case "random":
            return ContentSelector() if by_content else RandomSelector(seed)
        case "queueId":
            return QueueIdSelector()
    if not is_own(name):
        raise _invalid(name, "is not a selector", "Use hash, mod, random, queueId or package.module:function")
    return FunctionSelector(load_function(name), name)
