"""Launch the sm90 forward: attention, sink, alpha, beta and gate in one kernel.

It returns what the attention and ``apply_epilogue`` would, so the backward is the same. benchmarks/sm90_forward.py
times it beside the stock kernel with its epilogue.
"""

from typing import Any

import torch
from torch import Tensor

from affine_attn.core.call import Call, Output
from affine_attn.kernels.device import cdiv, num_sms
from affine_attn.kernels.epilogue import launch as epilogue
from affine_attn.kernels.epilogue.tiles import tiling_of
from affine_attn.kernels.launch import ELEMENTWISE, LOG2E, Launch, gate_kind, run, sink_kind, sink_strides, strides
from affine_attn.kernels.sm90.scheduler import ROWS, descriptor, order

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
    batch, heads, length, head_dim = q.shape
    is_affine, tiling = call.alpha is not None, tiling_of(call)
    has_y = is_affine or call.gate is not None
    o, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    y, sums, before = torch.empty_like(q) if has_y else o, None, epilogue.new_saved_sums(call)
    if is_affine:
        sums = epilogue.new_value_sums(call, tiling)
        epilogue.sum_values(call, tiling, sums)
    programs = num_sms(q.device)
    costs = tuple(blocks + _TILE_COST for blocks in range(1, cdiv(length, ROWS) + 1))
    tiles, counts = order(batch, heads, k.shape[1], costs, _HEADS, programs, q.device)
    sink, constant = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink or 0.0)
    alpha, beta, gate = epilogue.contiguous_rows(call.alpha), epilogue.contiguous_rows(call.beta), _elementwise(call)
    half = ROWS // 2
    arguments: dict[str, Any] = {
        "d_q": descriptor(q, half), "d_k": descriptor(k, ROWS), "d_v": descriptor(v, ROWS),
        "d_gate": None if gate is None else descriptor(gate, half), "d_o": descriptor(o, half),
        "d_y": descriptor(y, half), "p_lse": lse, "p_sink": sink, "p_alpha": alpha, "p_beta": beta,
        "p_gate": call.gate if gate is None else None, "p_sums": sums, "p_before": before,
        "p_order": tiles, "p_tiles": counts, "most": tiles.shape[1], "H": heads, "kv_heads": k.shape[1], "T": length,
        "factor": call.scale * LOG2E, "constant_sink": constant, **sink_strides(sink),
        **strides(call.gate, "g"), "segments": tiling.key_segments, "blocks": tiling.blocks,
        "block_segments": tiling.block_segments, "N": ROWS, "D": head_dim, "STAGES": STAGES[head_dim],
        "SINK": sink_kind(call.sink), "AFFINE": is_affine, "GATE": gate_kind(call.gate),
        "SEGMENT": tiling.tile.segment, "SAVED": tiling.tile.tokens, "num_warps": 4,
    }  # fmt: skip
    run(Launch("sm90.forward_kernel.sm90_forward_kernel", (programs,), arguments))
    return Output(y, o if has_y else None, lse, before)
