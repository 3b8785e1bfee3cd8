"""Would a forward of our own pay on Hopper? python3 benchmarks/hopper_forward.py 0.5B 1B

Affine attention is the stock forward and a pass over its output, which costs a tenth to a fifth more where heads are
small. A kernel that is as fast as the stock one could finish its rows while they are in registers: hopper_kernel.py is
such a kernel, timed here beside cuDNN's forward and the engine's affine forward, in several forms. A wrong one is not
timed. None is part of the package unless it wins.
"""

import argparse
import functools
import heapq
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
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

    @property
    def has_sums(self) -> bool:
        """Those of values are made where one block alone is cut by the diagonal."""
        return self.groups * self.rows <= self.keys

    def constants(self) -> dict[str, Any]:
        return {
            "GROUPS": self.groups, "M": self.rows, "N": self.keys, "STAGES": self.stages, "REGISTERS": self.registers,
            "TURNS": self.turns, "POLYNOMIAL": self.polynomial,
        }  # fmt: skip


FORMS = {
    "plain": Form(),
    "turns": Form(turns=True),
    "polynomial": Form(polynomial=True),
    "polynomial-turns": Form(polynomial=True, turns=True),
    "three-groups": Form(groups=3, keys=64, registers=160),
    "small-blocks": Form(keys=64),
    "more-heads": Form(heads=64),
}
# Of a tile's own cost, in blocks of keys: its first products, its epilogue.
_TILE_COST = 1.5


class Order(NamedTuple):
    tiles: Tensor  # int32 [programs, most]: head * blocks + block; the rest of a row is never used
    counts: Tensor  # int32 [programs]


@functools.lru_cache(maxsize=32)
def order(form: Form, heads: int, length: int, programs: int, device: torch.device) -> Order:
    """Tiles of ``heads`` at a time, the longest first, each to the program that is free first."""
    blocks = fused._ceil(length, form.groups * form.rows)
    lists: list[list[int]] = [[] for _ in range(programs)]
    busy = [(0.0, program) for program in range(programs)]
    for first in range(0, heads, form.heads):
        for block in reversed(range(blocks)):
            keys = fused._ceil(min((block + 1) * form.groups * form.rows, length), form.keys)
            for head in range(first, min(first + form.heads, heads)):
                until, program = busy[0]
                lists[program].append(head * blocks + block)
                heapq.heapreplace(busy, (until + keys + _TILE_COST, program))
    most = max(map(len, lists)) + 1
    padded = [tiles + [0] * (most - len(tiles)) for tiles in lists]
    options: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return Order(torch.tensor(padded, **options), torch.tensor([len(tiles) for tiles in lists], **options))


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    block = [1, 1, rows, x.shape[-1]]
    kind = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    return TensorDescriptor(
        x, list(x.shape), list(x.stride()), block, gl.NVMMASharedLayout.get_default_for(block, kind)
    )


def forward(call: Call, form: Form) -> Output:
    """As ``fused.finish``, for a causal call with Tq = Tk and a head_dim of 64, with alpha and beta or neither."""
    q, k, v = call.q, call.k, call.v
    batch, heads, length, head_dim = q.shape
    is_affine = call.alpha is not None
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    y, sums, before, plan = o, None, lse.new_empty(0), fused._plan(call)
    if is_affine:
        y, before, sums = torch.empty_like(q), fused.fake_sums(call), fused._new_value_sums(call, plan)
        fused._sum_values(call, plan, sums)
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    tiles, counts = order(form, batch * heads, length, programs, q.device)
    forward_kernel[(programs,)](
        _descriptor(q, form.rows), _descriptor(k, form.keys), _descriptor(v, form.keys), _descriptor(o, form.rows),
        _descriptor(y, form.rows), lse, fused._rows(call.alpha), fused._rows(call.beta), sums, before, tiles, counts,
        tiles.shape[1], heads, heads // k.shape[1], length, fused._ceil(length, form.groups * form.rows),
        call.scale * math.log2(math.e), plan.key_segments, plan.blocks, plan.block_segments,
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


def rows(name: str, chosen: dict[str, Form], rounds: int) -> Iterator[str]:
    shape, device = TRAINING_SHAPES["cuda"][name], torch.device("cuda")
    for variant in ("softmax", "affine"):
        inputs = random_inputs(VARIANTS[variant].spec, shape, torch.bfloat16, device)
        call = checked_call(**inputs)
        functions: dict[str, Callable[[], object]] = {"cuDNN": functools.partial(_stock, call)}
        if variant == "affine":
            functions["engine"] = functools.partial(attention, **inputs)
        for label, form in chosen.items():
            if variant == "affine" and not form.has_sums:
                continue
            if (reason := wrong(call, form)) is not None:
                yield f"{name:8} {variant:8} {label:24} not timed: {reason}"
            else:
                functions[label] = functools.partial(forward, call, form)
        for label, timing in side_by_side(functions, "cuDNN", device, rounds, round_ms=5.0).items():
            yield f"{name:8} {variant:8} {label:24} {timing.p50:8.4f} ms {timing.ratio:8.4f} of cuDNN"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = [name for name, shape in TRAINING_SHAPES["cuda"].items() if shape.head_dim == 64]
    parser.add_argument("shapes", nargs="*", default=shapes, help=", ".join(shapes))
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS, help="each takes seconds to compile")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.shapes) - set(shapes):
        parser.error(f"no shape {', '.join(sorted(unknown))} with a head_dim of 64; there are {', '.join(shapes)}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("this kernel is for GPUs of compute capability 9.0: H100, H200, GH200")
    for name in options.shapes:
        for line in rows(name, {form: FORMS[form] for form in options.forms}, options.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
