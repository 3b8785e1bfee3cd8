"""Launches the fused Triton epilogue: the same functions as :mod:`epilogue`, one pass over each tensor.

Forward: one small kernel sums the values before each segment, one kernel writes y. Backward: where a row factor r
(alpha, a headwise gate) is all that stands between dy and the attention, no scaled copy of dy is made. The stock
backward rebuilds weights as exp(s - lse), so lse - log |r| makes them |r| times larger, and every gradient with them;
a negative r flips the sign of its dy rows in place for the duration of the stock backward.

Plain sums of the values, and gradients of the stages where none goes through the attention, need nothing of it. On long
sequences their kernels run on a second stream and fill the multiprocessors that the stock kernels leave idle towards
their end; only what dv wants is added afterwards.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.kernels.device import cdiv, padded
from affine_attn.kernels.epilogue.eager import AttentionBackward, PlainAttention
from affine_attn.kernels.visible_sums import launch as visible_sums

# Where the sums u of visible values come from, as in the kernels: a running sum under a causal mask, one sum for all
# queries, a table with a row per query. 0: nowhere.
_RUNNING, _WHOLE, _TABLE = 1, 2, 3
ELEMENTWISE = 2


class _Tile(NamedTuple):
    """Tokens and columns a program has at a time, forward and backward; tokens of a segment, which it walks down."""

    tokens: int
    columns: int
    backward_columns: int
    segment: int
    warps: int


# By padded head_dim, timed on an H200 (LOG.md).
_TILES = {
    16: _Tile(32, 16, 16, 64, 1),
    32: _Tile(16, 32, 32, 64, 1),
    64: _Tile(8, 64, 64, 64, 1),
    128: _Tile(8, 64, 128, 64, 1),
    256: _Tile(8, 64, 128, 64, 1),
}
# Without sums the heads of a group have nothing in common, and tokens neither: one tile of one head per program.
_TILES_WITHOUT_SUMS = {
    16: _Tile(128, 16, 16, 128, 4),
    32: _Tile(64, 32, 32, 64, 4),
    64: _Tile(64, 64, 64, 64, 4),
    128: _Tile(32, 128, 128, 32, 4),
    256: _Tile(16, 256, 256, 16, 4),
}
# Most query heads a program has in flight, and most columns of them: more would not fit its registers.
_CHUNK, _CHUNK_COLUMNS = 4, 384
# Rows of which a program of negate_rows_kernel looks at the signs.
_ROWS = 1024
# The sums of values go block by block of segments: tokens of a block at least, blocks at most, columns of a program.
_BLOCK, _BLOCKS, _VALUE_COLUMNS = 256, 31, 32
# Heads of all sequences together: CUDA's limit for the second axis of a grid.
_MOST_HEADS = 65535
# Numbers of dv that a program adds to.
_DV_ELEMENTS = 2048
# Zeros that a program writes.
_ZEROS = 8192
# From so many queries on, a second stream is worth its launches.
_LONG = 1024
# Cycles that the second stream waits, so that the stock kernel has taken its multiprocessors before ours ask for any:
# in the forward, and in the backward per element of q. A stock backward begins with a kernel for <do, o>, which moves
# as much memory as ours, so that nothing is gained beside it.
_FORWARD_LEAD, _BACKWARD_LEAD = 1_000, 0.003


def _triton_problem() -> str | None:
    """Why Triton cannot be used at all, or None; found without importing it, which takes a while."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return None  # the module comes from a distribution of another name, as in ROCm builds
    oldest = (3, 6)
    return None if tuple(int(part) for part in installed.split(".")[:2]) >= oldest else f"triton {installed} is too old"


# Constants of the process, so that a compiler tracing why_not has nothing to look up.
_TRITON_PROBLEM = _triton_problem()
# Triton's CPU interpreter, which the tests use.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def why_not(call: Call) -> str | None:
    """Why the fused epilogue cannot serve this call, or None."""
    if (reason := why_no_kernels(call)) is not None:
        return reason
    # Said of the batch alone: torch.export can name no limit of a product.
    if call.q.shape[0] > _MOST_HEADS // max(call.heads, 1):
        heads = call.q.shape[0] * call.heads
        return f"the fused epilogue takes at most {_MOST_HEADS} heads of all sequences together, not {heads}"
    return None


def why_no_kernels(call: Call) -> str | None:
    """Why no kernel of Triton can serve this call, or None."""
    if _TRITON_PROBLEM is not None:
        return _TRITON_PROBLEM
    if call.q.device.type != "cuda" and not INTERPRETED:
        return "Triton kernels need a CUDA device"
    if call.q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"Triton kernels take bfloat16, float16 or float32, not {call.q.dtype}"
    if call.q.shape[-1] > 256:
        return f"Triton kernels take head_dim up to 256, not {call.q.shape[-1]}"
    return None


def _kernels() -> Any:
    """Imported late, where Triton is known to be there; a launch is nothing a type checker can follow."""
    from affine_attn.kernels.epilogue import kernels as epilogue

    return epilogue


class _Plan(NamedTuple):
    """How the tokens are cut into tiles and segments (kernels/epilogue.py says what for), and whence the sums come."""

    tile: _Tile
    sums: int
    d: int  # head_dim rounded up to a power of two
    tiles: int
    query_segments: int
    key_segments: int
    older: int  # keys before the first query's
    n_older: int  # segments of them

    @property
    def first(self) -> int:
        """Slot where the first key segment starts."""
        return self.older - self.n_older * self.tile.segment

    @property
    def block_segments(self) -> int:
        """Segments of a block."""
        return max(_BLOCK // self.tile.segment, cdiv(self.key_segments, _BLOCKS))

    @property
    def blocks(self) -> int:
        return cdiv(self.key_segments, self.block_segments)

    def walkers(self, call: Call) -> int:
        """Heads that walk: those of k, each with its group, or without sums those of q."""
        return call.k.shape[1] if self.sums else call.heads

    def constants(self, call: Call, columns: int) -> dict[str, int]:
        group = call.heads // self.walkers(call)
        chunk = max(n for n in range(1, min(_CHUNK, _CHUNK_COLUMNS // columns) + 1) if group % n == 0)
        return {
            "SUMS": self.sums, "CHUNKS": group // chunk, "CHUNK": chunk, "HEAD_DIM": call.q.shape[-1],
            "D": self.d, "SLICE": columns, "T": self.tile.tokens, "LENGTH": self.tile.segment,
            "num_warps": self.tile.warps,
        }  # fmt: skip


def plan_of(call: Call) -> _Plan:
    d = padded(call.q.shape[-1])
    sums = 0
    if call.beta is not None:
        sums = _TABLE if call.mask.restrictions else _RUNNING if call.mask.causal else _WHOLE
    tile = (_TILES if sums else _TILES_WITHOUT_SUMS)[d]
    if sums and call.heads == call.k.shape[1]:
        # Heads that share no values with others ask for half as much per token.
        tile = tile._replace(tokens=2 * tile.tokens)
    # Without a causal mask every query sees every key; segments then only cut the sum.
    older, covered = (call.tk - call.tq, call.tq) if call.mask.causal else (0, call.tk)
    n_older = max(0, cdiv(older, tile.segment))
    return _Plan(
        tile, sums, d, cdiv(call.tq, tile.tokens), cdiv(call.tq, tile.segment),
        n_older + cdiv(covered, tile.segment), older, n_older,
    )  # fmt: skip


def finish(call: Call, attention: PlainAttention) -> Output:
    """Stages 2 to 4 on the (o, z) of the attention, which are overwritten."""
    if call.sink is None and call.alpha is None and call.beta is None and call.gate is None:
        o, z = attention()
        return Output(o, o.new_empty(0), z, z.new_empty(0))
    plan = plan_of(call)
    if plan.sums in (_RUNNING, _WHOLE):
        sums, beside = new_value_sums(call, plan), _fork(call, _FORWARD_LEAD)
        o, z = attention()
        with beside:
            sum_values(call, plan, sums)
    else:
        sums, (o, z) = None, attention()
    in_place = call.alpha is None and call.beta is None and call.gate is None
    y = o if in_place else torch.empty_like(call.q)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=o.device)
    before = visible_sums.visible_sums(call) if plan.sums == _TABLE else new_saved_sums(call)
    sink, constant = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink or 0.0)
    alpha, beta, gate = contiguous_rows(call.alpha), contiguous_rows(call.beta), call.gate
    walkers = plan.walkers(call)
    _kernels().epilogue_kernel[(plan.query_segments * (plan.d // plan.tile.columns), call.q.shape[0] * walkers)](
        o, z, call.v, sums, before, sink, alpha, beta, gate, y, lse,
        *strides(o), *strides(call.v), *strides(gate), *strides(y), *sink_strides(sink),
        walkers, call.tq, plan.tiles, plan.older, plan.n_older, plan.key_segments, plan.blocks, plan.block_segments,
        constant,
        SINK=sink_kind(call.sink), HAS_ALPHA=alpha is not None, GATE=gate_kind(gate), KEEP_OUT=not in_place,
        BLOCKS=1 << plan.blocks.bit_length(), **plan.constants(call, plan.tile.columns),
    )  # fmt: skip
    return Output(y, o.new_empty(0) if in_place else o, lse, before)


def gradients(call: Call, dy: Tensor, output: Output, attention_backward: AttentionBackward) -> Gradients:
    """All gradients; ``attention_backward(do, out, lse)`` is the engine's plain backward."""
    o = output.saved_out if output.saved_out.numel() else output.y
    if not isinstance(call.sink, Tensor) and call.alpha is None and call.beta is None and call.gate is None:
        return (*attention_backward(dy, o, output.saved_lse), None, None, None, None)
    dy = negatable(call, dy)
    rows = _RowGradients(call, dy, o, output)
    if rows.do is not None:
        rows.launch()
        dq, dk, dv = attention_backward(rows.do, o, output.saved_lse)
    else:
        negate_rows(call, dy)
        try:
            beside = _fork(call, int(_BACKWARD_LEAD * call.q.numel()))
            dq, dk, dv = attention_backward(dy, o, output.saved_lse)
            with beside:
                rows.launch()
        except BaseException:
            negate_rows(call, dy)  # which is the caller's
            raise
    rows.settle(dv)
    return dq, dk, dv, *rows.results()


class _RowGradients:
    """Gradients of sink, alpha, beta and gate, and what beta adds to dv. All buffers are allocated first, on the main
    stream, to which they must belong although a second one fills them."""

    def __init__(self, call: Call, dy: Tensor, o: Tensor, output: Output):
        self.call, self.dy, self.o, self.output = call, dy, o, output
        self.plan = plan = plan_of(call)
        self.sink = sink = call.sink if isinstance(call.sink, Tensor) else None
        self.alpha, self.beta = contiguous_rows(call.alpha), contiguous_rows(call.beta)
        gate = call.gate if gate_kind(call.gate) == ELEMENTWISE else None
        # Wide slices where registers have room: with one of sink, beta and gate alone, and no tensor besides dy and o.
        is_light = gate is None and sum(x is not None for x in (sink, call.beta, call.gate)) == 1
        self.columns = plan.tile.backward_columns if is_light else plan.tile.columns
        # Gradients of numbers per row: every slice of columns writes its part.
        has_row_gate = call.gate is not None and gate is None
        wanted = [sink is not None, call.alpha is not None, call.beta is not None, has_row_gate]
        batch, heads, queries, head_dim = call.q.shape
        kv_heads, new = call.k.shape[1], functools.partial(torch.empty, device=dy.device)
        parts = (plan.d // self.columns, batch, heads, queries)
        self.parts = [new(parts, dtype=torch.float32) if is_wanted else None for is_wanted in wanted]
        self.dgate = None if gate is None else torch.empty_like(gate)
        self.do = None if gate is None else torch.empty_like(dy)
        shape, dtype = (batch, kv_heads, queries, head_dim), torch.float32 if plan.sums == _TABLE else call.v.dtype
        self.weighted = new(shape, dtype=dtype) if plan.sums in (_RUNNING, _TABLE) else None
        totals = (batch * kv_heads, plan.query_segments, plan.d)
        self.totals = new(totals, dtype=torch.float32) if plan.sums in (_RUNNING, _WHOLE) else None

    def launch(self) -> None:
        call, plan = self.call, self.plan
        dsink, dalpha, dbeta, dgate = self.parts
        walkers = plan.walkers(call)
        grid = (plan.query_segments * (plan.d // self.columns), call.q.shape[0] * walkers)
        _kernels().epilogue_backward_kernel[grid](
            self.dy, self.o, self.output.saved_lse, call.v, self.output.saved_sums,
            self.sink, self.alpha, self.beta, call.gate,
            dsink, dalpha, dbeta, dgate if self.dgate is None else self.dgate, self.do, self.weighted, self.totals,
            *strides(self.dy), *strides(self.o), *strides(call.v), *strides(call.gate), *strides(self.dgate),
            *strides(self.do), *sink_strides(self.sink), self.dy[..., 0].numel(),
            walkers, call.tq, plan.tiles, plan.older, plan.query_segments,
            SINK=sink_kind(call.sink), HAS_ALPHA=call.alpha is not None, GATE=gate_kind(call.gate),
            **plan.constants(call, self.columns),
        )  # fmt: skip
        if self.totals is not None:
            sum_from_each(self.totals, self.totals)

    def settle(self, dv: Tensor) -> None:
        """Add to dv what beta gives each value from the queries that see it, and restore the negated rows of dy."""
        call, plan = self.call, self.plan
        batch, kv_heads, _, head_dim = call.v.shape
        is_negated, gate = self.do is None, call.gate
        if is_negated and plan.sums != _RUNNING:
            negate_rows(call, self.dy)
        if self.weighted is not None and plan.sums == _TABLE:
            visible_sums.add_seen_by(call, self.weighted, dv)
        if plan.sums == _RUNNING:
            # Does both: a launch less.
            tokens = min(plan.tile.segment, _DV_ELEMENTS // plan.d)
            _kernels().add_seen_by_kernel[(cdiv(call.tq, tokens), batch * kv_heads)](
                dv, self.weighted, self.totals, self.dy, self.alpha, gate, *strides(dv), *strides(self.dy),
                *strides(gate), kv_heads, call.tq, plan.older, plan.query_segments,
                HAS_ALPHA=is_negated and self.alpha is not None, HAS_GATE=is_negated and gate is not None,
                GROUP=call.heads // kv_heads, HEAD_DIM=head_dim, D=plan.d, T=tokens, LENGTH=plan.tile.segment,
                num_warps=4,
            )  # fmt: skip
        if self.totals is not None and (plan.sums == _WHOLE or plan.older > 0):
            # Keys that every query sees get the whole sum.
            seen_by_all = slice(0, plan.older if plan.sums == _RUNNING else call.tk)
            whole = self.totals[:, 0].view(batch, kv_heads, 1, -1)[..., :head_dim]
            dv[:, :, seen_by_all] += whole  # added in fp32, rounded once

    def results(self) -> Gradients:
        call = self.call
        # Pairwise: a sum over so short a dimension takes three times as long.
        dsink, dalpha, dbeta, dgate = (None if x is None else functools.reduce(torch.add, x) for x in self.parts)
        return (
            None if dsink is None else dsink_of(call, dsink),
            None if dalpha is None else dalpha.to(call.alpha.dtype),
            None if dbeta is None else dbeta.to(call.beta.dtype),
            self.dgate if dgate is None else dgate[..., None].to(call.gate.dtype),
        )


def sum_from_each(totals: Tensor, sums: Tensor) -> None:
    """sums [kv heads, segments, columns]: of the totals [heads, segments, columns] of all heads of a group, from a
    segment to the last. Where there are as many heads, it may be the same tensor."""
    kv_heads, segments, d = sums.shape
    columns = min(_VALUE_COLUMNS, d)
    _kernels().totals_from_kernel[(d // columns, kv_heads)](
        totals, sums, segments, GROUP=totals.shape[0] // kv_heads, D=d, SLICE=columns, ROWS=128, num_warps=4
    )


def zero_and_sum_from_each(zeros: Tensor, totals: Tensor) -> None:
    """Fill one with 0, and do :func:`sum_from_each` in place on the other."""
    kv_heads, segments, d = totals.shape
    columns = min(_VALUE_COLUMNS, d)
    sums = kv_heads * (d // columns)
    _kernels().zeros_and_totals_kernel[(sums + cdiv(zeros.numel(), _ZEROS),)](
        zeros, zeros.numel(), totals, segments, sums, D=d, SLICE=columns, ROWS=32, BLOCK=_ZEROS, num_warps=4
    )


def dsink_of(call: Call, rows: Tensor) -> Tensor:
    """The gradient of a sink from its rows [B, H, Tq]."""
    assert isinstance(call.sink, Tensor)
    return (rows.sum((0, 2)) if call.sink.ndim == 1 else rows).to(call.sink.dtype)


def scale_rows(x: Tensor, scale: Tensor | float, out: Tensor) -> Tensor:
    """out = scale * x [B, H, T, D]: one scale, or fp32 ones [B or 1, 1, T]; torch has no fast kernel for two types."""
    batch, heads, rows, head_dim = x.shape
    d = padded(head_dim)
    tile = _TILES_WITHOUT_SUMS[d]
    tiles = cdiv(rows, tile.tokens)
    row_scale, one_scale = (scale.contiguous(), 1.0) if isinstance(scale, Tensor) else (None, scale)
    _kernels().scale_rows_kernel[(tiles * batch * heads,)](
        x, row_scale, one_scale, out, *strides(x), *strides(out),
        row_scale.stride(0) if row_scale is not None and row_scale.shape[0] > 1 else 0, heads, rows, tiles,
        HAS_ROWS=row_scale is not None, HEAD_DIM=head_dim, D=d, T=tile.tokens, num_warps=tile.warps,
    )  # fmt: skip
    return out


def negate_rows(call: Call, dy: Tensor) -> None:
    """Negate in place the rows of dy with a negative factor; a second call restores them."""
    alpha, gate = contiguous_rows(call.alpha), call.gate
    if alpha is None and gate is None:
        return
    batch, heads, queries, head_dim = dy.shape
    _kernels().negate_rows_kernel[(cdiv(queries, _ROWS), batch * heads)](
        dy, alpha, gate, *strides(dy), *strides(gate), heads, queries,
        HAS_ALPHA=alpha is not None, HAS_GATE=gate is not None,
        HEAD_DIM=head_dim, D=padded(head_dim), ROWS=_ROWS, T=16, num_warps=4,
    )  # fmt: skip


def _fork(call: Call, lead: int) -> AbstractContextManager:
    """Launches inside it may run beside what the current stream gets between this call and the context's end, but not
    in the first ``lead`` cycles."""
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
    """For what :func:`finish` saves for the backward: the sum of the values before each tile, or u itself."""
    plan = plan_of(call)
    batch, kv_heads, _, head_dim = call.v.shape
    shape = {
        _RUNNING: (batch * kv_heads, plan.tiles, plan.d),
        _WHOLE: (batch * kv_heads, plan.d),
        _TABLE: (batch, kv_heads, call.tq, head_dim),
    }.get(plan.sums, (0,))
    return torch.empty(shape, dtype=torch.float32, device=call.v.device)


def new_value_sums(call: Call, plan: _Plan) -> Tensor:
    """For :func:`sum_values`: the sum of the values before each segment in its block, then the total of each block."""
    batch, kv_heads = call.v.shape[:2]
    shape = (batch * kv_heads, plan.key_segments + plan.blocks, plan.d)
    return torch.empty(shape, dtype=torch.float32, device=call.v.device)


def sum_values(call: Call, plan: _Plan, sums: Tensor) -> None:
    """Fill ``sums``, of :func:`new_value_sums`, which the forward reads and nobody keeps."""
    batch, kv_heads, keys, head_dim = call.v.shape
    columns = min(_VALUE_COLUMNS, plan.d)
    _kernels().value_sums_kernel[(plan.blocks * (plan.d // columns), batch * kv_heads)](
        call.v, sums, *strides(call.v), kv_heads, keys, plan.first, plan.key_segments, plan.blocks,
        plan.block_segments, HEAD_DIM=head_dim, D=plan.d, SLICE=columns, LENGTH=plan.tile.segment, num_warps=1,
    )  # fmt: skip


def sink_kind(sink: Tensor | float | None) -> int:
    return 0 if sink is None else 1 if isinstance(sink, float) else 2


def gate_kind(gate: Tensor | None) -> int:
    return 0 if gate is None else 1 if gate.shape[-1] == 1 else ELEMENTWISE


def strides(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


def sink_strides(sink: Tensor | None) -> tuple[int, int, int]:
    return strides(sink) if sink is None or sink.ndim == 3 else (0, sink.stride(0), 0)


def contiguous_rows(x: Tensor | None) -> Tensor | None:
    """alpha and beta are small; the kernels read them as contiguous rows."""
    return None if x is None else x.contiguous()


def negatable(call: Call, dy: Tensor) -> Tensor:
    """dy, or a copy of it where rows may not be negated in place: two elements share memory, or it is an input's."""
    is_dense = dy.is_contiguous() or (
        dy.stride(-1) == 1 and dy.stride() == torch.empty_like(dy, device="meta").stride()
    )
    inputs = (x for x in (call.q, call.k, call.v, call.sink, call.alpha, call.beta, call.gate) if isinstance(x, Tensor))
    memory = dy.untyped_storage().data_ptr()
    is_shared = any(x.untyped_storage().data_ptr() == memory for x in inputs)
    return dy if is_dense and not is_shared else dy.clone(memory_format=torch.contiguous_format)
