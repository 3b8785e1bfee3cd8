"""``attention(...)`` and ``explain(...)``: the first engine without a reason to refuse runs the call."""

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from affine_attn.core import fused, hopper, hopper_backward, reference
from affine_attn.core.call import Call, checked_call
from affine_attn.core.engines import blocked, decode, flex, sdpa, triton
from affine_attn.core.masks import Mask
from affine_attn.core.spec import Logit

# An engine is a module with why_not(call) -> reason | None, run(call) -> y and a DESCRIPTION. Order is preference.
ENGINES: dict[str, ModuleType] = {
    "decode": decode,
    "sdpa": sdpa,
    "triton": triton,
    "flex": flex,
    "blocked": blocked,
    "reference": reference,
}


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
    call = checked_call(q, k, v, mask, scale, logit, sink, alpha, beta, gate)
    chosen = choose(call, impl)
    lines = []
    for name, engine in ENGINES.items():
        reason = why_not(name, call)
        if name == chosen:
            lines.append(f"{name}: runs this call ({engine.DESCRIPTION}{_epilogue_note(name, call)})")
        elif reason is not None:
            lines.append(f"{name}: cannot, {reason}")
        elif (reason := only_by_name(name, call)) is not None:
            lines.append(f"{name}: only by name, {reason}")
        else:
            lines.append(f"{name}: could, but {chosen} {'was asked for' if impl != 'auto' else 'is preferred'}")
    return "\n".join(lines)


def _epilogue_note(name: str, call: Call) -> str:
    """Where the stages after the attention run, for the engines that have them apart."""
    if name not in ("sdpa", "triton"):
        return ""
    if (reason := fused.why_not(call)) is not None:
        return f"; torch operations after it, since {reason}"
    has_own_forward = name == "sdpa" and hopper.why_not(call) is None
    has_own_backward = name == "sdpa" and hopper_backward.why_not(call) is None
    forward = "its forward is one kernel of our own with that epilogue" if has_own_forward else "fused kernels after it"
    return f"; {forward}{'; a backward of our own' if has_own_backward else ''}"


def choose(call: Call, impl: str) -> str:
    """The engine's name, or an error that says why it cannot be ``impl``."""
    if impl == "auto":
        return next(n for n in ENGINES if only_by_name(n, call) is None and why_not(n, call) is None)
    if impl not in list(ENGINES):
        raise ValueError(f"impl must be one of {['auto', *ENGINES]}, got {impl!r}")
    if (reason := why_not(impl, call)) is not None:
        raise ValueError(f"impl={impl!r} cannot run this call: {reason}")
    return impl


def why_not(name: str, call: Call) -> str | None:
    """Why an engine cannot run the call, or None."""
    # Not while a compiler traces: it would put the question into every graph.
    is_eager = not torch.compiler.is_compiling()
    if (
        is_eager
        and name != "reference"
        and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)
    ):
        return "the transforms of torch.func and forward-mode derivatives know the operations of the reference alone"
    return ENGINES[name].why_not(call)


def only_by_name(name: str, call: Call) -> str | None:
    """Why "auto" leaves an engine alone although it may be able to run the call, or None."""
    if name == "flex" and call.q.device.type == "cpu":
        return "since it builds the dense matrix on the CPU"
    return None
