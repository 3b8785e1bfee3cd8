"""The definition of correctness: the attention family as it is written on paper.

    s_ij = logit(scale * q_i.k_j)                  stage 1  logit
    p_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink))  stage 2  sink
    w_ij = alpha_i * p_ij + beta_i                 stage 3  affine, on visible keys only
    y_i  = gate_i * sum_j w_ij v_j                 stage 4  gate

Dense, any dtype, any device, differentiable by autograd. Every engine is tested against it in float64.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from affine_attn.core.call import Call

DESCRIPTION = "dense torch: the definition of correctness"


def why_not(call: Call) -> str | None:
    return None


def run(call: Call, matmul: torch.dtype | None = None) -> Tensor:
    """y [B, H, Tq, D]; ``matmul`` lowers the precision of the two products (the yardstick of the tolerance rule)."""
    return run_with_weights(call, matmul)[0]


def run_with_weights(call: Call, matmul: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """y, and the weights w [B, H, Tq, Tk] it is made of: zero on invisible keys, in the precision of row statistics."""
    everything = slice(0, call.tq), slice(0, call.tk)
    visible = call.visible(*everything)
    call, poisoned = isolate(call, visible.any(-1), lambda bad: visible.to(bad.dtype) @ bad)
    s = scores(call, call.k, visible, *everything, matmul=matmul)
    p, _ = probabilities(s, sink_rows(call, everything[0]))
    w = weights(p, visible, call.alpha, call.beta)
    y = grouped_matmul(w, call.v.to(w.dtype), matmul)
    if call.gate is not None:
        y = call.gate.to(y.dtype) * y
    return _Poison.apply(y, poisoned).to(call.q.dtype), w


class _Poison(torch.autograd.Function):
    """NaN where a row sees a bad entry; a loss that reads one of these gets NaN gradients, any other none of them."""

    # So that torch.func takes it, for gradients of single samples say.
    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, poisoned: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return y.masked_fill(poisoned, float("nan"))

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    # torch declares *grad_outputs and documents naming them, as here.
    @staticmethod
    def backward(ctx, dy: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (poisoned,) = ctx.saved_tensors
        return dy.masked_fill(poisoned & (dy != 0), float("nan")), None

    @staticmethod
    def jvp(ctx, dy: Tensor, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        (poisoned,) = ctx.saved_tensors
        return dy.masked_fill(poisoned, float("nan"))


class _Zeroed(torch.autograd.Function):
    """x with zeros at the bad entries, and the gradient of what it became: NaN where a loss reads one of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.masked_fill(bad, 0.0)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    # torch declares *grad_outputs and documents naming them, as here.
    @staticmethod
    def backward(ctx, dx: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return dx, None

    @staticmethod
    def jvp(ctx, dx: Tensor, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        return dx.clone()


def scores(
    call: Call, k: Tensor, visible: Tensor, rows: slice, keys: slice, matmul: torch.dtype | None = None
) -> Tensor:
    """Stage 1 for a block of rows and keys: s [B, H, rows, keys], -inf on invisible keys."""
    dtype = row_dtype(call.q)
    s = call.scale * grouped_matmul(call.q[:, :, rows].to(dtype), k[:, :, keys].to(dtype).mT, matmul)
    factor, offset = coefficients(call, rows, keys)
    s = s if factor is None else factor * s
    s = s if offset is None else s + offset
    return s.masked_fill(~visible, float("-inf"))


def coefficients(call: Call, rows: slice, keys: slice) -> tuple[Tensor | None, Tensor | None]:
    """Factor and offset of the logit stage on a block, broadcastable to [B, H, rows, keys]."""
    if call.logit is None:
        return None, None
    p = call.mask.positions(call.tq, call.tk, call.q.device)[:, None, rows, None]
    j = torch.arange(call.tk, device=call.q.device)[keys]
    head = torch.arange(call.heads, device=call.q.device)[:, None, None]
    return call.logit.coefficients((p - j).to(row_dtype(call.q)), call.count()[..., rows, None], head, call.heads)


def probabilities(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Stage 2: p [B, H, rows, keys] and the sink's own probability [B, H, rows, 1]."""
    pivot = s.detach().amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), float("-inf"))
    if sink is not None:
        sink = sink[..., None]
        pivot = torch.maximum(pivot, sink.detach())
    # A row without keys and without a sink has no maximum; any finite pivot gives it p = 0 and finite gradients.
    pivot = torch.where(pivot == float("-inf"), 0.0, pivot)
    e = torch.exp(s - pivot)
    total = e.sum(-1, keepdim=True)
    if sink is None:
        return e / torch.where(total == 0, 1.0, total), None
    # A sink of +inf is its own pivot: inf - inf would be NaN where it takes everything.
    e_sink = torch.exp(torch.where(torch.isposinf(sink), 0.0, sink - pivot))
    total = total + e_sink
    total = torch.where(total == 0, 1.0, total)
    return e / total, e_sink / total


def weights(p: Tensor, visible: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Tensor:
    """Stage 3: alpha * p + beta on visible keys."""
    if alpha is not None:
        p = alpha.to(p.dtype)[..., None] * p
    return p if beta is None else p + torch.where(visible, beta.to(p.dtype)[..., None], 0.0)


def grouped_matmul(x: Tensor, m: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [B, H, T, n] @ m [B, Hkv, n, d], query head h with kv head h // (H / Hkv), without copying m."""
    rows = x.unflatten(1, (m.shape[1], -1)).flatten(2, 3)
    with own_precision(x):
        product = rows @ m if dtype is None else (rows.to(dtype) @ m.to(dtype)).to(x.dtype)
    return product.unflatten(2, (x.shape[1] // m.shape[1], x.shape[2])).flatten(1, 2)


def own_precision(x: Tensor) -> AbstractContextManager:
    """For products in the precision of what is multiplied: autocast would round scores and weights to 16 bits."""
    # Tensors without numbers know no autocast.
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def isolate(call: Call, sees_any: Tensor, visible_sum: Callable[[Tensor], Tensor]) -> tuple[Call, Tensor]:
    """The call with non-finite entries zeroed, and what must be NaN because of one, bool [B, H, Tq, D].

    That is what sees one, or is of a query that has one and sees any key (sees_any, bool [B or 1, 1, Tq]). A plain
    product would spread an inf to rows that cannot see it, and from a query to keys that it cannot see: 0 * inf is NaN.
    """
    bad_q, bad_k = (~x.isfinite().all(-1, keepdim=True) for x in (call.q, call.k))
    bad_v = ~call.v.isfinite()
    seen = visible_sum((bad_k | bad_v).float()) > 0
    poisoned = seen.repeat_interleave(call.heads // call.k.shape[1], dim=1) | (bad_q & sees_any[..., None])
    q, k, v = _Zeroed.apply(call.q, bad_q), call.k.masked_fill(bad_k, 0.0), call.v.masked_fill(bad_v, 0.0)
    return replace(call, q=q, k=k, v=v), poisoned


def row_dtype(x: Tensor) -> torch.dtype:
    """Row statistics are at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rows_of(x: Tensor | None, rows: slice) -> Tensor | None:
    """A block of rows of a stage input [B, H, Tq, ...]."""
    return None if x is None else x[:, :, rows]


def sink_rows(call: Call, rows: slice) -> Tensor | None:
    """The sink of a block of rows, broadcastable to [B, H, rows], in the precision of row statistics."""
    if call.sink is None:
        return None
    sink = torch.as_tensor(call.sink, dtype=row_dtype(call.q), device=call.q.device)
    return sink if sink.ndim == 0 else sink[:, None] if sink.ndim == 1 else sink[:, :, rows]
