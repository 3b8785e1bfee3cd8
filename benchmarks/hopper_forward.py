"""Would a forward of our own pay on Hopper? python3 benchmarks/hopper_forward.py 0.5B 1B

Affine attention is the stock forward and a pass over its output, which costs a tenth to a fifth more where heads are
small. A kernel that is as fast as the stock one could finish its rows while they are in registers: hopper_kernel.py is
such a kernel, timed here beside cuDNN's forward and the engine's affine forward, in several forms. A wrong one is not
timed. None is part of the package unless it wins.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn import VARIANTS, attention
from affine_attn.core import fused
from affine_attn.core.accuracy import random_inputs
from affine_attn.core.call import Call, checked_call
from affine_attn.core.engines import stock
from affine_attn.core.ops import Output
from affine_attn.measure import side_by_side
from benchmarks.cases import TRAINING_SHAPES
from benchmarks.hopper_kernel import forward_kernel


@dataclass(frozen=True)
class Form:
    """How the work is cut: ``groups`` of four warps with ``rows`` queries each, ``keys`` at a time, ``stages`` of them
    in flight, ``registers`` of a thread that attends; ``heads`` whose keys are read in turn, to stay in the cache."""

    groups: int = 2
    rows: int = 64
    keys: int = 128
    stages: int = 4
    registers: int = 240
    heads: int = 32
    turns: bool = False  # groups of warps issue their products in turn
    polynomial: bool = False

    def has_sums(self, head_dim: int) -> bool:
        """Those of values are made where one block is cut by the diagonal, and need registers of their own."""
        return self.groups * self.rows <= self.keys and head_dim == 64

    def constants(self) -> dict[str, Any]:
        return {
            "GROUPS": self.groups, "M": self.rows, "N": self.keys, "STAGES": self.stages, "REGISTERS": self.registers,
            "SHARE": self.heads, "TURNS": self.turns, "POLYNOMIAL": self.polynomial,
        }  # fmt: skip


FORMS = {
    "two groups": Form(),
    "in turns": Form(turns=True),
    "polynomial": Form(polynomial=True),
    "polynomial, in turns": Form(polynomial=True, turns=True),
    "three groups": Form(groups=3, keys=64, registers=160),
    "small blocks": Form(keys=64),
    "more heads": Form(heads=64),
}


def forms(head_dim: int) -> dict[str, Form]:
    """Those that fit: with 128 columns half as many stages."""
    if head_dim == 64:
        return FORMS
    few = {name: replace(form, stages=form.stages // 2) for name, form in FORMS.items()}
    return {name: form for name, form in few.items() if form.groups == 2}


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    block = [1, 1, rows, x.shape[-1]]
    kind = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    return TensorDescriptor(
        x, list(x.shape), list(x.stride()), block, gl.NVMMASharedLayout.get_default_for(block, kind)
    )


def forward(call: Call, form: Form) -> Output:
    """As :func:`affine_attn.core.fused.finish` for a causal call with Tq = Tk, with alpha and beta or neither."""
    q, k, v = call.q, call.k, call.v
    batch, heads, length, head_dim = q.shape
    is_affine = call.alpha is not None
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    y, sums, before, plan = o, None, lse.new_empty(0), fused._plan(call)
    if is_affine:
        y, before, sums = torch.empty_like(q), fused.fake_sums(call), fused._new_value_sums(call, plan)
        fused._sum_values(call, plan, sums)
    blocks = triton.cdiv(length, form.groups * form.rows)
    tiles = blocks * batch * heads
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    forward_kernel[(min(tiles, programs),)](
        _descriptor(q, form.rows), _descriptor(k, form.keys), _descriptor(v, form.keys), _descriptor(o, form.rows),
        _descriptor(y, form.rows), lse, call.alpha, call.beta, sums, before, batch * heads, heads, heads // k.shape[1],
        length, blocks, tiles, call.scale * math.log2(math.e), plan.key_segments, plan.blocks, plan.block_segments,
        D=head_dim, AFFINE=is_affine, BLOCKS=1 << plan.blocks.bit_length(), SEGMENT=plan.tile.segment,
        SAVED=plan.tile.tokens, **form.constants(), num_warps=4,
    )  # fmt: skip
    return Output(y, o if is_affine else o.new_empty(0), lse, before)


def _stock(call: Call) -> tuple[Tensor, Tensor]:
    return stock.forward(call.q, call.k, call.v, call.scale, causal=True, window=None)


def wrong(call: Call, form: Form) -> str | None:
    """What differs from the engine's output by more than 16 bits explain, or None."""
    expected = fused.finish(call, functools.partial(_stock, call))
    for name, found, right in zip(Output._fields, forward(call, form), expected, strict=True):
        # An alpha of exactly 0 makes its log-sum-exp infinite.
        if found.shape != right.shape or not torch.equal(found.isfinite(), right.isfinite()):
            return f"{name} has another shape or other infinities"
        found, right = found[right.isfinite()].float(), right[right.isfinite()].float()
        if right.numel() and (error := float((found - right).abs().max())) > 0.02 * (1 + float(right.abs().max())):
            return f"{name} differs by {error:.3g}"
    return None


def rows(name: str, rounds: int) -> Iterator[str]:
    shape, device = TRAINING_SHAPES["cuda"][name], torch.device("cuda")
    for variant in ("softmax", "affine"):
        inputs = random_inputs(VARIANTS[variant].spec, shape, torch.bfloat16, device)
        call = checked_call(**inputs)
        functions: dict[str, Callable[[], object]] = {"cuDNN": functools.partial(_stock, call)}
        if variant == "affine":
            functions["engine"] = functools.partial(attention, **inputs)
        for label, form in forms(shape.head_dim).items():
            if variant == "affine" and not form.has_sums(shape.head_dim):
                continue
            if (reason := wrong(call, form)) is not None:
                yield f"{name:8} {variant:8} {label:24} not timed: {reason}"
            else:
                functions[label] = functools.partial(forward, call, form)
        for label, timing in side_by_side(functions, "cuDNN", device, rounds, round_ms=5.0).items():
            yield f"{name:8} {variant:8} {label:24} {timing.p50:8.4f} ms {timing.ratio:8.4f} of cuDNN"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["0.5B", "1B"], help=", ".join(TRAINING_SHAPES["cuda"]))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name in options.shapes:
        for line in rows(name, options.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
