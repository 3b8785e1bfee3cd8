"""Stages 2 to 4 as row-wise work on (o, z) of any plain attention, forward and backward.

With o = softmax(s) V, z its log-sum-exp and u_i the sum of the visible values:

    y = gate * (alpha * sigmoid(z - sink) * o + beta * u)

A stock attention backward gives exact dq, dk when it is handed o' = sigmoid(z - sink) * o as its output,
z' = logaddexp(z, sink) as its log-sum-exp and alpha * gate * dy as the incoming gradient; the rest is here.

Everything runs tile by tile along the tokens: prefix sums of v carry from tile to tile, and on the CPU a tile stays in
the cache through all its operations.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.core.stages import row_dtype, rows_of, sink_rows

# Entries of a tile of o: 2^17 fp32 entries are half a MiB, which a CPU core's own cache holds.
_TILE_ENTRIES = 2**17


def rescale_by_sink(o: Tensor, z: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """(o, z) of softmax -> (o', z') of softmax with a sink in the denominator. Differentiable where z is."""
    sink = sink_rows(call, slice(None))
    if sink is None:
        return o, z
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


def begin(call: Call) -> None:
    """Do nothing: in torch nothing runs beside the attention."""


def apply_epilogue(call: Call, o: Tensor, z: Tensor, begun: None = None) -> Output:
    """Return y and what the backward needs, for masks without window, documents, padding or lengths and Tq <= Tk."""
    o, z = rescale_by_sink(o, z, call)
    if call.alpha is None and call.beta is None and call.gate is None:
        return Output(o, o.new_empty(0), z, z.new_empty(0))
    y = torch.empty_like(call.q)
    dtype = row_dtype(call.q)
    for rows, u in _value_tiles(call):
        alpha, beta, gate = (rows_of(x, rows) for x in (call.alpha, call.beta, call.gate))
        y[:, :, rows] = combine(o[:, :, rows], u, alpha, beta, gate, dtype)
    return Output(y, o, z, z.new_empty(0))


class RowGradients:
    """Gradients of sink, alpha, beta and gate, and what beta adds to dv."""

    def __init__(self, call: Call, dy: Tensor, output: Output):
        self.call, self.lse = call, output.saved_lse
        self.out = o = output.saved_out if output.saved_out.numel() else output.y
        dtype = row_dtype(call.q)
        self.do = torch.empty_like(call.q)
        # <gate * dy, o'>: dalpha, and the sink's gradient up to row factors.
        self.along_o = torch.empty(call.q.shape[:3], dtype=dtype, device=call.q.device)
        self.dbeta = None if call.beta is None else torch.empty_like(self.along_o)
        self.dgate = None if call.gate is None else torch.empty_like(call.gate)
        values = (*call.v.shape[:2], *call.q.shape[2:])
        self.du = None if call.beta is None else torch.empty(values, dtype=dtype, device=o.device)
        for rows, u in _value_tiles(call):
            alpha, beta, gate = (rows_of(x, rows) for x in (call.alpha, call.beta, call.gate))
            # In fp32 before any multiplication: 16-bit results would be rounded to 16 bits.
            g, o_rows = dy[:, :, rows].to(dtype), o[:, :, rows]
            if gate is not None:
                per_entry = g * combine(o_rows, u, alpha, beta, None, dtype)
                self.dgate[:, :, rows] = per_entry.sum(-1, keepdim=True) if gate.shape[-1] == 1 else per_entry
                g = g * gate
            self.do[:, :, rows] = g if alpha is None else g * alpha[..., None]
            self.along_o[:, :, rows] = (g * o_rows).sum(-1)
            if beta is not None and u is not None:
                groups = _groups(g, u)
                self.dbeta[:, :, rows] = (groups * u[:, :, None]).sum(-1).flatten(1, 2)
                self.du[:, :, rows] = (groups * _groups(beta.to(dtype), u)[..., None]).sum(2)

    @contextmanager
    def incoming(self) -> Iterator[Tensor]:
        """Give the gradient for the attention's backward, which is launched inside."""
        yield self.do

    def finish(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
        """Return all gradients, from those of the attention."""
        call = self.call
        if self.du is not None:
            dv = (dv + _values_backward(self.du, call)).to(call.v.dtype)
        dsink = None
        if isinstance(call.sink, Tensor):
            along = self.along_o if call.alpha is None else self.along_o * call.alpha
            # exp(sink - z') is the sink's own probability; equal infinities mean it takes everything.
            sink = sink_rows(call, slice(None))
            assert sink is not None  # call.sink is a tensor
            dsink = -torch.exp(torch.where(self.lse == sink, 0.0, sink - self.lse)) * along
            dsink = (dsink.sum((0, 2)) if call.sink.ndim == 1 else dsink).to(call.sink.dtype)
        dalpha = None if call.alpha is None else self.along_o.to(call.alpha.dtype)
        dbeta = None if self.dbeta is None else self.dbeta.to(call.beta.dtype)
        return dq, dk, dv, dsink, dalpha, dbeta, self.dgate


def new_saved_sums(call: Call) -> Tensor:
    """Allocate what the forward saves as sums: nothing."""
    return torch.empty(0, dtype=row_dtype(call.q), device=call.q.device)


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


def _groups(x: Tensor, u: Tensor) -> Tensor:
    """[B, H, ...] -> [B, Hkv, g, ...]."""
    return x.unflatten(1, (u.shape[1], -1))
