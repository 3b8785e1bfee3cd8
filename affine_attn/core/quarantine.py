"""Keeps a NaN or inf away from rows that cannot see it, and shows it in those that do.

Kernels multiply masked tiles by zero weights, and 0 * inf is NaN: one bad future value would spoil the rows before it.
And on the CPU the stock kernel takes some rows without a largest score for rows without keys: a NaN query gives 0.
These wrappers look for non-finite entries, run the engine on zeroed copies, and put NaN exactly where a row has or
sees a bad one. Looking needs the values on the host: on CUDA, where that would stall the stream, an engine is
wrapped only if it is slow anyway (``devices``).
"""

import torch
from torch import Tensor

from affine_attn.core.call import Backward, Call, Forward, Gradients, Output
from affine_attn.core.reference import isolate
from affine_attn.core.visible_sums import sums_in_blocks


def quarantined(forward: Forward, devices: tuple[str, ...]) -> Forward:
    def run(call: Call) -> Output:
        if call.q.device.type not in devices or _finite(call):
            return forward(call)
        clean, poisoned = _clean(call)
        output = forward(clean)
        return output._replace(y=output.y.masked_fill(poisoned, float("nan")))

    return run


def quarantined_backward(forward: Forward, backward: Backward, devices: tuple[str, ...]) -> Backward:
    def run(call: Call, dy: Tensor, output: Output) -> Gradients:
        if call.q.device.type not in devices or _finite(call):
            return backward(call, dy, output)
        clean, poisoned = _clean(call)
        # The saved output holds the NaN; the clean one is cheaper to recompute than to keep.
        gradients = backward(clean, dy, forward(clean))
        if not (dy.masked_fill(~poisoned, 0.0) != 0).any():
            return gradients
        # The loss reads a NaN.
        return tuple(None if gradient is None else torch.full_like(gradient, float("nan")) for gradient in gradients)

    return run


def _finite(call: Call) -> bool:
    # A sum is finite only if all its terms are (overflow merely sends a valid call down the careful path). Not in
    # float64: torch would first copy all keys and values, at several times the cost of decoding with them.
    dtype = torch.promote_types(call.k.dtype, torch.float32)
    return bool(torch.isfinite(call.q.sum(dtype=dtype) + call.k.sum(dtype=dtype) + call.v.sum(dtype=dtype)))


def _clean(call: Call) -> tuple[Call, Tensor]:
    return isolate(call, call.count() > 0, lambda bad: sums_in_blocks(bad, call))
