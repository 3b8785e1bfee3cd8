"""What numbers from outside are: those of callers, of recipes, of files."""

import math
from typing import Any


def is_count(value: Any, least: int = 0, most: float = math.inf) -> bool:
    """Return True for an integer from ``least`` to ``most``; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
