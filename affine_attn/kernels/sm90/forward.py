"""Launches the forward of our own for Hopper: attention, sink, alpha, beta and gate in one kernel.

What it returns is what :func:`fused.finish` would, so the backward is the same. Timed beside the stock kernel with its
epilogue by benchmarks/hopper_forward.py.
"""

import functools
import heapq
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.core.call import Call, Output
from affine_attn.kernels.device import capability, cdiv, kept, multiprocessors, uploaded
from affine_attn.kernels.epilogue import launch as fused

# Slots of the ring by head_dim: as many as shared memory holds.
STAGES = {64: 4, 128: 2}
# Rows of a tile, and keys at a time.
ROWS = 128
# Heads at a time: all their tiles come before those of the next ones, so that their keys and values stay in the cache.
_HEADS = 32
# What a tile costs besides its blocks of keys (its first products, its epilogue), as a number of blocks.
_TILE_COST = 1.5


def why_not(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or why it would gain nothing; None where it runs."""
    if (reason := why_no_kernel(call)) is not None:
        return reason
    if (call.alpha is None) != (call.beta is None):
        return "the forward in one kernel has alpha only together with beta"
    if call.alpha is None and call.sink is None and call.gate is None:
        return "there is nothing to do after the attention"
    return why_no_gate(call)


def why_no_gate(call: Call) -> str | None:
    """Why the kernels for Hopper cannot take the call's gate, or None."""
    gate = _gate_by_channel(call)
    if gate is not None and gate.dtype != call.q.dtype:
        return f"kernels for Hopper take a gate by channel in the type of q, not {gate.dtype}"
    if gate is not None and not can_be_copied(gate):
        return "kernels for Hopper read rows of a gate that begin at multiples of 16 bytes"
    return None


def why_no_kernel(call: Call) -> str | None:
    """Why no kernel for Hopper, forward or backward, can serve the call, or None."""
    if (reason := fused.why_not(call)) is not None:
        return reason
    if capability(call.q.device) != (9, 0):
        return "kernels for Hopper are for GPUs of compute capability 9.0"
    if call.q.dtype == torch.float32 or call.q.shape[-1] not in STAGES:
        return f"kernels for Hopper take 16-bit inputs with a head_dim of {' or '.join(map(str, STAGES))}"
    if not call.mask.causal or call.mask.restrictions or call.tq != call.tk or 0 in call.q.shape:
        return "kernels for Hopper have a causal mask alone, and as many keys as queries"
    if not all(map(can_be_copied, (call.q, call.k, call.v))):
        return "kernels for Hopper read rows that begin at multiples of 16 bytes"
    return None


def can_be_copied(x: Tensor) -> bool:
    """By the copy engine."""
    return x.stride(-1) == 1 and not x.data_ptr() % 16 and all(n > 0 and not n % 8 for n in x.stride()[:3])


def _gate_by_channel(call: Call) -> Tensor | None:
    return call.gate if fused.gate_kind(call.gate) == fused.ELEMENTWISE else None


class Order(NamedTuple):
    tiles: Tensor  # int32 [programs, most, 4]: batch entry, head, head of k and v, first row; a last one is never used
    counts: Tensor  # int32 [programs]


@kept
def order(
    batch: int,
    heads: int,
    kv_heads: int,
    costs: tuple[float, ...],
    heads_at_once: int,
    programs: int,
    device: torch.device,
) -> Order:
    """Tiles of some heads at a time, the longest first, each to the program that is free first; a head's tiles have
    these costs."""
    lists: list[list[tuple[int, int, int, int]]] = [[] for _ in range(programs)]
    busy = [(0.0, program) for program in range(programs)]
    places = [(entry, head, head * kv_heads // heads) for entry in range(batch) for head in range(heads)]
    longest_first = sorted(range(len(costs)), key=lambda tile: -costs[tile])
    for first in range(0, len(places), heads_at_once):
        for tile in longest_first:
            for place in places[first : first + heads_at_once]:
                until, program = busy[0]
                lists[program].append((*place, tile * ROWS))
                heapq.heapreplace(busy, (until + costs[tile], program))
    most = max(map(len, lists)) + 1
    padded = [tiles + [(0, 0, 0, 0)] * (most - len(tiles)) for tiles in lists]
    options: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}  # whatever the default device is
    tables = torch.tensor(padded, **options), torch.tensor(list(map(len, lists)), **options)
    return Order(*uploaded(tables, device))


def forward(call: Call) -> Output:
    """All stages at once; see :func:`why_not`."""
    q, k, v = call.q, call.k, call.v
    batch, heads, length, head_dim = q.shape
    is_affine, plan = call.alpha is not None, fused.plan_of(call)
    has_y = is_affine or call.gate is not None
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    y, sums, before = torch.empty_like(q) if has_y else o, None, fused.new_saved_sums(call)
    if is_affine:
        sums = fused.new_value_sums(call, plan)
        fused.sum_values(call, plan, sums)
    programs = multiprocessors(q.device)
    costs = tuple(blocks + _TILE_COST for blocks in range(1, cdiv(length, ROWS) + 1))
    tiles, counts = order(batch, heads, k.shape[1], costs, _HEADS, programs, q.device)
    sink, constant = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink or 0.0)
    alpha, beta, gate = fused.contiguous_rows(call.alpha), fused.contiguous_rows(call.beta), _gate_by_channel(call)
    half = ROWS // 2
    _kernel()[(programs,)](
        descriptor(q, half), descriptor(k, ROWS), descriptor(v, ROWS),
        None if gate is None else descriptor(gate, half), descriptor(o, half), descriptor(y, half),
        lse, sink, alpha, beta, call.gate if gate is None else None, sums, before,
        tiles, counts, tiles.shape[1], heads, k.shape[1], length, call.scale * math.log2(math.e), constant,
        *fused.sink_strides(sink), *fused.strides(call.gate), plan.key_segments, plan.blocks, plan.block_segments,
        N=ROWS, D=head_dim, STAGES=STAGES[head_dim], SINK=fused.sink_kind(call.sink), AFFINE=is_affine,
        GATE=fused.gate_kind(call.gate), SEGMENT=plan.tile.segment, SAVED=plan.tile.tokens, num_warps=4,
    )  # fmt: skip
    return Output(y, o if has_y else o.new_empty(0), lse, before)


def _kernel() -> Any:
    """Imported late, where Triton is known to be there; a launch is nothing a type checker can follow."""
    from affine_attn.kernels.sm90.forward_kernel import hopper_forward_kernel

    return hopper_forward_kernel


def descriptor(x: Tensor, rows: int) -> Any:
    """For the copy engine: blocks of so many rows."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = (1, 1, rows, *x.shape[3:])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), _shared_layout(block, x.dtype))


@functools.cache
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kind = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for(list(block), kind)
