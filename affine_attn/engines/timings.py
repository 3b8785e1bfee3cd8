"""How long kernels took in training, by what a call has, over the plain attention of FlashAttention-4.

timings.json has the numbers of one H200; ``python3 benchmarks/fa4.py --timings`` writes it from what was measured.
"""

import json
from pathlib import Path
from typing import NamedTuple

# Forward and backward, by their names in plan.KERNELS.
Pair = tuple[str, str]
# By the stages, which of them read and write the most.
SINK, AFFINE, GATED = "sink", "affine", "affine_gated"
# Whether heads have keys and values of their own.
OWN, SHARED = "own", "shared"
CAUSAL, WINDOW, DOCUMENTS = "causal", "window", "documents"


class Point(NamedTuple):
    """What was timed."""

    mask: str
    head_dim: int
    tokens: int
    stages: str
    heads: str


PATH = Path(__file__).with_suffix(".json")


def read(text: str) -> dict[Point, dict[Pair, float]]:
    return {
        Point(*(entry[field] for field in Point._fields)): {
            (forward, backward): time for forward, backward, time in entry["times"]
        }
        for entry in json.loads(text)
    }


def written(times: dict[Point, dict[Pair, float]]) -> str:
    """Return the text that :func:`read` reads, a line for each point."""
    entries = ({**point._asdict(), "times": [[*pair, t] for pair, t in times[point].items()]} for point in times)
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"


TIMES = read(PATH.read_text())
# Numbers of tokens that were timed under a plain causal mask, and head dims.
LENGTHS = tuple(sorted({point.tokens for point in TIMES if point.mask == CAUSAL}))
HEAD_DIMS = tuple(sorted({point.head_dim for point in TIMES if point.mask == CAUSAL}))


def of(point: Point) -> dict[Pair, float]:
    """Return the times of the nearest point: of most tokens that are no more, or the fewest, and of such heads."""
    found = [p for p in TIMES if p.mask == point.mask and p.stages == point.stages]
    nearest = min(abs(p.head_dim - point.head_dim) for p in found)
    tokens = sorted({p.tokens for p in found if abs(p.head_dim - point.head_dim) == nearest})
    there = max((n for n in tokens if n <= point.tokens), default=tokens[0])
    found = [p for p in found if abs(p.head_dim - point.head_dim) == nearest and p.tokens == there]
    return TIMES[min(found, key=lambda p: p.heads != point.heads)]


def fastest(times: dict[Pair, float], has_fa4: bool) -> tuple[Pair, float] | None:
    """Return the pair that took least time, of those with FlashAttention-4 in them or of the others."""
    found = [(pair, time) for pair, time in times.items() if any("fa4" in kernel for kernel in pair) == has_fa4]
    return min(found, key=lambda entry: entry[1]) if found else None


def saved_by_fa4(mask: str, head_dim: int, tokens: int, stages: str, heads: str) -> float:
    """Return how much less time a point took with FlashAttention-4 than without, negative where it was more."""
    times = of(Point(mask, head_dim, tokens, stages, heads))
    with_it, without = fastest(times, True), fastest(times, False)
    return without[1] - with_it[1] if with_it is not None and without is not None else 0.0
