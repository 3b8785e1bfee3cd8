"""Engine ``triton``: own flash kernels for distance logits and for masks that stock kernels lack, plus the epilogue.

Launchers only; the kernels and how they get a(i-j) almost for free are in kernels/distance_logit.py. Their constant
tables are built here.
"""

import importlib
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.core.blocks import ScoreStatistics
from affine_attn.core.call import Call
from affine_attn.core.masks import document_bounds
from affine_attn.core.spec import Alibi, LogN, ScaleInvariant
from affine_attn.engines.compose import compose, why_not_beta
from affine_attn.engines.operator import on_its_device
from affine_attn.kernels.device import cdiv, kept, padded, uploaded
from affine_attn.kernels.epilogue import launch as fused

DESCRIPTION = "own flash kernels (distance logits, documents, padding, windows) with a row-wise epilogue"

LOG2E = math.log2(math.e)
PLAIN, SCALE_INVARIANT, ALIBI = 0, 1, 2  # as in the kernels

# A tile is far when every row is at least this many tile half-widths from its centre: from there on the tables below
# give the factor a(t) to 2e-7 relative before fp32 rounding, for every tau.
FAR_RATIO = 3
# The (Chebyshev degree, fp16 piece) each column of a far table holds. A coefficient is about a sixth of the one before,
# so only the first few need more than one 11-bit piece. 16 columns are one tensor-core step.
FAR_SLOTS = (
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1),
    (5, 0), (6, 0), (7, 0), (8, 0), (9, 0),
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options of one kernel.

    maxnreg caps the registers so that two programs share a multiprocessor; it applies without documents and padding,
    whose tiles need more registers.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


# {kernel: {largest head dim: Config}} for 16-bit inputs, timed on an H200 (LOG.md).
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
_LOGITS = {type(None): PLAIN, ScaleInvariant: SCALE_INVARIANT, Alibi: ALIBI}
# fp32 inputs use exact fp32 products on the plain cores: small tiles, correctness only.
CONFIG_FP32 = Config(32, 32, num_warps=4, num_stages=1)


def why_not(call: Call) -> str | None:
    # LogN has moved into q by the time the kernels run.
    seen_by_kernels = replace(call, logit=None) if isinstance(call.logit, LogN) else call
    if (reason := why_not_statistics(seen_by_kernels)) is not None:
        return reason
    if not call.mask.causal:
        return "its attention kernels are causal"
    return why_not_beta(call)


def why_not_statistics(call: Call) -> str | None:
    """Why the pass over the scores alone cannot run, or None; it is less choosy than attention."""
    if (reason := fused.why_not(call)) is not None:
        return reason
    if call.mask.lengths is not None:
        return "its kernels have no mask.lengths"
    if not call.mask.causal and call.logit is not None:
        return "its distance logits are causal"
    if isinstance(call.logit, LogN):
        return "LogN scales q, which would be rounded again"
    if type(call.logit) not in _LOGITS:
        return f"its kernels do not know the {type(call.logit).__name__} logit"
    if call.q.shape[-1] < 16:
        return f"its kernels need a head_dim of at least 16, not {call.q.shape[-1]}"
    if 0 in (call.tk, call.tq, call.q.shape[0]):
        return "its kernels need at least one query and one key"
    return None


def _config(kernel: str, q: Tensor) -> Config:
    if q.dtype == torch.float32:
        return CONFIG_FP32
    return next(config for limit, config in CONFIGS[kernel].items() if q.shape[-1] <= limit)


class FarTables(NamedTuple):
    coefficients: Tensor  # fp16 [length, 16]: row c approximates f on [c - width/2, c + width/2]
    falling: Tensor  # fp16 [16, width]: Chebyshev polynomials at the distances c + width/2 - j (columns are keys)
    rising: Tensor  # fp16 [16, width]: the same at c - width/2 + i (columns are queries)


@kept
def far_tables(tau: float, width: int, length: int, device: torch.device) -> FarTables:
    """f(t) = sqrt(log2e + 2 log2(1 + t/tau)) as (coefficients @ basis), good from FAR_RATIO half-widths on."""
    half = width // 2
    degrees = 1 + max(degree for degree, _ in FAR_SLOTS)
    float64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    angle = (torch.arange(degrees, **float64) + 0.5) * (math.pi / degrees)
    # Rows nearer than one half-width are never read: keep them finite.
    center = torch.arange(length, **float64).clamp(min=half)
    t = center[:, None] + half * angle.cos()
    f = (LOG2E + 2 * LOG2E * torch.log1p(t / tau)).sqrt()
    waves = torch.cos(torch.arange(degrees, **float64)[:, None] * angle) * (2 / degrees)  # [degree, node]
    waves[0] /= 2
    rest = f @ waves.T  # Chebyshev interpolation: [length, degrees]
    offset = (half - torch.arange(width, **float64)) / half  # 1 .. -1 + 2/width
    coefficients = torch.empty(length, len(FAR_SLOTS), dtype=torch.float16, device="cpu")
    falling = torch.empty(len(FAR_SLOTS), width, dtype=torch.float16, device="cpu")
    rising = torch.empty_like(falling)
    for slot, (degree, _) in enumerate(FAR_SLOTS):
        coefficients[:, slot] = rest[:, degree].half()
        rest[:, degree] -= coefficients[:, slot].double()
        falling[slot] = torch.cos(degree * torch.acos(offset)).half()
        rising[slot] = torch.cos(degree * torch.acos(-offset)).half()
    return FarTables(*uploaded((coefficients, falling, rising), device))


class Launch:
    """What every kernel of one call shares: sizes, mask tensors, the logit's constants."""

    def __init__(self, call: Call):
        batch, self.heads, self.rows, self.dim = call.q.shape
        self.kv_heads, self.keys = call.k.shape[1], call.k.shape[2]
        self.programs, self.kv_programs = batch * self.heads, batch * self.kv_heads
        mask, logit = call.mask, call.logit
        self.device = call.q.device
        self.logit = _LOGITS[type(logit)]
        self.tau = logit.tau if isinstance(logit, ScaleInvariant) else 1.0
        self.window = mask.window if mask.window is not None and mask.window < self.keys else None
        self.documents = self.first = self.last = None
        if mask.documents is not None:
            # Kernels compare 32-bit ids: the first slot of a document names it, whatever its own id.
            self.first, self.last = document_bounds(mask.documents)
            self.documents = self.first
        self.padding = None if mask.padding is None else mask.padding.to(torch.uint8).contiguous()
        self.fast_log = call.q.is_cuda and torch.version.hip is None
        # The kernels' scores are in base 2. The scale-invariant factor carries sqrt(log2e), the others log2e whole.
        unit = math.sqrt(LOG2E) if self.logit == SCALE_INVARIANT else LOG2E
        self.qk_factor = call.scale * unit
        self.grad_factor = call.scale / unit if self.logit == SCALE_INVARIANT else call.scale

    def sizes(self) -> tuple[int, ...]:
        return self.heads, self.heads // self.kv_heads, self.rows, self.keys, self.window or 0

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
            is_far = self.logit == SCALE_INVARIANT
            width = config.block_n if columns == "keys" else config.block_m
            options["FAR_SLOTS"] = len(FAR_SLOTS) if is_far else 0
            options["FAR_REACH"] = (FAR_RATIO + 1) * width // 2 if is_far else 0
        return options


def _kernels(name: str) -> Any:
    """Imported late, where Triton is known to be there; a launch is nothing a type checker can follow."""
    return importlib.import_module(f"affine_attn.kernels.flash.{name}_kernels")


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _attend(call: Call) -> tuple[Tensor, Tensor]:
    launch, config = Launch(call), _config("forward", call.q)
    q, k, v = call.q, call.k, call.v
    out = torch.empty_like(call.q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _kernels("forward").distance_forward_kernel[(cdiv(launch.rows, config.block_m), launch.programs)](
        q, k, v, out, lse, launch.documents, launch.first, launch.padding,
        *launch.far(config, "keys"), *_strides(q, k, v, out),
        *launch.sizes(), launch.qk_factor, 1 / launch.tau, **launch.options(config, "keys"),
    )  # fmt: skip
    return out, lse


def _attend_backward(call: Call, do: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Deterministic: every kernel owns what it writes."""
    launch, kernels = Launch(call), _kernels("backward")
    q, k, v = call.q, call.k, call.v
    do = do if do.stride(-1) == 1 else do.contiguous()
    base2_lse, delta = torch.empty_like(lse), torch.empty_like(lse)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    rows = 64
    kernels.distance_backward_rows_kernel[(cdiv(launch.rows, rows), launch.programs)](
        out, do, lse, base2_lse, delta, *_strides(out, do), launch.heads, launch.rows,
        D=launch.dim, BLOCK_D=padded(launch.dim), BLOCK_M=rows, LOGIT=launch.logit,
        num_warps=4,
    )  # fmt: skip
    scalars = (launch.qk_factor, launch.grad_factor, 1 / launch.tau)
    config = _config("dkdv", q)
    kernels.distance_backward_dkdv_kernel[(cdiv(launch.keys, config.block_n), launch.kv_programs)](
        q, k, v, do, base2_lse, delta, dk, dv, launch.documents, launch.last, launch.padding,
        *launch.far(config, "queries"), *_strides(q, k, v, do, dk, dv), *launch.sizes(), *scalars,
        **launch.options(config, "queries"),
    )  # fmt: skip
    config = _config("dq", q)
    kernels.distance_backward_dq_kernel[(cdiv(launch.rows, config.block_m), launch.programs)](
        q, k, v, do, base2_lse, delta, dq, launch.documents, launch.first, launch.padding,
        *launch.far(config, "keys"), *_strides(q, k, v, do, dq), *launch.sizes(), *scalars,
        **launch.options(config, "keys"),
    )  # fmt: skip
    return dq, dk, dv


run = compose("triton", _attend, _attend_backward, look_on=())


@on_its_device
def score_statistics(call: Call, first_key: Tensor) -> ScoreStatistics:
    """Return the row statistics of the scores in one pass over q and k, fp32; first_key as in core/blocks.py."""
    first_key = first_key[:, 0].expand(call.q.shape[0], call.tq)
    launch, config = Launch(call), _config("statistics", call.q)
    q, k = call.q, call.k
    results = [torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in ScoreStatistics._fields]
    _kernels("forward").qk_statistics_kernel[(cdiv(launch.rows, config.block_m), launch.programs)](
        q, k, first_key.to(torch.int32).contiguous(), *results, launch.documents, launch.first, launch.last,
        launch.padding, *_strides(q, k), *launch.sizes(), launch.qk_factor, 1 / launch.tau,
        **launch.options(config, None), CAUSAL=call.mask.causal,
    )  # fmt: skip
    return ScoreStatistics(*results)
