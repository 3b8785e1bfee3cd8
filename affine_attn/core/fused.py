"""Launches the fused Triton epilogue: the same functions as :mod:`epilogue`, one pass over each tensor.

Forward: one kernel reads o and v once and writes y. Backward: where a row factor r (alpha, a headwise gate) is all that
stands between dy and the attention, no scaled copy of dy is made. The stock backward rebuilds weights as exp(s - lse),
so lse - log |r| makes them |r| times larger, and every gradient with them; a negative r flips the sign of its dy rows
in place for the duration of the stock backward. One kernel then does the rest.
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

_RELAYED, _WHOLE, _TABLE = 1, 2, 3  # as in the kernels
_ELEMENTWISE = 2


class _Tile(NamedTuple):
    """Tokens of a tile; columns and warps of a forward program; warps of a backward program, which has all columns."""

    tokens: int
    columns: int
    warps: int
    backward_warps: int


# By padded head_dim, timed on an H200 (LOG.md).
_TILES = {
    16: _Tile(64, 16, 4, 4),
    32: _Tile(64, 32, 4, 4),
    64: _Tile(64, 64, 4, 4),
    128: _Tile(32, 64, 2, 4),
    256: _Tile(32, 64, 2, 8),
}
# Tiles in a leg of a relay, rows a sign check covers.
_LEG, _ROWS = 16, 1024
_LAB_F, _LAB_B = {}, {}


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
    """How the sums of visible values come about, and the sizes all kernels of a call share."""

    tile: _Tile
    d: int  # head_dim rounded up to a power of two
    tiles: int
    legs: int
    sums: int
    older: int  # keys before the first query's

    def sizes(self, call: Call) -> dict[str, int]:
        return {"HEAD_DIM": call.q.shape[-1], "D": self.d, "T": self.tile.tokens, "LEG": _LEG}


def _plan(call: Call) -> _Plan:
    d = max(16, 1 << (call.q.shape[-1] - 1).bit_length())
    tiles = -(-call.tq // _TILES[d].tokens)
    sums = 0 if call.beta is None else _TABLE if _is_restricted(call) else _RELAYED if call.mask.causal else _WHOLE
    return _Plan(_TILES[d], d, tiles, tiles // _LEG + 1, sums, call.tk - call.tq)


def _is_restricted(call: Call) -> bool:
    """Is the mask more than causal?"""
    return bool(call.mask.tensors) or call.mask.window is not None


def _relay(call: Call, plan: _Plan) -> Tensor | None:
    """An empty relay per kv head: a total per tile, and what each leg starts with."""
    if plan.sums not in (_RELAYED, _WHOLE):
        return None
    shape = (call.v.shape[0] * call.v.shape[1], plan.tiles + plan.legs, plan.d)
    return torch.full(shape, _kernels().UNSET.value, dtype=torch.int32, device=call.v.device).view(torch.float32)


def finish(call: Call, o: Tensor, z: Tensor) -> Output:
    """Stages 2 to 4 on a fresh (o, z), which may be overwritten."""
    if call.sink is None and call.alpha is None and call.beta is None and call.gate is None:
        return Output(o, o.new_empty(0), z, z.new_empty(0))
    plan = _plan(call)
    in_place = call.alpha is None and call.beta is None and call.gate is None
    y = o if in_place else torch.empty_like(call.q)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=o.device)
    sums, base = fake_sums(call), None
    if plan.sums == _WHOLE:
        sums = call.v.sum(2, dtype=torch.float32)
    elif plan.sums == _TABLE:
        sums = visible_sums.visible_sums(call)
    elif plan.sums == _RELAYED and plan.older > 0:
        base = call.v[:, :, : plan.older].sum(2, dtype=torch.float32)
    sink, constant = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink or 0.0)
    alpha, beta, gate = _rows(call.alpha), _rows(call.beta), call.gate
    batch, heads, queries, _ = call.q.shape
    kv_heads = call.k.shape[1]
    relay = _relay(call, plan) if plan.sums == _RELAYED else None
    _kernels().epilogue_kernel[(batch * kv_heads * (plan.d // plan.tile.columns), plan.tiles)](
        o, z, call.v, base, relay, sums, sink, alpha, beta, gate, y, lse,
        *_strides(o), *_strides(call.v), *_strides(gate), *_strides(y), *_sink_strides(sink),
        heads, kv_heads, queries, plan.older, plan.tiles, plan.legs, constant,
        SINK=_sink_kind(call.sink), HAS_ALPHA=alpha is not None, SUMS=plan.sums, HAS_BASE=base is not None,
        GATE=_gate_kind(gate), KEEP_OUT=not in_place, SLICE=plan.tile.columns, **plan.sizes(call),
        num_warps=plan.tile.warps, **_LAB_F,
    )  # fmt: skip
    return Output(y, o.new_empty(0) if in_place else o, lse, sums)


def gradients(call: Call, dy: Tensor, output: Output, attention_backward: AttentionBackward) -> Gradients:
    """All gradients; ``attention_backward(do, out, lse)`` is the engine's plain backward."""
    o = output.saved_out if output.saved_out.numel() else output.y
    if not isinstance(call.sink, Tensor) and call.alpha is None and call.beta is None and call.gate is None:
        return (*attention_backward(dy, o, output.saved_lse), None, None, None, None)
    kernels, plan = _kernels(), _plan(call)
    dy = dy if _is_dense(dy) else dy.contiguous()
    sink = call.sink if isinstance(call.sink, Tensor) else None
    alpha, beta, gate = _rows(call.alpha), _rows(call.beta), call.gate
    batch, heads, queries, head_dim = call.q.shape
    kv_heads = call.k.shape[1]
    elementwise = _gate_kind(gate) == _ELEMENTWISE
    do = dy
    if elementwise:
        do = torch.empty_like(dy)
        kernels.gated_gradient_kernel[(plan.tiles, batch * heads)](
            dy, alpha, gate, do, *_strides(dy), *_strides(gate), *_strides(do), heads, queries,
            HAS_ALPHA=alpha is not None, HEAD_DIM=head_dim, D=plan.d, T=plan.tile.tokens,
            num_warps=plan.tile.backward_warps,
        )  # fmt: skip
    elif alpha is not None or gate is not None:
        # For the duration of the stock backward: the epilogue's restores them.
        kernels.negate_rows_kernel[(-(-queries // _ROWS), batch * heads)](
            dy, alpha, gate, *_strides(dy), *_strides(gate), heads, queries,
            HAS_ALPHA=alpha is not None, HAS_GATE=gate is not None,
            HEAD_DIM=head_dim, D=plan.d, ROWS=_ROWS, T=16, num_warps=4,
        )  # fmt: skip
    dq, dk, dv = attention_backward(do, o, output.saved_lse)
    row = torch.empty(call.q.shape[:3], dtype=torch.float32, device=dy.device)
    dsink, dalpha, dbeta = (None if x is None else torch.empty_like(row) for x in (sink, alpha, beta))
    dgate = None if gate is None else torch.empty_like(gate)
    if dgate is not None and not elementwise:
        dgate = dgate.contiguous()  # one number per row, written like the other rows
    relay = _relay(call, plan)
    weighted = torch.empty_like(output.saved_sums) if plan.sums == _TABLE else None
    kernels.epilogue_backward_kernel[(batch * kv_heads, plan.tiles)](
        dy, o, output.saved_lse, call.v, relay, output.saved_sums, sink, alpha, beta, gate,
        dsink, dalpha, dbeta, dgate, dv, weighted,
        *_strides(dy), *_strides(o), *_strides(call.v), *_strides(gate), *_strides(dgate if elementwise else None),
        *_sink_strides(sink), *_strides(dv),
        heads, kv_heads, queries, plan.older, plan.tiles, plan.legs,
        SINK=_sink_kind(call.sink), HAS_ALPHA=alpha is not None, SUMS=plan.sums, GATE=_gate_kind(gate),
        **plan.sizes(call), num_warps=plan.tile.backward_warps, **_LAB_B,
    )  # fmt: skip
    if weighted is not None:
        visible_sums.add_seen_by(call, weighted, dv)
    elif relay is not None and (plan.sums == _WHOLE or plan.older > 0):
        # Keys that every query sees get the whole sum.
        seen_by_all = slice(0, call.tk if plan.sums == _WHOLE else plan.older)
        whole = relay[:, : plan.tiles].sum(1).view(batch, kv_heads, 1, -1)[..., :head_dim]
        dv[:, :, seen_by_all] += whole.to(dv.dtype)
    if dsink is not None:
        dsink = (dsink.sum((0, 2)) if sink.ndim == 1 else dsink).to(sink.dtype)
    return (
        dq, dk, dv, dsink,
        None if dalpha is None else dalpha.to(call.alpha.dtype),
        None if dbeta is None else dbeta.to(call.beta.dtype),
        dgate,
    )  # fmt: skip


def fake_sums(call: Call) -> Tensor:
    """An empty tensor of what :func:`finish` saves as sums."""
    plan = _plan(call)
    batch, kv_heads, _, head_dim = call.v.shape
    shape = {
        _RELAYED: (batch * kv_heads, plan.tiles, plan.d),
        _WHOLE: (batch, kv_heads, head_dim),
        _TABLE: (batch, kv_heads, call.tq, head_dim),
    }.get(plan.sums, (0,))
    return torch.empty(shape, dtype=torch.float32, device=call.v.device)


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
