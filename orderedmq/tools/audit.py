"""Compares two histories per sharding key: did every message arrive, once and in order? DuckDB (the extra ``audit``) does the work.

A history is a sequence of rows. A row has a key, an identity (by default its body, or a field of it) and a position. Identities are
compared within a key, by MD5.

The order of a key: the first occurrences of identities must have the same order in ACTUAL as in EXPECTED. A row that comes after
a row that should follow it is out of order. An identity that occurs n times in EXPECTED is matched n times; further occurrences
in ACTUAL count as duplicated.

Memory is bounded by `MEMORY`, however many rows there are: DuckDB writes what does not fit into temporary files.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from orderedmq.errors import missing_package

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from orderedmq.tools.audit_sides import Side

#: DuckDB's limits. Each thread needs some of the memory, however many cores there are.
MEMORY: Final = "1GB"
THREADS: Final = 4

KINDS: Final = ("lost", "not_yet", "duplicated", "out_of_order", "moved", "extra")


@dataclass
class Extent:
    """The counts of one side.

    split_keys: keys that occur in several queues, so that their messages have no common order. repeated: messages whose identity
    occurred before.
    """

    name: str
    messages: int = 0
    keys: int = 0
    split_keys: int = 0
    repeated: int = 0


@dataclass(frozen=True)
class Example:
    kind: str
    side: str
    where: str
    key: str | None
    id: str


class Finding(NamedTuple):
    """A kind of difference: its identifier, its name for users, the number of messages with it, and a note or ""."""

    kind: str
    name: str
    messages: int
    note: str = ""


@dataclass
class Audit:
    """The findings, counted in messages.

    lost: in EXPECTED but not in ACTUAL. gaps: runs of lost or moved messages before another one of their key. not_yet: also absent, but
    after the last message of their queue in EXPECTED that ACTUAL has, as is normal while a pipeline is running; for a table whose rows
    name no queue, such messages are lost. duplicated: more often in ACTUAL than in EXPECTED. moved: in ACTUAL under another key. extra:
    in ACTUAL but not in EXPECTED. out_of_order: after a message that should follow it. keys_affected: keys with any of these differences,
    except not_yet.
    """

    expected: Extent
    actual: Extent
    lost: int = 0
    not_yet: int = 0
    gaps: int = 0
    duplicated: int = 0
    moved: int = 0
    extra: int = 0
    out_of_order: int = 0
    keys_affected: int = 0
    examples: list[Example] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether exactly the messages of EXPECTED arrived, each once, in the order of its key, and each key in one queue."""
        return not any(finding.messages for finding in self.findings) and not self.actual.split_keys

    @property
    def findings(self) -> list[Finding]:
        """All kinds of difference, including kinds that no message has."""
        note = f"{self.gaps:,} gaps" if self.lost else ""
        return [
            Finding("lost", "lost", self.lost, note),
            Finding("not_yet", "not yet", self.not_yet, "at the ends of queues" if self.not_yet else ""),
            Finding("duplicated", "duplicated", self.duplicated),
            Finding("out_of_order", "out of order", self.out_of_order),
            Finding("moved", "under another key", self.moved),
            Finding("extra", "unexpected", self.extra),
        ]

    @property
    def nothing_in_common(self) -> bool:
        """Whether no message of EXPECTED is in ACTUAL although both have messages, as when a query has changed the bodies."""
        return 0 < self.lost + self.not_yet == self.expected.messages and 0 < self.extra == self.actual.messages

    @property
    def verdict(self) -> str:
        """The result in one or two sentences."""
        if self.nothing_in_common:
            return (
                f"No message of {self.expected.name} is in {self.actual.name}, because whole bodies are compared and all differ. "
                "If a field of JSON bodies identifies a message, compare by it (--id-field, or id_field in Python)."
            )
        if self.ok:
            return f"{self.actual.name} has every message of {self.expected.name}, once and in the order of its key."
        if not any(finding.messages for finding in self.findings):
            return (
                f"{self.actual.split_keys:,} keys are in several queues of {self.actual.name}, so their messages have no order."
            )
        if not self.keys_affected:
            return f"{self.not_yet:,} messages of {self.expected.name} are not yet in {self.actual.name}, which has all others in order."
        return f"{self.keys_affected:,} of {max(self.expected.keys, self.actual.keys):,} keys are affected."

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


_HISTORY: Final = "CREATE TABLE history (expected BOOLEAN, key VARCHAR, id UHUGEINT, position HUGEINT, queue VARCHAR)"

#: MD5, because DuckDB's own hash is the same for many bodies that differ only in a few digits.
#: A position has the value that orders the side's rows in its upper bits, and the row's number on its side in the lower 40.
_INSERT: Final = """
INSERT INTO history
SELECT $expected, key, md5_number(id), sort::HUGEINT * (1::HUGEINT << 40) + number, queue FROM batch
"""

_EXTENTS: Final = """
SELECT expected, sum(messages), count(key), count(*) FILTER (first_queue < last_queue AND key IS NOT NULL)
FROM (
    SELECT expected, key, count(*) AS messages, min(queue) AS first_queue, max(queue) AS last_queue
    FROM history GROUP BY expected, key
)
GROUP BY expected
"""

#: Pair the n-th occurrence of an identity in EXPECTED with the n-th in ACTUAL. A position is NULL if that side has no such occurrence.
#: ``wanted``: whether EXPECTED has the identity of an occurrence in ACTUAL at all.
_PAIRS: Final = """
CREATE TABLE pairs AS
WITH numbered AS (
    SELECT *, row_number() OVER same AS turn, count(*) FILTER (expected) OVER same AS expectations
    FROM history
    WINDOW same AS (PARTITION BY key, id ORDER BY expected DESC, position)
)
SELECT
    key,
    id,
    if(expected, turn, turn - expectations) AS occurrence,
    max(queue) FILTER (expected) AS queue,
    max(position) FILTER (expected) AS sent,
    max(position) FILTER (NOT expected) AS arrived,
    bool_or(NOT expected AND expectations > 0) AS wanted
FROM numbered
GROUP BY ALL
"""

#: A message without a partner is moved if one of the other side, under another key, has its identity. Each such message is counted once,
#: so that its row in EXPECTED has another kind. ``position``: that in EXPECTED for lost and departed messages, otherwise that in ACTUAL.
_DIFFERENCES: Final = """
CREATE TABLE differences AS
WITH ordered AS (
    SELECT key, arrived, sent < max(sent) OVER (
        PARTITION BY key ORDER BY arrived ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS late
    FROM pairs WHERE sent IS NOT NULL AND arrived IS NOT NULL AND key IS NOT NULL
), single AS (
    SELECT
        key,
        sent,
        arrived,
        queue,
        row_number() OVER (PARTITION BY id, sent IS NULL ORDER BY sent, arrived)
            <= least(count(sent) OVER (PARTITION BY id), count(arrived) OVER (PARTITION BY id)) AS moved
    FROM pairs WHERE (sent IS NULL OR arrived IS NULL) AND NOT wanted
), reached AS (
    SELECT queue, max(sent) AS last
    FROM (SELECT queue, sent FROM pairs WHERE arrived IS NOT NULL UNION ALL SELECT queue, sent FROM single WHERE moved)
    GROUP BY queue
)
SELECT 'duplicated' AS kind, key, arrived AS position FROM pairs WHERE sent IS NULL AND wanted
UNION ALL
SELECT 'out_of_order', key, arrived FROM ordered WHERE late
UNION ALL
SELECT if(moved, 'moved', 'extra'), key, arrived FROM single WHERE sent IS NULL
UNION ALL
SELECT if(moved, 'departed', if(queue > '' AND sent > coalesce(last, -1), 'not_yet', 'lost')), key, sent
FROM single LEFT JOIN reached USING (queue) WHERE arrived IS NULL
"""

#: A gap ends at the next message of the key that has arrived.
_GAPS: Final = """
WITH gaps AS (
    SELECT kind, absent.key, present.sent
    FROM differences AS absent
    ASOF LEFT JOIN (SELECT key, sent FROM pairs WHERE sent IS NOT NULL AND arrived IS NOT NULL) AS present
    ON absent.key = present.key AND absent.position < present.sent
    WHERE kind IN ('lost', 'departed')
)
SELECT count(*) FROM (SELECT DISTINCT key, sent FROM gaps WHERE sent IS NOT NULL)
"""


def require_duckdb(feature: str, extra: str = "audit") -> None:
    """Check that DuckDB is installed. ``feature``: what needs it, for the error. Raises OptionError MISSING."""
    if importlib.util.find_spec("duckdb") is None:
        raise missing_package(feature, "duckdb", extra)


def audit(expected: Side, actual: Side, *, examples: int = 5, progress: Callable[[int], None] | None = None) -> Audit:
    """Return the differences between two histories.

    ``examples``: maximum number of examples of each kind. ``progress`` is called with the number of rows of each batch that is read.
    Call `require_duckdb` before. Raises the errors of the sides, and OSError if the temporary files do not fit on the disk.
    """
    import duckdb

    with tempfile.TemporaryDirectory(prefix="orderedmq-audit-") as folder:
        config: dict[str, Any] = {
            "memory_limit": MEMORY,
            "threads": min(THREADS, os.cpu_count() or 1),
            "temp_directory": folder,
            "preserve_insertion_order": False,
        }
        try:
            with duckdb.connect(config=config) as connection:
                connection.execute(_HISTORY)
                for is_expected, side in ((True, expected), (False, actual)):
                    for rows in side.rows():
                        connection.register("batch", pa.Table.from_batches([rows]))
                        connection.execute(_INSERT, {"expected": is_expected})
                        if progress is not None:
                            progress(rows.num_rows)
                return _compare(connection, expected, actual, examples)
        except RuntimeError as error:
            if "interrupted" not in str(error):
                raise
            # DuckDB took the signal of Ctrl-C.
            raise KeyboardInterrupt from error
        except (duckdb.OutOfMemoryException, duckdb.IOException, duckdb.TransactionException) as error:
            # The queries are fixed, so only a lack of space can make them fail. A commit that finds no space is an error of transactions.
            reason = str(error).partition("\n")[0]
            raise OSError(errno.ENOSPC, f"{tempfile.gettempdir()} has too little space for DuckDB's files: {reason}") from error


def _compare(connection: DuckDBPyConnection, expected: Side, actual: Side, examples: int) -> Audit:
    def rows(query: str, *values: Any) -> list[Any]:
        return connection.execute(query, values or None).fetchall()

    extents = {True: Extent(expected.name), False: Extent(actual.name)}
    for is_expected, *counts in rows(_EXTENTS):
        extents[is_expected] = Extent(extents[is_expected].name, *counts)
    rows(_PAIRS)
    rows("DROP TABLE history")
    rows(_DIFFERENCES)
    counts = dict(rows("SELECT kind, count(*) FROM differences GROUP BY kind"))
    [(gaps,)] = rows(_GAPS)
    repeated = "SELECT count(sent), count(arrived) FROM pairs WHERE occurrence > 1"
    [(extents[True].repeated, extents[False].repeated)] = rows(repeated)
    [(keys_affected,)] = rows("SELECT count(DISTINCT key) FROM differences WHERE kind <> 'not_yet'")
    report = Audit(
        extents[True],
        extents[False],
        gaps=gaps,
        keys_affected=keys_affected,
        **{kind: counts.get(kind, 0) for kind in KINDS},
    )
    first = (
        "SELECT (position & ((1::HUGEINT << 40) - 1))::BIGINT AS number FROM differences WHERE kind = ? ORDER BY number LIMIT ?"
    )
    for kind in KINDS:
        side = expected if kind in ("lost", "not_yet") else actual
        numbers = [number for (number,) in rows(first, kind, examples)]
        report.examples += [Example(kind, side.name, *location) for location in side.locate(numbers)] if numbers else []
    return report
