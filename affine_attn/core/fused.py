"""Launches the fused Triton epilogue: the same functions as :mod:`epilogue`, one pass over each tensor.

Forward: one small kernel sums the values before each tile, one kernel writes y. Backward: where a row factor r (alpha, a
headwise gate) is all that stands between dy and the attention, no scaled copy of dy is made. The stock backward
rebuilds weights as exp(s - lse), so lse - log |r| makes them |r| times larger, and every gradient with them; a negative
r flips the sign of its dy rows in place for the duration of the stock backward. One kernel then does the rest, and a
small one hands the sums of later tiles to dv.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.core import visible_sums
from affine_attn.core.call import Call
from affine_attn.core.epilogue import AttentionBackward
from affine_attn.core.ops import Gradients, Output

_RUNNING, _WHOLE, _TABLE = 1, 2, 3  # as in the kernels
_ELEMENTWISE = 2

# Tokens of a tile and warps of a program, by padded head_dim.
_TILES = {16: (128, 4), 32: (128, 4), 64: (64, 4), 128: (64, 4), 256: (64, 8)}
# Software pipelining over the heads of a group; rows a sign check covers.
_STAGES, _ROWS = 3, 1024
_LAB_F, _LAB_B = {}, {}
# Tiles in a segment of sums over tokens; columns that one program of the prefix kernel walks down, and how.
_SEGMENT = 8
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


class _Plan(NamedTuple):
    """How the tokens are cut into tiles, and how the sums of visible values come about."""

    sums: int
    tokens: int
    warps: int
    d: int  # head_dim rounded up to a power of two
    query_tiles: int
    key_tiles: int
    older: int  # keys before the first query's
    n_older: int  # tiles of them

    @property
    def first(self) -> int:
        """Slot where the first key tile starts."""
        return self.older - self.n_older * self.tokens

    @property
    def segments(self) -> int:
        return -(-self.key_tiles // _SEGMENT)

    def constants(self, call: Call) -> dict[str, int]:
        return {
            "SUMS": self.sums, "HEAD_DIM": call.q.shape[-1], "D": self.d, "T": self.tokens, "SEGMENT": _SEGMENT,
            "STAGES": _STAGES, "num_warps": self.warps,
        }  # fmt: skip


def _plan(call: Call) -> _Plan:
    d = max(16, 1 << (call.q.shape[-1] - 1).bit_length())
    tokens, warps = _TILES[d]
    restricted = bool(call.mask.tensors) or call.mask.window is not None
    sums = 0 if call.beta is None else _TABLE if restricted else _RUNNING if call.mask.causal else _WHOLE
    # Without a causal mask every query sees every key; tiles then only cut the sum.
    older, covered = (call.tk - call.tq, call.tq) if call.mask.causal else (0, call.tk)
    n_older = max(0, -(-older // tokens))
    return _Plan(sums, tokens, warps, d, -(-call.tq // tokens), n_older - (-covered // tokens), older, n_older)


def finish(call: Call, o: Tensor, z: Tensor) -> Output:
    """Stages 2 to 4 on a fresh (o, z), which may be overwritten."""
    if call.sink is None and call.alpha is None and call.beta is None and call.gate is None:
        return Output(o, o.new_empty(0), z, z.new_empty(0))
    plan = _plan(call)
    in_place = call.alpha is None and call.beta is None and call.gate is None
    y = o if in_place else torch.empty_like(call.q)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=o.device)
    sums = visible_sums.visible_sums(call) if plan.sums == _TABLE else _value_prefix(call, plan)
    sink, constant = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink or 0.0)
    alpha, beta, gate = _rows(call.alpha), _rows(call.beta), call.gate
    batch, heads, queries, _ = call.q.shape
    _kernels().epilogue_kernel[(plan.query_tiles, batch * call.k.shape[1])](
        o, z, call.v, sums, sink, alpha, beta, gate, y, lse,
        *_strides(o), *_strides(call.v), *_strides(gate), *_strides(y), *_sink_strides(sink),
        heads, call.k.shape[1], queries, plan.older, plan.n_older, plan.key_tiles, plan.segments, constant,
        SINK=_sink_kind(call.sink), HAS_ALPHA=alpha is not None, GATE=_gate_kind(gate), KEEP_OUT=not in_place,
        **plan.constants(call), **_LAB_F,
    )  # fmt: skip
    return Output(y, o.new_empty(0) if in_place else o, lse, sums)


def gradients(call: Call, dy: Tensor, output: Output, attention_backward: AttentionBackward) -> Gradients:
    """All gradients; ``attention_backward(do, out, lse)`` is the engine's plain backward."""
    o = output.saved_out if output.saved_out.numel() else output.y
    if not isinstance(call.sink, Tensor) and call.alpha is None and call.beta is None and call.gate is None:
        return (*attention_backward(dy, o, output.saved_lse), None, None, None, None)
    plan = _plan(call)
    dy = dy if _is_dense(dy) else dy.contiguous()
    sink = call.sink if isinstance(call.sink, Tensor) else None
    alpha, beta, gate = _rows(call.alpha), _rows(call.beta), call.gate
    dq, dk, dv = attention_backward(_attention_gradient(call, plan, dy), o, output.saved_lse)
    batch, heads, queries, head_dim = call.q.shape
    kv_heads = call.k.shape[1]
    row = torch.empty(call.q.shape[:3], dtype=torch.float32, device=dy.device)
    dsink, dalpha, dbeta = (None if x is None else torch.empty_like(row) for x in (sink, alpha, beta))
    elementwise = _gate_kind(gate) == _ELEMENTWISE
    dgate = None if gate is None else torch.empty_like(gate)
    if dgate is not None and not elementwise:
        dgate = dgate.contiguous()  # one number per row, written like the other rows
    # Sums of beta * gate * dy over the heads of a group: per tile, or per row where a table says who sees whom.
    shape = output.saved_sums.shape if plan.sums == _TABLE else (batch * kv_heads, plan.query_tiles, plan.d)
    weighted = torch.empty(shape, dtype=torch.float32, device=dy.device)
    arguments = (
        dy, o, output.saved_lse, call.v, output.saved_sums, sink, alpha, beta, gate,
        dsink, dalpha, dbeta, dgate, dv, weighted,
        *_strides(dy), *_strides(o), *_strides(call.v), *_strides(gate), *_strides(dv), *_sink_strides(sink),
    )  # fmt: skip
    counts = (heads, kv_heads, queries, plan.older, plan.n_older, plan.key_tiles, plan.segments, plan.query_tiles)
    constants = plan.constants(call) | {"SINK": _sink_kind(call.sink), "HAS_ALPHA": alpha is not None}
    grid = (plan.query_tiles, batch * kv_heads)
    if elementwise or plan.sums == _TABLE:
        _kernels().row_gradients_in_registers_kernel[grid](
            *arguments, *_strides(dgate), *counts, GATE=_gate_kind(gate), **constants
        )
    else:
        _kernels().row_gradients_kernel[grid](*arguments, *counts, HAS_GATE=gate is not None, **constants, **_LAB_B)
    if plan.sums == _TABLE:
        visible_sums.add_seen_by(call, weighted, dv)
    elif plan.sums == _RUNNING and plan.query_tiles > 1:
        _kernels().add_later_totals_kernel[(-(-(plan.query_tiles - 1) // _SEGMENT), batch * kv_heads)](
            dv, weighted, *_strides(dv), kv_heads, queries, plan.older, plan.query_tiles,
            HEAD_DIM=head_dim, D=plan.d, T=plan.tokens, SEGMENT=_SEGMENT, STAGES=_STAGES, num_warps=plan.warps,
        )  # fmt: skip
    if plan.sums == _WHOLE or (plan.sums == _RUNNING and plan.older > 0):
        # Keys that every query sees get the whole sum.
        seen_by_all = slice(0, plan.older if plan.sums == _RUNNING else call.tk)
        whole = weighted.sum(1).view(batch, kv_heads, 1, -1)[..., :head_dim]
        dv[:, :, seen_by_all] += whole.to(dv.dtype)
    if dsink is not None:
        dsink = (dsink.sum((0, 2)) if sink.ndim == 1 else dsink).to(sink.dtype)
    return (
        dq, dk, dv, dsink,
        None if dalpha is None else dalpha.to(call.alpha.dtype),
        None if dbeta is None else dbeta.to(call.beta.dtype),
        dgate,
    )  # fmt: skip


def _attention_gradient(call: Call, plan: _Plan, dy: Tensor) -> Tensor:
    """What the attention's backward takes for dy: a product with an elementwise gate, or dy with rows negated in place.

    The kernels that follow the attention's backward restore those rows.
    """
    alpha, gate = _rows(call.alpha), call.gate
    batch, heads, queries, head_dim = dy.shape
    if _gate_kind(gate) == _ELEMENTWISE:
        do = torch.empty_like(dy)
        _kernels().gated_gradient_kernel[(plan.query_tiles, batch * heads)](
            dy, alpha, gate, do, *_strides(dy), *_strides(gate), *_strides(do), heads, queries,
            HAS_ALPHA=alpha is not None, HEAD_DIM=head_dim, D=plan.d, T=plan.tokens, num_warps=plan.warps,
        )  # fmt: skip
        return do
    if alpha is not None or gate is not None:
        _kernels().negate_rows_kernel[(-(-queries // _ROWS), batch * heads)](
            dy, alpha, gate, *_strides(dy), *_strides(gate), heads, queries,
            HAS_ALPHA=alpha is not None, HAS_GATE=gate is not None,
            HEAD_DIM=head_dim, D=plan.d, ROWS=_ROWS, T=16, num_warps=4,
        )  # fmt: skip
    return dy


def fake_sums(call: Call) -> Tensor:
    """An empty tensor of what :func:`finish` saves as sums."""
    plan = _plan(call)
    batch, kv_heads, _, head_dim = call.v.shape
    shape = (0,)
    if plan.sums == _TABLE:
        shape = (batch, kv_heads, call.tq, head_dim)
    elif plan.sums:
        shape = (batch * kv_heads, plan.key_tiles + plan.segments, plan.d)
    return torch.empty(shape, dtype=torch.float32, device=call.v.device)


def _value_prefix(call: Call, plan: _Plan) -> Tensor:
    sums = fake_sums(call)
    if plan.sums:
        batch, kv_heads, keys, head_dim = call.v.shape
        columns = min(_PREFIX_SLICE, plan.d)
        _kernels().value_prefix_kernel[(batch * kv_heads * (plan.d // columns), plan.segments)](
            call.v, sums, *_strides(call.v), kv_heads, keys, plan.first, plan.key_tiles, plan.segments,
            HEAD_DIM=head_dim, D=plan.d, SLICE=columns, T=plan.tokens, SEGMENT=_SEGMENT, STAGES=_PREFIX_STAGES,
            num_warps=_PREFIX_WARPS,
        )  # fmt: skip
    return sums


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
