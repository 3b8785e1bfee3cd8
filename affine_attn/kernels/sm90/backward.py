"""Launch the sm90 backward: the preprocess kernel, then attention's gradients with what beta adds to dv.

It takes what a forward has saved, whichever it was. CTAs add up dq in no fixed order, as stock kernels do: two runs may
differ in its last bits. benchmarks/sm90_backward.py times it beside the stock kernel.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.kernels.device import cdiv, num_sms
from affine_attn.kernels.epilogue import launch as epilogue
from affine_attn.kernels.epilogue.tiles import Tiling, tiling_of
from affine_attn.kernels.launch import (
    ELEMENTWISE,
    INTERPRETED,
    LOG2E,
    Prepared,
    Tiles,
    gate_kind,
    prepared,
    sink_kind,
    sink_strides,
    steps,
    strides,
)
from affine_attn.kernels.sm90.scheduler import ROWS, Order, can_be_copied, order, tiles

# By head_dim: pipeline stages for blocks of queries and for tiles of keys, as many as shared memory holds; whether dq
# comes a block late, for which registers must have room.
STAGES, TILES, LATE = {64: 3, 128: 2}, {64: 2, 128: 1}, {64: True, 128: False}
# Queries at a time, and keys of a warpgroup: as in the kernel, tested.
QUERIES, HALF = 64, 64
# kv heads at a time: what their CTAs read and add to must stay in the cache, or memory moves several times as much.
_KV_HEADS = 8
# Tokens for which it was timed and found faster than cuDNN's. At 32768 it is slower (docs/log), below it was not timed.
LENGTHS = range(512, 8192 + 1)
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
        call, has_beta = self.call, self.call.beta is not None
        tiled = (call.gate, self.do, self.dgate) if self.is_elementwise else (None, None, None)
        gate, do, dgate = tiled
        launch = _preprocess(
            tiling_of(call), call.q.dtype, self.dy.stride(), self.o.stride(), call.v.stride(), *map(steps, tiled),
            gate_kind(call.gate), steps(self.row_gate), self.do.stride(), sink_kind(call.sink), steps(self.sink),
            call.alpha is not None, has_beta, self.tokens, num_sms(self.dy.device),
        )  # fmt: skip
        launch(
            d_dy=self.dy, d_o=self.o, d_v=call.v if has_beta else None, d_gate=gate, d_do=do, d_dgate=dgate,
            p_before=self.output.saved_sums if has_beta else None, p_lse=self.output.saved_lse, p_sink=self.sink,
            p_alpha=self.alpha, p_beta=self.beta, p_gate=self.row_gate, p_do=self.do, p_dsink=self.dsink,
            p_dalpha=self.dalpha, p_dbeta=self.dbeta, p_dgate=None if self.is_elementwise else self.dgate,
            p_delta=None if self.delta is self.dalpha else self.delta,
            p_shift=None if self.shift is self.beta else self.shift, p_totals=self.after,
        )  # fmt: skip

    def results(self) -> tuple[Tensor | None, ...]:
        dsink = None if self.dsink is None else epilogue.dsink_of(self.call, self.dsink)
        dalpha = None if self.dalpha is None else self.dalpha.to(self.call.alpha.dtype)
        return dsink, dalpha, self.dbeta, self.dgate


@prepared
def _preprocess(
    tiling: Tiling,
    dtype: torch.dtype,
    of_dy: tuple[int, ...],
    of_o: tuple[int, ...],
    of_v: tuple[int, ...],
    of_gate: tuple[int, ...] | None,
    of_do_tiles: tuple[int, ...] | None,
    of_dgate: tuple[int, ...] | None,
    gate: int,
    of_row_gate: tuple[int, ...] | None,
    of_do: tuple[int, ...],
    sink: int,
    of_sink: tuple[int, ...] | None,
    has_alpha: bool,
    has_beta: bool,
    tokens: int,
    sms: int,
) -> Prepared:
    of_heads = tiling.batch, tiling.heads, tiling.queries, tiling.head_dim
    of_kv_heads = tiling.batch, tiling.kv_heads, tiling.keys, tiling.head_dim
    copied = {"d_dy": _in_rows(of_heads, of_dy, dtype), "d_o": _in_rows(of_heads, of_o, dtype)}
    copied["d_v"] = _in_rows(of_kv_heads, of_v, dtype)
    for name, steps_of in (("d_gate", of_gate), ("d_do", of_do_tiles), ("d_dgate", of_dgate)):
        if steps_of is not None:
            copied[name] = _in_rows(of_heads, steps_of, dtype)
    is_elementwise = gate == ELEMENTWISE
    per_head = cdiv(tiling.queries, tokens)
    items = tiling.batch * tiling.kv_heads * per_head
    numbers: dict[str, Any] = {
        **strides(of_do, "d"), **strides(of_row_gate, "g"), **sink_strides(of_sink), "kv_heads": tiling.kv_heads,
        "T": tiling.queries, "per_head": per_head, "items": items, "SINK": sink, "HAS_ALPHA": has_alpha,
        "HAS_BETA": has_beta, "GATE": gate, "GROUP": tiling.heads // tiling.kv_heads, "D": tiling.head_dim,
        "STAGES": PREPROCESS_STAGES[is_elementwise], "SAVED": tiling.tile.tokens if has_beta else 1, "num_warps": 4,
        "maxnreg": ROW_REGISTERS, "launch_pdl": not INTERPRETED,
    }  # fmt: skip
    grid = (_even(items, CTAS_PER_SM[is_elementwise] * sms),)
    return Prepared("sm90.preprocess_kernel.sm90_preprocess_kernel", grid, numbers, copied)


def _in_rows(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tiles:
    """Return how TMA copies tiles of TILE_COLUMNS columns, in which a token has a row or two."""
    *outer, head_dim = shape
    parts = head_dim // TILE_COLUMNS
    return tiles((*outer, parts, TILE_COLUMNS), (*strides[:3], TILE_COLUMNS, 1), dtype, TILE_ROWS // parts)


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
    places, counts = _order(call.q.shape, call.k.shape[1], num_sms(call.q.device), call.q.device)
    _backward(
        call.q.shape, call.k.shape, call.q.dtype, call.q.stride(), call.k.stride(), call.v.stride(), rows.do.stride(),
        dk.stride(), dv.stride(), call.scale, rows.shift is not None, rows.signs is not None, rows.per_head,
        rows.tokens, places.shape,
    )(
        d_q=call.q, d_k=call.k, d_v=call.v, d_dy=rows.do, d_dk=dk, d_dv=dv, p_lse=lse, p_delta=rows.delta,
        p_beta=rows.shift, p_signs=rows.signs, p_after=rows.after, p_dq=sums, p_order=places, p_tiles=counts,
    )  # fmt: skip


@functools.lru_cache(1024)
def _order(of_q: tuple[int, ...], kv_heads: int, programs: int, device: torch.device) -> Order:
    batch, heads, length, _ = of_q
    group, blocks = heads // kv_heads, cdiv(length, QUERIES)
    costs = tuple(group * (blocks - first) + _TILE_COST for first in range(0, blocks, ROWS // QUERIES))
    return order(batch, kv_heads, kv_heads, costs, _KV_HEADS, programs, device)


@prepared
def _backward(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    dtype: torch.dtype,
    of_q: tuple[int, ...],
    of_k: tuple[int, ...],
    of_v: tuple[int, ...],
    of_do: tuple[int, ...],
    of_dk: tuple[int, ...],
    of_dv: tuple[int, ...],
    scale: float,
    has_beta: bool,
    has_signs: bool,
    segments: int,
    segment: int,
    of_order: tuple[int, ...],
) -> Prepared:
    _, heads, length, head_dim = queries
    kv_heads = keys[1]
    copied = {
        "d_q": tiles(queries, of_q, dtype, QUERIES), "d_k": tiles(keys, of_k, dtype, ROWS),
        "d_v": tiles(keys, of_v, dtype, ROWS), "d_dy": tiles(queries, of_do, dtype, QUERIES),
        "d_dk": tiles(keys, of_dk, dtype, HALF), "d_dv": tiles(keys, of_dv, dtype, HALF),
    }  # fmt: skip
    numbers: dict[str, Any] = {
        "most": of_order[1], "kv_heads": kv_heads, "T": length, "segments": segments, "factor": scale * LOG2E,
        "scale": scale, "per_scale": 1 / scale, "GROUP": heads // kv_heads, "D": head_dim, "STAGES": STAGES[head_dim],
        "TILES": TILES[head_dim], "HAS_BETA": has_beta, "HAS_SIGNS": has_signs, "LATE": LATE[head_dim],
        "SEGMENT": segment, "num_warps": 4,
    }  # fmt: skip
    return Prepared("sm90.backward_kernel.sm90_backward_kernel", (of_order[0],), numbers, copied)


def rounded(call: Call, sums: Tensor) -> Tensor:
    """Postprocess: return dq, scaled and rounded to the type of q."""
    return epilogue.scale_rows(sums[:, :, : call.tq], call.scale, torch.empty_like(call.q))
