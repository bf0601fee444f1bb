"""Classifies errors by the kind of failed request: a wrong request, a missing thing, or a refusal."""

from __future__ import annotations

from typing import Literal

from orderedmq.conditions import GroupCondition, StoreCondition, TopicCondition
from orderedmq.errors import GroupError, OptionError, OrderedMQError, StoreError, TopicError

Kind = Literal["usage", "missing", "refused"]


def kind_of(error: OrderedMQError) -> Kind:
    """Return "usage" if the request itself is wrong, "missing" if it names something that does not exist, else "refused"."""
    misnamed = (TopicCondition.BAD_NAME, TopicCondition.RESERVED, TopicCondition.AMBIGUOUS, GroupCondition.BAD_NAME)
    if isinstance(error, OptionError) or error.sub in misnamed:
        return "usage"
    absent = (StoreCondition.MISSING, TopicCondition.MISSING, TopicCondition.NO_SUCH_QUEUE, GroupCondition.MISSING)
    # The class is also checked, because members of different enumerations are equal if their texts are equal.
    if isinstance(error, StoreError | TopicError | GroupError) and error.sub in absent:
        return "missing"
    return "refused"
