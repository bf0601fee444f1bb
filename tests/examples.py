"""How many examples a property takes."""

from __future__ import annotations

from hypothesis import settings


def examples(times: float) -> settings:
    """Return settings whose number of examples is the default one, which depends on the tier (conftest.py), multiplied by ``times``."""
    return settings(max_examples=round(settings().max_examples * times))
