"""Losses of 20 training steps of every variant; ``python -m tests.support.golden_losses`` writes golden_losses.json.

A refactor keeps them. A change that means to move them writes the file again, and its commit says why.
"""

import json
import tempfile
from pathlib import Path

import torch

from affine_attn.core.variants import VARIANTS
from affine_attn.distill.run import run
from tests.support.tiny_runs import counting_shards, metrics, tiny

FILE = Path(__file__).with_suffix(".json")


def losses(variant: str, data: Path, output: Path) -> list[float]:
    """Return losses with a teacher and a share of the hard loss, so that every part of the loss counts."""
    chosen = tiny(data, attention=variant, steps=20, decay_steps=5, teacher="nano", loss="forward_kl", hard=0.5)
    run(chosen, output)
    return [row["loss"] for row in metrics(output)]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = counting_shards(Path(folder))
        found = {variant: losses(variant, data, Path(folder) / variant) for variant in VARIANTS}
    rows = (f'"{variant}": {json.dumps([round(loss, 7) for loss in each])}' for variant, each in found.items())
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
