"""``orderedmq audit``: shows which messages a pipeline lost, duplicated or reordered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orderedmq.cli import queue_names
from orderedmq.cli.shell import REFUSED, Column, Shell, command, commands, parse_moment
from orderedmq.conditions import OptionCondition
from orderedmq.errors import OptionError
from orderedmq.tools.readable import number

if TYPE_CHECKING:
    from orderedmq.broker import Broker
    from orderedmq.tools.audit import Audit
    from orderedmq.tools.audit_sides import Side

app = commands("")


@command(app, "audit")
def compare(
    shell: Shell,
    expected: Annotated[
        str,
        typer.Argument(
            help="The messages that should have arrived: a topic, or the path of a table, with a / or a dot: Parquet, "
            "Delta, or the metadata file of an Iceberg table.",
            show_default=False,
            autocompletion=queue_names.topics,
        ),
    ],
    actual: Annotated[
        str,
        typer.Argument(
            help="The messages that did arrive: a topic or a table.", show_default=False, autocompletion=queue_names.topics
        ),
    ],
    id_field: Annotated[
        str | None,
        typer.Option(
            help="Field of JSON bodies that identifies a message; the rest of the body may differ (default: the whole body).",
            metavar="FIELD",
        ),
    ] = None,
    key_column: Annotated[
        str, typer.Option(help="For tables: the column of the sharding key.", metavar="COLUMN")
    ] = "sharding_key",
    id_column: Annotated[
        str | None,
        typer.Option(
            help="For tables: the column that identifies a message (default: body, or its --id-field).", metavar="COLUMN"
        ),
    ] = None,
    order_column: Annotated[
        str | None,
        typer.Option(
            help="For tables: the column of numbers or times that orders the rows of a key (default: queue_offset if it exists, else the "
            "order in the data).",
            metavar="COLUMN",
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            help="For topics: only messages stored at this time or later, in ISO-8601 (UTC unless it has a zone) or in ms since 1970.",
            metavar="TIME",
            show_default=False,
        ),
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="Maximum examples of each kind.")] = 5,
) -> None:
    """Compare two topics, or a topic and a table, per sharding key. The exit code is 1 if anything is lost, duplicated or out of order.

    A key is in order if the first occurrences of its messages in ACTUAL have the same order as in EXPECTED. Queues are not compared, so
    a message may be in another queue, and the topics may have different numbers of queues.

    Messages at the end of a queue of EXPECTED, after the last one that ACTUAL has, are "not yet" there, which also gives the exit code 1.
    In JSON, extra counts unexpected messages, and moved messages under another key.
    """
    # Imported here, because pyarrow's datasets import pandas, which would make --help half a second slower.
    from orderedmq.tools.audit import audit, require_duckdb
    from orderedmq.tools.audit_sides import TableSide, TopicSide, open_table

    require_duckdb("orderedmq audit")
    table: dict[str, Any] = {
        "key_column": key_column,
        "id_column": id_column,
        "order_column": order_column,
        "id_field": id_field,
    }

    begin = None if since is None else parse_moment(since, "--since")

    def side(name: str, broker: Broker) -> Side:
        if "/" in name or "." in name:
            return TableSide(name, open_table(Path(name)), **table)
        return TopicSide(broker.log, name, id_field, begin)

    tables = {"/", "."} & {*expected, *actual}
    if tables and since is not None:
        raise OptionError(
            OptionCondition.CONFLICT, "option --since is for topics, but one side is a table. Filter its rows before the audit"
        )
    if not tables and (id_column or order_column):
        raise OptionError(
            OptionCondition.CONFLICT, "options --id-column and --order-column are for tables, but both sides are topics"
        )
    with shell.broker() as broker:
        # Read the ends of ACTUAL first, so that a message that arrives between the two reads is "not yet" there, and never unexpected.
        second = side(actual, broker)
        first = side(expected, broker)
        with shell.progress("comparing", first.messages + second.messages) as bar:
            report = audit(first, second, examples=examples, progress=bar.advance)
    if shell.json:
        shell.emit(report.to_dict())
        if report.nothing_in_common:
            shell.note(report.verdict)
    else:
        show(shell, report)
    if not report.ok:
        raise typer.Exit(REFUSED)


def show(shell: Shell, audit: Audit) -> None:
    """Print the findings as tables and sentences."""
    sides = [vars(audit.expected) | {"side": "expected"}, vars(audit.actual) | {"side": "actual"}]
    shell.show(
        sides,
        (
            Column("side", "side"),
            Column("name", "name"),
            Column("messages", "messages", number, right=True),
            Column("keys", "keys", number, right=True),
            Column("split_keys", "keys in several queues", number, right=True),
        ),
    )
    shell.show(
        [finding._asdict() for finding in audit.findings],
        (Column("name", "finding"), Column("messages", "messages", number, right=True), Column("note", "")),
    )
    if audit.examples:
        shell.show(
            [vars(example) for example in audit.examples],
            (
                Column("kind", "finding", lambda kind: kind.replace("_", " ")),
                Column("side", "name"),
                Column("where", "where"),
                Column("key", "key"),
                Column("id", "message"),
            ),
            title="examples",
        )
    if audit.expected.repeated:
        shell.say(
            f"{audit.expected.repeated:,} messages of {audit.expected.name} equal an earlier message of their key. Each is matched only once."
        )
    shell.say(audit.verdict)
