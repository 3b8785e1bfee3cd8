"""Launch the flash kernels: forward, backward and row statistics of plain and distance logits."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from affine_attn.core.blocks import ScoreStatistics
from affine_attn.core.call import Call
from affine_attn.core.spec import Alibi, ScaleInvariant, SoftCap
from affine_attn.kernels.device import cdiv, padded
from affine_attn.kernels.flash.far_tables import FAR_RATIO, FAR_SLOTS, far_tables
from affine_attn.kernels.launch import LOG2E, Launch, cap_of, run, strides

PLAIN, SCALE_INVARIANT, ALIBI = 0, 1, 2  # as in the kernels


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options of one kernel.

    maxnreg caps the registers so that two programs share an SM; it applies without documents and padding,
    whose tiles need more registers.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


# {kernel: {largest width of keys and values: Config}} for 16-bit inputs, timed on an H200 (docs/log).
CONFIGS = {
    "forward": {
        64: Config(128, 64, num_warps=8, num_stages=3, maxnreg=128),
        128: Config(128, 64, num_warps=8, num_stages=3),
        256: Config(128, 32, num_warps=8, num_stages=2),
    },
    "dkdv": {
        64: Config(64, 64, num_warps=4, num_stages=2),
        128: Config(64, 128, num_warps=8, num_stages=2),
        256: Config(32, 64, num_warps=8, num_stages=2),
    },
    "dq": {
        64: Config(128, 64, num_warps=8, num_stages=2, maxnreg=128),
        128: Config(64, 64, num_warps=4, num_stages=2),
        256: Config(64, 32, num_warps=8, num_stages=2),
    },
    "statistics": {
        64: Config(128, 64, num_warps=8, num_stages=3),
        128: Config(128, 64, num_warps=8, num_stages=3),
        256: Config(128, 64, num_warps=8, num_stages=2),
    },
}
# The slope of a soft cap needs registers: half the queries at a time spill none (not timed).
CONFIGS["dkdv_capped"] = CONFIGS["dkdv"] | {128: Config(32, 128, num_warps=8, num_stages=2)}
LOGITS = {type(None): PLAIN, ScaleInvariant: SCALE_INVARIANT, Alibi: ALIBI}
CURVES = (type(None), SoftCap)
# fp32 inputs use exact fp32 MMAs on the plain cores: small tiles, correctness only.
CONFIG_FP32 = Config(32, 32, num_warps=4, num_stages=1)


def _config(kernel: str, call: Call) -> Config:
    if call.q.dtype == torch.float32:
        return CONFIG_FP32
    widest = max(call.q.shape[-1], call.value_dim)
    return next(config for limit, config in CONFIGS[kernel].items() if widest <= limit)


class Shared:
    """What every kernel of one call shares: sizes, mask tensors, the logit's constants."""

    def __init__(self, call: Call):
        batch, self.heads, self.rows, self.dim = call.q.shape
        self.value_dim = call.value_dim
        self.kv_heads, self.keys = call.k.shape[1], call.k.shape[2]
        self.programs, self.kv_programs = batch * self.heads, batch * self.kv_heads
        mask, logit = call.mask, call.logit
        self.device = call.q.device
        self.logit = LOGITS[type(logit)]
        self.tau = logit.tau if isinstance(logit, ScaleInvariant) else 1.0
        self.window = mask.window if mask.window is not None and mask.window < self.keys else None
        self.documents = self.first = self.last = None
        if mask.documents is not None:
            # Kernels compare 32-bit ids: the first slot of a document names it, whatever its own id.
            *_, self.first, self.last = mask.documents_in_order()
            self.documents = self.first
        self.padding = None if mask.padding is None else mask.padding.to(torch.uint8).contiguous()
        self.fast_log = call.q.is_cuda and torch.version.hip is None
        # The kernels' scores are in base 2. The scale-invariant factor carries sqrt(log2e), the others log2e whole.
        unit = math.sqrt(LOG2E) if self.logit == SCALE_INVARIANT else LOG2E
        # It multiplies q.k, or with a soft cap the tanh in its place.
        cap = cap_of(call.curve)
        self.cap_factor = None if cap is None else call.scale / cap
        self.qk_factor = (call.scale if cap is None else cap) * unit
        self.grad_factor = call.scale / unit if self.logit == SCALE_INVARIANT else call.scale

    def arguments(self, config: Config, columns: str | None) -> dict[str, Any]:
        """Return the arguments that all kernels share; ``columns`` of a far tile are "keys" or "queries"."""
        sizes = {
            "H": self.heads, "G": self.heads // self.kv_heads, "Tq": self.rows, "Tk": self.keys,
            "window": self.window or 0, "qk_factor": self.qk_factor, "cap_factor": self.cap_factor,
            "inv_tau": 1 / self.tau, "p_document": self.documents, "p_padding": self.padding,
        }  # fmt: skip
        if columns is not None:
            sizes["p_far"], sizes["p_basis"] = self.far(config, columns)
        return sizes | self.options(config, columns)

    def far(self, config: Config, columns: str) -> tuple[Tensor | None, Tensor | None]:
        """(table, basis) for tiles whose columns are "keys" or "queries"."""
        if self.logit != SCALE_INVARIANT:
            return None, None
        width = config.block_n if columns == "keys" else config.block_m
        # Rows past the end of the last query block look up to one block further.
        length = 1 << (self.keys + 255).bit_length()
        tables = far_tables(self.tau, width, length, self.device)
        return tables.coefficients, tables.falling if columns == "keys" else tables.rising

    def options(self, config: Config, columns: str | None) -> dict[str, Any]:
        """Constexprs and launch options; ``columns`` as above, None for a kernel without far tiles."""
        options: dict[str, Any] = {
            "D": self.dim, "BLOCK_D": padded(self.dim),
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
            "LOGIT": self.logit, "HAS_WINDOW": self.window is not None, "HAS_DOCUMENTS": self.documents is not None,
            "HAS_PADDING": self.padding is not None, "FAST_LOG": self.fast_log,
            "num_warps": config.num_warps, "num_stages": config.num_stages,
        }  # fmt: skip
        if config.maxnreg is not None and self.documents is None and self.padding is None:
            options["maxnreg"] = config.maxnreg
        if columns is not None:
            options["DV"], options["BLOCK_DV"] = self.value_dim, padded(self.value_dim)
            is_far = self.logit == SCALE_INVARIANT
            width = config.block_n if columns == "keys" else config.block_m
            options["FAR_SLOTS"] = len(FAR_SLOTS) if is_far else 0
            options["FAR_REACH"] = (FAR_RATIO + 1) * width // 2 if is_far else 0
        return options


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return (o, z) of plain attention."""
    shared, config = Shared(call), _config("forward", call)
    q, k, v = call.q, call.k, call.v
    out = call.new_output()
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    arguments = {
        "p_q": q, "p_k": k, "p_v": v, "p_out": out, "p_lse": lse, "p_doc_first": shared.first,
        **_strides(q=q, k=k, v=v, o=out), **shared.arguments(config, "keys"),
    }  # fmt: skip
    grid = (cdiv(shared.rows, config.block_m), shared.programs)
    run(Launch("flash.forward_kernels.flash_forward_kernel", grid, arguments))
    return out, lse


def backward(call: Call, do: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv). Deterministic: every kernel owns what it writes."""
    shared = Shared(call)
    q, k, v = call.q, call.k, call.v
    do = do if do.stride(-1) == 1 else do.contiguous()
    base2_lse, delta = torch.empty_like(lse), torch.empty_like(lse)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    rows = 64
    preprocess = {
        "p_out": out, "p_grad": do, "p_lse": lse, "p_lse2": base2_lse, "p_delta": delta, **_strides(o=out, g=do),
        "H": shared.heads, "Tq": shared.rows, "DV": shared.value_dim, "BLOCK_DV": padded(shared.value_dim),
        "BLOCK_M": rows, "LOGIT": shared.logit, "num_warps": 4,
    }  # fmt: skip
    inputs = {
        "p_q": q, "p_k": k, "p_v": v, "p_grad": do, "p_lse2": base2_lse, "p_delta": delta,
        "grad_factor": shared.grad_factor, **_strides(q=q, k=k, v=v, g=do),
    }  # fmt: skip
    of_keys, of_queries = _config("dkdv" if call.curve is None else "dkdv_capped", call), _config("dq", call)
    dkdv = {"p_dk": dk, "p_dv": dv, "p_doc_last": shared.last, **_strides(dk=dk, dv=dv)}
    dkdv |= inputs | shared.arguments(of_keys, "queries")
    dq_only = {"p_dq": dq, "p_doc_first": shared.first, **_strides(dq=dq)}
    dq_only |= inputs | shared.arguments(of_queries, "keys")
    tiles = cdiv(shared.rows, rows), cdiv(shared.keys, of_keys.block_n), cdiv(shared.rows, of_queries.block_m)
    run(
        Launch("flash.backward_kernels.flash_preprocess_kernel", (tiles[0], shared.programs), preprocess),
        Launch("flash.backward_kernels.flash_dkdv_kernel", (tiles[1], shared.kv_programs), dkdv),
        Launch("flash.backward_kernels.flash_dq_kernel", (tiles[2], shared.programs), dq_only),
    )
    return dq, dk, dv


def score_statistics(call: Call, first_key: Tensor) -> ScoreStatistics:
    """Return the row statistics of the scores in one pass over q and k, fp32; first_key as in core/blocks.py."""
    shared, config = Shared(call), _config("statistics", call)
    q, k = call.q, call.k
    found = ScoreStatistics(*(torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(5)))
    arguments = {
        "p_q": q, "p_k": k, "p_first_key": first_key[:, 0].expand(q.shape[0], call.tq).to(torch.int32).contiguous(),
        "p_lse": found.lse, "p_mean": found.mean, "p_max": found.largest, "p_sum": found.total,
        "p_first_score": found.first, "p_doc_first": shared.first, "p_doc_last": shared.last,
        "CAUSAL": call.mask.causal, **_strides(q=q, k=k), **shared.arguments(config, None),
    }  # fmt: skip
    grid = (cdiv(shared.rows, config.block_m), shared.programs)
    run(Launch("flash.forward_kernels.flash_statistics_kernel", grid, arguments))
    return found


def _strides(**tensors: Tensor) -> dict[str, int]:
    """Return the strides of tensors by their letters."""
    return {name: stride for letter, x in tensors.items() for name, stride in strides(x, letter, "bhn").items()}
