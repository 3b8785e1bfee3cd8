"""Engine ``blocked``: the reference on blocks of queries, with recompute in the backward.

Any logit, any mask, any device; memory is linear in the length because only a few rows of the score matrix exist at a
time. It is the engine of last resort for training and the first one for masks that stock kernels lack.
"""

import torch
from torch import Tensor

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.core.masks import block_of
from affine_attn.core.nonfinite import all_finite, careful, careful_gradients, is_clean
from affine_attn.core.stages import (
    coefficients,
    grouped_matmul,
    own_precision,
    probabilities,
    raw_scores,
    row_dtype,
    rows_of,
    scores,
    sink_rows,
    weights,
)
from affine_attn.engines.needs import Facts
from affine_attn.engines.operator import register
from affine_attn.engines.plan import Plan


def forward(call: Call, plan: Plan) -> Output:
    output = _forward(call)
    # What is not finite makes some y NaN: no product leaves it out.
    return output if _is_fine(call, output.y) else careful(call, _forward)


def backward(call: Call, plan: Plan, dy: Tensor, output: Output) -> Gradients:
    gradients = _backward(call, dy)
    if _is_fine(call, gradients.q, gradients.k):
        return gradients
    return careful_gradients(call, dy, _forward, lambda clean, _: _backward(clean, dy))


def _is_fine(call: Call, *results: Tensor) -> bool:
    return call.q.device.type not in ("cpu", "cuda") or all_finite(*results) or is_clean(call)


def _forward(call: Call) -> Output:
    y = call.new_output()
    k, v = call.k.to(row_dtype(call.k)), call.v.to(row_dtype(call.v))
    for rows, keys in call.blocks():
        p, _, visible = _probabilities(call, k, rows, keys)
        w = weights(p, visible, rows_of(call.alpha, rows), rows_of(call.beta, rows))
        out = grouped_matmul(w, v[:, :, keys])
        y[:, :, rows] = out if call.gate is None else out * call.gate[:, :, rows]
    return Output(y)


def _backward(call: Call, dy: Tensor) -> Gradients:
    dtype = row_dtype(call.q)
    k, v = call.k.to(dtype), call.v.to(dtype)
    dq, dk, dv = torch.empty_like(call.q), torch.zeros_like(k), torch.zeros_like(v)
    dsink, dalpha, dbeta, dgate, dbias = (
        torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) if isinstance(x, Tensor) else None
        for x in (call.sink, call.alpha, call.beta, call.gate, call.bias)
    )
    for rows, keys in call.blocks():
        p, p_sink, visible = _probabilities(call, k, rows, keys)
        alpha, beta, gate = (rows_of(x, rows) for x in (call.alpha, call.beta, call.gate))
        w = weights(p, visible, alpha, beta)
        g = dy[:, :, rows].to(dtype)
        if gate is not None:
            per_entry = g * grouped_matmul(w, v[:, :, keys])
            dgate[:, :, rows] = per_entry.sum(-1, keepdim=True) if gate.shape[-1] == 1 else per_entry
            g = g * gate
        dv[:, :, keys] += _sum_over_group(w, g, v)
        dw = grouped_matmul(g, v[:, :, keys].mT)
        if dbeta is not None:
            dbeta[:, :, rows] = torch.where(visible, dw, 0.0).sum(-1)
        along = (p * dw).sum(-1, keepdim=True)  # <g, o'>
        if dalpha is not None:
            dalpha[:, :, rows] = along[..., 0]
            dw, along = dw * alpha[..., None], along * alpha[..., None]
        ds = p * (dw - along)
        if dsink is not None:
            assert p_sink is not None  # dsink is there only where a sink is
            row = -(p_sink * along)[..., 0]
            if dsink.ndim == 1:
                dsink += row.sum((0, 2))
            else:
                dsink[:, :, rows] = row
        if dbias is not None:
            block = block_of(dbias, rows, keys)
            block += ds.sum_to_size(block.shape)
        factor, _ = coefficients(call, rows, keys)
        ds = ds if factor is None else ds * factor
        if call.curve is not None:
            ds = ds * call.curve.derivative(raw_scores(call, k, rows, keys))
        ds = call.scale * ds
        dq[:, :, rows] = grouped_matmul(ds, k[:, :, keys])
        dk[:, :, keys] += _sum_over_group(ds, call.q[:, :, rows].to(dtype), k)
    gradients = Gradients(dq, dk, dv, dsink, dalpha, dbeta, dgate, dbias)
    given = zip(call.tensors, gradients, strict=True)
    return Gradients._make(None if x is None or d is None else d.to(x.dtype) for x, d in given)


def _probabilities(call: Call, k: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None, Tensor]:
    visible = call.visible(rows, keys)
    p, p_sink = probabilities(scores(call, k, visible, rows, keys), sink_rows(call, rows))
    return p, p_sink, visible


def _sum_over_group(x: Tensor, m: Tensor, like: Tensor) -> Tensor:
    """x^T m summed over the query heads of each kv head: [B, H, T, n], [B, H, T, d] -> [B, Hkv, n, d]."""
    group = (like.shape[1], -1)
    with own_precision(x):
        return x.unflatten(1, group).flatten(2, 3).mT @ m.unflatten(1, group).flatten(2, 3)


def fake(call: Call, facts: Facts) -> Output:
    return Output(call.new_output())


run = register("blocked", forward, backward, fake)
