"""Launch the decode kernels: keys are split over programs, and partial results combined."""

import functools
import math

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.spec import Alibi, LogN, ScaleInvariant, SoftCap
from affine_attn.kernels.device import capability, cdiv, num_sms, padded
from affine_attn.kernels.launch import INTERPRETED, LOG2E, Launch, cap_of, strides

LOGITS = {type(None): 0, LogN: 0, ScaleInvariant: 1, Alibi: 2}  # as in the kernels; LogN has moved into q
CURVES = (type(None), SoftCap)

# Cost model of the split rule, in units of the time a program takes for one tile when half the slots are busy.
_START_COST = 2.0  # fill the pipeline, load q, write the partial result (and read it again)
_COMBINE_COST = 0.2  # per split: the combine reads them one block after another
_SECOND_LAUNCH_COST = 2.0  # splits > 1 needs the combine kernel
_SATURATING = 0.5  # the share of slots whose loads already take all the bandwidth

_TILE_BYTES = 16 * 1024  # of K (and of V) per tile: 32 KiB per pipeline stage
_STAGES = 3


def launches(call: Call, y: Tensor, splits: int | None = None) -> list[Launch]:
    """Return the launches that write y."""
    batch, heads, queries, dim = call.q.shape
    kv_heads, keys = call.k.shape[1:3]
    group, mask, value_dim = heads // kv_heads, call.mask, call.value_dim
    q, k, v = call.q, call.k, call.v
    padding = None if mask.padding is None else _dense(mask.padding).view(torch.uint8)
    documents, lengths = (None if x is None else _dense(x) for x in (mask.documents, mask.lengths))
    sink, constant = (call.sink, None) if isinstance(call.sink, Tensor) else (None, call.sink)
    if sink is not None:
        sink = (sink[None, :, None] if sink.ndim == 1 else sink).expand(batch, heads, queries)
    gate = None if call.gate is None else call.gate.expand(batch, heads, queries, value_dim)
    rows = (group + (call.beta is not None)) * queries
    widest = padded(max(dim, value_dim))
    block_m, block_n, warps = _tile(rows, widest, q.element_size())
    row_blocks = cdiv(rows, block_m)
    if splits is None:
        seen = keys if mask.window is None else min(keys, mask.window + queries - 1)
        # Programs an SM holds at once, by their registers and shared memory.
        light = block_m * widest * warps <= 16 * 128 * 4 and padding is None and documents is None
        slots = num_sms(q.device) * (3 if light else 2)
        splits = choose_splits(batch * kv_heads * row_blocks, cdiv(seen, block_n), slots)
    # The epilogue needs the zero head and all its query heads in one program.
    is_fused = splits == 1 and row_blocks == 1
    acc = top = total = None
    if not is_fused:
        acc = torch.empty(batch, kv_heads, rows, splits, value_dim, dtype=torch.float32, device=q.device)
        top, total = torch.empty(2, batch, kv_heads, rows, splits, dtype=torch.float32, device=q.device)
    shared = {
        "p_sink": sink, "constant_sink": constant, "p_alpha": call.alpha, "p_beta": call.beta, "p_gate": gate, "p_y": y,
        "p_acc": acc, "p_m": top, "p_l": total, "p_lengths": lengths, "TK": keys, "window": min(mask.window or 0, keys),
        "splits": splits, "HAS_WINDOW": mask.window is not None, "KV_HEADS": kv_heads, "GROUP": group, "TQ": queries,
        "DV": value_dim, "BLOCK_N": block_n, "BLOCK_DV": padded(value_dim), **_early(q.device),
        **strides(sink, "s", "bhi"), **strides(call.alpha, "a", "bhi"), **strides(call.beta, "b", "bhi"),
        **strides(gate, "g", "bhid"), **strides(y, "y", "bhi"),
    }  # fmt: skip
    tau = call.logit.tau if isinstance(call.logit, ScaleInvariant) else 1.0
    cap = cap_of(call.curve)
    split = shared | {
        "p_q": q, "p_k": k, "p_v": v, "p_padding": padding, "p_documents": documents,
        "scale_log2": (call.scale if cap is None else cap) * LOG2E,
        "cap_factor": None if cap is None else call.scale / cap, "inverse_tau": 1.0 / tau,
        "stride_padding_b": 0 if padding is None else padding.stride(0),
        "stride_documents_b": 0 if documents is None else documents.stride(0),
        "LOGIT": LOGITS[type(call.logit)], "CAUSAL": mask.causal, "FUSED": is_fused, "D": dim, "BLOCK_M": block_m,
        "BLOCK_D": padded(dim), "NUM_STAGES": _STAGES, "num_warps": warps,
        **strides(q, "q", "bhi"), **strides(k, "k", "bhn"), **strides(v, "v", "bhn"),
    }  # fmt: skip
    plan = [Launch("decode.kernels.decode_split_kernel", (kv_heads * row_blocks, splits, batch), split)]
    if not is_fused:
        combine = shared | {"BLOCK_S": 8, "num_warps": 4}
        plan.append(Launch("decode.kernels.decode_combine_kernel", (heads * queries, batch), combine))
    return plan


def _tile(rows: int, width: int, bytes_per_element: int) -> tuple[int, int, int]:
    """Return (BLOCK_M, BLOCK_N, warps): an MMA needs at least 16 rows; K and V tiles have constant bytes."""
    is_wide = bytes_per_element > 2
    block_m = min(16 if is_wide else 64, padded(rows))
    block_n = min(128, max(16, _TILE_BYTES // (width * bytes_per_element)))
    # At most 64 fp32 accumulators per thread.
    warps = 8 if is_wide or block_m * width > 64 * 128 else 4
    return block_m, block_n, warps


@functools.cache
def choose_splits(programs: int, tiles: int, slots: int) -> int:
    """Return how many key ranges fill the GPU and its last wave, from shapes alone.

    ``programs`` at one split, key ``tiles`` of a full row, ``slots`` for programs on the GPU. The time of S splits is
    modelled as the time to stream all tiles, at a speed that grows until enough programs run, plus what an unfilled
    last wave and the combine cost. With lengths a row's own keys are divided by the same S, so a half-empty static
    cache still fills the GPU.
    """

    def time(splits: int) -> float:
        waves = programs * splits / slots
        stream = programs * tiles / min(programs * splits, _SATURATING * slots)
        unevenness = math.sqrt(math.ceil(waves) / waves) if waves > 1 else 1.0
        combine = 0.0 if splits == 1 else _COMBINE_COST * splits + _SECOND_LAUNCH_COST
        return stream * unevenness + _START_COST * math.ceil(waves) + combine

    # More than four waves only add combine work; a split of less than one tile is empty.
    most = max(1, min(tiles, math.ceil(4 * slots / programs)))
    return min(range(1, most + 1), key=time)


def _early(device: torch.device) -> dict[str, bool]:
    """Return options of a launch that overlaps the end of the kernel before it: steps of decoding are short."""
    if capability(device) >= (9, 0) and not INTERPRETED:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
