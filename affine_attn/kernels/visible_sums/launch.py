"""Sums over what a mask lets be seen: u, the values each query sees, and the gradients each key is seen with.

The two are a matmul with the 0/1 mask and with its transpose, so one kernel does both with queries and keys in each
other's place. It reads whole tiles as their totals and multiplies only where a tile is cut: long windows and documents
cost a pass over the tensor and no more. core/blocks.py has the same in torch, for flex and non-finite values.
"""

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.kernels.device import cdiv, padded
from affine_attn.kernels.launch import Launch, run, strides

# (rows, sources, warps) of a tile, by padded head_dim; fp32 MMAs run on the plain cores.
_TILES = {16: (64, 64, 4), 32: (64, 64, 4), 64: (64, 64, 8), 128: (64, 64, 8), 256: (64, 32, 8)}
_TILES_FP32 = (32, 32, 4)
# Totals of whole tiles read at once, and software pipelining over the cut ones.
_CHUNK, _STAGES = 32, 2


def visible_sums(call: Call) -> Tensor:
    """u_i = sum of the values visible to query i, fp32 [B, Hkv, Tq, D]."""
    batch, kv_heads, _, head_dim = call.v.shape
    u = torch.empty(batch, kv_heads, call.tq, head_dim, dtype=torch.float32, device=call.v.device)
    run(*launches(call, call.v, u, transposed=False))
    return u


def add_seen_by(call: Call, w: Tensor, dv: Tensor) -> None:
    """dv_j += sum of w_i over the queries i that see key j, in place; w fp32 [B, Hkv, Tq, D]."""
    run(*launches(call, w, dv, transposed=True))


def launches(call: Call, source: Tensor, result: Tensor, transposed: bool) -> list[Launch]:
    """Return the launches that sum ``source`` into ``result``.

    ``transposed``: rows are keys and sources are queries, else the other way round.
    """
    mask, older = call.mask, call.tk - call.tq
    batch, kv_heads, sources, head_dim = source.shape
    rows = result.shape[2]
    d = padded(head_dim)
    m, n, warps = _TILES_FP32 if call.v.dtype == torch.float32 else _TILES[d]
    tiles = cdiv(sources, n)
    totals = torch.empty(batch * kv_heads, tiles, d, dtype=torch.float32, device=source.device)
    real = None if mask.padding is None else mask.padding.contiguous().view(torch.uint8)
    back, ahead = mask.band(call.tq, call.tk)
    if transposed:
        back, ahead = ahead, back
    doc_first = doc_last = run_first = run_last = None
    if mask.documents is not None:
        *_, doc_first, doc_last = mask.documents_in_order()
        run_first, run_last = mask.document_runs()
    shared = {
        "p_source": source, "p_totals": totals, "p_real": real,
        **strides(source, "s"), "kv_heads": kv_heads, "sources": sources, "tiles": tiles,
        "HEAD_DIM": head_dim, "D": d, "N": n, "num_warps": warps,
    }  # fmt: skip
    sums = {
        "p_result": result, "p_doc_first": doc_first, "p_doc_last": doc_last,
        "p_run_first": run_first, "p_run_last": run_last, **strides(result, "r"),
        "slots": call.tk, "rows": rows, "row_offset": 0 if transposed else older,
        "source_offset": older if transposed else 0, "back": back, "ahead": ahead,
        "TRANSPOSED": transposed, "HAS_DOCUMENTS": mask.documents is not None, "HAS_PADDING": real is not None,
        # On the CPU this is Triton's interpreter, whose bf16 matmuls are wrong.
        "IN_FP32": call.v.dtype == torch.float32 or call.v.device.type == "cpu",
        "M": m, "CHUNK": _CHUNK, "num_stages": _STAGES,
    }  # fmt: skip
    return [
        Launch(
            "visible_sums.kernels.tile_totals_kernel",
            (tiles, batch * kv_heads),
            shared | {"HIDE_PADDING": real is not None and not transposed},
        ),
        Launch("visible_sums.kernels.visible_sums_kernel", (cdiv(rows, m), batch * kv_heads), shared | sums),
    ]
