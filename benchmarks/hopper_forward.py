"""What the forward of our own saves on Hopper: python3 benchmarks/hopper_forward.py

Beside each other: cuDNN's plain forward, the same with its epilogue, and attention and epilogue in one kernel. A result
that differs from the second's by more than 16 bits explain is not timed.
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
from affine_attn.core import fused, hopper
from affine_attn.core.accuracy import Shape, random_inputs
from affine_attn.core.call import Call, checked_call
from affine_attn.core.engines import stock
from affine_attn.core.ops import Output
from affine_attn.measure import side_by_side

# Heads, heads of k and v, head_dim: of 0.5B, 1B and 3B.
HEADS = ((16, 16, 64), (32, 8, 64), (24, 8, 128))
# As many tokens in all, but for the last: one sequence.
BATCHES = {256: 128, 512: 64, 1024: 32, 2048: 16, 8192: 4, 32768: 1, 4096: 1}


def plain(call: Call) -> tuple[Tensor, Tensor]:
    return stock.forward(call.q, call.k, call.v, call.scale, causal=True, window=None)


def with_epilogue(call: Call) -> Output:
    return fused.finish(call, functools.partial(plain, call))


def wrong(call: Call) -> str | None:
    """What differs by more than 16 bits explain, or None."""
    for name, found, right in zip(Output._fields, hopper.forward(call), with_epilogue(call), strict=True):
        # An alpha of exactly 0 makes its log-sum-exp infinite.
        if found.shape != right.shape or not torch.equal(found.isfinite(), right.isfinite()):
            return f"{name} has another shape or other infinities"
        found, right = found[right.isfinite()].float(), right[right.isfinite()].float()
        if right.numel() and (error := float((found - right).abs().max())) > 0.02 * (1 + float(right.abs().max())):
            return f"{name} differs by {error:.3g}"
    return None


def rows(shape: Shape, variant: str, rounds: int) -> Iterator[str]:
    device = torch.device("cuda")
    call = checked_call(**random_inputs(VARIANTS[variant].spec, shape, torch.bfloat16, device))
    label = f"{shape.batch:4} x {shape.tq:5}, heads {shape.heads}/{shape.kv_heads}, {shape.head_dim} {variant:10}"
    if (reason := hopper.why_not(call) or wrong(call)) is not None:
        yield f"{label} not timed: {reason}"
        return
    functions: dict[str, Callable[[], object]] = {
        "cuDNN, plain": functools.partial(plain, call),
        "cuDNN, epilogue": functools.partial(with_epilogue, call),
        "one kernel": functools.partial(hopper.forward, call),
    }
    for name, timing in side_by_side(functions, "cuDNN, plain", device, rounds, round_ms=5.0).items():
        yield f"{label} {name:16} {timing.p50:8.4f} ms {timing.ratio:8.4f} of plain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=["sink", "affine"], choices=VARIANTS)
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
