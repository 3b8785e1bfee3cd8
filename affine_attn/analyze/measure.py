"""One pass over the layers of a model and the sequences of a text. Memory is linear in the length of a sequence."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from affine_attn.analyze.accumulate import Correlation, Histogram
from affine_attn.analyze.weights import signed_statistics, window_weights
from affine_attn.api import attention_stats
from affine_attn.core.call import checked_call
from affine_attn.core.stats import AttentionStats
from affine_attn.errors import NotFinite
from affine_attn.models.collect import LayerStatistics, attention_layers, collect_statistics, evaluating
from affine_attn.models.modeling import AffineAttnForCausalLM
from affine_attn.nn.alpha import alpha_gates
from affine_attn.nn.layer import AttentionLayer, observe

BINS = 64
# Row sums of softmax differ from one by rounding alone: no histogram of them is narrower than this.
NARROWEST = 0.02
OF_ALPHA = ("alpha", "alpha_saturated", "alpha_ma", "alpha_entropy")
METRICS = (
    "entropy", "entropy_clipped", "entropy_absolute", "first_token", "row_sum", "sink_mass", "negative", "mean_logit",
    "max_logit", *OF_ALPHA,
)  # fmt: skip


def measure(
    model: AffineAttnForCausalLM,
    sequences: Sequence[Mapping[str, Tensor]],
    map_layers: Sequence[int],
    window: slice,
    done: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Any], np.ndarray]:
    """The entries ``heads``, ``layers``, ``scalars``, ``row_sums`` and ``histograms`` of an analysis, and its maps.

    sequences: arguments of the decoder, [1, T] each, without padding. map_layers, window: whose weights are kept, of
    the first sequence. done: called after each sequence.
    """
    layers = range(model.config.num_hidden_layers)
    ranges = _ranges(model, sequences)
    measured = [_Layer(window if number in map_layers else None, ranges) for number in layers]

    def batches() -> Iterator[Mapping[str, Tensor]]:
        for batch in _on_device(model, sequences):
            yield batch
            done()

    collected = collect_statistics(model, batches(), visit=lambda number, *seen: measured[number].add(*seen))
    found = [mine.per_head(means) for mine, means in zip(measured, collected, strict=True)]
    for number, of_layer in enumerate(found):
        if not all(math.isfinite(value) for values in of_layer.values() for value in values or () if value is not None):
            raise NotFinite(
                f"the model's attention is not finite on this text, from layer {number} on: has it diverged, or is it "
                "too large for this --dtype?"
            )
    names = [name for name in METRICS if any(of_layer[name] is not None for of_layer in found)]
    heads = {name: [of_layer[name] for of_layer in found] for name in names}
    of_layers = {name: [_reduced(name, values) for values in heads[name]] for name in names}
    content = {
        "heads": heads,
        "layers": of_layers,
        "scalars": {name: _reduced(name, of_layers[name]) for name in names},
        "row_sums": _row_sums(np.stack([torch.cat(layer.row_sums).numpy() for layer in measured])),
        "histograms": _histograms(measured),
    }
    return content, np.stack([layer.map for layer in measured if layer.map is not None])


class _Layer:
    """What is added up over sequences beyond the means of ``LayerStatistics``."""

    def __init__(self, window: slice | None, ranges: dict[str, tuple[float, float]]):
        self.window = window
        self.rows = self.pairs = 0
        self.sums: dict[str, Tensor] = {}
        self.row_sums: list[Tensor] = []
        self.histograms = {name: Histogram(*limits, BINS) for name, limits in ranges.items()}
        self.correlation = Correlation()
        self.map: np.ndarray | None = None

    def add(self, arguments: dict[str, Any], stats: AttentionStats) -> None:
        call = checked_call(**arguments)
        count = call.count()
        if self.window is not None and self.map is None:
            self.map = window_weights(call, self.window)[0].float().cpu().numpy()
        if call.alpha is None:
            # No weight is negative, and renormalising takes the sink out: what is left is softmax.
            plain = {name: arguments[name] for name in ("q", "k", "mask", "logit")}
            entropy = (stats if call.sink is None else attention_stats(**plain)).entropy
            new = {"entropy_clipped": entropy, "entropy_absolute": entropy, "negative": torch.zeros_like(entropy)}
        else:
            new = signed_statistics(call)._asdict()
            self._add_alpha(call.alpha, call.beta, count, stats.entropy)
        for name, value in new.items():
            self.sums[name] = self.sums.get(name, 0) + value.sum((0, 2), dtype=torch.float64).cpu()
        self.rows += call.q.shape[0] * call.tq
        self.pairs += int(count.expand(call.q.shape[0], 1, call.tq).sum())
        self.row_sums.append(stats.row_sum.mean(1).flatten().cpu())

    def _add_alpha(self, alpha: Tensor, beta: Tensor | None, count: Tensor, entropy: Tensor) -> None:
        self.correlation.add(alpha, entropy)
        self.histograms["alpha"].add(alpha)
        if beta is not None:
            self.histograms["beta"].add(beta)
            self.histograms["beta_sum"].add(count * beta)

    def per_head(self, means: LayerStatistics) -> dict[str, list[float | None] | None]:
        counts = {name: self.pairs if name == "negative" else self.rows for name in self.sums}
        own: dict[str, Any] = {name: (value / counts[name]).tolist() for name, value in self.sums.items()}
        own["alpha_entropy"] = None if means.alpha is None else self.correlation.result()
        collected = {name: getattr(means, name) for name in METRICS if name not in own}
        return own | {name: None if value is None else value.tolist() for name, value in collected.items()}


def _on_device(model: AffineAttnForCausalLM, sequences: Sequence[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    for sequence in sequences:
        yield {name: tensor.to(model.device) for name, tensor in sequence.items()}


def _ranges(model: AffineAttnForCausalLM, sequences: Sequence[Mapping[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """Return bounds of values: alpha lies between its ends, N beta = alpha_ma - alpha, and a row has n <= N keys."""
    gates = alpha_gates(model)
    if not gates:
        return {}
    bottom, top = min(gate.affine.ends[0] for gate in gates), max(gate.affine.ends[1] for gate in gates)
    if math.isinf(bottom) or math.isinf(top):
        bottom, top = _reached(model, sequences)
    averages = torch.cat([gate.alpha_ma.float().cpu() for gate in gates])
    low, high = min(float(averages.min()) - top, 0.0), max(float(averages.max()) - bottom, 0.0)
    length = sequences[0]["input_ids"].shape[1]
    least = min(length if gate.affine.length == "keys" else max(gate.affine.length, 1) for gate in gates)
    ranges = {"alpha": (bottom, top)}
    if any(gate.affine.beta for gate in gates):
        ranges |= {"beta": (low / least, high / least), "beta_sum": (low, high)}
    return ranges


@torch.no_grad()
def _reached(model: AffineAttnForCausalLM, sequences: Sequence[Mapping[str, Tensor]]) -> tuple[float, float]:
    """The least and the largest alpha on these sequences, which are read a time more for it: phi has no end."""
    low, high = math.inf, -math.inf

    def see(layer: AttentionLayer, call: dict[str, Any]) -> None:
        nonlocal low, high
        if call["alpha"] is not None:
            low, high = min(low, float(call["alpha"].min())), max(high, float(call["alpha"].max()))

    with evaluating(model), observe(attention_layers(model), see):
        for batch in _on_device(model, sequences):
            model.base_model(**batch, use_cache=False)
    return low, max(high, low + NARROWEST)


def _reduced(name: str, values: Sequence[float | None] | None) -> float | None:
    there = [value for value in values or () if value is not None]
    if not there:
        return None
    return max(there) if name == "max_logit" else sum(there) / len(there)


def _row_sums(values: np.ndarray) -> dict[str, Any]:
    """values [L, queries]."""
    middle, half = (values.max() + values.min()) / 2, max(values.max() - values.min(), NARROWEST) / 2
    edges = np.linspace(middle - half, middle + half, BINS + 1)
    # Rounding in the values' own precision must not leave one outside.
    inside = values.astype(np.float64).clip(edges[0], edges[-1])
    counts = np.stack([np.histogram(layer, edges)[0] for layer in inside])
    return {
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "mean": inside.mean(1).tolist(),
        "median": np.median(inside, axis=1).tolist(),
        "all": {"counts": counts.sum(0).tolist(), "mean": float(inside.mean()), "median": float(np.median(inside))},
    }


def _histograms(measured: list[_Layer]) -> dict[str, Any]:
    histograms: dict[str, Any] = {}
    for name, first in measured[0].histograms.items():
        counts = [layer.histograms[name].counts for layer in measured]
        histograms[name] = {
            "edges": np.linspace(first.low, first.high, first.bins + 1).tolist(),
            "counts": [None if layer is None else layer.tolist() for layer in counts],
        }
    return histograms
