"""Engine ``sdpa``: PyTorch's own fused attention, plus the row-wise epilogue, as one differentiable operator.

Which aten operator runs depends on the machine: cuDNN or flash on CUDA; on the CPU flash-for-CPU, which does masks and
distance biases piece by piece, while logits with factors are matmuls in torch. On Hopper the sm90 kernels do some
forwards and backwards whole (kernels/sm90).
"""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.engines import aten, cpu_masks
from affine_attn.engines.compose import compose
from affine_attn.engines.plan import OF_ONE_WIDTH
from affine_attn.kernels.sm90 import backward, forward

_ON_CPU = {
    "cpu_masks": (cpu_masks.attend, cpu_masks.attend_backward),
    "cpu_scores": (cpu_masks.attend_with_factors, cpu_masks.attend_with_factors_backward),
}


def _attend(call: Call, kernel: str | None) -> tuple[Tensor, Tensor]:
    if call.q.shape[3] != call.v.shape[3] and kernel in OF_ONE_WIDTH:
        o, z = _attend(_in_one_width(call), kernel)
        return o[..., : call.value_dim].contiguous(), z
    if kernel in _ON_CPU:
        return _ON_CPU[kernel][0](call)
    return aten.forward(kernel, call.q, call.k, call.v, call.scale, call.mask.causal, call.mask.window)


def _attend_backward(
    call: Call, kernel: str | None, do: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if call.q.shape[3] != call.v.shape[3] and kernel in OF_ONE_WIDTH:
        wide = _in_one_width(call)
        do, out = (_widened(x, wide.value_dim) for x in (do, out))
        dq, dk, dv = _attend_backward(wide, kernel, do, out, lse)
        return dq[..., : call.q.shape[3]], dk[..., : call.q.shape[3]], dv[..., : call.value_dim]
    if kernel in _ON_CPU:
        return _ON_CPU[kernel][1](call, do, out, lse)
    m = call.mask
    return aten.backward(kernel, do, call.q, call.k, call.v, out, lse, call.scale, m.causal, m.window)


def _in_one_width(call: Call) -> Call:
    """Return the call with zeros as further channels of keys or values, which change no score and no other channel."""
    width = max(call.q.shape[3], call.value_dim)
    return replace(call, q=_widened(call.q, width), k=_widened(call.k, width), v=_widened(call.v, width))


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))


run = compose(
    "sdpa",
    _attend,
    _attend_backward,
    ("flash_for_cpu", *_ON_CPU),
    {"sm90": forward.forward},
    {"sm90": backward.backward},
)
