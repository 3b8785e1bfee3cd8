"""Launches the fused Triton epilogue: the same functions as :mod:`epilogue`, one pass over each tensor.

Forward: one small kernel sums the values of each tile, one kernel writes y. Backward: where a row factor r (alpha, a
headwise gate) is all that stands between dy and the attention, no scaled copy of dy is made. The stock backward
rebuilds weights as exp(s - lse), so lse - log |r| makes them |r| times larger, and every gradient with them; a negative
r flips the sign of its dy rows in place for the duration of the stock backward. One kernel then does the rest.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.epilogue import AttentionBackward
from affine_attn.core.ops import Gradients, Output

_ELEMENTWISE = 2  # as in the kernels

# Tokens of a tile and warps of a program, by padded head_dim.
_TILES = {16: (128, 4), 32: (128, 4), 64: (64, 4), 128: (64, 4), 256: (64, 8)}

# Sums of later tiles read at once, software pipelining over the heads of a group, rows a sign check covers.
_CHUNK, _STAGES, _ROWS = 32, 3, 1024
# Columns that one program of the prefix kernel walks down, and how.
_PREFIX_SLICE, _PREFIX_STAGES, _PREFIX_WARPS = 32, 4, 2


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
    if _TRITON_PROBLEM is not None:
        return _TRITON_PROBLEM
    if call.q.device.type != "cuda" and not INTERPRETED:
        return "Triton kernels need a CUDA device"
    if call.q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the fused epilogue takes bfloat16, float16 or float32, not {call.q.dtype}"
    if call.q.shape[-1] > 256:
        return f"the fused epilogue takes head_dim up to 256, not {call.q.shape[-1]}"
    return None


def _kernels() -> Any:
    """Imported late, where Triton is known to be there; a launch is nothing a type checker can follow."""
    from affine_attn.core.kernels import epilogue

    return epilogue


class _Tiling(NamedTuple):
    tokens: int
    warps: int
    d: int  # head_dim rounded up to a power of two
    query_tiles: int
    n_older: int  # key tiles before the first query's
    older: int

    @property
    def tiles(self) -> int:
        return self.n_older + self.query_tiles

    @property
    def first(self) -> int:
        return self.older - self.n_older * self.tokens


def _tiling(call: Call) -> _Tiling:
    d = max(16, 1 << (call.q.shape[-1] - 1).bit_length())
    tokens, warps = _TILES[d]
    # Without a causal mask every query sees every key; tiles then only cut the sum.
    older = call.tk - call.tq if call.mask.causal else 0
    covered = call.tq if call.mask.causal else call.tk
    return _Tiling(tokens, warps, d, -(-covered // tokens), -(-older // tokens), older)


def finish(call: Call, o: Tensor, z: Tensor) -> Output:
    """Stages 2 to 4 on a fresh (o, z), which may be overwritten."""
    if call.sink is None and call.alpha is None and call.beta is None and call.gate is None:
        return Output(o, o.new_empty(0), z, z.new_empty(0))
    kernels = _kernels()

    tiling = _tiling(call)
    in_place = call.alpha is None and call.beta is None and call.gate is None
    y = o if in_place else torch.empty_like(call.q)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=o.device)
    prefix = _value_prefix(call, tiling)
    sink, constant = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink or 0.0)
    alpha, beta, gate = _rows(call.alpha), _rows(call.beta), call.gate
    batch, heads, queries, head_dim = call.q.shape
    kernels.epilogue_kernel[(-(-queries // tiling.tokens), batch * call.k.shape[1])](
        o, z, call.v, prefix, sink, alpha, beta, gate, y, lse,
        *_strides(o), *_strides(call.v), *_strides(gate), *_strides(y), *_sink_strides(sink),
        heads, call.k.shape[1], queries, tiling.older, tiling.n_older, tiling.tiles, constant,
        SINK=_sink_kind(call.sink), HAS_ALPHA=alpha is not None, HAS_BETA=beta is not None,
        GATE=_gate_kind(gate), KEEP_OUT=not in_place, CAUSAL=call.mask.causal,
        HEAD_DIM=head_dim, D=tiling.d, T=tiling.tokens, STAGES=_STAGES, num_warps=tiling.warps,
    )  # fmt: skip
    return Output(y, o.new_empty(0) if in_place else o, lse, lse.new_empty(0) if prefix is None else prefix)


def gradients(call: Call, dy: Tensor, output: Output, attention_backward: AttentionBackward) -> Gradients:
    """All gradients; ``attention_backward(do, out, lse)`` is the engine's plain backward."""
    o = output.saved_out if output.saved_out.numel() else output.y
    if not isinstance(call.sink, Tensor) and call.alpha is None and call.beta is None and call.gate is None:
        return (*attention_backward(dy, o, output.saved_lse), None, None, None, None)
    kernels = _kernels()

    tiling = _tiling(call)
    dy = dy if _is_dense(dy) else dy.contiguous()
    sink = call.sink if isinstance(call.sink, Tensor) else None
    alpha, beta, gate = _rows(call.alpha), _rows(call.beta), call.gate
    batch, heads, queries, head_dim = call.q.shape
    kv_heads = call.k.shape[1]
    query_tiles = -(-queries // tiling.tokens)
    sizes = {"HEAD_DIM": head_dim, "D": tiling.d, "T": tiling.tokens, "num_warps": tiling.warps}
    elementwise = _gate_kind(gate) == _ELEMENTWISE
    if elementwise:
        do = torch.empty_like(dy)
        kernels.gated_gradient_kernel[(query_tiles, batch * heads)](
            dy, alpha, gate, do, *_strides(dy), *_strides(gate), *_strides(do), heads, queries,
            HAS_ALPHA=alpha is not None, **sizes,
        )  # fmt: skip
        dq, dk, dv = attention_backward(do, o, output.saved_lse)
    else:
        with _negated_rows(dy, alpha, gate, tiling):
            dq, dk, dv = attention_backward(dy, o, output.saved_lse)
    row = torch.empty(call.q.shape[:3], dtype=torch.float32, device=dy.device)
    dsink, dalpha, dbeta = (None if x is None else torch.empty_like(row) for x in (sink, alpha, beta))
    dgate = None if gate is None else torch.empty_like(gate)
    if dgate is not None and not elementwise:
        dgate = dgate.contiguous()  # one number per row, written like the other rows
    prefix = totals = None
    if beta is not None:
        prefix = output.saved_sums
        totals = torch.empty(batch * kv_heads, query_tiles, tiling.d, dtype=torch.float32, device=dy.device)
    pointers = (dy, o, output.saved_lse, call.v, prefix, sink, alpha, beta, gate, dsink, dalpha, dbeta, dgate, totals)
    strides = (*_strides(dy), *_strides(o), *_strides(call.v), *_strides(gate))
    counts = (heads, kv_heads, queries, tiling.older, tiling.n_older, tiling.tiles, query_tiles)
    constants = {
        "SINK": _sink_kind(call.sink), "HAS_ALPHA": alpha is not None, "HAS_BETA": beta is not None,
        "CAUSAL": call.mask.causal, "STAGES": _STAGES,
    } | sizes  # fmt: skip
    grid = (query_tiles, batch * kv_heads)
    if elementwise:
        kernels.gated_row_gradients_kernel[grid](
            *pointers, *strides, *_strides(dgate), *_sink_strides(sink), *counts, **constants
        )
    else:
        kernels.row_gradients_kernel[grid](
            *pointers, *strides, *_sink_strides(sink), *counts, HAS_GATE=gate is not None, **constants
        )
    if totals is not None and call.mask.causal:
        kernels.value_gradient_kernel[grid](
            dy, beta, gate, totals, dv, *_strides(dy), *_strides(gate), *_strides(dv),
            heads, kv_heads, queries, tiling.older, query_tiles,
            GATE=_gate_kind(gate), CHUNK=_CHUNK, STAGES=_STAGES, **sizes,
        )  # fmt: skip
    if totals is not None and (not call.mask.causal or tiling.older):
        # Keys that every query sees get the whole sum.
        seen_by_all = slice(0, tiling.older if call.mask.causal else call.tk)
        whole = totals.sum(1).view(batch, kv_heads, 1, -1)[..., :head_dim]
        dv[:, :, seen_by_all] += whole.to(dv.dtype)
    if dsink is not None:
        dsink = (dsink.sum((0, 2)) if sink.ndim == 1 else dsink).to(sink.dtype)
    return (
        dq, dk, dv, dsink,
        None if dalpha is None else dalpha.to(call.alpha.dtype),
        None if dbeta is None else dbeta.to(call.beta.dtype),
        dgate,
    )  # fmt: skip


@contextmanager
def _negated_rows(dy: Tensor, alpha: Tensor | None, gate: Tensor | None, tiling: _Tiling) -> Iterator[None]:
    """Inside, rows of dy whose factor alpha * gate is negative are negated, in place and in stream order."""
    batch, heads, queries, head_dim = dy.shape

    def negate() -> None:
        _kernels().negate_rows_kernel[(-(-queries // _ROWS), batch * heads)](
            dy, alpha, gate, *_strides(dy), *_strides(gate), heads, queries,
            HAS_ALPHA=alpha is not None, HAS_GATE=gate is not None,
            HEAD_DIM=head_dim, D=tiling.d, ROWS=_ROWS, T=16, num_warps=4,
        )  # fmt: skip

    has_factor = alpha is not None or gate is not None
    if has_factor:
        negate()
    yield
    if has_factor:
        negate()


def fake_sums(call: Call) -> Tensor:
    """An empty tensor of what :func:`finish` saves as sums."""
    tiling = _tiling(call)
    shape = (0,) if call.beta is None else (call.v.shape[0] * call.v.shape[1], tiling.tiles + 1, tiling.d)
    return torch.empty(shape, dtype=torch.float32, device=call.v.device)


def _value_prefix(call: Call, tiling: _Tiling) -> Tensor | None:
    if call.beta is None:
        return None
    kernels = _kernels()

    batch, kv_heads, keys, head_dim = call.v.shape
    prefix = fake_sums(call)
    columns = min(_PREFIX_SLICE, tiling.d)
    kernels.value_prefix_kernel[(batch * kv_heads, tiling.d // columns)](
        call.v, prefix, *_strides(call.v), kv_heads, keys, tiling.first, tiling.tiles,
        HEAD_DIM=head_dim, D=tiling.d, SLICE=columns, T=tiling.tokens, STAGES=_PREFIX_STAGES, num_warps=_PREFIX_WARPS,
    )  # fmt: skip
    return prefix


def _sink_kind(sink: Tensor | float | None) -> int:
    return 0 if sink is None else 1 if isinstance(sink, float) else 2


def _gate_kind(gate: Tensor | None) -> int:
    return 0 if gate is None else 1 if gate.shape[-1] == 1 else _ELEMENTWISE


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2))


def _sink_strides(sink: Tensor | None) -> tuple[int, int, int]:
    return _strides(sink) if sink is None or sink.ndim == 3 else (0, sink.stride(0), 0)


def _rows(x: Tensor | None) -> Tensor | None:
    """alpha and beta are small; the kernels read them as contiguous rows."""
    return None if x is None else x.contiguous()


def _is_dense(x: Tensor) -> bool:
    """Rows may be negated in place only where no two elements share memory."""
    return x.is_contiguous() or (x.stride(-1) == 1 and x.stride() == torch.empty_like(x, device="meta").stride())
