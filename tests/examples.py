"""Sets the number of examples of a property test."""

from __future__ import annotations

from hypothesis import settings


def examples(times: float) -> settings:
    """Return settings with ``times`` as many examples as the default, which depends on the tier (conftest.py)."""
    return settings(max_examples=round(settings().max_examples * times))
