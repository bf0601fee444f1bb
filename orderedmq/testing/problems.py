"""The error of a query that a test runs."""

from __future__ import annotations

from typing import ClassVar

from orderedmq.conditions import QueryTestCondition
from orderedmq.errors import ErrorOf


class QueryTestError(ErrorOf[QueryTestCondition]):
    """A query cannot be run or killed in the way that the test requires."""

    family: ClassVar[str] = "ORDEREDMQ_TESTING"
    conditions = QueryTestCondition
