"""What comes from outside, of callers, of recipes, of files: numbers, and names that are almost known."""

import difflib
import math
from collections.abc import Iterable
from typing import Any


def is_count(value: Any, least: int = 0, most: float = math.inf) -> bool:
    """Return True for an integer from ``least`` to ``most``; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """End a sentence about an unknown name: with the known one that is most like it, if any is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""
