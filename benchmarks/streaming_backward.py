"""Are the gradients that affine attention adds faster in one pass? python3 benchmarks/streaming_backward.py

An experiment on Hopper, not yet run on a GPU and not in use: the kernels of core/fused.py beside the one kernel of
streaming_backward_kernel.py, in bf16 at the shapes of the paper's students. Alone, in per cent of a copy of the bytes
that must move; and as part of forward + backward, over plain cuDNN. A result that differs from that of core/fused.py by
more than 16 bits explain is not timed.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn.core import fused, hopper
from affine_attn.core.accuracy import Shape
from affine_attn.core.call import Call
from affine_attn.core.epilogue import AttentionBackward
from affine_attn.core.gpu import cdiv, multiprocessors
from affine_attn.core.ops import Gradients, Output
from affine_attn.measure import side_by_side
from benchmarks.cases import Case
from benchmarks.other_gradients import instead, run
from benchmarks.steps import ceilings, prepare

# Programs on a multiprocessor and slots of the ring, by head_dim: as many as shared memory holds.
PROGRAMS, STAGES = {64: 2, 128: 1}, {64: 3, 128: 3}
# Query heads of a group with which two programs still fit.
MOST_HEADS = 4


def registers(head_dim: int) -> dict[str, int]:
    """The option that lets two programs of eight warps share the registers of a multiprocessor."""
    return {"maxnreg": 128} if PROGRAMS[head_dim] > 1 else {}


def gradients(call: Call, dy: Tensor, output: Output, attention_backward: AttentionBackward) -> Gradients:
    """As :func:`fused.gradients`, for calls with alpha and beta alone that :mod:`hopper` has done the forward of."""
    dy = dy if fused._is_dense(dy) else dy.contiguous()
    fused._negate_rows(call, fused.plan_of(call), dy)
    dq, dk, dv = attention_backward(dy, output.saved_out, output.saved_lse)
    return dq, dk, dv, None, *add_gradients(call, dy, output, dv), None


def add_gradients(call: Call, dy: Tensor, output: Output, dv: Tensor) -> tuple[Tensor, Tensor]:
    """dalpha and dbeta; adds to dv what beta gives it, and restores the negated rows of dy."""
    batch, heads, length, head_dim = call.q.shape
    kv_heads, plan, module = call.k.shape[1], fused.plan_of(call), _module()
    segments = cdiv(length, module.L.value)
    shape = (batch * kv_heads, segments + cdiv(segments, module.BLOCK.value), head_dim)
    totals = torch.full(shape, module.ABSENT.value, dtype=torch.int32, device=dy.device)
    dalpha, dbeta = (torch.empty(call.q.shape[:3], dtype=torch.float32, device=dy.device) for _ in range(2))
    if PROGRAMS[head_dim] > 1 and heads // kv_heads > MOST_HEADS:
        # Programs wait for each other: those that found no room would be waited for for ever.
        raise ValueError(f"groups of {heads // kv_heads} heads leave no room for {PROGRAMS[head_dim]} programs")
    items = batch * kv_heads * segments
    programs = min(items, PROGRAMS[head_dim] * multiprocessors(dy.device))
    module.streaming_backward_kernel[(programs,)](
        *(_descriptor(x, module.L.value, module.C.value) for x in (dy, output.saved_out, call.v, dv)),
        fused.contiguous_rows(call.alpha), fused.contiguous_rows(call.beta), output.saved_sums, dalpha, dbeta, totals,
        dy, *fused.strides(dy), items, segments, kv_heads, length,
        GROUP=heads // kv_heads, PANELS=head_dim // module.C.value, STAGES=STAGES[head_dim], SAVED=plan.tile.tokens,
        num_warps=4, **registers(head_dim),
    )  # fmt: skip
    return dalpha.to(call.alpha.dtype), dbeta.to(call.beta.dtype)


def _module() -> Any:
    """Imported late: it needs Triton."""
    from benchmarks import streaming_backward_kernel

    return streaming_backward_kernel


def _descriptor(x: Tensor, rows: int, columns: int) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = hopper._shared_layout(rows, columns, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, columns], layout)


def alone(shape: Shape, rounds: int) -> Iterator[str]:
    device = torch.device("cuda")
    copy = ceilings(device)["copy bandwidth"]
    step = prepare(Case("affine, backward", "gradients", "affine"), shape, "epilogue", device)
    functions = {"copy": copy.run, "in use": step.run, "one pass": instead(gradients, step.run)}
    timings = side_by_side(functions, "copy", device, rounds)
    bytes_per_ms = (copy.moved or 0) / timings.pop("copy").p50
    for what, timing in timings.items():
        share = (step.moved or 0) / bytes_per_ms / timing.p50
        yield f"{what:26} {timing.p50 * 1e3:8.1f} us {share:8.1%} of a copy"


if __name__ == "__main__":
    run(__doc__, gradients, alone)
