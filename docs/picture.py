"""Draws docs/family.svg, the picture of the README: ``python -m docs.picture``.

The weights of one query are what attention returns for the identity as values, so the package draws itself.
"""

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from affine_attn import attention
from affine_attn.analyze.style import style
from affine_attn.figures.style import VARIANT_COLOURS

PICTURE = Path(__file__).parent / "family.svg"
KEYS = 12
# Title, arguments of attention: each changes what one query may do with the same scores.
PANELS = (
    ("softmax", "softmax: spends exactly one unit", {}),
    ("sink", "sink: may spend less", {"sink": 3.0}),
    ("affine", "affine: scales, and may subtract", {"alpha": 0.6, "beta": -0.03}),
)


def weights(**stages: float) -> torch.Tensor:
    """Return the weights of the last of 12 queries, whose scores are the same in every panel."""
    scores = torch.linspace(0, 5, KEYS).sin() * 1.2
    scores[0] = 3.2  # the first token takes what no other key should get
    q, k = torch.zeros(1, 1, 1, KEYS), torch.eye(KEYS)[None, None]
    q[0, 0, 0] = scores
    rows: dict[str, Any] = {name: torch.full((1, 1, 1), value) for name, value in stages.items()}
    return attention(q, k, torch.eye(KEYS)[None, None], scale=1.0, **rows)[0, 0, 0]


def draw(path: Path = PICTURE) -> None:
    with style():
        figure = Figure(figsize=(9, 2.3), layout="constrained")
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for axis, (name, title, stages) in zip(axes, PANELS, strict=True):
            w = weights(**stages)
            axis.bar(range(KEYS), w.tolist(), color=VARIANT_COLOURS[name])
            axis.axhline(0, color="#333333", linewidth=0.8)
            axis.set_title(title)
            axis.text(0.97, 0.9, f"sum {w.sum():.2f}", transform=axis.transAxes, ha="right", va="top")
            axis.set_xlabel("key")
        axes[0].set_ylabel("weight")
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw()
