"""Engine ``sdpa``: PyTorch's own fused attention, plus the row-wise epilogue, as one differentiable operator.

Which aten operator runs (its *kernel*) depends on the machine: cuDNN or flash on CUDA, flash-for-CPU on the CPU. On
Hopper the sm90 kernels do some forwards and backwards whole (kernels/sm90).
"""

from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.spec import LogN
from affine_attn.engines import aten
from affine_attn.engines.compose import compose, why_not_beta
from affine_attn.kernels.sm90 import backward, forward

DESCRIPTION = "PyTorch's fused attention with a row-wise epilogue"


def why_not(call: Call) -> str | None:
    if call.logit is not None and not isinstance(call.logit, LogN):
        return f"a stock kernel has plain scores, or those of LogN, not the {type(call.logit).__name__} logit"
    for name in call.mask.tensors:
        return f"a stock kernel has no mask.{name}"
    return why_not_beta(call) or aten.why_not(call.q, call.k, call.mask.causal, call.mask.window)


def _attend(call: Call) -> tuple[Tensor, Tensor]:
    return aten.forward(call.q, call.k, call.v, call.scale, call.mask.causal, call.mask.window)


def _attend_backward(call: Call, do: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return aten.backward(do, call.q, call.k, call.v, out, lse, call.scale, call.mask.causal, call.mask.window)


run = compose("sdpa", _attend, _attend_backward, ("cpu",), fused_forward=forward, fused_backward=backward)
