"""Does a backward of our own pay on Hopper? python3 benchmarks/hopper_backward.py

An experiment, not yet run on a GPU and not in use: cuDNN's backward beside that of hopper_backward_kernel.py, in which
beta costs an addition, in bf16 at the shapes of the paper's students. First kernels alone, then forward + backward of
affine attention with either, over plain cuDNN. A result that differs from the one in use by more than 16 bits explain
is not timed.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn.core import fused, hopper
from affine_attn.core.accuracy import Shape
from affine_attn.core.call import Call, checked_call
from affine_attn.core.engines import stock
from affine_attn.core.epilogue import AttentionBackward
from affine_attn.core.gpu import cdiv
from affine_attn.core.ops import Gradients, Output
from affine_attn.measure import side_by_side
from benchmarks.other_gradients import AFFINE, run
from benchmarks.steps import inputs_of

# Queries at a time, and by head_dim: slots of the ring, and whether dq comes a block late.
QUERIES = 64
STAGES, LATE = {64: 3, 128: 2}, {64: True, 128: False}


def gradients(call: Call, dy: Tensor, output: Output, attention_backward: AttentionBackward) -> Gradients:
    """As :func:`fused.gradients`, for calls with alpha and beta alone that :mod:`hopper` has done the forward of."""
    dy = dy if fused._is_dense(dy) else dy.contiguous()
    fused._negate_rows(call, fused.plan_of(call), dy)
    rows = fused._RowGradients(call, dy, output.saved_out, output)
    rows.launch()  # does more than is needed: what dv wants is computed below
    _, dalpha, dbeta, _ = rows.results()
    assert call.alpha is not None
    is_negative = call.alpha < 0
    delta, beta = (torch.where(is_negative, -x, x).float() for x in (dalpha, call.beta))
    dq, dk, dv = backward(call, dy, output.saved_lse, delta, beta)
    fused._negate_rows(call, fused.plan_of(call), dy)
    return dq, dk, dv, None, dalpha, dbeta, None


def backward(call: Call, dy: Tensor, lse: Tensor, delta: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; ``lse`` and ``beta`` are those of rows whose dy has the sign of alpha, delta is <dy, o>."""
    acc = new_dq(call)
    dk, dv = torch.empty_like(call.k), torch.empty_like(call.v)
    launch(call, dy, lse, delta, beta, acc, dk, dv)
    return scaled_dq(call, acc), dk, dv


def new_dq(call: Call) -> Tensor:
    batch, heads, length, head_dim = call.q.shape
    shape = (batch, heads, cdiv(length, QUERIES) * QUERIES, head_dim)
    return torch.zeros(shape, dtype=torch.float32, device=call.q.device)


def launch(
    call: Call, dy: Tensor, lse: Tensor, delta: Tensor, beta: Tensor | None, acc: Tensor, dk: Tensor, dv: Tensor
) -> None:
    batch, heads, length, head_dim = call.q.shape
    kv_heads, module = call.k.shape[1], _module()
    keys, half = module.N.value, module.HALF.value
    module.hopper_backward_kernel[(batch * kv_heads * cdiv(length, keys),)](
        hopper._descriptor(call.q, QUERIES), hopper._descriptor(call.k, keys), hopper._descriptor(call.v, keys),
        hopper._descriptor(dy, QUERIES), hopper._descriptor(dk, half), hopper._descriptor(dv, half),
        lse, delta.contiguous(), fused.contiguous_rows(beta), acc, batch, kv_heads, length,
        call.scale * math.log2(math.e), call.scale,
        GROUP=heads // kv_heads, M=QUERIES, D=head_dim, STAGES=STAGES[head_dim], HAS_BETA=beta is not None,
        LATE=LATE[head_dim], num_warps=4,
    )  # fmt: skip


def scaled_dq(call: Call, acc: Tensor) -> Tensor:
    length = call.q.shape[2]
    scale = torch.full((1, 1, length), call.scale, dtype=torch.float32, device=acc.device)
    return fused.scale_rows(acc[:, :, :length], scale, torch.empty_like(call.q))


def _module() -> Any:
    """Imported late: it needs Triton."""
    from benchmarks import hopper_backward_kernel

    return hopper_backward_kernel


def alone(shape: Shape, rounds: int) -> Iterator[str]:
    device = torch.device("cuda")
    call = checked_call(**inputs_of(AFFINE, shape, device))
    o, lse = stock.forward(call.q, call.k, call.v, call.scale, causal=True, window=None)
    dy, dk, dv, acc = torch.randn_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v), new_dq(call)
    delta, lse = (dy.float() * o.float()).sum(-1), lse.contiguous()
    ours_alone = functools.partial(launch, call, dy, lse, delta)
    parts: dict[str, Callable[[], object]] = {
        "cuDNN": lambda: stock.backward(
            dy, call.q, call.k, call.v, o, lse, call.scale, causal=True, window=None
        ),
        "ours, main kernel, no beta": lambda: ours_alone(None, acc, dk, dv),
        "ours, main kernel": lambda: ours_alone(call.beta, acc, dk, dv),
        "ours, dq set to 0": lambda: new_dq(call),
        "ours, dq to 16 bits": lambda: scaled_dq(call, acc),
    }  # fmt: skip
    for what, timing in side_by_side(parts, "cuDNN", device, rounds).items():
        yield f"{what:26} {timing.p50 * 1e3:8.1f} us {timing.ratio:8.4f} of cuDNN"


if __name__ == "__main__":
    run(__doc__, gradients, alone)
