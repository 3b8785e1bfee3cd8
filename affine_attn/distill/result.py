"""``result.json``: a finished run in a few numbers, all of them from its ``metrics.jsonl``."""

from pathlib import Path
from statistics import median
from typing import Any

from affine_attn.distill.metrics import METRICS, JsonLines
from affine_attn.runs.series import gradient_statistics

RESULT = "result.json"
_SPEEDS = ("tokens_per_second", "mfu")
_MEMORY = ("peak_memory_bytes", "max_rss_bytes")


def result(folder: Path) -> dict[str, Any]:
    """The last step's line (its losses, and those on held-out text), with medians of speeds and the most memory over
    all steps, and ``gradients``: ``gradient_statistics`` of the first steps."""
    rows = JsonLines(folder / METRICS).rows()
    summary = dict(rows[-1])
    for names, reduced in ((_SPEEDS, median), (_MEMORY, max)):
        summary |= {name: reduced(row[name] for row in rows) for name in names if name in summary}
    return summary | {"gradients": gradient_statistics([row["grad_norm"] for row in rows])}
