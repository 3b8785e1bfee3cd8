"""Engine ``sdpa``: PyTorch's own fused attention, plus the row-wise epilogue, as one differentiable operator.

A stock kernel returns (o, z); stages 2 to 4 follow as an epilogue. The backward hands the stock backward the
sink-adjusted (o', z'), so dq and dk are exact although the kernel knows nothing of sinks, gates or alpha.

Which aten operator runs (its *kernel*) depends on the machine: cuDNN or flash on CUDA, flash-for-CPU on the CPU.
"""

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.engines import stock
from affine_attn.core.epilogue import epilogue, epilogue_backward, rescale_by_sink
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
    o, z = rescale_by_sink(o, z, call.sink)
    if _is_plain(call):
        y = _like_q(o, call)
        return Output(y, y.new_empty(0), z.contiguous())
    return Output(epilogue(o, call), _like_q(o, call), z.contiguous())


def backward(call: Call, dy: Tensor, output: Output) -> Gradients:
    o = output.y if _is_plain(call) else output.saved_out
    rows = epilogue_backward(dy, o, output.saved_lse, call)
    q = _row_scaled(call)
    dq, dk, dv = stock.backward(
        rows.do, q, call.k, call.v, o, output.saved_lse, call.scale, call.mask.causal, call.mask.window
    )
    if rows.dv is not None:
        dv = (dv + rows.dv).to(call.v.dtype)
    if isinstance(call.logit, LogN):
        dq = (dq * _row_scale(call)).to(call.q.dtype)
    return dq, dk, dv, rows.dsink, rows.dalpha, rows.dbeta, rows.dgate


def _is_plain(call: Call) -> bool:
    """y is the (sink-adjusted) attention output itself."""
    return call.alpha is None and call.beta is None and call.gate is None


def _row_scaled(call: Call) -> Tensor:
    """LogN is a factor per row, so it moves into q."""
    return (call.q * _row_scale(call)).to(call.q.dtype) if isinstance(call.logit, LogN) else call.q


def _row_scale(call: Call) -> Tensor:
    return LogN.row_scale(call.count(), row_dtype(call.q))[..., None]


def _like_q(x: Tensor, call: Call) -> Tensor:
    """x in q's dense layout, as the fake promises; a no-op for what the stock kernels return in that layout."""
    y = torch.empty_like(call.q, device="meta")
    return x if x.stride() == y.stride() else torch.empty_like(call.q).copy_(x)


def fake(call: Call) -> Output:
    y = torch.empty_like(call.q)
    z = torch.empty(call.q.shape[:3], dtype=row_dtype(call.q), device=call.q.device)
    return Output(y, y.new_empty(0) if _is_plain(call) else torch.empty_like(y), z)


_LOOK_ON = ("cpu",)
run = register("sdpa", quarantined(forward, _LOOK_ON), quarantined_backward(forward, backward, _LOOK_ON), fake)
