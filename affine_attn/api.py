"""The functions of the package: ``attention``, ``attention_stats`` and ``explain``."""

import torch
from torch import Tensor

from affine_attn.core import reference
from affine_attn.core.blocks import score_statistics
from affine_attn.core.call import Call, checked_call
from affine_attn.core.masks import Mask
from affine_attn.core.spec import Logits
from affine_attn.core.stats import AttentionStats, attention_statistics
from affine_attn.engines import blocked, decode, fa4, flash, flex, needs, sdpa
from affine_attn.engines.needs import MACHINES, Facts, facts_of
from affine_attn.engines.operator import Run
from affine_attn.engines.plan import ENGINES, choose, engine, explanation

# What runs each engine of plan.ENGINES.
_RUN: dict[str, Run] = {
    "decode": decode.run,
    "fa4": fa4.run,
    "sdpa": sdpa.run,
    "triton": flash.run,
    "flex": flex.run,
    "blocked": blocked.run,
    "reference": lambda call, _: reference.run(call),
}


def attention(
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
    impl: str = "auto",
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """y = gate * ((alpha * softmax_with_sink(logit(scale q k^T) + bias) + beta) v), [B, H, Tq, Dv].

    q: [B, H, Tq, D]; k: [B, Hkv, Tk, D]; v: [B, Hkv, Tk, Dv]. Queries are the last Tq of the Tk positions; query head h
        reads kv head h // (H / Hkv). All three share a dtype; sink, alpha, beta, gate and bias have that or fp32.
    mask: causal by default, see :class:`Mask`.
    scale: of q k^T, 1/sqrt(D) by default.
    sink: None, a number, [H] or [B, H, Tq]; exp(sink) joins the denominator of the softmax.
    alpha, beta: [B, H, Tq], None for 1 and 0; beta is added on visible keys only.
    gate: [B, H, Tq, Dv or 1], None for 1.
    logit: None (plain), ``ScaleInvariant()``, ``LogN()``, ``Alibi()``, ``SoftCap()`` or a :class:`Logit` of your own;
        a curve and coefficients together as a tuple, ``(SoftCap(50.0), ScaleInvariant())``.
    bias: added to the scores, broadcastable to [B, H, Tq, Tk], with a gradient; what it hides with -inf beta still
        sees, unlike what the mask hides.
    impl: "auto", or an engine by name, which raises with its reason where it cannot run the call.
    """
    call = checked_call(q, k, v, mask, scale, logit, sink, alpha, beta, gate, bias=bias)
    facts = facts_of(call)
    return _RUN[_engine(call, facts, impl)](call, facts)


def explain(
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
    impl: str = "auto",
    on: str | None = None,
    *,
    bias: Tensor | None = None,
) -> str:
    """Return the plan of :func:`attention` for these arguments: its engine and kernels, and why the others do not run.

    on: the machine, where it is not that of the tensors: "cpu", or "sm80", "sm90" or "sm100" for NVIDIA's GPUs.
    """
    call = checked_call(q, k, v, mask, scale, logit, sink, alpha, beta, gate, bias=bias)
    if on is not None and on not in MACHINES:
        raise ValueError(f"on must be None or one of {list(MACHINES)}, got {on!r}")
    facts = facts_of(call, None if on is None else MACHINES[on])
    return explanation(call, _engine(call, facts, impl), facts, was_asked_for=impl != "auto")


def _engine(call: Call, facts: Facts, impl: str) -> str:
    """Return the engine's name, or raise an error that says why it cannot be ``impl``."""
    if impl == "auto":
        return choose(facts) if facts.is_traced else engine(facts)
    if impl not in list(ENGINES):
        raise ValueError(f"impl must be one of {['auto', *ENGINES]}, got {impl!r}")
    if (reason := ENGINES[impl].why_not(facts)) is not None:
        sizes = f"q is {list(call.q.shape)}, k {list(call.k.shape)}"
        raise ValueError(f"impl={impl!r} cannot run this call: {reason} ({sizes})")
    return impl


@torch.no_grad()
def attention_stats(
    q: Tensor,
    k: Tensor,
    mask: Mask = Mask(),
    scale: float | None = None,
    logit: Logits = None,
    sink: Tensor | float | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    bias: Tensor | None = None,
) -> AttentionStats:
    """Return statistics of the weights that :func:`attention` would use for the same arguments.

    q [B, H, Tq, D], k [B, Hkv, Tk, D]. Values and gate are not asked for: they do not change the weights.
    """
    call = checked_call(q, k, k, mask, scale, logit, sink, alpha, beta, bias=bias)
    first_key = mask.first(call.tq, call.tk, q.device)
    has_kernel = needs.score_statistics(facts_of(call)) is None
    measure = flash.score_statistics if has_kernel else score_statistics
    return attention_statistics(call, measure(call, first_key))
