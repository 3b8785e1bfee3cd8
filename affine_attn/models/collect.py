"""``collect_statistics``: what ``attention_stats`` says of every layer and head of a model, on given sequences."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from affine_attn.api import attention_stats
from affine_attn.core.stats import AttentionStats
from affine_attn.errors import UserError
from affine_attn.nn.layer import AttentionLayer, observe

_ROWS = ("entropy", "first_token", "row_sum", "sink_mass")


@dataclass
class LayerStatistics:
    """Statistics of one layer, a number for each head [H], fp32 on the CPU; those of alpha are None without alpha."""

    entropy: Tensor  # means over queries; see AttentionStats
    first_token: Tensor
    row_sum: Tensor
    sink_mass: Tensor
    mean_logit: Tensor  # over visible pairs
    max_logit: Tensor
    alpha: Tensor | None = None  # mean over tokens
    alpha_saturated: Tensor | None = None  # share of tokens with alpha at an end of its range
    alpha_ma: Tensor | None = None  # the moving average as it stands
    # One entry per batch, [B, H, T] on the CPU, where they were asked for.
    queries: list[AttentionStats] = field(default_factory=list)
    query_alpha: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def collect_statistics(
    model: Any,
    batches: Tensor | Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]],
    queries: bool = False,
    forward: Callable[[Any], Any] | None = None,
    visit: Callable[[int, dict[str, Any], AttentionStats], None] | None = None,
) -> list[LayerStatistics]:
    """Run the decoder of ``model`` on the batches and return the statistics of its layers, in order.

    model: an AffineAttn model, as it stands: its weights, moving averages, modes and random numbers stay untouched.
    batches: input_ids [B, T] or [T]; or arguments of the decoder, of one batch or of several. Without padding, whose
        queries would count.
    queries: keep the numbers of every single query too. Memory is linear in the length with and without them.
    forward: what is done with a batch, where it is not the decoder that is called.
    visit: is shown each layer's number, its arguments of ``attention`` and their statistics, for more of the same kind.
    """
    layers = attention_layers(model)
    sums = {layer: _Sums(layer, queries) for layer in layers}
    numbers = {layer: number for number, layer in enumerate(layers)}

    def see(layer: AttentionLayer, call: dict[str, Any]) -> None:
        stats = sums[layer].add(call)
        if visit is not None:
            visit(numbers[layer], call, stats)

    with evaluating(model), observe(layers, see):
        for batch in _batches(batches):
            if forward is None:
                model.base_model(**batch, use_cache=False)
            else:
                forward(batch)
    return [entry.result() for entry in sums.values()]


def _batches(given: Any) -> Iterable[Mapping[str, Tensor]]:
    if isinstance(given, Tensor):
        given = {"input_ids": given.view(-1, given.shape[-1])}
    return [given] if isinstance(given, Mapping) else given


def attention_layers(model: Any) -> list[AttentionLayer]:
    """Those of the model, in order."""
    layers = [module for module in model.modules() if isinstance(module, AttentionLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no attention of affine_attn: see affine_attn.models.convert")
    return layers


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model into eval mode; afterwards every module has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class _Sums:
    """Sums of one layer over batches, in float64."""

    def __init__(self, layer: AttentionLayer, keep: bool):
        self.layer, self.keep = layer, keep
        self.sums: dict[str, Tensor] = {}
        self.rows, self.pairs = 0, torch.zeros((), dtype=torch.int64)
        self.largest: Tensor | None = None
        self.queries: list[AttentionStats] = []
        self.query_alpha: list[Tensor] = []

    def add(self, call: dict[str, Any]) -> AttentionStats:
        q, k, mask, alpha = call["q"], call["k"], call["mask"], call["alpha"]
        if mask.padding is not None:
            raise UserError("statistics count every query: give batches without padding, such as one text at a time")
        stats = attention_stats(**{name: value for name, value in call.items() if name not in ("v", "gate")})
        # [B, 1], or [B, H] where heads see different pairs.
        pairs = mask.count(q.shape[2], k.shape[2], q.device).expand(q.shape[0], -1, q.shape[2]).sum(-1)
        new = {name: getattr(stats, name).sum((0, 2), dtype=torch.float64) for name in _ROWS}
        new["mean_logit"] = (stats.mean_logit.double() * pairs).sum(0)
        if alpha is not None:
            low, high = self.layer.alpha.affine.ends
            at_end = (alpha <= low) | (alpha >= high)
            new["alpha"], new["alpha_saturated"] = alpha.sum((0, 2), dtype=torch.float64), at_end.double().sum((0, 2))
        self.sums = {name: value + self.sums.get(name, 0) for name, value in new.items()}
        self.rows += q.shape[0] * q.shape[2]
        self.pairs = self.pairs + pairs.sum(0)
        largest = stats.max_logit.amax(0)
        self.largest = largest if self.largest is None else torch.maximum(largest, self.largest)
        if self.keep:
            self.queries.append(AttentionStats(*(value.cpu() for value in stats)))
            if alpha is not None:
                self.query_alpha.append(alpha.cpu())
        return stats

    def result(self) -> LayerStatistics:
        if self.largest is None:
            raise UserError("there are no batches to collect statistics from")
        counts = {name: self.pairs if name == "mean_logit" else self.rows for name in self.sums}
        means = {name: (value / counts[name]).float().cpu() for name, value in self.sums.items()}
        average = None if self.layer.alpha is None else self.layer.alpha.alpha_ma.float().cpu().clone()
        return LayerStatistics(
            **means,
            max_logit=self.largest.cpu(),
            alpha_ma=average,
            queries=self.queries,
            query_alpha=self.query_alpha,
        )
