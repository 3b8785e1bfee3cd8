"""Keeps a NaN or inf away from rows that cannot see it, and shows it in those that do.

Kernels multiply masked tiles by zero weights, and 0 * inf is NaN: one bad future value would spoil the rows before it.
And on the CPU the stock kernel takes some rows without a largest score for rows without keys: a NaN query gives 0.
Engines look for non-finite entries, in values by way of their results, which in decoding are small beside them; if
there are any, they run on zeroed copies, and NaN is put exactly where a row has or sees a bad entry. Looking needs the
values on the host: on CUDA, where that would stall the stream, only an engine looks that is slow anyway.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from affine_attn.core.blocks import sums_in_blocks
from affine_attn.core.call import Call, Gradients, Output


def all_finite(*tensors: Tensor) -> bool:
    """Look at the sums: one is finite only if all its terms are. Overflow merely sends a call down the careful path."""
    for x in tensors:
        # 16 bits overflow early. In float64 torch would first copy the tensor, at several times the cost of reading it.
        total = x.sum(dtype=torch.float32) if x.dtype == torch.float16 else x.sum()
        if not math.isfinite(total.item()):
            return False
    return True


def is_clean(call: Call) -> bool:
    return all_finite(call.q, call.k, call.v)


def careful(call: Call, forward: Callable[[Call], Output]) -> Output:
    """Run ``forward`` on zeroed copies, and put NaN where a row has or sees what was not finite."""
    clean, poisoned = _clean(call)
    output = forward(clean)
    return output._replace(y=output.y.masked_fill(poisoned, float("nan")), is_clean=False)


def careful_gradients(
    call: Call, dy: Tensor, forward: Callable[[Call], Output], backward: Callable[[Call, Output], Gradients]
) -> Gradients:
    """Run ``backward`` on zeroed copies; all is NaN if the loss reads one."""
    clean, poisoned = _clean(call)
    # The saved output holds the NaN; the clean one is cheaper to recompute than to keep.
    gradients = backward(clean, forward(clean))
    if not (dy.masked_fill(~poisoned, 0.0) != 0).any():
        return gradients
    spoilt = (None if gradient is None else torch.full_like(gradient, float("nan")) for gradient in gradients)
    return Gradients._make(spoilt)


def _clean(call: Call) -> tuple[Call, Tensor]:
    return isolate(call, call.count() > 0, lambda bad: sums_in_blocks(bad, call))


def isolate(call: Call, sees_any: Tensor, visible_sum: Callable[[Tensor], Tensor]) -> tuple[Call, Tensor]:
    """The call with non-finite entries zeroed, and what must be NaN because of one, bool [B, H, Tq, Dv].

    That is what sees one, or is of a query that has one and sees any key (sees_any, bool [B or 1, 1 or H, Tq]). A plain
    matmul would spread an inf to rows that cannot see it, and from a query to keys that it cannot see: 0 * inf is NaN.
    """
    bad_q, bad_k = (~x.isfinite().all(-1, keepdim=True) for x in (call.q, call.k))
    bad_v = ~call.v.isfinite()
    seen = visible_sum((bad_k | bad_v).float()) > 0
    poisoned = seen.repeat_interleave(call.heads // seen.shape[1], dim=1) | (bad_q & sees_any[..., None])
    q, k, v = _Zeroed.apply(call.q, bad_q), call.k.masked_fill(bad_k, 0.0), call.v.masked_fill(bad_v, 0.0)
    return replace(call, q=q, k=k, v=v), poisoned


def poison(y: Tensor, poisoned: Tensor) -> Tensor:
    """Return y with NaN where ``poisoned``; differentiable."""
    return _Poison.apply(y, poisoned)


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
