"""Launch the sm90 forward: attention, sink, alpha, beta and gate in one kernel.

It returns what the attention and ``apply_epilogue`` would, so the backward is the same. benchmarks/sm90_forward.py
times it beside the stock kernel with its epilogue.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from affine_attn.core.call import Call, Output
from affine_attn.kernels.device import cdiv, num_sms
from affine_attn.kernels.epilogue import launch as epilogue
from affine_attn.kernels.epilogue.tiles import Tiling, tiling_of
from affine_attn.kernels.launch import (
    ELEMENTWISE,
    LOG2E,
    Prepared,
    gate_kind,
    prepared,
    sink_kind,
    sink_strides,
    steps,
    strides,
)
from affine_attn.kernels.sm90.scheduler import ROWS, Order, order, tiles

# Pipeline stages by head_dim: as many as shared memory holds.
STAGES = {64: 4, 128: 2}
# Heads at a time: all their tiles come before those of the next ones, so that their keys and values stay in the cache.
_HEADS = 32
# What a tile costs besides its blocks of keys (its first MMAs, its epilogue), as a number of blocks.
_TILE_COST = 1.5


def _elementwise(call: Call) -> Tensor | None:
    return call.gate if gate_kind(call.gate) == ELEMENTWISE else None


def forward(call: Call) -> Output:
    """Run all stages in one kernel, for calls that engines/needs.py lets through."""
    q, k, v = call.q, call.k, call.v
    is_affine, has_y = call.alpha is not None, call.alpha is not None or call.gate is not None
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    y, sums, before = torch.empty_like(q) if has_y else o, None, epilogue.new_saved_sums(call)
    if is_affine:
        sums = epilogue.new_value_sums(call)
        epilogue.sum_values(call, sums)
    places, counts = _order(q.shape, k.shape[1], num_sms(q.device), q.device)
    sink, constant = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink or 0.0)
    alpha, beta, gate = epilogue.contiguous_rows(call.alpha), epilogue.contiguous_rows(call.beta), _elementwise(call)
    launch = _forward(
        tiling_of(call), q.dtype, q.stride(), k.stride(), v.stride(), o.stride(), y.stride(), gate_kind(call.gate),
        steps(call.gate), sink_kind(call.sink), steps(sink), constant, call.scale, is_affine, places.shape,
    )  # fmt: skip
    launch(
        d_q=q, d_k=k, d_v=v, d_gate=gate, d_o=o, d_y=y, p_lse=lse, p_sink=sink, p_alpha=alpha, p_beta=beta,
        p_gate=call.gate if gate is None else None, p_sums=sums, p_before=before, p_order=places, p_tiles=counts,
    )  # fmt: skip
    return Output(y, o if has_y else None, lse, before)


@functools.lru_cache(1024)
def _order(of_q: tuple[int, ...], kv_heads: int, programs: int, device: torch.device) -> Order:
    batch, heads, length, _ = of_q
    costs = tuple(blocks + _TILE_COST for blocks in range(1, cdiv(length, ROWS) + 1))
    return order(batch, heads, kv_heads, costs, _HEADS, programs, device)


@prepared
def _forward(
    tiling: Tiling,
    dtype: torch.dtype,
    of_q: tuple[int, ...],
    of_k: tuple[int, ...],
    of_v: tuple[int, ...],
    of_o: tuple[int, ...],
    of_y: tuple[int, ...],
    gate: int,
    of_gate: tuple[int, ...] | None,
    sink: int,
    of_sink: tuple[int, ...] | None,
    constant_sink: float,
    scale: float,
    is_affine: bool,
    of_order: tuple[int, ...],
) -> Prepared:
    queries = tiling.batch, tiling.heads, tiling.queries, tiling.head_dim
    keys, half = (tiling.batch, tiling.kv_heads, tiling.keys, tiling.head_dim), ROWS // 2
    copied = {
        "d_q": tiles(queries, of_q, dtype, half), "d_k": tiles(keys, of_k, dtype, ROWS),
        "d_v": tiles(keys, of_v, dtype, ROWS), "d_o": tiles(queries, of_o, dtype, half),
        "d_y": tiles(queries, of_y, dtype, half),
    }  # fmt: skip
    if of_gate is not None and gate == ELEMENTWISE:
        copied["d_gate"] = tiles(queries, of_gate, dtype, half)
    numbers: dict[str, Any] = {
        "most": of_order[1], "H": tiling.heads, "kv_heads": tiling.kv_heads, "T": tiling.queries,
        "factor": scale * LOG2E, "constant_sink": constant_sink, **sink_strides(of_sink), **strides(of_gate, "g"),
        "segments": tiling.key_segments, "blocks": tiling.blocks, "block_segments": tiling.block_segments, "N": ROWS,
        "D": tiling.head_dim, "STAGES": STAGES[tiling.head_dim], "SINK": sink, "AFFINE": is_affine, "GATE": gate,
        "SEGMENT": tiling.tile.segment, "SAVED": tiling.tile.tokens, "num_warps": 4,
    }  # fmt: skip
    return Prepared("sm90.forward_kernel.sm90_forward_kernel", (of_order[0],), numbers, copied)
