"""Launch the sm90 backward: the preprocess kernel, then attention's gradients with what beta adds to dv.

It takes what a forward has saved, whichever it was. CTAs add up dq in no fixed order, as stock kernels do: two runs may
differ in its last bits. benchmarks/sm90_backward.py times it beside the stock kernel.
"""

from typing import Any

import torch
from torch import Tensor

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.kernels.device import cdiv, num_sms
from affine_attn.kernels.epilogue import launch as epilogue
from affine_attn.kernels.epilogue.tiles import tiling_of
from affine_attn.kernels.launch import (
    ELEMENTWISE,
    INTERPRETED,
    LOG2E,
    Launch,
    gate_kind,
    run,
    sink_kind,
    sink_strides,
    strides,
)
from affine_attn.kernels.sm90.scheduler import ROWS, can_be_copied, descriptor, order

# By head_dim: pipeline stages for blocks of queries and for tiles of keys, as many as shared memory holds; whether dq
# comes a block late, for which registers must have room.
STAGES, TILES, LATE = {64: 3, 128: 2}, {64: 2, 128: 1}, {64: True, 128: False}
# Queries at a time, and keys of a warpgroup: as in the kernel, tested.
QUERIES, HALF = 64, 64
# kv heads at a time: what their CTAs read and add to must stay in the cache, or memory moves several times as much.
_KV_HEADS = 8
# Tokens for which it was timed and found faster than cuDNN's. At 32768 it is slower (docs/log), below it was not timed.
LENGTHS = range(2048, 8192 + 1)
# What a tile costs besides its blocks of queries (keys in, gradients out), as a number of blocks.
_TILE_COST = 2.0
# Of sm90_preprocess_kernel: rows and columns of a tile, as in the kernel, tested.
TILE_ROWS, TILE_COLUMNS = 64, 64
# Without and with elementwise gates: its pipeline stages, and CTAs on an SM, as timed: memory is slower with more
# bytes in flight (docs/log). Registers of a thread, so that there is room for two CTAs.
PREPROCESS_STAGES, CTAS_PER_SM, ROW_REGISTERS = (2, 3), (2, 1), 128


def backward(call: Call, dy: Tensor, output: Output) -> Gradients:
    """Return all gradients of a call that engines/needs.py lets through."""
    dy = _copyable(epilogue.negatable(call, dy))
    rows = Preprocess(call, dy, output)
    dk, dv = torch.empty_like(call.k), torch.empty_like(call.v)
    rows.launch()
    try:
        sums = new_sums(call, rows)
        launch(call, output.lse, rows, sums, dk, dv)
    finally:
        if rows.do is dy:  # of which rows are negated, and which is the caller's
            epilogue.negate_rows(call, dy)
    return Gradients(rounded(call, sums), dk, dv, *rows.results())


def _copyable(x: Tensor) -> Tensor:
    """Return x, or a copy that TMA can read."""
    return x if can_be_copied(x) else x.clone(memory_format=torch.contiguous_format)


class Preprocess:
    """The preprocess kernel: gradients of sink, alpha, beta and gate, and what the attention's backward reads."""

    def __init__(self, call: Call, dy: Tensor, output: Output):
        self.call, self.dy, self.output = call, dy, output
        self.o = _copyable(output.attended)
        batch, heads, queries, head_dim = call.q.shape
        # Tokens of an item, and items of a kv head.
        self.tokens = TILE_ROWS * TILE_COLUMNS // head_dim
        self.per_head = cdiv(queries, self.tokens)

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=dy.device)

        def like(x: Tensor | None) -> Tensor | None:
            """Allocate a contiguous gradient of ``x``."""
            return None if x is None else new(*x.shape, dtype=x.dtype)

        # Row statistics are copied one by one, which takes 32 bits.
        self.sink = call.sink.float() if isinstance(call.sink, Tensor) else None
        self.alpha, self.beta = (None if x is None else x.float().contiguous() for x in (call.alpha, call.beta))
        self.dsink = None if self.sink is None else new(batch, heads, queries)
        self.dbeta, self.dgate, self.do = like(call.beta), like(call.gate), dy
        self.dalpha = None if self.alpha is None else torch.empty_like(self.alpha)
        self.is_elementwise = gate_kind(call.gate) == ELEMENTWISE
        self.row_gate = None if call.gate is None or self.is_elementwise else call.gate.float()
        if call.gate is not None and self.is_elementwise:
            self.dgate, self.do = torch.empty_like(call.gate), torch.empty_like(dy)
        # Without a headwise gate shift is beta itself, and with alpha delta is dalpha, both up to the signs of alpha.
        # Not with alpha alone: for signs without beta the compiler puts waits between all MMAs (docs/log).
        self.signs = self.alpha if self.row_gate is None and self.beta is not None else None
        self.delta = new(batch, heads, queries) if self.signs is None or self.dalpha is None else self.dalpha
        self.shift = self.beta if self.beta is None or self.row_gate is None else torch.empty_like(self.beta)
        # Sums over the items of a kv head; new_sums makes of them those from each item on.
        self.after = None if call.beta is None else new(batch * call.k.shape[1], self.per_head, head_dim)

    def launch(self) -> None:
        """Run the kernel, which negates rows of dy with a negative factor unless there is a do besides."""
        call, (batch, heads, queries, head_dim) = self.call, self.call.q.shape
        kv_heads, has_beta = call.k.shape[1], call.beta is not None
        tiled = (call.gate, self.do, self.dgate) if self.is_elementwise else (None, None, None)
        items = batch * kv_heads * self.per_head
        most = CTAS_PER_SM[self.is_elementwise] * num_sms(self.dy.device)
        gate, do, dgate = (None if x is None else _in_rows(x) for x in tiled)
        arguments: dict[str, Any] = {
            "d_dy": _in_rows(self.dy), "d_o": _in_rows(self.o), "d_v": _in_rows(call.v) if has_beta else None,
            "d_gate": gate, "d_do": do, "d_dgate": dgate,
            "p_before": self.output.saved_sums if has_beta else None, "p_lse": self.output.saved_lse,
            "p_sink": self.sink, "p_alpha": self.alpha, "p_beta": self.beta, "p_gate": self.row_gate,
            "p_do": self.do, "p_dsink": self.dsink, "p_dalpha": self.dalpha, "p_dbeta": self.dbeta,
            "p_dgate": None if self.is_elementwise else self.dgate,
            "p_delta": None if self.delta is self.dalpha else self.delta,
            "p_shift": None if self.shift is self.beta else self.shift, "p_totals": self.after,
            **strides(self.do, "d"), **strides(self.row_gate, "g"), **sink_strides(self.sink),
            "kv_heads": kv_heads, "T": queries, "per_head": self.per_head, "items": items,
            "SINK": sink_kind(call.sink), "HAS_ALPHA": call.alpha is not None, "HAS_BETA": has_beta,
            "GATE": gate_kind(call.gate), "GROUP": heads // kv_heads, "D": head_dim,
            "STAGES": PREPROCESS_STAGES[self.is_elementwise], "SAVED": tiling_of(call).tile.tokens if has_beta else 1,
            "num_warps": 4, "maxnreg": ROW_REGISTERS, "launch_pdl": not INTERPRETED,
        }  # fmt: skip
        run(Launch("sm90.preprocess_kernel.sm90_preprocess_kernel", (_even(items, most),), arguments))

    def results(self) -> tuple[Tensor | None, ...]:
        dsink = None if self.dsink is None else epilogue.dsink_of(self.call, self.dsink)
        dalpha = None if self.dalpha is None else self.dalpha.to(self.call.alpha.dtype)
        return dsink, dalpha, self.dbeta, self.dgate


def _in_rows(x: Tensor) -> Any:
    """Return a TMA descriptor of tiles of TILE_COLUMNS columns, in which a token has a row or two."""
    rows = x.unflatten(-1, (-1, TILE_COLUMNS))
    return descriptor(rows, TILE_ROWS // rows.shape[3])


def _even(items: int, most: int) -> int:
    """Return the fewest CTAs with no more items each: else a few would have one more, and end alone."""
    return cdiv(items, cdiv(items, most))


def new_sums(call: Call, rows: Preprocess) -> Tensor:
    """Allocate the zeroed fp32 dq accumulator, and suffix-sum the per-item totals."""
    batch, heads, length, head_dim = call.q.shape
    shape = (batch, heads, cdiv(length, QUERIES) * QUERIES, head_dim)
    if rows.after is None:
        return torch.zeros(shape, dtype=torch.float32, device=call.q.device)
    sums = torch.empty(shape, dtype=torch.float32, device=call.q.device)
    epilogue.zero_and_sum_from_each(sums, rows.after)
    return sums


def launch(call: Call, lse: Tensor, rows: Preprocess, sums: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Write dk and dv, and add dq without its scale to the sums."""
    batch, heads, length, head_dim = call.q.shape
    kv_heads, programs = call.k.shape[1], num_sms(call.q.device)
    group, blocks = heads // kv_heads, cdiv(length, QUERIES)
    costs = tuple(group * (blocks - first) + _TILE_COST for first in range(0, blocks, ROWS // QUERIES))
    tiles, counts = order(batch, kv_heads, kv_heads, costs, _KV_HEADS, programs, call.q.device)
    arguments: dict[str, Any] = {
        "d_q": descriptor(call.q, QUERIES), "d_k": descriptor(call.k, ROWS), "d_v": descriptor(call.v, ROWS),
        "d_dy": descriptor(rows.do, QUERIES), "d_dk": descriptor(dk, HALF), "d_dv": descriptor(dv, HALF),
        "p_lse": lse, "p_delta": rows.delta, "p_beta": rows.shift, "p_signs": rows.signs, "p_after": rows.after,
        "p_dq": sums, "p_order": tiles, "p_tiles": counts, "most": tiles.shape[1], "kv_heads": kv_heads, "T": length,
        "segments": rows.per_head, "factor": call.scale * LOG2E, "scale": call.scale,
        "per_scale": 1 / call.scale, "GROUP": group, "D": head_dim, "STAGES": STAGES[head_dim],
        "TILES": TILES[head_dim], "HAS_BETA": rows.shift is not None, "HAS_SIGNS": rows.signs is not None,
        "LATE": LATE[head_dim], "SEGMENT": rows.tokens, "num_warps": 4,
    }  # fmt: skip
    run(Launch("sm90.backward_kernel.sm90_backward_kernel", (programs,), arguments))


def rounded(call: Call, sums: Tensor) -> Tensor:
    """Postprocess: return dq, scaled and rounded to the type of q."""
    return epilogue.scale_rows(sums[:, :, : call.tq], call.scale, torch.empty_like(call.q))
