"""The error of a test's query."""

from __future__ import annotations

from typing import ClassVar

from orderedmq.conditions import QueryTestCondition
from orderedmq.errors import ErrorOf


class QueryTestError(ErrorOf[QueryTestCondition]):
    """A query cannot be run by a test as it asked."""

    family: ClassVar[str] = "ORDEREDMQ_TESTING"
    conditions = QueryTestCondition
