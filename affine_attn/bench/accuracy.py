"""How far an engine is from the truth, and how far it may be: the one tolerance rule of tests, checks and benchmarks.

The truth is the reference in float64 on the same (already rounded) inputs. The yardstick is the reference with its two
matrix products in the inputs' precision. An engine's y and every gradient must satisfy, in the maximum and RMS norm,

    error(engine) <= 2 * error(yardstick) + rounding
    rounding = (2 eps + eps_rows * (largest logit + largest weight gradient)) * (1 + norm(truth))

eps is the inputs' precision, eps_rows that of the row statistics. A weight exp(s - z) inherits the absolute rounding of
s and z as a relative error; a score's gradient is p times a difference of weight gradients <dy, v>, which may cancel.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.api import attention
from affine_attn.core import reference
from affine_attn.core.call import checked_call
from affine_attn.core.masks import Mask
from affine_attn.core.spec import AttentionSpec
from affine_attn.core.stages import grouped_matmul, scores


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: q [batch, heads, tq, head_dim], k [batch, kv_heads, tk, head_dim]; v has value_dim channels."""

    batch: int
    heads: int
    kv_heads: int
    tq: int
    tk: int
    head_dim: int
    value_dim: int | None = None  # head_dim by default

    def __str__(self) -> str:
        width = f"D{self.head_dim}" if self.value_dim is None else f"D{self.head_dim}-V{self.value_dim}"
        return f"B{self.batch}-H{self.heads}-K{self.kv_heads}-T{self.tq}x{self.tk}-{width}"


def random_inputs(
    spec: AttentionSpec,
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    largest_logit: float | None = None,
    bias: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Arguments of ``attention`` for a spec: q, k, v, the stage inputs it needs, and its logit.

    Learned sinks run from -8 to 8; alpha includes exact 0 and 1. ``largest_logit`` rescales q to reach such logits. A
    bias of the given shape hides a key here and there.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64, device=device)

    s = shape
    rows = (s.batch, s.heads, s.tq)
    value_dim = s.head_dim if s.value_dim is None else s.value_dim
    tensors = {"q": randn(*rows, s.head_dim)}
    for name, width in (("k", s.head_dim), ("v", value_dim)):
        tensors[name] = randn(s.batch, s.kv_heads, s.tk, width)
    if largest_logit is not None:
        logits = grouped_matmul(tensors["q"], tensors["k"].mT) * s.head_dim**-0.5
        tensors["q"] *= largest_logit / logits.abs().max()
    fp32 = {}
    if spec.sink == "learned":
        fp32["sink"] = torch.linspace(-8, 8, s.heads, dtype=torch.float64, device=device)
    if spec.affine is not None:
        fp32["alpha"] = spec.affine.alpha_range * (0.5 + 0.4 * randn(*rows)).clamp(0, 1)
        if spec.affine.beta:
            fp32["beta"] = (0.5 - fp32["alpha"]) / max(s.tk, 1)
    if spec.gate is not None:
        is_by_channel = spec.projected_gate is not None and spec.projected_gate.per_channel
        tensors["gate"] = torch.sigmoid(randn(*rows, value_dim if is_by_channel else 1))
    if bias is not None:
        fp32["bias"] = (x := randn(*bias)).masked_fill(x > 2, -math.inf)
    row_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    inputs: dict[str, Any] = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    inputs |= {name: tensor.to(device, row_dtype) for name, tensor in fp32.items()}
    if isinstance(spec.sink, float):
        inputs["sink"] = spec.sink
    inputs["logit"] = spec.logit
    return inputs


class Deviation(NamedTuple):
    """Largest error of one tensor, relative to 1 + its largest exact entry, and what the rule allows of that."""

    name: str
    error: float
    allowed: float
    within: bool


def value_and_gradients(
    function, inputs: dict[str, Any], dy: Tensor | None, constants: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """y and the gradient of every tensor input but constants, by name, for a function of keyword arguments; y alone
    without dy."""
    if dy is None:
        return {"y": function(**inputs)}
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and name not in constants}
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    y = function(**{**inputs, **leaves})
    gradients = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    return {"y": y.detach(), **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def deviations(
    impl: str,
    inputs: dict[str, Any],
    mask: Mask = Mask(),
    scale: float | None = None,
    seed: int = 1,
    function=None,
    gradients: bool = True,
    constants: tuple[str, ...] = (),
) -> list[Deviation]:
    """Compare ``attention(..., impl=impl)`` (or ``function``) with the float64 reference: y and every gradient, but
    those of constants."""
    q, v = inputs["q"], inputs["v"]
    dy = torch.randn((*q.shape[:3], v.shape[3]), generator=torch.Generator().manual_seed(seed)).to(q)
    engine = function or (lambda **x: attention(**x, mask=mask, scale=scale, impl=impl))
    exact_inputs = {name: x.double() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    incoming = dy if gradients else None
    exact = value_and_gradients(_reference(mask, scale), exact_inputs, dy.double() if gradients else None, constants)
    yardstick = value_and_gradients(_reference(mask, scale, matmul=q.dtype), inputs, incoming, constants)
    measured = value_and_gradients(engine, inputs, incoming, constants)
    rounding = _rounding(exact_inputs, dy.double(), q.dtype, mask, scale)
    return [_deviation(name, measured[name], yardstick[name], truth, rounding) for name, truth in exact.items()]


def _rounding(exact_inputs: dict[str, Any], dy: Tensor, dtype: torch.dtype, mask: Mask, scale: float | None) -> float:
    call = checked_call(**exact_inputs, mask=mask, scale=scale)
    everything = slice(0, call.tq), slice(0, call.tk)
    visible = call.visible(*everything)
    s = scores(call, call.k, visible, *everything)
    if not s.numel():
        return 2 * torch.finfo(dtype).eps
    dw = grouped_matmul(dy, call.v.mT)
    largest = sum(float(torch.where(visible & x.isfinite(), x, 0.0).abs().max()) for x in (s, dw))
    rows = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return 2 * torch.finfo(dtype).eps + rows * largest


def _deviation(name: str, x: Tensor, yardstick: Tensor, truth: Tensor, rounding: float) -> Deviation:
    if not x.numel():
        return Deviation(name, 0.0, 0.0, True)
    error, expected = x.double() - truth, yardstick.double() - truth
    ratios: list[tuple[float, float]] = []
    for norm in (lambda t: t.square().mean().sqrt(), lambda t: t.abs().max()):
        size = 1 + norm(truth)
        ratios.append((float(norm(error) / size), float(2 * norm(expected) / size) + rounding))
    return Deviation(name, *ratios[-1], all(error <= allowed for error, allowed in ratios))


def _reference(mask: Mask, scale: float | None, matmul: torch.dtype | None = None):
    return lambda **inputs: reference.run(checked_call(**inputs, mask=mask, scale=scale), matmul=matmul)
