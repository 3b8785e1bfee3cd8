"""What the sm90 forward saves: python3 benchmarks/sm90_forward.py

Beside each other: cuDNN's plain forward, the same with its epilogue, and attention and epilogue in one kernel. A result
that differs from the second's by more than 16 bits explain is not timed.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn import VARIANTS
from affine_attn.bench.accuracy import Shape, random_inputs
from affine_attn.bench.timing import side_by_side
from affine_attn.core.call import Call, Output, checked_call
from affine_attn.engines import aten
from affine_attn.engines.needs import facts_of
from affine_attn.engines.plan import stock, why_not
from affine_attn.kernels.epilogue import launch as epilogue
from affine_attn.kernels.sm90 import forward as sm90_forward

# Heads, heads of k and v, head_dim: of 0.5B, 1B and 3B.
HEADS = ((16, 16, 64), (32, 8, 64), (24, 8, 128))
# As many tokens in all, but for the last: one sequence.
BATCHES = {256: 128, 512: 64, 1024: 32, 2048: 16, 8192: 4, 32768: 1, 4096: 1}


def plain(call: Call) -> tuple[Tensor, Tensor]:
    o, z = aten.forward(stock(facts_of(call)), call.q, call.k, call.v, call.scale, causal=True, window=None)
    return o, z.contiguous()


def with_epilogue(call: Call) -> Output:
    begun = epilogue.begin(call)
    return epilogue.apply_epilogue(call, *plain(call), begun)


def wrong(call: Call) -> str | None:
    """What differs by more than 16 bits explain, or None."""
    for name, found, right in zip(Output._fields, sm90_forward.forward(call), with_epilogue(call), strict=True):
        if not (isinstance(found, Tensor) and isinstance(right, Tensor)):
            if found is not right:
                return f"{name} is {found} for one of the two, {right} for the other"
            continue
        # An alpha of exactly 0 makes its log-sum-exp infinite.
        if found.shape != right.shape or not torch.equal(found.isfinite(), right.isfinite()):
            return f"{name} has another shape or other infinities"
        found, right = found[right.isfinite()].float(), right[right.isfinite()].float()
        if right.numel() and (error := float((found - right).abs().max())) > 0.02 * (1 + float(right.abs().max())):
            return f"{name} differs by {error:.3g}"
    return None


def functions(call: Call) -> dict[str, Callable[[], object]]:
    """What is timed, the first as the one that ratios refer to; an error that says why not."""
    if (reason := why_not("sm90 forward", call) or wrong(call)) is not None:
        raise ValueError(reason)
    return {
        "cuDNN, plain": functools.partial(plain, call),
        "cuDNN, epilogue": functools.partial(with_epilogue, call),
        "one kernel": functools.partial(sm90_forward.forward, call),
    }


def command(
    functions: Callable[[Call], dict[str, Callable[[], object]]], description: str, variants: list[str]
) -> None:
    """Times the functions of a call at all shapes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=variants, choices=VARIANTS)
    parser.add_argument("--lengths", nargs="*", type=int, default=list(BATCHES), choices=BATCHES)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("this kernel is for GPUs of compute capability 9.0: H100, H200, GH200")
    device = torch.device("cuda")
    for (heads, kv_heads, head_dim), length, variant in product(HEADS, options.lengths, options.variants):
        shape = Shape(BATCHES[length], heads, kv_heads, length, length, head_dim)
        label = f"{shape.batch:4} x {length:5}, heads {heads}/{kv_heads}, {head_dim} {variant:12}"
        call = checked_call(**random_inputs(VARIANTS[variant].spec, shape, torch.bfloat16, device))
        try:
            timed = functions(call)
        except ValueError as reason:
            print(f"{label} not timed: {reason}", flush=True)
            continue
        for name, timing in side_by_side(timed, next(iter(timed)), device, options.rounds, round_ms=5.0).items():
            print(f"{label} {name:27} {timing.p50:8.4f} ms {timing.ratio:8.4f} of plain", flush=True)


if __name__ == "__main__":
    command(functions, __doc__, ["sink", "affine"])
