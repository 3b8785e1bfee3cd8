"""Pictures of how a model attends to a text, for notebooks: every function returns a matplotlib figure.

A model is an AffineAttn, Llama, Mistral or Qwen model or the folder of one; a text is a string, for which the tokenizer
is that beside the model's weights unless one is given, or input_ids. ``affine-attn analyze`` draws these and others of
many sequences.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from affine_attn.analyze.figures import HEAD_METRICS, MAP_TOKENS, Figure, attention_maps, head_metric
from affine_attn.analyze.measure import measure
from affine_attn.analyze.run import token_texts, variant_name
from affine_attn.analyze.style import new_figure, plain, style, token_labels
from affine_attn.checks import is_count, nearest
from affine_attn.errors import UserError
from affine_attn.models.collect import collect_statistics
from affine_attn.models.convert import convert
from affine_attn.models.load import load, tokenizer_of
from affine_attn.models.modeling import AffineAttnForCausalLM
from affine_attn.runs.analysis import Analysis


def attention_map(
    model: Any, text: str | Tensor | Sequence[int], layer: int | None = None, tokens: int = MAP_TOKENS,
    tokenizer: Any = None,
) -> Figure:  # fmt: skip
    """The weights of a layer, averaged over heads, among the first tokens of a text. Weights below zero are orange.

    layer: from 0; by default the eighth or, where there are fewer, the last.
    """
    chosen, ids, labels = _read(model, text, tokenizer)
    layers = chosen.config.num_hidden_layers
    if layer is not None and not is_count(layer, 0, layers - 1):
        raise UserError(f"plot: layer must be between 0 and {layers - 1}, got {layer!r}")
    if not is_count(tokens, 1):
        raise UserError(f"plot: tokens must be an integer >= 1, got {tokens!r}")
    with style():
        return attention_maps([_analysis(chosen, ids, labels, slice(0, min(tokens, len(labels))))], layer, tokens)


def heads(model: Any, text: str | Tensor | Sequence[int], metric: str = "row_sum", tokenizer: Any = None) -> Figure:
    """A number of every layer and head: row_sum, first_token, sink_mass, negative, alpha, alpha_saturated,
    alpha_entropy, as docs/metrics.md defines them."""
    if metric not in HEAD_METRICS:
        raise UserError(
            f"plot: metric must be one of {', '.join(HEAD_METRICS)}, got {metric!r}{nearest(metric, HEAD_METRICS)}"
        )
    analysis = _analysis(*_read(model, text, tokenizer))
    if metric not in analysis.content["heads"]:
        raise UserError(f"plot: there is no {metric} in this model: it has no alpha")
    with style():
        return head_metric([analysis], metric)


def alpha(model: Any, text: str | Tensor | Sequence[int], tokens: int = MAP_TOKENS, tokenizer: Any = None) -> Figure:
    """The alpha of every head at each of the first tokens of a text, the heads of a layer below each other."""
    chosen, ids, labels = _read(model, text, tokenizer)
    collected = [layer.query_alpha for layer in collect_statistics(chosen, ids, queries=True)]
    rows = {number: alphas[0][0, :, :tokens].numpy() for number, alphas in enumerate(collected) if alphas}
    if not rows:
        raise UserError("plot: there is no alpha in this model")
    count, shown = len(next(iter(rows.values()))), token_labels(labels[:tokens])
    with style():
        height = float(np.clip(0.14 * count * len(rows), 1.4, 7)) + 1
        figure, axes = new_figure(float(np.clip(0.2 * len(shown), 3, 10)) + 1.5, height)
        axis = axes[0, 0]
        image = axis.imshow(np.concatenate(list(rows.values())), aspect="auto", cmap="cividis", vmin=0)
        axis.grid(False)
        axis.set_xticks(range(len(shown)), shown, rotation=90, fontsize=7)
        axis.set_yticks([count * place + (count - 1) / 2 for place in range(len(rows))], [str(layer) for layer in rows])
        for place in range(1, len(rows)):
            axis.axhline(count * place - 0.5, color="white", linewidth=1)
        axis.set_ylabel("layer, its heads")
        axis.set_title(plain(_name(chosen)))
        figure.colorbar(image, ax=axis, label="α")
    return figure


def _read(model: Any, text: Any, tokenizer: Any) -> tuple[AffineAttnForCausalLM, Tensor, list[str]]:
    """The model with this package's attention, input_ids [1, T] on its device, and a label for each of them."""
    place = str(model) if isinstance(model, str | Path) else getattr(model.config, "name_or_path", "")
    network: Any = load(model) if isinstance(model, str | Path) else model
    if tokenizer is None and Path(place or "-").is_dir():
        tokenizer = tokenizer_of(place)
    if isinstance(text, str):
        if tokenizer is None:
            raise UserError("plot: the model has no tokenizer beside it: give tokenizer=..., or input_ids as the text")
        text = tokenizer(text).input_ids
    ids = torch.as_tensor(text).reshape(1, -1)
    if not ids.numel() or ids.is_floating_point():
        raise UserError("plot: the text has no tokens")
    if not isinstance(network, AffineAttnForCausalLM):
        network = convert(network, "softmax")
    return network, ids.to(network.device), token_texts(ids[0].tolist(), tokenizer)


def _name(model: AffineAttnForCausalLM) -> str:
    return _variant(model) or "attention of its own"


def _variant(model: AffineAttnForCausalLM) -> str | None:
    return variant_name([model.config.spec(layer) for layer in range(model.config.num_hidden_layers)])


def _analysis(model: AffineAttnForCausalLM, ids: Tensor, labels: list[str], window: slice = slice(0, 1)) -> Analysis:
    layers = list(range(model.config.num_hidden_layers))
    measured, maps = measure(model, [{"input_ids": ids}], layers, window)
    about = {"variant": _variant(model), "layers": len(layers), "heads": model.config.num_attention_heads}
    place = {"layers": layers, "start": window.start, "stop": window.stop, "tokens": labels[window]}
    return Analysis({"name": _name(model), "model": about, **measured, "map": place}, maps)
