"""Affine scaling's alpha: the gate, its moving average, and the one commit per optimizer step.

A training forward only adds to a local (sum, count). ``track_alpha(model, optimizer)`` turns the sums of all layers
into one all-reduce and one update after each optimizer step: use, then update. So micro-batches and data-parallel ranks
cannot skew the average. Activation recomputation adds nothing, and sees the average that its forward saw; only in a
layer that is compiled inside of the checkpoint it adds once more, to sum and count alike.
"""

import functools
import warnings
from typing import Any, Literal
from weakref import ReferenceType, WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.optim.optimizer import register_optimizer_step_post_hook

from affine_attn.core.masks import Mask
from affine_attn.core.spec import ACTIVATIONS, Affine, check_counts
from affine_attn.core.stages import own_precision

_HALF = (torch.bfloat16, torch.float16)
# Tokens of a decoding step. So few are summed without a matmul, which a compiler fuses with all that follows.
_FEW_TOKENS = 8


def _wide_linear(x: Tensor, w: Tensor) -> Tensor:
    """x wᵀ with sums and result in fp32.

    On CUDA autocast's 16-bit numbers are what is multiplied, as they are for q_proj: without tensor cores this small
    matmul would take as long as all of affine scaling's kernels.
    """
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x, w = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (x, w))
    with own_precision(x):
        if x.is_cuda and not hasattr(w, "full_tensor"):
            if x.shape[0] * x.shape[1] <= _FEW_TOKENS:
                return (x.float()[..., None, :] * w.float()).sum(-1)
            if x.dtype == w.dtype in _HALF:
                return _WideLinear.apply(x, w)
        return F.linear(x.float(), w.float())


class _WideLinear(torch.autograd.Function):
    """Matmuls of 16-bit numbers with the sums left in fp32, for which aten has no derivative."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        # A head's tokens lie side by side, as in alpha: what follows then reads and writes memory in one order.
        return torch.mm(w, x.flatten(0, -2).t(), out_dtype=torch.float32).t().view(*x.shape[:-1], len(w))

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        dy = dy.to(x.dtype)
        return dy @ w, dy.flatten(0, -2).t() @ x.flatten(0, -2)


class AlphaGate(nn.Module):
    """alpha = alpha_range * phi(W_a x), one fp32 scalar per token and head, and beta = (alpha_ma - alpha) / N.

    dim: the width of x, the normed hidden state that q_proj reads. heads: those of q. affine: phi, alpha_range and N.
    init_std: of W_a. A training forward counts alpha; ``track_alpha`` makes the average alpha_ma of what was counted.
    """

    def __init__(self, dim: int, heads: int, affine: Affine = Affine(), init_std: float = 0.02):
        super().__init__()
        check_counts("AlphaGate", dim=dim, heads=heads)
        if not isinstance(affine, Affine):
            raise ValueError(f"AlphaGate: affine must be Affine(...), got {affine!r}")
        self.affine = affine
        # What a forward reads, as plain values: a compiled decoding step checks at every token that they are still the
        # same, and of plain ones torch sees it at a glance.
        self.phi, self.alpha_range = affine.phi, affine.alpha_range
        self.length: int | Literal["keys"] | None = affine.length if affine.beta else None
        self.init_std = init_std
        self.w_a = nn.Parameter(torch.empty(heads, dim))
        self.alpha_ma: Tensor
        self.register_buffer("alpha_ma", torch.full((heads,), float(affine.start), dtype=torch.float32))
        # Plain tensors, not buffers: DDP broadcasts buffers from rank 0 and would overwrite the other ranks' sums.
        # One count per head: under tensor parallelism a rank sees the tokens of its own heads only.
        self._sum = torch.zeros(heads, dtype=torch.float32)
        self._count = torch.zeros(heads, dtype=torch.float32)
        # Of the heads this rank has; tensor parallelism moves it and shards w_a, the average stays whole.
        self.first_head = 0
        # Once it is gone, nobody commits.
        self._optimizer: ReferenceType[torch.optim.Optimizer] | None = None
        self._warned = False
        self._weight_version: int | None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w_a, std=self.init_std)
        self.alpha_ma.fill_(self.affine.start)
        self._forget()

    def _forget(self) -> None:
        """What was counted, of weights that are no more."""
        self._sum.zero_()
        self._count.zero_()
        self._weight_version = None

    def extra_repr(self) -> str:
        heads, dim = self.w_a.shape
        beta = f"length={self.length!r}" if self.affine.beta else "beta=False"
        return f"dim={dim}, heads={heads}, phi={self.phi}, {beta}"

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """x [B, T, D], valid bool [B, T] (which tokens the average counts) -> alpha fp32 [B, H, T]."""
        if x.ndim != 3 or x.shape[2] != self.w_a.shape[1]:
            raise ValueError(f"AlphaGate: x must be [batch, tokens, {self.w_a.shape[1]}], got {list(x.shape)}")
        # A row for all sequences would be counted once and summed for each.
        if valid is not None and valid.shape != x.shape[:2]:
            raise ValueError(f"AlphaGate: valid must be [B, T] of x, {list(x.shape[:2])}, got {list(valid.shape)}")
        logits = _wide_linear(x, self.w_a)
        # Rows of one head side by side, as the kernels read them.
        alpha = self.alpha_range * ACTIVATIONS[self.phi](logits).transpose(1, 2).contiguous()
        # In this order a compiled decoding step never asks for ``training``, which it would check at every token.
        if torch.is_grad_enabled() and self.training and (torch.compiler.is_compiling() or not _is_repeated()):
            self._accumulate(alpha.detach(), valid)
        return alpha

    def beta(self, alpha: Tensor, mask: Mask = Mask(), keys: int | None = None) -> Tensor | None:
        """beta_i = (alpha_ma - alpha_i) / N_i, fp32 [B, H, Tq]; None where the spec has no beta.

        keys: of the call. By default as many as the tensors of the mask have, or as the queries, which a call with a
        cache has more than.
        """
        if self.length is None:
            return None
        if keys is None:
            keys = next((x.shape[-1] for x in (mask.documents, mask.padding) if x is not None), alpha.shape[2])
        if self.length == "keys":
            n = keys if mask.lengths is None else mask.lengths.long().clamp(min=1)[:, None, None]
        else:
            n = mask.count(alpha.shape[2], keys, alpha.device).clamp(min=max(self.length, 1))
        average = self.alpha_ma
        if alpha.shape[1] != average.shape[0]:
            average = average[self._own(alpha)]
        return (average[:, None] - alpha) / n

    def _own(self, alpha: Tensor) -> slice:
        return slice(self.first_head, self.first_head + alpha.shape[1])

    def _accumulate(self, alpha: Tensor, valid: Tensor | None) -> None:
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            raise ValueError(
                "AlphaGate: a transform of torch.func cannot count tokens for alpha_ma; call eval() before it"
            )
        self._warn_if_never_committed()
        self._place_sums(alpha.device)
        own = self._own(alpha)
        if valid is None:
            self._sum[own] += alpha.sum((0, 2))
            self._count[own] += alpha.shape[0] * alpha.shape[2]
        else:
            # No multiplication: 0 * NaN is NaN.
            self._sum[own] += torch.where(valid.bool()[:, None], alpha, 0.0).sum((0, 2))
            self._count[own] += valid.bool().sum()

    def _place_sums(self, device: torch.device) -> None:
        """Built on the meta device and filled from a checkpoint, as Hugging Face loads models: not through _apply."""
        if self._sum.device != device:
            self._sum = self._sum.new_zeros(self._sum.shape, device=device)
            self._count = torch.zeros_like(self._sum)

    def _warn_if_never_committed(self) -> None:
        """A change of W_a bumps its version; sums that outlive one belong to a loop that never commits."""
        if torch.compiler.is_compiling() or self._warned or (self._optimizer is not None and self._optimizer()):
            return
        version = self.w_a._version
        if self._weight_version is not None and version != self._weight_version:
            # In the code of a folder: what transformers has made of it, whose name no import statement may hold.
            home = __name__.removesuffix(".nn.alpha")
            own = home != __name__
            where = f"from {home} import track_alpha" if own else f"importlib.import_module({home!r}).track_alpha"
            warnings.warn(
                "the optimizer stepped but alpha_ma was not updated: call track_alpha(model, optimizer) once "
                f"({where})",
                stacklevel=4,
            )
            self._warned = True  # once is enough
        self._weight_version = version
        _watch_steps()
        _uncommitted[id(self)] = self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, in memory or in a file, that no optimizer commits."""
        return self.__dict__ | {"_optimizer": None, "_warned": False, "_weight_version": None}

    def _apply(self, fn, recurse=True):
        average = self.alpha_ma
        super()._apply(fn, recurse)
        if self.alpha_ma.dtype != torch.float32:
            # .to(bfloat16) must neither round the average nor change its type.
            device = self.alpha_ma.device
            self.alpha_ma = average.to(device) if not average.is_meta else self.alpha_ma.float()
        self._place_sums(self.alpha_ma.device)
        return self

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # With assign=True the buffer would have the type of a checkpoint that was rounded as a whole.
        self.alpha_ma = self.alpha_ma.float()
        self._forget()


def _is_repeated() -> bool:
    """Return True if a backward repeats a counted forward, for what non-reentrant checkpointing has dropped.

    Other kinds repeat inside of a function's backward what its forward ran without gradients, and did not count.
    """
    node = torch._C._current_autograd_node()
    if node is None or not isinstance(node, BackwardCFunction):
        return node is not None
    # A function that asks for what it saved may start the repetition, too.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_recomputation_hook")


# Gates that counted tokens which no optimizer will commit by itself, by their id: a set cannot be looked through while
# another thread adds to it.
_uncommitted: WeakValueDictionary[int, AlphaGate] = WeakValueDictionary()


@functools.cache
def _watch_steps() -> None:
    """Hook all optimizers: fused ones do not bump the version of the weights that they change."""

    def invalidate(optimizer: torch.optim.Optimizer, *_) -> None:
        gates = [gate for reference in _uncommitted.valuerefs() if (gate := reference()) is not None]
        if not gates:
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for gate in gates:
            if gate._weight_version is not None and id(gate.w_a) in stepped:
                gate._weight_version = -1

    register_optimizer_step_post_hook(invalidate)


def alpha_gates(model: nn.Module) -> list[AlphaGate]:
    """Those of all layers, in order."""
    return [module for module in model.modules() if isinstance(module, AlphaGate)]


def commit_alpha(model: nn.Module, group: dist.ProcessGroup | None = None, found_inf: Tensor | None = None) -> None:
    """alpha_ma <- momentum * alpha_ma + (1 - momentum) * mean of alpha since the last commit, in every layer.

    Under torch.distributed the means are taken over all ranks of ``group``, in one all-reduce for all layers.
    found_inf: not 0 where the step was left out, on any rank: what was counted then stays for the next commit.
    Called inside of a backward it waits for its end: layers that are yet to be recomputed must see the average of their
    forward.
    """
    commit = functools.partial(_commit, model, group, found_inf)
    if torch._C._current_graph_task_id() == -1:
        commit()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(commit)


@torch.no_grad()
def _commit(model: nn.Module, group: dist.ProcessGroup | None, found_inf: Tensor | None) -> None:
    gates = alpha_gates(model)
    if not gates:
        return
    for gate in gates:
        # Where nothing was counted yet, say because all forwards were in eval mode.
        gate._place_sums(gate.alpha_ma.device)
        if gate.alpha_ma.dtype != torch.float32:
            # It went past _apply, and the small steps of an average would be rounded away.
            raise ValueError(
                f"alpha_ma is {gate.alpha_ma.dtype}, it must stay float32: use FSDP 2, or give FSDP 1 "
                "MixedPrecision(buffer_dtype=torch.float32)"
            )
    skipped = gates[0]._sum.new_zeros(1) if found_inf is None else found_inf.to(gates[0]._sum).reshape(1)
    totals = torch.cat([skipped, *(torch.cat((gate._sum, gate._count)) for gate in gates)])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(totals, group=group)
    skipped, *totals = totals.split([1, *(2 * gate._sum.numel() for gate in gates)])
    stepped = skipped == 0
    for gate, total in zip(gates, totals, strict=True):
        sums, count = total.chunk(2)
        mean = sums / count.clamp(min=1)
        if not gate.affine.per_head:
            mean = mean.mean().expand_as(mean)
        momentum = gate.affine.momentum
        updated = momentum * gate.alpha_ma + (1 - momentum) * mean
        # No tokens since the last commit (a second optimizer of the same step, say), or a NaN among them (a batch that
        # the loop left out, say): keep the average.
        gate.alpha_ma.copy_(torch.where(stepped & (count > 0) & updated.isfinite(), updated, gate.alpha_ma))
        for counted in (gate._sum, gate._count):
            counted.masked_fill_(stepped, 0.0)
        gate._weight_version = None


def track_alpha(model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> None:
    """Update alpha_ma (``commit_alpha``) after every step of ``optimizer``; call it once, before training.

    Without it alpha_ma never changes, and beta is wrong. A second call does nothing. ``group``: the data-parallel ranks
    to average over, by default all.
    """
    # What accelerate makes of an optimizer has no hooks: the one inside it steps, at the end of an accumulation.
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "register_step_post_hook"):
        given = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise ValueError(f"track_alpha: a module and its torch optimizer must be given, got {given}")
    tracked: WeakSet = optimizer.__dict__.setdefault("_affine_attn_tracked", WeakSet())
    if model in tracked:
        return
    tracked.add(model)
    for gate in alpha_gates(model):
        gate._optimizer = ReferenceType(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, *_) -> None:
        # How a GradScaler tells a fused optimizer to leave the step out; others it does not call then.
        commit_alpha(model, group, getattr(optimizer, "found_inf", None))

    optimizer.register_step_post_hook(after_step)
