"""How many examples a property takes."""

from __future__ import annotations

from hypothesis import settings


def examples(times: float) -> settings:
    """Return settings with ``times`` as many examples as properties take by default, which depends on the tier (conftest.py)."""
    return settings(max_examples=round(settings().max_examples * times))
