"""Statistics of every layer and head of a model, and their plot: ``python examples/statistics_plot.py [FOLDER] [PNG]``.

FOLDER is an AffineAttn model, such as one of ``runs/demo``; without it a small random one stands in. No matrix of all
queries and keys exists at any time, so long sequences cost no more memory than a forward.
"""

import sys

import torch
from matplotlib.figure import Figure

from affine_attn.models import AffineAttnForCausalLM, preset
from affine_attn.models.collect import LayerStatistics, collect_statistics

SHOWN = ("row_sum", "first_token", "entropy")


def statistics(model: AffineAttnForCausalLM, sequences: int = 2, length: int = 128) -> list[LayerStatistics]:
    ids = torch.randint(0, model.config.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(0))
    return collect_statistics(model, [{"input_ids": ids}])


def plot(layers: list[LayerStatistics], path: str) -> None:
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(SHOWN)), SHOWN, strict=True):
        image = axis.imshow(torch.stack([getattr(layer, name) for layer in layers]).numpy(), aspect="auto")
        axis.set(title=name.replace("_", " "), xlabel="head", ylabel="layer")
        figure.colorbar(image, ax=axis)
    figure.savefig(path)


if __name__ == "__main__":
    folder, path = (*sys.argv[1:], None, None)[:2]
    torch.manual_seed(0)
    model = AffineAttnForCausalLM.from_pretrained(folder) if folder else AffineAttnForCausalLM(preset("nano", "affine"))
    layers = statistics(model)
    plot(layers, path or "statistics.png")
    for number, layer in enumerate(layers):
        print(f"layer {number}: row sum {layer.row_sum.mean():.3f}, alpha {layer.alpha.mean():.3f}")
