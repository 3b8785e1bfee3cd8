"""The functions of the package: ``attention``, ``attention_stats`` and ``explain``."""

import torch
from torch import Tensor

from affine_attn.core.blocks import score_statistics
from affine_attn.core.call import checked_call
from affine_attn.core.masks import Mask
from affine_attn.core.spec import Logit
from affine_attn.core.stats import AttentionStats, attention_statistics
from affine_attn.engines import flash as flash_engine
from affine_attn.engines.plan import ENGINES, choose, explanation


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = Mask(),
    scale: float | None = None,
    logit: Logit | None = None,
    sink: Tensor | float | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """y = gate * ((alpha * softmax_with_sink(logit(scale q k^T)) + beta) v), [B, H, Tq, D].

    q: [B, H, Tq, D]; k, v: [B, Hkv, Tk, D]. Queries are the last Tq of the Tk positions; query head h reads kv head
        h // (H / Hkv). All three share a dtype; sink, alpha, beta and gate have that or fp32.
    mask: causal by default, see :class:`Mask`.
    scale: of q k^T, 1/sqrt(D) by default.
    logit: None (plain), ``ScaleInvariant()``, ``LogN()``, ``Alibi()`` or a :class:`Logit` of your own.
    sink: None, a number, [H] or [B, H, Tq]; exp(sink) joins the denominator of the softmax.
    alpha, beta: [B, H, Tq], None for 1 and 0; beta is added on visible keys only.
    gate: [B, H, Tq, D or 1], None for 1.
    impl: "auto", or an engine by name, which raises with its reason where it cannot run the call.
    """
    call = checked_call(q, k, v, mask, scale, logit, sink, alpha, beta, gate)
    return ENGINES[choose(call, impl)].run(call)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = Mask(),
    scale: float | None = None,
    logit: Logit | None = None,
    sink: Tensor | float | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
    impl: str = "auto",
) -> str:
    """Which engine :func:`attention` would take for these arguments, and why each other one would not run."""
    return explanation(checked_call(q, k, v, mask, scale, logit, sink, alpha, beta, gate), impl)


@torch.no_grad()
def attention_stats(
    q: Tensor,
    k: Tensor,
    mask: Mask = Mask(),
    scale: float | None = None,
    logit: Logit | None = None,
    sink: Tensor | float | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
) -> AttentionStats:
    """Return statistics of the weights that :func:`attention` would use for the same arguments.

    q [B, H, Tq, D], k [B, Hkv, Tk, D]. Values and gate are not asked for: they do not change the weights.
    """
    call = checked_call(q, k, k, mask, scale, logit, sink, alpha, beta)
    first_key = mask.first(call.tq, call.tk, q.device)
    measure = score_statistics if flash_engine.why_not_statistics(call) else flash_engine.score_statistics
    return attention_statistics(call, measure(call, first_key))
