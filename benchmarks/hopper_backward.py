"""What the backward of our own saves on Hopper: python3 benchmarks/hopper_backward.py

Beside each other: cuDNN's plain backward, the same with the gradients of the stages, and the backward of our own, also
by its parts. A result that differs from the second's by more than 16 bits explain is not timed.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn import VARIANTS
from affine_attn.core import fused, hopper_backward
from affine_attn.core.accuracy import Shape, random_inputs
from affine_attn.core.call import Call, checked_call
from affine_attn.core.engines import stock
from affine_attn.core.ops import Gradients, Output
from affine_attn.measure import side_by_side
from benchmarks.hopper_forward import BATCHES, HEADS, plain, with_epilogue


def plain_backward(call: Call, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return stock.backward(do, call.q, call.k, call.v, o, lse, call.scale, causal=True, window=None)


def in_stages(call: Call, dy: Tensor, output: Output) -> Gradients:
    return fused.gradients(call, dy, output, functools.partial(plain_backward, call))


def wrong(call: Call, dy: Tensor, output: Output) -> str | None:
    """What differs by more than 16 bits explain, or None."""
    before = dy.clone()
    names = ("dq", "dk", "dv", "dsink", "dalpha", "dbeta", "dgate")
    for name, a, b in zip(
        names, hopper_backward.backward(call, dy, output), in_stages(call, dy, output), strict=True
    ):  # fmt: skip
        if b is not None and not (error := float((a.float() - b.float()).norm() / b.float().norm())) < 5e-3:
            return f"{name} differs by {error:.3g}"
    return None if torch.equal(dy, before) else "dy is changed"


def parts(call: Call, dy: Tensor, output: Output) -> dict[str, Callable[[], object]]:
    """What the backward of our own launches, one by one."""
    rows = hopper_backward.RowGradients(call, dy, output)
    rows.launch()
    sums, dk, dv = hopper_backward.new_sums(call), torch.empty_like(call.k), torch.empty_like(call.v)
    return {
        "ours: rows": rows.launch,
        "ours: dq = 0": functools.partial(hopper_backward.new_sums, call),
        "ours: attention": functools.partial(hopper_backward.launch, call, output.saved_lse, rows, sums, dk, dv),
        "ours: dq rounded": functools.partial(hopper_backward.rounded, call, sums),
    }


def rows(shape: Shape, variant: str, rounds: int) -> Iterator[str]:
    device = torch.device("cuda")
    call = checked_call(**random_inputs(VARIANTS[variant].spec, shape, torch.bfloat16, device))
    label = f"{shape.batch:4} x {shape.tq:5}, heads {shape.heads}/{shape.kv_heads}, {shape.head_dim} {variant:12}"
    output, (o, lse), dy = with_epilogue(call), plain(call), torch.randn_like(call.q)
    if (reason := hopper_backward.why_not(call) or wrong(call, dy, output)) is not None:
        yield f"{label} not timed: {reason}"
        return
    functions: dict[str, Callable[[], object]] = {
        "cuDNN, plain": functools.partial(plain_backward, call, dy, o, lse.contiguous()),
        "cuDNN, stages": functools.partial(in_stages, call, dy, output),
        "ours": functools.partial(hopper_backward.backward, call, dy, output),
        **parts(call, dy, output),
    }
    for name, timing in side_by_side(functions, "cuDNN, plain", device, rounds, round_ms=5.0).items():
        yield f"{label} {name:16} {timing.p50:8.4f} ms {timing.ratio:8.4f} of plain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=["softmax", "affine"], choices=VARIANTS)
    parser.add_argument("--lengths", nargs="*", type=int, default=list(BATCHES), choices=BATCHES)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("this kernel is for GPUs of compute capability 9.0: H100, H200, GH200")
    for heads, kv_heads, head_dim in HEADS:
        for length in options.lengths:
            shape = Shape(BATCHES[length], heads, kv_heads, length, length, head_dim)
            for variant in options.variants:
                for line in rows(shape, variant, options.rounds):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
