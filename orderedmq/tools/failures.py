"""What kind of failure an error is for somebody who asked for something: wrongly asked, missing, or refused."""

from __future__ import annotations

from typing import Literal

from orderedmq.conditions import GroupCondition, StoreCondition, TopicCondition
from orderedmq.errors import GroupError, OptionError, OrderedMQError, StoreError, TopicError

Kind = Literal["usage", "missing", "refused"]


def kind_of(error: OrderedMQError) -> Kind:
    """Return whether the request itself is wrong, whether what it names is not there, or whether it was refused or failed."""
    misnamed = (TopicCondition.BAD_NAME, TopicCondition.RESERVED, TopicCondition.AMBIGUOUS, GroupCondition.BAD_NAME)
    if isinstance(error, OptionError) or error.sub in misnamed:
        return "usage"
    absent = (StoreCondition.MISSING, TopicCondition.MISSING, TopicCondition.NO_SUCH_QUEUE, GroupCondition.MISSING)
    # The class is asked for, too: members of two enumerations are equal if their texts are.
    if isinstance(error, StoreError | TopicError | GroupError) and error.sub in absent:
        return "missing"
    return "refused"
