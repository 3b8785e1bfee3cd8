"""Engine ``sdpa``: PyTorch's own fused attention, plus the row-wise epilogue, as one differentiable operator.

Which aten operator runs depends on the machine: cuDNN or flash on CUDA, flash-for-CPU on the CPU, where it does masks
and distance biases piece by piece. On Hopper the sm90
kernels do some forwards and backwards whole (kernels/sm90).
"""

from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.engines import aten, cpu_masks
from affine_attn.engines.compose import compose
from affine_attn.kernels.sm90 import backward, forward


def _attend(call: Call, kernel: str | None) -> tuple[Tensor, Tensor]:
    if kernel == "cpu_masks":
        return cpu_masks.attend(call)
    return aten.forward(kernel, call.q, call.k, call.v, call.scale, call.mask.causal, call.mask.window)


def _attend_backward(
    call: Call, kernel: str | None, do: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if kernel == "cpu_masks":
        return cpu_masks.attend_backward(call, do, out, lse)
    m = call.mask
    return aten.backward(kernel, do, call.q, call.k, call.v, out, lse, call.scale, m.causal, m.window)


run = compose(
    "sdpa",
    _attend,
    _attend_backward,
    ("flash_for_cpu", "cpu_masks"),
    {"sm90": forward.forward},
    {"sm90": backward.backward},
)
