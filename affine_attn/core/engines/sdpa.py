"""Engine ``sdpa``: PyTorch's own fused attention, plus the row-wise epilogue, as one differentiable operator.

A stock kernel returns (o, z); stages 2 to 4 follow as an epilogue. The backward hands the stock backward the
sink-adjusted (o', z'), so dq and dk are exact although the kernel knows nothing of sinks, gates or alpha.

Which aten operator runs (its *kernel*) depends on the machine: cuDNN or flash on CUDA, flash-for-CPU on the CPU.
"""

from types import ModuleType

import torch
from torch import Tensor

from affine_attn.core import epilogue, fused
from affine_attn.core.call import Call
from affine_attn.core.engines import stock
from affine_attn.core.ops import Gradients, Output, register
from affine_attn.core.quarantine import quarantined, quarantined_backward
from affine_attn.core.reference import row_dtype
from affine_attn.core.spec import LogN

DESCRIPTION = "PyTorch's fused attention with a row-wise epilogue"


def why_not(call: Call) -> str | None:
    if call.logit is not None and not isinstance(call.logit, LogN):
        return f"a stock kernel cannot compute the {type(call.logit).__name__} logit (it depends on i-j)"
    for name in call.mask.tensors:
        return f"a stock kernel has no mask.{name}"
    if call.mask.window is not None and call.beta is not None:
        return "the sum of windowed values needs another engine"
    return stock.why_not(call.q, call.k, call.mask.causal, call.mask.window)


def forward(call: Call) -> Output:
    o, z = stock.forward(_row_scaled(call), call.k, call.v, call.scale, call.mask.causal, call.mask.window)
    output = _stages(call).finish(call, _like_q(o, call), z.contiguous())
    return output._replace(y=_like_q(output.y, call))


def backward(call: Call, dy: Tensor, output: Output) -> Gradients:
    def attention_backward(do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return stock.backward(
            do, _row_scaled(call), call.k, call.v, o, lse, call.scale, call.mask.causal, call.mask.window
        )

    dq, *rest = _stages(call).gradients(call, dy, output, attention_backward)
    if isinstance(call.logit, LogN):
        dq = (dq * _row_scale(call)).to(call.q.dtype)
    return dq, *rest


def _stages(call: Call) -> ModuleType:
    """Where stages 2 to 4 run: fused kernels, or torch."""
    return epilogue if fused.why_not(call) else fused


def _row_scaled(call: Call) -> Tensor:
    """LogN is a factor per row, so it moves into q."""
    return (call.q * _row_scale(call)).to(call.q.dtype) if isinstance(call.logit, LogN) else call.q


def _row_scale(call: Call) -> Tensor:
    return LogN.row_scale(call.count(), row_dtype(call.q))[..., None]


def _like_q(x: Tensor, call: Call) -> Tensor:
    """x in q's dense layout, as the fake promises; a no-op for what the stock kernels return in that layout."""
    if x.stride() == call.q.stride():
        return x
    y = torch.empty_like(call.q)
    return x if x.stride() == y.stride() else y.copy_(x)


def fake(call: Call) -> Output:
    y = torch.empty_like(call.q)
    z = torch.empty(call.q.shape[:3], dtype=row_dtype(call.q), device=call.q.device)
    is_plain = call.alpha is None and call.beta is None and call.gate is None
    return Output(y, y.new_empty(0) if is_plain else torch.empty_like(y), z, _stages(call).fake_sums(call))


_LOOK_ON = ("cpu",)
run = register("sdpa", quarantined(forward, _LOOK_ON), quarantined_backward(forward, backward, _LOOK_ON), fake)
