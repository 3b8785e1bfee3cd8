"""Stages 2 to 4 as row-wise work on (o, z) of any plain attention, forward and backward.

With o = softmax(s) V, z its log-sum-exp and u_i the sum of the visible values:

    y = gate * (alpha * sigmoid(z - sink) * o + beta * u)

A stock attention backward gives exact dq, dk when it is handed o' = sigmoid(z - sink) * o as its output,
z' = logaddexp(z, sink) as its log-sum-exp and alpha * gate * dy as the incoming gradient; the rest is here.

Everything runs tile by tile along the tokens: prefix sums of v carry from tile to tile, and on the CPU a tile stays in
the cache through all its operations.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.reference import row_dtype, rows_of

# Entries of a tile of o: 2^17 fp32 entries are half a MiB, which a CPU core's own cache holds.
_TILE_ENTRIES = 2**17


def rescale_by_sink(o: Tensor, z: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o, z) of softmax -> (o', z') of softmax with a sink in the denominator. Differentiable where z is."""
    if sink is None:
        return o, z
    sink = rows_of(sink, slice(None)).to(z.dtype)
    # A row without keys has z = -inf and o = 0; with a sink of -inf the difference would be NaN.
    kept = torch.where(z == float("-inf"), 0.0, torch.sigmoid(z - sink))
    return (o * kept[..., None]).to(o.dtype), torch.logaddexp(z, sink)


def combine(
    o: Tensor, u: Tensor | None, alpha: Tensor | None, beta: Tensor | None, gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """gate * (alpha * o' + beta * u) in ``dtype``; o [B, H, T, D], u [B, Hkv, T or 1, D]."""
    y = o.to(dtype) if alpha is None else o * alpha.to(dtype)[..., None]
    if u is not None and beta is not None:
        y = torch.addcmul(_groups(y, u), _groups(beta.to(dtype), u)[..., None], u[:, :, None]).flatten(1, 2)
    return y if gate is None else y * gate.to(dtype)


class RowGradients(NamedTuple):
    do: Tensor  # incoming gradient for the stock backward, in q's dtype
    dv: Tensor | None  # what reaches v through u, fp32 [B, Hkv, Tk, D]
    dsink: Tensor | None
    dalpha: Tensor | None
    dbeta: Tensor | None
    dgate: Tensor | None


def epilogue(o: Tensor, call: Call) -> Tensor:
    """y from the sink-adjusted o', for masks without window, documents, padding or lengths and Tq <= Tk."""
    y = torch.empty_like(call.q)
    dtype = row_dtype(call.q)
    for rows, u in _value_tiles(call):
        stages = (_rows(x, rows) for x in (call.alpha, call.beta, call.gate))
        y[:, :, rows] = combine(o[:, :, rows], u, *stages, dtype)
    return y


def epilogue_backward(dy: Tensor, o: Tensor, z: Tensor, call: Call) -> RowGradients:
    """All row-wise gradients from dy and the sink-adjusted (o', z')."""
    dtype = row_dtype(call.q)
    do = torch.empty_like(call.q)
    # <gate * dy, o'>: dalpha, and the sink's gradient up to row factors.
    along_o = torch.empty(call.q.shape[:3], dtype=dtype, device=call.q.device)
    dbeta = None if call.beta is None else torch.empty_like(along_o)
    dgate = None if call.gate is None else torch.empty_like(call.gate)
    du = None if call.beta is None else torch.empty(*call.v.shape[:2], *call.q.shape[2:], dtype=dtype, device=o.device)
    for rows, u in _value_tiles(call):
        alpha, beta, gate = (_rows(x, rows) for x in (call.alpha, call.beta, call.gate))
        g, o_rows = dy[:, :, rows], o[:, :, rows]
        if gate is not None:
            per_entry = g * combine(o_rows, u, alpha, beta, None, dtype)
            dgate[:, :, rows] = per_entry.sum(-1, keepdim=True) if gate.shape[-1] == 1 else per_entry
            g = g * gate.to(dtype)
        do[:, :, rows] = g if alpha is None else g * alpha.to(dtype)[..., None]
        along_o[:, :, rows] = (g * o_rows).sum(-1, dtype=dtype)
        if beta is not None:
            groups = _groups(g.to(dtype), u)
            dbeta[:, :, rows] = (groups * u[:, :, None]).sum(-1).flatten(1, 2)
            du[:, :, rows] = (groups * _groups(beta.to(dtype), u)[..., None]).sum(2)
    dsink = None
    if call.sink is not None:
        along = along_o if call.alpha is None else along_o * call.alpha
        # exp(sink - z') is the sink's own probability; equal infinities mean it takes everything.
        sink = rows_of(call.sink, slice(None)).to(dtype)
        dsink = -torch.exp(torch.where(z == sink, 0.0, sink - z)) * along
        dsink = (dsink.sum((0, 2)) if call.sink.ndim == 1 else dsink).to(call.sink.dtype)
    return RowGradients(
        do,
        None if du is None else _values_backward(du, call),
        dsink,
        None if call.alpha is None else along_o.to(call.alpha.dtype),
        None if dbeta is None else dbeta.to(call.beta.dtype),
        dgate,
    )


def _value_tiles(call: Call) -> Iterator[tuple[slice, Tensor | None]]:
    """(rows, u of these rows [B, Hkv, rows or 1, D]); u is None where the call has no beta."""
    per_token = call.q.shape[0] * call.heads * call.q.shape[3]
    step = call.tq if call.q.device.type != "cpu" else max(16, _TILE_ENTRIES // max(per_token, 1))
    dtype, older = row_dtype(call.v), call.tk - call.tq
    carry = None
    if call.beta is not None:
        seen_by_all = slice(0, older) if call.mask.causal else slice(0, call.tk)
        carry = call.v[:, :, seen_by_all].sum(2, keepdim=True, dtype=dtype)
    for start in range(0, call.tq, step):
        rows = slice(start, min(start + step, call.tq))
        u = carry
        if carry is not None and call.mask.causal:
            u = call.v[:, :, older + rows.start : older + rows.stop].cumsum(2, dtype=dtype).add_(carry)
            carry = u[:, :, -1:]
        yield rows, u


def _values_backward(du: Tensor, call: Call) -> Tensor:
    """The transpose of u = prefix sums of v: reverse prefix sums of du, [B, Hkv, Tk, D]."""
    if not call.mask.causal:
        return du.sum(2, keepdim=True).expand(-1, -1, call.tk, -1)
    sums = du.flip(2).cumsum(2).flip(2)
    older = sums[:, :, :1].expand(-1, -1, call.tk - call.tq, -1)
    return torch.cat((older, sums), 2)


def _rows(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[:, :, rows]


def _groups(x: Tensor, u: Tensor) -> Tensor:
    """[B, H, ...] -> [B, Hkv, g, ...]."""
    return x.unflatten(1, (u.shape[1], -1))
