"""Short, distinct names of owners and members. Pure.

A client id is unique and therefore long: a query's 32 digits, its host, its process and a random number. For each client, a table
shows the shortest name that no other client in the table has. JSON output has the whole id.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

#: ``<query>@<host>-<pid>-<random>``; over RocketMQ with the prefix ``orderedmq-``.
_OURS = re.compile(r"(?:orderedmq-)?(?P<query>.+)@(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{8}")
_DIGITS = re.compile(r"[0-9a-f]{32}")
_SHORT = 8


def owners_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the client ids in the column owner, with the names of their queries."""
    return {row["owner"]: row.get("query_name") for row in rows if row.get("owner") is not None}


def short_names(clients: Mapping[str, str | None]) -> dict[str, str]:
    """Return for each client the shortest name that no other client has.

    ``clients``: client ids with their query names, None if a name is unknown.
    """
    left = {client: _names(client, name) for client, name in clients.items()}
    while True:
        seen = Counter(names[0] for names in left.values())
        double = [names for names in left.values() if seen[names[0]] > 1 and len(names) > 1]
        if not double:
            return {client: names[0] for client, names in left.items()}
        for names in double:
            del names[0]


def _names(client: str, name: str | None) -> list[str]:
    """Return the possible names of a client: the shortest first, its id last."""
    ours = _OURS.fullmatch(client)
    if ours is None:
        # The id of a consumer in Java is <ip>@<pid>#<time>.
        return [*([name] if name else []), *([client.partition("#")[0]] if "#" in client else []), client]
    query = name or (ours["query"][:_SHORT] if _DIGITS.fullmatch(ours["query"]) else ours["query"])
    return [query, f"{query}-{ours['pid']}", f"{query}@{ours['host']}-{ours['pid']}", client]
