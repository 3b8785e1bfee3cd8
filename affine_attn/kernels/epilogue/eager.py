"""Stages 2 to 4 as row-wise work on (o, z) of any plain attention, forward and backward.

With o = softmax(s) V, z its log-sum-exp and u_i the sum of the visible values:

    y = gate * (alpha * sigmoid(z - sink) * o + beta * u)

A stock attention backward gives exact dq, dk when it is handed o' = sigmoid(z - sink) * o as its output,
z' = logaddexp(z, sink) as its log-sum-exp and alpha * gate * dy as the incoming gradient; the rest is here.

Everything runs tile by tile along the tokens: prefix sums of v carry from tile to tile, and on the CPU a tile stays in
the cache through all its operations.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.core.pieces import pieces_of, visible_sums, visible_sums_backward
from affine_attn.core.stages import row_dtype, rows_of, sink_rows

# Entries of a tile of o: 2^17 fp32 entries are half a MiB, which a CPU core's own cache holds.
_TILE_ENTRIES = 2**17
# Heads of a group that are added one by one.
_FEW_HEADS = 4


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
    y = o.to(dtype) if alpha is None else o * alpha.to(dtype).unsqueeze(-1)
    if u is not None and beta is not None:
        y = y.clone() if y is o else y  # which is changed in place
        beta = beta.to(dtype).unsqueeze(-1)
        if u.shape[1] == y.shape[1]:
            y.addcmul_(beta, u)
        else:
            _groups(y, u).addcmul_(_groups(beta, u), u.unsqueeze(2))
    return y if gate is None else y * gate.to(dtype)


def begin(call: Call) -> None:
    """Do nothing: in torch nothing runs beside the attention."""


def apply_epilogue(call: Call, o: Tensor, z: Tensor, begun: None = None) -> Output:
    """Return y and what the backward needs, for Tq <= Tk where the mask is causal alone."""
    if call.sink is not None:
        o, z = rescale_by_sink(o, z, call)
    if call.alpha is None and call.beta is None and call.gate is None:
        return Output(o, None, z)
    dtype, y = row_dtype(call.q), None
    for rows, u in _value_tiles(call):
        if rows is None:
            y = combine(o, u, call.alpha, call.beta, call.gate, dtype).to(call.q.dtype)
        else:
            y = call.new_output() if y is None else y
            alpha, beta, gate = (rows_of(x, rows) for x in (call.alpha, call.beta, call.gate))
            y[:, :, rows] = combine(_rows(o, rows), u, alpha, beta, gate, dtype)
    assert y is not None  # there is a tile, if an empty one
    return Output(y, o, z)


class RowGradients:
    """Gradients of sink, alpha, beta and gate, and what beta adds to dv."""

    def __init__(self, call: Call, dy: Tensor, output: Output):
        self.call, self.saved_lse = call, output.lse
        self.out = o = output.attended
        self.is_folded = _is_folded(call)
        self.lse = _lse_of_alpha(output.lse, call.alpha) if self.is_folded and call.alpha is not None else output.lse
        self.along_o = self.dbeta = self.dgate = self.du = None
        has_rows = not (call.alpha is None and call.beta is None and call.gate is None)
        if not has_rows and not isinstance(call.sink, Tensor):
            # A constant sink is in out and lse already.
            self.do = dense(dy, call, o)
            return
        parts = [self._part(rows, u, dy, o) for rows, u in _value_tiles(call)]
        do, *found = zip(*parts, strict=True)
        self.do = dense(dy if self.is_folded else do[0] if len(do) == 1 else torch.cat(do, 2), call, o)
        self.along_o, self.dbeta, self.dgate, self.du = (x[0] if len(x) == 1 else _joined(x) for x in found)

    def _part(self, rows: slice | None, u: Tensor | None, dy: Tensor, o: Tensor) -> tuple[Any, ...]:
        """Return do, <gate * dy, o'> (dalpha, and the sink's gradient up to row factors), dbeta, dgate and du."""
        call, dtype = self.call, row_dtype(self.call.q)
        alpha, beta, gate = (rows_of(x, rows) for x in (call.alpha, call.beta, call.gate))
        # In fp32 before any multiplication: 16-bit results would be rounded to 16 bits.
        g, o_rows = _rows(dy, rows).to(dtype), _rows(o, rows)
        dgate = dbeta = du = along_o = product = None
        if gate is not None:
            dgate = g * combine(o_rows, u, alpha, beta, None, dtype)
            dgate = (dgate.sum(-1, keepdim=True) if gate.shape[-1] == 1 else dgate).to(gate.dtype)
            g = g * gate
        # Memory for one product at a time: what is new has to be made by the system first, which takes longer.
        if alpha is not None or isinstance(call.sink, Tensor):
            product = g * o_rows
            along_o = product.sum(-1)
        if beta is not None and u is not None:
            beta, product = beta.to(dtype).unsqueeze(-1), torch.empty_like(g) if product is None else product
            if u.shape[1] == g.shape[1]:
                dbeta, du = torch.mul(g, u, out=product).sum(-1), g * beta
            else:
                groups, of_groups = _groups(g, u), _groups(product, u)
                dbeta = torch.mul(groups, u.unsqueeze(2), out=of_groups).sum(-1).flatten(1, 2)
                du = _sum_of_groups(torch.mul(groups, _groups(beta, u), out=of_groups))
        if self.is_folded:
            return None, along_o, dbeta, dgate, du
        do = g if alpha is None else torch.mul(g, alpha.to(dtype).unsqueeze(-1), out=product)
        # In q's type at once: tiles are kept until all are there.
        return do.to(call.q.dtype), along_o, dbeta, dgate, du

    def incoming(self) -> AbstractContextManager[Tensor]:
        """Give the gradient for the attention's backward, which is launched inside; out and lse have the rest."""
        return nullcontext(self.do)

    def finish(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
        """Return all gradients, from those of the attention."""
        call = self.call
        if self.du is not None:
            dv += _values_backward(self.du, call)  # added in fp32, rounded once
        dsink = None
        if isinstance(call.sink, Tensor):
            assert self.along_o is not None
            along = self.along_o if call.alpha is None else self.along_o * call.alpha
            # exp(sink - z') is the sink's own probability; equal infinities mean it takes everything.
            sink = sink_rows(call, slice(None))
            assert sink is not None  # call.sink is a tensor
            dsink = -torch.exp(torch.where(self.saved_lse == sink, 0.0, sink - self.saved_lse)) * along
            dsink = (dsink.sum((0, 2)) if call.sink.ndim == 1 else dsink).to(call.sink.dtype)
        dalpha = None if call.alpha is None or self.along_o is None else self.along_o.to(call.alpha.dtype)
        dbeta = None if call.beta is None or self.dbeta is None else self.dbeta.to(call.beta.dtype)
        return Gradients(dq, dk, dv, dsink, dalpha, dbeta, self.dgate)


def _is_folded(call: Call) -> bool:
    """Return True if alpha is all that stands between dy and the attention, on a CPU, no row of it is negative, and a
    copy of dy would be worth saving.

    The attention's backward rebuilds weights as exp(s - lse), so a smaller lse makes them alpha times as large, and
    every gradient with them: there is no scaled copy of dy.
    """
    if call.alpha is None or call.gate is not None or call.q.device.type != "cpu":
        return False
    if call.q.numel() <= _TILE_ENTRIES:
        return False
    least, largest = (x.item() for x in call.alpha.aminmax())
    return least >= 0 and largest < math.inf


def _lse_of_alpha(lse: Tensor, alpha: Tensor) -> Tensor:
    # Of a row without weights there is nothing to rebuild.
    return torch.where(lse.isinf(), lse, lse - alpha.to(lse.dtype).log())


def new_saved_sums(call: Call) -> Tensor:
    """Allocate what the forward saves as sums: nothing."""
    return torch.empty(0, dtype=row_dtype(call.q), device=call.q.device)


def _value_tiles(call: Call) -> Iterator[tuple[slice | None, Tensor | None]]:
    """(rows, u of these rows [B, Hkv, rows or 1, D]); rows are None for all, u where the call has no beta."""
    v, beta, (batch, heads, queries, dim) = call.v, call.beta, call.q.shape
    older = call.tk - queries
    step = max(16, _TILE_ENTRIES // max(batch * heads * dim, 1)) if call.q.device.type == "cpu" else queries
    if beta is not None and call.mask.restrictions:
        sums = visible_sums(v, pieces_of(call.mask, call.tq, call.tk, v.device), queries)
        starts = range(0, queries, step)
        yield from ((rows, sums[:, :, rows]) for rows in (slice(start, start + step) for start in starts))
        return
    if beta is None:
        carry = None
    elif not call.mask.causal:
        carry = v.sum(2, keepdim=True, dtype=row_dtype(v))
    elif queries <= step and older == 0:
        yield None, v.cumsum(2, dtype=row_dtype(v))
        return
    else:
        carry = v[:, :, :older].sum(2, keepdim=True, dtype=row_dtype(v))
    if queries <= step:
        if carry is not None and call.mask.causal:
            carry = v[:, :, older:].cumsum(2, dtype=carry.dtype).add_(carry)
        yield None, carry
        return
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        u = carry
        if carry is not None and call.mask.causal:
            u = v[:, :, older + rows.start : older + rows.stop].cumsum(2, dtype=carry.dtype).add_(carry)
            carry = u[:, :, -1:]
        yield rows, u


def dense(x: Tensor, call: Call, o: Tensor) -> Tensor:
    """Return x as a stock backward reads it: the gradient of a sum, say, is one number everywhere."""
    steps = x.stride()
    return x if steps == call.q.stride() or steps == o.stride() or x.is_contiguous() else call.new_output().copy_(x)


def _rows(x: Tensor, rows: slice | None) -> Tensor:
    return x if rows is None else x[:, :, rows]


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """Join what tiles of rows have given."""
    there = [x for x in parts if x is not None]
    return torch.cat(there, 2) if there else None


def _values_backward(du: Tensor, call: Call) -> Tensor:
    """The transpose of u = sums of visible v: of prefix sums those of du in reverse, [B, Hkv, Tk, D]."""
    if call.mask.restrictions:
        return visible_sums_backward(du, pieces_of(call.mask, call.tq, call.tk, du.device), call.tk)
    if not call.mask.causal:
        return du.sum(2, keepdim=True).expand(-1, -1, call.tk, -1)
    sums = du if du.shape[2] == 1 else du.flip(2).cumsum(2).flip(2)
    if call.tk == call.tq:
        return sums
    older = sums[:, :, :1].expand(-1, -1, call.tk - call.tq, -1)
    return torch.cat((older, sums), 2)


def _sum_of_groups(x: Tensor) -> Tensor:
    """[B, Hkv, g, T, D] -> [B, Hkv, T, D]; of few long heads torch's sum takes longer than additions."""
    adds = 1 < x.shape[2] <= _FEW_HEADS and x.numel() > _TILE_ENTRIES
    return functools.reduce(torch.add, x.unbind(2)) if adds else x.sum(2)


def _groups(x: Tensor, u: Tensor) -> Tensor:
    """[B, H, ...] -> [B, Hkv, g, ...]."""
    (batch, heads, *rest), kv_heads = x.shape, u.size(1)
    return x.view(batch, kv_heads, heads // kv_heads, *rest)
