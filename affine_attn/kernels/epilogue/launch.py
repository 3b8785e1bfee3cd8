"""Launch the fused Triton epilogue: the functions of eager.py, one pass over each tensor.

Forward: one small kernel sums the values before each segment, one kernel writes y. Backward: where a row factor r
(alpha, a headwise gate) is all that stands between dy and the attention, no scaled copy of dy is made. The stock
backward rebuilds weights as exp(s - lse), so lse - log |r| makes them |r| times larger, and every gradient with them;
a negative r flips the sign of its dy rows in place for the duration of the stock backward.

Plain sums of the values, and gradients of the stages where none goes through the attention, need nothing of it. On long
sequences their kernels run on a second stream and fill the SMs that the stock kernels leave idle towards their end;
only what dv wants is added afterwards.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.kernels.device import cdiv, padded
from affine_attn.kernels.epilogue.tiles import TILES_WITHOUT_SUMS, Tiling, tiling_of
from affine_attn.kernels.launch import (
    ELEMENTWISE,
    NO_GATE,
    RUNNING,
    TABLE,
    WHOLE,
    Prepared,
    gate_kind,
    prepared,
    sink_kind,
    sink_strides,
    steps,
    strides,
)
from affine_attn.kernels.visible_sums import launch as visible_sums

# Columns of a program that sums values.
VALUE_COLUMNS = 32
# Rows of which a program of negate_rows_kernel looks at the signs.
ROWS = 1024
# Numbers of dv that a program adds to.
_DV_ELEMENTS = 2048
# Zeros that a program writes.
_ZEROS = 8192
# From so many queries on, a second stream is worth its launches.
_LONG = 1024
# Cycles that the second stream waits, so that the stock kernel has taken its SMs before ours ask for any: in the
# forward, and in the backward per element of q. A stock backward begins with a kernel for <do, o>, which moves as much
# memory as ours, so that nothing is gained beside it.
_FORWARD_LEAD, _BACKWARD_LEAD = 1_000, 0.003


class Begun(NamedTuple):
    """What the epilogue's forward prepares before the attention is launched."""

    value_sums: Tensor | None
    first: Tensor | None  # where each slot's document begins, for sums that restart
    beside: AbstractContextManager  # what is launched inside it may run beside the attention


def begin(call: Call) -> Begun:
    """Allocate what a second stream will fill, on the stream that owns it, and mark where that stream may start."""
    tiling = tiling_of(call)
    if tiling.sums not in (RUNNING, WHOLE):
        return Begun(None, None, nullcontext())
    return Begun(new_value_sums(call), _first_slots(call, tiling), _fork(call, _FORWARD_LEAD))


def _first_slots(call: Call, tiling: Tiling) -> Tensor | None:
    """Return where each slot's document begins, if sums restart there, from the stream on which tables are known."""
    return call.mask.document_runs()[0] if tiling.restarts else None


def apply_epilogue(call: Call, o: Tensor, z: Tensor, begun: Begun) -> Output:
    """Return y and what the backward needs; (o, z) of the attention are overwritten."""
    if call.sink is None and call.alpha is None and call.beta is None and call.gate is None:
        return Output(o, None, z)
    if begun.value_sums is not None:
        with begun.beside:
            sum_values(call, begun.value_sums, begun.first)
    tiling = tiling_of(call)
    in_place = call.alpha is None and call.beta is None and call.gate is None
    y = o if in_place else call.new_output()
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=o.device)
    before = visible_sums.visible_sums(call) if tiling.sums == TABLE else new_saved_sums(call)
    sink, constant = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink or 0.0)
    alpha, beta, gate = contiguous_rows(call.alpha), contiguous_rows(call.beta), call.gate
    launch = _forward(
        tiling, o.stride(), call.v.stride(), y.stride(), gate_kind(gate), steps(gate), sink_kind(call.sink),
        steps(sink), constant, alpha is not None, in_place,
    )  # fmt: skip
    launch(
        p_o=o, p_z=z, p_v=call.v, p_first=begun.first, p_sums=begun.value_sums, p_before=before, p_sink=sink,
        p_alpha=alpha, p_beta=beta, p_gate=gate, p_y=y, p_lse=lse,
    )  # fmt: skip
    return Output(y, None if in_place else o, lse, before)


@prepared
def _forward(
    tiling: Tiling,
    of_o: tuple[int, ...],
    of_v: tuple[int, ...],
    of_y: tuple[int, ...],
    gate: int,
    of_gate: tuple[int, ...] | None,
    sink: int,
    of_sink: tuple[int, ...] | None,
    constant_sink: float,
    has_alpha: bool,
    in_place: bool,
) -> Prepared:
    numbers: dict[str, Any] = {
        **strides(of_o, "o"), **strides(of_v, "v"), **strides(of_gate, "g"), **strides(of_y, "y"),
        **sink_strides(of_sink), "kv_heads": tiling.walkers, "queries": tiling.queries, "tiles": tiling.tiles,
        "older": tiling.older, "n_older": tiling.n_older, "segments": tiling.key_segments, "blocks": tiling.blocks,
        "block_segments": tiling.block_segments, "constant_sink": constant_sink,
        "UNEVEN": tiling.window % tiling.tile.tokens > 0,
        "SINK": sink, "HAS_ALPHA": has_alpha, "GATE": gate,
        "KEEP_OUT": not in_place, "BLOCKS": 1 << tiling.blocks.bit_length(),
        **tiling.constants(tiling.tile.columns),
    }  # fmt: skip
    grid = (tiling.query_segments * (tiling.d // tiling.tile.columns), tiling.batch * tiling.walkers)
    return Prepared("epilogue.kernels.epilogue_kernel", grid, numbers)


class RowGradients:
    """Gradients of sink, alpha, beta and gate, and what beta adds to dv.

    All buffers are allocated first, on the main stream, to which they must belong although a second one fills them.
    """

    def __init__(self, call: Call, dy: Tensor, output: Output):
        self.call, self.output, self.lse = call, output, output.lse
        self.out = o = output.attended
        # A constant sink is in out and lse already.
        stages = (call.alpha, call.beta, call.gate)
        self.is_plain = not isinstance(call.sink, Tensor) and all(x is None for x in stages)
        self.dy = dy if self.is_plain else negatable(call, dy)
        if self.is_plain:
            return
        self.tiling = tiling = tiling_of(call)
        self.first = _first_slots(call, tiling)
        self.sink = sink = call.sink if isinstance(call.sink, Tensor) else None
        self.alpha, self.beta = contiguous_rows(call.alpha), contiguous_rows(call.beta)
        gate = call.gate if gate_kind(call.gate) == ELEMENTWISE else None
        # Wide slices where registers have room: with one of sink, beta and gate alone, and no tensor besides dy and o.
        is_light = gate is None and sum(x is not None for x in (sink, call.beta, call.gate)) == 1
        self.columns = tiling.tile.backward_columns if is_light else tiling.tile.columns
        # Gradients of row statistics: every slice of columns writes its part.
        has_row_gate = call.gate is not None and gate is None
        wanted = [sink is not None, call.alpha is not None, call.beta is not None, has_row_gate]
        batch, heads, queries = call.q.shape[:3]
        kv_heads, new = call.k.shape[1], functools.partial(torch.empty, device=o.device)
        slices = tiling.d // self.columns
        parts = (slices, batch, heads, queries) if slices > 1 else (batch, heads, queries)
        self.parts = [new(parts, dtype=torch.float32) if is_wanted else None for is_wanted in wanted]
        self.dgate = None if gate is None else torch.empty_like(gate)
        self.do = None if gate is None else torch.empty_like(self.dy)
        shape, dtype = (
            (batch, kv_heads, queries, call.value_dim),
            torch.float32 if tiling.sums == TABLE else call.v.dtype,
        )
        self.weighted = new(shape, dtype=dtype) if tiling.sums in (RUNNING, TABLE) else None
        totals = (batch * kv_heads, tiling.query_segments, tiling.d)
        self.totals = new(totals, dtype=torch.float32) if tiling.sums in (RUNNING, WHOLE) else None

    def incoming(self) -> AbstractContextManager[Tensor]:
        """Give the gradient for the attention's backward, which is launched inside; out and lse have the rest.

        That is dy itself, with rows negated where their factor is negative: ``finish``, or an error, restores them.
        """
        return nullcontext(self.dy) if self.is_plain else self._incoming()

    @contextmanager
    def _incoming(self) -> Iterator[Tensor]:
        if self.do is not None:
            self._launch()
            yield self.do
        else:
            negate_rows(self.call, self.dy)
            try:
                beside = _fork(self.call, int(_BACKWARD_LEAD * self.call.q.numel()))
                yield self.dy
                with beside:
                    self._launch()
            except BaseException:
                negate_rows(self.call, self.dy)  # which is the caller's
                raise

    def finish(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
        """Return all gradients, from those of the attention."""
        if self.is_plain:
            return Gradients(dq, dk, dv)
        self._add_to_values(dv)
        return Gradients(dq, dk, dv, *self._results())

    def _launch(self) -> None:
        call, tiling = self.call, self.tiling
        dsink, dalpha, dbeta, dgate = self.parts
        launch = _backward(
            tiling, self.columns, self.dy.stride(), self.out.stride(), call.v.stride(), gate_kind(call.gate),
            steps(call.gate), steps(self.dgate), steps(self.do), sink_kind(call.sink), steps(self.sink),
            call.alpha is not None,
        )  # fmt: skip
        launch(
            p_dy=self.dy, p_o=self.out, p_lse=self.output.saved_lse, p_v=call.v, p_first=self.first,
            p_before=self.output.saved_sums, p_sink=self.sink, p_alpha=self.alpha, p_beta=self.beta, p_gate=call.gate,
            p_dsink=dsink, p_dalpha=dalpha, p_dbeta=dbeta, p_dgate=dgate if self.dgate is None else self.dgate,
            p_do=self.do, p_weighted=self.weighted, p_totals=self.totals,
        )  # fmt: skip
        if self.totals is not None and not tiling.window:
            launch = _sums_from_each(self.totals.shape, self.totals.shape, tiling if tiling.restarts else None)
            launch(p_totals=self.totals, p_sums=self.totals, p_first=self.first)

    def _add_to_values(self, dv: Tensor) -> None:
        """Add to dv what beta gives each value from the queries that see it, and restore the negated rows of dy."""
        call, tiling = self.call, self.tiling
        is_negated, gate = self.do is None, call.gate
        if is_negated and (tiling.sums != RUNNING or tiling.window):
            negate_rows(call, self.dy)
        if tiling.window:
            _window_values(tiling, dv.stride())(p_dv=dv, p_weighted=self.weighted, p_totals=self.totals)
            return
        if self.weighted is not None and tiling.sums == TABLE:
            visible_sums.add_seen_by(call, self.weighted, dv)
        if tiling.sums == RUNNING:
            # Does both: a launch less.
            launch = _values(
                tiling, dv.stride(), self.dy.stride(), steps(gate), is_negated and self.alpha is not None,
                is_negated and gate is not None,
            )  # fmt: skip
            try:
                launch(
                    p_dv=dv, p_weighted=self.weighted, p_from=self.totals, p_first=self.first, p_dy=self.dy,
                    p_alpha=self.alpha, p_gate=gate,
                )  # fmt: skip
            except BaseException:
                if is_negated:
                    negate_rows(call, self.dy)
                raise
        if self.totals is not None and (tiling.sums == WHOLE or tiling.older > 0):
            # Keys that every query sees get the whole sum.
            seen_by_all = slice(0, tiling.older if tiling.sums == RUNNING else call.tk)
            whole = self.totals[:, 0].view(tiling.batch, tiling.kv_heads, 1, -1)[..., : tiling.head_dim]
            if self.first is not None:
                # The sum is of the first query's document.
                own = self.first[:, seen_by_all] == self.first[:, tiling.older, None]
                whole = torch.where(own[:, None, :, None], whole, 0.0)
            dv[:, :, seen_by_all] += whole  # added in fp32, rounded once

    def _results(self) -> tuple[Tensor | None, ...]:
        call = self.call
        # Pairwise: a sum over so short a dimension takes three times as long.
        dsink, dalpha, dbeta, dgate = (
            x if x is None or x.ndim == 3 else functools.reduce(torch.add, x) for x in self.parts
        )
        return (
            None if dsink is None else dsink_of(call, dsink),
            None if dalpha is None else dalpha.to(call.alpha.dtype),
            None if dbeta is None else dbeta.to(call.beta.dtype),
            self.dgate if dgate is None else dgate[..., None].to(call.gate.dtype),
        )


@prepared
def _backward(
    tiling: Tiling,
    columns: int,
    of_dy: tuple[int, ...],
    of_o: tuple[int, ...],
    of_v: tuple[int, ...],
    gate: int,
    of_gate: tuple[int, ...] | None,
    of_dgate: tuple[int, ...] | None,
    of_do: tuple[int, ...] | None,
    sink: int,
    of_sink: tuple[int, ...] | None,
    has_alpha: bool,
) -> Prepared:
    numbers: dict[str, Any] = {
        **strides(of_dy, "d"), **strides(of_o, "o"), **strides(of_v, "v"), **strides(of_gate, "g"),
        **strides(of_dgate, "w"), **strides(of_do, "a"), **sink_strides(of_sink),
        "stride_part": tiling.batch * tiling.heads * tiling.queries, "kv_heads": tiling.walkers,
        "queries": tiling.queries, "tiles": tiling.tiles, "older": tiling.older, "segments": tiling.query_segments,
        "SINK": sink, "HAS_ALPHA": has_alpha, "GATE": gate, **tiling.constants(columns),
    }  # fmt: skip
    grid = (tiling.query_segments * (tiling.d // columns), tiling.batch * tiling.walkers)
    return Prepared("epilogue.kernels.epilogue_backward_kernel", grid, numbers)


@prepared
def _values(
    tiling: Tiling,
    of_dv: tuple[int, ...],
    of_dy: tuple[int, ...],
    of_gate: tuple[int, ...] | None,
    has_alpha: bool,
    has_gate: bool,
) -> Prepared:
    tokens = min(tiling.tile.segment, _DV_ELEMENTS // tiling.d)
    numbers: dict[str, Any] = {
        **strides(of_dv, "n"), **strides(of_dy, "d"), **strides(of_gate, "g"), "kv_heads": tiling.kv_heads,
        "queries": tiling.queries, "older": tiling.older, "segments": tiling.query_segments,
        "RESTARTS": tiling.restarts, "HAS_ALPHA": has_alpha, "HAS_GATE": has_gate,
        "GROUP": tiling.heads // tiling.kv_heads, "HEAD_DIM": tiling.head_dim, "D": tiling.d, "T": tokens,
        "LENGTH": tiling.tile.segment, "num_warps": 4,
    }  # fmt: skip
    grid = (cdiv(tiling.queries, tokens), tiling.batch * tiling.kv_heads)
    return Prepared("epilogue.kernels.add_seen_by_kernel", grid, numbers)


@prepared
def _window_values(tiling: Tiling, of_dv: tuple[int, ...]) -> Prepared:
    columns = min(VALUE_COLUMNS, tiling.d)
    numbers: dict[str, Any] = {
        **strides(of_dv, "n"), "kv_heads": tiling.kv_heads, "keys": tiling.keys, "queries": tiling.queries,
        "older": tiling.older, "n_older": tiling.n_older, "segments": tiling.query_segments, "window": tiling.window,
        "UNEVEN": tiling.window % tiling.tile.segment > 0, "HEAD_DIM": tiling.head_dim, "D": tiling.d,
        "SLICE": columns, "LENGTH": tiling.tile.segment, "num_warps": 2,
    }  # fmt: skip
    grid = (tiling.key_segments * (tiling.d // columns), tiling.batch * tiling.kv_heads)
    return Prepared("epilogue.kernels.add_window_kernel", grid, numbers)


def sum_from_each(totals: Tensor, sums: Tensor) -> None:
    """Fill sums [kv heads, segments, columns] from the totals [heads, segments, columns]: over all heads of a group,
    from each segment to the last. Where there are as many heads, it may be the same tensor."""
    _sums_from_each(totals.shape, sums.shape, None)(p_totals=totals, p_sums=sums, p_first=None)


@prepared
def _sums_from_each(of_totals: tuple[int, ...], of_sums: tuple[int, ...], restarting: Tiling | None) -> Prepared:
    """``restarting``: the tiling of sums that begin anew with each document."""
    kv_heads, segments, d = of_sums
    columns, t = min(VALUE_COLUMNS, d), restarting
    numbers: dict[str, Any] = {
        "segments": segments, "kv_heads": 1 if t is None else t.kv_heads, "keys": 0 if t is None else t.keys,
        "older": 0 if t is None else t.older, "RESTARTS": t is not None, "GROUP": of_totals[0] // kv_heads, "D": d,
        "SLICE": columns, "ROWS": 128, "LENGTH": 1 if t is None else t.tile.segment, "num_warps": 4,
    }  # fmt: skip
    return Prepared("epilogue.kernels.totals_from_kernel", (d // columns, kv_heads), numbers)


def zero_and_sum_from_each(zeros: Tensor, totals: Tensor) -> None:
    """Fill one with 0, and do :func:`sum_from_each` in place on the other."""
    _zeros_and_sums(zeros.numel(), totals.shape)(p_zeros=zeros, p_totals=totals)


@prepared
def _zeros_and_sums(zeros: int, of_totals: tuple[int, ...]) -> Prepared:
    kv_heads, segments, d = of_totals
    columns = min(VALUE_COLUMNS, d)
    sums = kv_heads * (d // columns)
    numbers: dict[str, Any] = {
        "numbers": zeros, "segments": segments, "sums": sums, "D": d, "SLICE": columns, "ROWS": 32, "BLOCK": _ZEROS,
        "num_warps": 4,
    }  # fmt: skip
    return Prepared("epilogue.kernels.zeros_and_totals_kernel", (sums + cdiv(zeros, _ZEROS),), numbers)


def dsink_of(call: Call, rows: Tensor) -> Tensor:
    """Return the gradient of a sink from its rows [B, H, Tq]."""
    assert isinstance(call.sink, Tensor)
    return (rows.sum((0, 2)) if call.sink.ndim == 1 else rows).to(call.sink.dtype)


def scale_rows(x: Tensor, scale: Tensor | float, out: Tensor) -> Tensor:
    """Write scale * x [B, H, T, D] into out: one scale, or fp32 ones [B or 1, 1, T]; torch has no fast kernel for two
    types."""
    row_scale, one_scale = (scale.contiguous(), 1.0) if isinstance(scale, Tensor) else (None, scale)
    step = row_scale.stride(0) if row_scale is not None and row_scale.shape[0] > 1 else 0
    _scaling(x.shape, x.stride(), out.stride(), row_scale is not None, step, one_scale)(
        p_x=x, p_scale=row_scale, p_y=out
    )
    return out


@prepared
def _scaling(
    shape: tuple[int, ...], of_x: tuple[int, ...], of_y: tuple[int, ...], has_rows: bool, of_rows: int, scale: float
) -> Prepared:
    batch, heads, rows, head_dim = shape
    d = padded(head_dim)
    tile = TILES_WITHOUT_SUMS[d]
    tiles = cdiv(rows, tile.tokens)
    numbers: dict[str, Any] = {
        "scale": scale, **strides(of_x, "x"), **strides(of_y, "y"), "stride_sb": of_rows, "heads": heads, "rows": rows,
        "tiles": tiles, "HAS_ROWS": has_rows, "HEAD_DIM": head_dim, "D": d, "T": tile.tokens, "num_warps": tile.warps,
    }  # fmt: skip
    return Prepared("epilogue.kernels.scale_rows_kernel", (tiles * batch * heads,), numbers)


def negate_rows(call: Call, dy: Tensor) -> None:
    """Negate in place the rows of dy with a negative factor; a second call restores them."""
    alpha, gate = contiguous_rows(call.alpha), call.gate
    if alpha is not None or gate is not None:
        _negation(dy.shape, dy.stride(), steps(gate), alpha is not None, gate_kind(gate) != NO_GATE)(
            p_dy=dy, p_alpha=alpha, p_gate=gate
        )


@prepared
def _negation(
    shape: tuple[int, ...], of_dy: tuple[int, ...], of_gate: tuple[int, ...] | None, has_alpha: bool, has_gate: bool
) -> Prepared:
    batch, heads, queries, head_dim = shape
    numbers: dict[str, Any] = {
        **strides(of_dy, "d"), **strides(of_gate, "g"), "heads": heads, "queries": queries, "HAS_ALPHA": has_alpha,
        "HAS_GATE": has_gate, "HEAD_DIM": head_dim, "D": padded(head_dim), "ROWS": ROWS, "T": 16, "num_warps": 4,
    }  # fmt: skip
    return Prepared("epilogue.kernels.negate_rows_kernel", (cdiv(queries, ROWS), batch * heads), numbers)


def _fork(call: Call, lead: int) -> AbstractContextManager:
    """Return a context whose launches may run beside what the current stream gets between this call and its end, but
    not in the first ``lead`` cycles."""
    if call.q.device.type != "cuda" or call.tq < _LONG:
        return nullcontext()
    main = torch.cuda.current_stream(call.q.device)
    return _beside(main, main.record_event(), lead)


@contextmanager
def _beside(main: torch.cuda.Stream, start: Any, lead: int) -> Iterator[None]:
    side = _side_stream(main.device)
    side.wait_event(start)
    try:
        with torch.cuda.stream(side):
            torch.cuda._sleep(lead)
            yield
    finally:
        # Also where a launch fails: the buffers go back to the main stream.
        main.wait_stream(side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def new_saved_sums(call: Call) -> Tensor:
    """Allocate what the forward saves for the backward: the sum of the values before each tile, or u itself."""
    t = tiling_of(call)
    shape = {
        RUNNING: (t.batch * t.kv_heads, t.tiles, t.d),
        WHOLE: (t.batch * t.kv_heads, t.d),
        TABLE: (t.batch, t.kv_heads, t.queries, t.head_dim),
    }.get(t.sums, (0,))
    return torch.empty(shape, dtype=torch.float32, device=call.v.device)


def new_value_sums(call: Call) -> Tensor:
    """Allocate for :func:`sum_values`: the sum of values before each segment in its block, then each block's total; for
    sums that slide that from each tile to the end of its segment."""
    t = tiling_of(call)
    rows = t.key_segments * (t.tile.segment // t.tile.tokens) if t.window else t.key_segments + t.blocks
    shape = (t.batch * t.kv_heads, rows, t.d)
    return torch.empty(shape, dtype=torch.float32, device=call.v.device)


def sum_values(call: Call, sums: Tensor, first: Tensor | None = None) -> None:
    """Fill ``sums``, of :func:`new_value_sums`, which the forward reads and nobody keeps."""
    tiling = tiling_of(call)
    if tiling.window:
        _tile_sums(tiling, call.v.stride())(p_v=call.v, p_sums=sums)
    else:
        _value_sums(tiling, call.v.stride())(p_v=call.v, p_first=first, p_sums=sums)


@prepared
def _value_sums(tiling: Tiling, of_v: tuple[int, ...]) -> Prepared:
    columns = min(VALUE_COLUMNS, tiling.d)
    numbers: dict[str, Any] = {
        **strides(of_v, "v"), "kv_heads": tiling.kv_heads, "keys": tiling.keys, "first": tiling.first,
        "segments": tiling.key_segments, "blocks": tiling.blocks, "block_segments": tiling.block_segments,
        "RESTARTS": tiling.restarts, "HEAD_DIM": tiling.head_dim, "D": tiling.d, "SLICE": columns,
        "LENGTH": tiling.tile.segment, "num_warps": 1,
    }  # fmt: skip
    grid = (tiling.blocks * (tiling.d // columns), tiling.batch * tiling.kv_heads)
    return Prepared("epilogue.kernels.value_sums_kernel", grid, numbers)


@prepared
def _tile_sums(tiling: Tiling, of_v: tuple[int, ...]) -> Prepared:
    columns = min(VALUE_COLUMNS, tiling.d)
    numbers: dict[str, Any] = {
        **strides(of_v, "v"), "kv_heads": tiling.kv_heads, "keys": tiling.keys, "first": tiling.first,
        "segments": tiling.key_segments, "HEAD_DIM": tiling.head_dim, "D": tiling.d, "SLICE": columns,
        "T": tiling.tile.tokens, "LENGTH": tiling.tile.segment, "num_warps": 1,
    }  # fmt: skip
    grid = (tiling.key_segments * (tiling.d // columns), tiling.batch * tiling.kv_heads)
    return Prepared("epilogue.kernels.tile_sums_kernel", grid, numbers)


def contiguous_rows(x: Tensor | None) -> Tensor | None:
    """Return alpha or beta as the kernels read them; both are small."""
    return None if x is None else x.contiguous()


def negatable(call: Call, dy: Tensor) -> Tensor:
    """Return dy, or a copy where rows may not be negated in place: elements share memory, or it is an input's."""
    is_dense = dy.is_contiguous() or (
        dy.stride(-1) == 1 and dy.stride() == torch.empty_like(dy, device="meta").stride()
    )
    inputs = (x for x in (call.q, call.k, call.v, call.sink, call.alpha, call.beta, call.gate) if isinstance(x, Tensor))
    memory = dy.untyped_storage().data_ptr()
    is_shared = any(x.untyped_storage().data_ptr() == memory for x in inputs)
    return dy if is_dense and not is_shared else dy.clone(memory_format=torch.contiguous_format)
