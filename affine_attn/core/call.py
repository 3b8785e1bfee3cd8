"""One validated attention call: what the public functions accept, every engine receives.

All checks of user input stand here, one sentence each: the argument, what was given, what is allowed.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from affine_attn.core.masks import Mask, check_broadcastable, with_4_dims
from affine_attn.core.spec import Logit, Logits, is_number, is_sink, scores_of

# Scores that may exist at once: 2^20 fp32 entries are 4 MiB, near the cache, and the blocks stay matmul-sized.
_SCORES_OF_A_BLOCK = 2**20


class Options(NamedTuple):
    """What of a call is neither a tensor nor its mask."""

    scale: float
    curve: Logit | None
    logit: Logit | None
    constant_sink: float | None


class Gradients(NamedTuple):
    """One for each tensor of a call that may have one; its fields are the only list of these."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    alpha: Tensor | None = None
    beta: Tensor | None = None
    gate: Tensor | None = None
    bias: Tensor | None = None


_SDPA = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


@dataclass(eq=False, slots=True)
class Call:
    """The arguments of ``attention``, checked, with scale > 0 and rows that are dense in memory."""

    q: Tensor  # [B, H, Tq, D]
    k: Tensor  # [B, Hkv, Tk, D]
    v: Tensor  # [B, Hkv, Tk, Dv]
    mask: Mask
    scale: float
    curve: Logit | None  # the two parts of stage 1: f(scale * q.k), and the coefficients of that
    logit: Logit | None
    sink: Tensor | float | None  # a number, [H] or [B, H, Tq]
    alpha: Tensor | None  # [B, H, Tq]
    beta: Tensor | None  # [B, H, Tq]
    gate: Tensor | None  # [B, H, Tq, Dv or 1]
    bias: Tensor | None  # [B or 1, H or 1, Tq or 1, Tk or 1]

    @property
    def tq(self) -> int:
        return self.q.shape[2]

    @property
    def tk(self) -> int:
        return self.k.shape[2]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def value_dim(self) -> int:
        return self.v.shape[3]

    def new_output(self) -> Tensor:
        """Allocate y [B, H, Tq, Dv], in the layout of q where it is as wide."""
        q, width = self.q, self.value_dim
        return torch.empty_like(q) if width == q.shape[3] else q.new_empty(*q.shape[:3], width)

    @property
    def needs_grad(self) -> bool:
        if torch.is_grad_enabled():
            for x in self.tensors:
                if x is not None and x.requires_grad:
                    return True
        return False

    def count(self) -> Tensor:
        return self.mask.count(self.tq, self.tk, self.q.device)

    def blocks(self) -> list[tuple[slice, slice]]:
        """(rows, keys) pieces that cover what is visible, a bounded number of scores each."""
        per_row = max(1, self.q.shape[0] * self.heads * self.tk)
        # Some rows at least, however long they are: for each block all keys and values are read again.
        step = max(16, min(512, _SCORES_OF_A_BLOCK // per_row))
        rows = [slice(start, min(start + step, self.tq)) for start in range(0, self.tq, step)]
        return [(r, self.mask.key_range(self.tq, self.tk, r)) for r in rows]

    def visible(self, rows: slice, keys: slice) -> Tensor:
        return self.mask.visible(self.tq, self.tk, self.q.device, rows, keys)

    @property
    def options(self) -> Options:
        return Options(self.scale, self.curve, self.logit, None if isinstance(self.sink, Tensor) else self.sink)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that may have gradients, in the order of :class:`Gradients`."""
        sink = self.sink if isinstance(self.sink, Tensor) else None
        return self.q, self.k, self.v, sink, self.alpha, self.beta, self.gate, self.bias

    @classmethod
    def of(cls, options: Options, mask: Mask, *tensors: Any) -> "Call":
        """Return the call with these tensors, in the order of :attr:`tensors`."""
        q, k, v, sink, *rest = tensors
        scale, curve, logit, constant_sink = options
        return cls(q, k, v, mask, scale, curve, logit, constant_sink if sink is None else sink, *rest)


def refuse_context_parallel() -> None:
    """Raise while torch's ``context_parallel`` is on: it shards sequences, and gathers keys for its own SDPA alone."""
    # Asked of the function that it replaces, since torch has no question for it.
    sdpa = F.scaled_dot_product_attention
    if sdpa is _SDPA:
        return
    if sdpa.__module__.startswith("torch.distributed.tensor.experimental"):
        raise ValueError(
            "attention knows no context parallelism: under torch's context_parallel a rank has a part of the sequence, "
            "and would attend to that alone"
        )


class Output(NamedTuple):
    """What a forward returns: the result, and what its backward will be given."""

    y: Tensor
    saved_out: Tensor | None = None  # attention output after the sink; None where y itself is that
    saved_lse: Tensor | None = None  # the log-sum-exp its backward must see, fp32 [B, H, Tq]; None: it recomputes
    saved_sums: Tensor | None = None  # sums of tiles of v; None where nothing needs them
    is_clean: bool = False  # q, k and v were looked at, and are finite

    @property
    def attended(self) -> Tensor:
        """The attention output after the sink."""
        return self.y if self.saved_out is None else self.saved_out

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of an engine that does not recompute."""
        assert self.saved_lse is not None
        return self.saved_lse


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = Mask(),
    scale: float | None = None,
    logit: Logits = None,
    sink: Tensor | float | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    bias: Tensor | None = None,
) -> Call:
    """Validate and normalise."""
    refuse_context_parallel()
    # What a tensor is asked for is asked once: a small call is short.
    dtype = device = None
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        if tensor.is_nested:
            raise ValueError(
                f"{name} must not be a nested tensor: give its documents as one row [1, heads, tokens, channels], with "
                "Mask.packed(lengths)"
            )
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [batch, heads, tokens, head_dim], got {list(tensor.shape)}"
            )
        of_tensor, place = tensor.dtype, tensor.device
        if of_tensor not in _DTYPES:
            raise ValueError(f"{name} must be a floating point tensor, got {of_tensor}; it may have 16, 32 or 64 bits")
        if dtype is None:
            dtype, device = of_tensor, place
        if of_tensor != dtype:
            raise ValueError(f"q, k and v must share a dtype, got {dtype} for q and {of_tensor} for {name}")
        if place != device:
            raise ValueError(f"{name} is on {place}, q is on {device}; all must share a device")
    (batch, heads, tq, dim), of_k, of_v = q.shape, k.shape, v.shape
    batch_of_k, kv_heads, tk, dim_of_k = of_k
    value_dim = of_v[3]
    if of_k[:3] != of_v[:3]:
        raise ValueError(
            f"k and v must have the same shape, their last dimension aside, got {list(of_k)} and {list(of_v)}"
        )
    if dim == 0 or value_dim == 0:
        raise ValueError(
            f"q, k and v must have at least one channel per head, got {list(q.shape)} for q and {list(of_v)} for v"
        )
    if batch_of_k != batch or dim_of_k != dim:
        raise ValueError(f"q {list(q.shape)} and k {list(of_k)} must agree in batch and head_dim")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k has {kv_heads}: the heads of q must be a multiple of those of k")
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask, got {type(mask).__name__}")
    mask.check((batch, heads, tq, tk), q.device)
    curve = coefficients = None
    if logit is not None:
        curve, coefficients = scores = scores_of(logit)
        for part in scores:
            if part is not None and part.needs_causal and not mask.causal:
                raise ValueError(f"logit {type(part).__name__} needs a causal mask, got Mask(causal=False)")
    if isinstance(sink, Tensor):
        _check_stage("sink", sink, ((heads,), (batch, heads, tq)), q)
    elif sink is not None:
        if not is_sink(sink):
            raise ValueError(f"sink must be None, a number or a Tensor, got {sink!r}")
        sink = float(sink)
    rows = (batch, heads, tq)
    if alpha is not None:
        _check_stage("alpha", alpha, (rows,), q)
    if beta is not None:
        _check_stage("beta", beta, (rows,), q)
    if gate is not None:
        _check_stage("gate", gate, ((batch, heads, tq, value_dim), (batch, heads, tq, 1)), q)
    if bias is not None:
        _check_stage("bias", bias, None, q)
        check_broadcastable("bias", bias, (batch, heads, tq, tk))
        bias = with_4_dims(bias)
    if scale is not None and not is_number(scale):
        raise ValueError(f"scale must be None or a finite number, got {scale!r}")
    factor = dim**-0.5 if scale is None else float(scale)
    if factor <= 0:
        # Stock kernels multiply the scores of masked keys too, and minus infinity has to stay what it is.
        q, factor = (-q, -factor) if factor else (q * 0.0, 1.0)
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        q, k, v = _with_dense_rows(q), _with_dense_rows(k), _with_dense_rows(v)
    gate = None if gate is None else _with_dense_rows(gate)
    return Call(q, k, v, mask, factor, curve, coefficients, sink, alpha, beta, gate, bias)


def _with_dense_rows(x: Tensor) -> Tensor:
    """Kernels read a head's channels as neighbours in memory; a tensor laid out otherwise is copied."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _check_stage(name: str, tensor: Tensor, shapes: tuple[tuple[int, ...], ...] | None, q: Tensor) -> None:
    """Raise if a tensor has none of the shapes (None: its shape is checked elsewhere), another type or device."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if shapes is not None and tensor.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} must have shape {allowed}, got {list(tensor.shape)}")
    if tensor.dtype not in (q.dtype, torch.float32):
        raise ValueError(f"{name} must be {q.dtype} (as q) or torch.float32, got {tensor.dtype}")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, q is on {q.device}; all must share a device")
