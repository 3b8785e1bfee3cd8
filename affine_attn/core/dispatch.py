"""``attention(...)`` and ``explain(...)``: the first engine without a reason to refuse runs the call."""

from types import ModuleType

from torch import Tensor

from affine_attn.core import reference
from affine_attn.core.call import Call, checked_call
from affine_attn.core.engines import blocked, flex, sdpa, triton
from affine_attn.core.masks import Mask
from affine_attn.core.spec import Logit

# An engine is a module with why_not(call) -> reason | None, run(call) -> y and a DESCRIPTION. Order is preference.
ENGINES: dict[str, ModuleType] = {
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

    q [B, H, Tq, D]; k, v [B, Hkv, Tk, D]: queries are the last Tq of the Tk positions, query head h reads kv head
    h // (H / Hkv). sink: None, a number, [H] or [B, H, Tq]. alpha, beta: [B, H, Tq]. gate: [B, H, Tq, D or 1].
    impl: "auto", or an engine by name, which then raises with its reason instead of falling back.
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
        reason = engine.why_not(call)
        if name == chosen:
            lines.append(f"{name}: runs this call ({engine.DESCRIPTION})")
        elif reason is not None:
            lines.append(f"{name}: cannot, {reason}")
        elif name not in order(call):
            lines.append(f"{name}: only by name, since it builds the dense matrix on the CPU")
        else:
            lines.append(f"{name}: could, but {chosen} {'was asked for' if impl != 'auto' else 'is preferred'}")
    return "\n".join(lines)


def choose(call: Call, impl: str) -> str:
    """The engine's name, or an error that says why it cannot be ``impl``."""
    if impl == "auto":
        return next(name for name in order(call) if ENGINES[name].why_not(call) is None)
    if impl not in ENGINES:
        raise ValueError(f"impl must be one of {['auto', *ENGINES]}, got {impl!r}")
    if (reason := ENGINES[impl].why_not(call)) is not None:
        raise ValueError(f"impl={impl!r} cannot run this call: {reason}")
    return impl


def order(call: Call) -> list[str]:
    # FlexAttention on the CPU builds the dense matrix; it runs there only when asked for by name.
    return [name for name in ENGINES if not (name == "flex" and call.q.device.type == "cpu")]
