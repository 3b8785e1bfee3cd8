"""FlashAttention-4, of the package flash-attn-4, behind one pair of functions: (q, k, v) -> (o, z) and back.

Its public functions would make a graph of their own, so the two inside them are called, by the names of their
arguments. Contiguous documents are its sequences of variable length: rows one after another, and where each begins.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.kernels.device import must_be_deterministic

PACKAGE = "flash-attn-4"
_SHARED = (
    "q", "k", "v", "softmax_scale", "causal", "window_size_left", "window_size_right", "cu_seqlens_q", "cu_seqlens_k",
    "max_seqlen_q", "max_seqlen_k", "learnable_sink",
)  # fmt: skip
# The functions, and arguments that they must have.
FUNCTIONS = {
    "_flash_attn_fwd": frozenset((*_SHARED, "return_lse")),
    "_flash_attn_bwd": frozenset((*_SHARED, "out", "dout", "lse", "deterministic")),
}


def function(name: str) -> Callable[..., Any]:
    """Return a function of :data:`FUNCTIONS`; the package is imported when it is first asked for one."""
    return getattr(importlib.import_module("flash_attn.cute.interface"), name)


def forward(call: Call, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (o, z) of plain attention, or with a sink [H] those after it."""
    places = _places(call)
    q, k, v = (_tokens(x, places) for x in (call.q, call.k, call.v))
    o, z, *_ = function("_flash_attn_fwd")(q, k, v, **places, **_options(call), learnable_sink=sink, return_lse=True)
    batch, _, queries, _ = call.q.shape
    if places:
        # Its log-sum-exp has the heads first then, and no batch.
        o, z = o.unflatten(0, (batch, queries)), z.unflatten(1, (batch, queries)).transpose(0, 1)
    return o.transpose(1, 2), z


def backward(
    call: Call, do: Tensor, o: Tensor, z: Tensor, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (dq, dk, dv, dsink); those of q, k and v are exact also if o and z have a sink in them and do has factors
    per row, that of a sink [H] where z has this sink and no factors."""
    places = _places(call)
    q, k, v, o = (_tokens(x, places) for x in (call.q, call.k, call.v, o))
    # It would compile another kernel for the gradient of a sum, one number everywhere.
    do = _tokens(do.contiguous() if 0 in do.stride() else do, places)
    z = z.transpose(0, 1).flatten(1) if places else z
    dq, dk, dv, *rest = function("_flash_attn_bwd")(
        q,
        k,
        v,
        out=o,
        dout=do,
        lse=z.contiguous(),
        **places,
        **_options(call),
        deterministic=must_be_deterministic(),
        learnable_sink=sink,
    )
    dq, dk, dv = (
        (d.view(x.shape[0], x.shape[2], *d.shape[1:]) if places else d).transpose(1, 2)
        for d, x in ((dq, call.q), (dk, call.k), (dv, call.v))
    )
    return dq, dk, dv, rest[0] if rest else None


def forward_with_sink(call: Call) -> Output:
    """Return what a call with a sink and no other stage computes; one sink for each head, or for all."""
    sink, device = call.sink, call.q.device
    assert sink is not None
    of_heads = sink if isinstance(sink, Tensor) else torch.full((call.heads,), sink, dtype=torch.float32, device=device)
    o, z = forward(call, of_heads)
    return Output(o, None, z.contiguous())


def backward_with_sink(call: Call, dy: Tensor, output: Output) -> Gradients:
    sink = call.sink if isinstance(call.sink, Tensor) else None
    return Gradients(*backward(call, dy, output.attended, output.lse, sink))


def _options(call: Call) -> dict[str, Any]:
    """A window counts the keys before a query without its own."""
    m = call.mask
    window = {} if m.window is None else {"window_size_left": m.window - 1, "window_size_right": 0}
    return {"softmax_scale": call.scale, "causal": m.causal, **window}


def _places(call: Call) -> dict[str, Any]:
    """Return where documents begin and end among the tokens, as arguments; none is longer than its row."""
    if call.mask.documents is None:
        return {}
    queries, keys = call.mask.cu_seqlens(call.tq, call.tk)
    return {"cu_seqlens_q": queries, "cu_seqlens_k": keys, "max_seqlen_q": call.tq, "max_seqlen_k": call.tk}


def _tokens(x: Tensor, places: dict[str, Any]) -> Tensor:
    """[B, H, T, D] -> [B, T, H, D], and with documents [B T, H, D]."""
    x = x.transpose(1, 2)
    return x.flatten(0, 1) if places else x
