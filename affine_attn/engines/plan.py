"""Who runs a call, decided once from facts: which engine, before the operator; which kernels, inside of it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from affine_attn.core.call import Call
from affine_attn.core.spec import Alibi, LogN
from affine_attn.engines import needs
from affine_attn.engines.needs import MACHINES, Facts, Sizes, facts_of, sizes_of

Need = Callable[[Facts], str | None]


class Engine(NamedTuple):
    why_not: Need
    description: str
    only_by_name: Need = needs.nothing


# Order is preference.
ENGINES: dict[str, Engine] = {
    "decode": Engine(needs.decode, "one pass over the cache, split over keys; inference only"),
    "fa4": Engine(needs.fa4, "FlashAttention-4 with a row-wise epilogue", needs.fa4_unasked),
    "sdpa": Engine(needs.sdpa, "PyTorch's fused attention with a row-wise epilogue", needs.sdpa_unasked),
    "triton": Engine(
        needs.flash,
        "own flash kernels (distance logits, soft caps, documents, padding, windows) with a row-wise epilogue",
    ),
    "flex": Engine(needs.flex, "FlexAttention with a row-wise epilogue: any logit, any mask", needs.flex_unasked),
    "blocked": Engine(needs.transforms, "query-blocked torch with recompute: any logit, any mask, linear memory"),
    "reference": Engine(needs.nothing, "dense torch: the definition of correctness"),
}


class Plan(NamedTuple):
    """The kernels of a call."""

    forward: str  # a key of KERNELS
    backward: str | None  # a key of KERNELS; None where nothing requires a gradient
    epilogue: str | None  # row-wise work outside of the attention's kernel, if there is any: "kernels" or "torch"
    sums: str | None  # of the visible values, which beta weighs: a key of SUMS


KERNELS = {
    "sm90": "the kernel for Hopper, with all stages in it",
    "fa4": "FlashAttention-4",
    "fa4_sink": "FlashAttention-4, with the sink in it",
    "cudnn": "PyTorch's cuDNN operator",
    "flash2": "PyTorch's flash operator",
    "flash_for_cpu": "PyTorch's flash operator for the CPU",
    "cpu_masks": "PyTorch's flash operator for the CPU, a call for each piece of the mask",
    "cpu_scores": "torch's matmuls, a call for each block of rows of the mask's pieces",
    "flash": "flash kernels of this package",
    "decode": "the decode kernel",
    "flex": "FlexAttention",
    "blocked": "torch, a block of queries at a time",
    "recompute": "torch, a block of queries at a time, of which the weights are computed again",
    "reference": "dense torch",
    "autograd": "torch's own derivatives",
}
# Those that have values as wide as keys: zeros fill up the narrower.
OF_ONE_WIDTH = ("flash2", "flash_for_cpu", "cpu_masks")
SUMS = {
    "running": "a running sum along the tokens, as the mask is causal",
    "restarting": "a running sum along each document",
    "sliding": "a sum that slides along with the window",
    "whole": "one sum, as every query sees all keys",
    "table": "a row per query, from kernels for what a mask lets be seen",
    "pieces": "in torch, a piece of the mask at a time",
    "blocks": "in torch, a block of queries at a time",
    "streamed": "gathered while the values stream by",
    "weights": "beta is added to each weight instead",
}
EPILOGUES = {"kernels": "fused kernels", "torch": "torch operations"}


def choose(f: Facts) -> str:
    """Return the first engine that runs the call; undecorated for compilers, which may trace no cache."""
    return next(name for name, e in ENGINES.items() if e.only_by_name(f) is None and e.why_not(f) is None)


engine = functools.lru_cache(4096)(choose)


@functools.lru_cache(4096)
def kernels(name: str, f: Facts, s: Sizes) -> Plan:
    """Return the kernels with which the engine ``name`` runs the call."""
    if name == "decode":
        return Plan("decode", None, None, "streamed" if f.has_beta else None)
    if name == "flex":
        return Plan("flex", _if(f.has_grad, "autograd"), "torch", _if(f.has_beta, "blocks"))
    if name in ("blocked", "reference"):
        backward = {"blocked": "recompute", "reference": "autograd"}[name]
        return Plan(name, _if(f.has_grad, backward), None, _if(f.has_beta, "weights"))
    if name not in _STOCK:
        raise KeyError(f"engine {name!r} has no plan")
    forward = backward = _STOCK[name](f)
    if name == "sdpa" and needs.sm90_forward(f, s) is None:
        forward = "sm90"
    if name == "sdpa" and needs.sm90_backward(f, s) is None:
        backward = "sm90"
    if name == "fa4" and needs.sm90_beside_fa4(f, s) is None:
        forward = "sm90"
    epilogue = "kernels" if needs.epilogue(f) is None else "torch"
    if not f.has_stages and f.logit is not LogN:
        epilogue = None
    of_masks = "table" if epilogue == "kernels" else "pieces"
    has_packed = f.causal and f.restrictions == ("documents",) and f.documents != needs.SCATTERED
    has_window = f.causal and f.restrictions == ("window",) and f.has_long_window
    if epilogue == "kernels" and (has_packed or has_window) and not f.sizes.is_overlong:
        of_masks = "restarting" if has_packed else "sliding"
    sums = of_masks if f.restrictions else "running" if f.causal else "whole"
    return Plan(forward, _if(f.has_grad, backward), epilogue, _if(f.has_beta, sums))


def facts_now(name: str, f: Facts) -> Facts:
    """Return the facts of a forward as they are at its backward: what belongs to the process may have changed."""
    process = needs.process()
    if process == (f.flash, f.is_deterministic):
        return f
    return runnable(name, f._replace(flash=process.flash, is_deterministic=process.is_deterministic))


def runnable(name: str, f: Facts) -> Facts:
    """Return the facts of a backward, if the engine of its forward runs it still."""
    if (reason := ENGINES[name].why_not(f)) is not None:
        raise RuntimeError(f"the backward of engine {name!r} cannot run after its forward: {reason}")
    return f


def fa4(f: Facts) -> str:
    """Return the kernels of FlashAttention-4: those with the sink in them where a sink is the only stage."""
    is_alone = f.has_sink and not (f.has_row_sink or f.has_alpha or f.has_beta or f.has_gate)
    # The gradient of a sink is summed by a kernel that head_dim 256 does without on Blackwell.
    return "fa4_sink" if is_alone and (f.head_dim < 256 or f.machine.capability == (9, 0)) else "fa4"


def stock(f: Facts) -> str:
    """Return the operator of PyTorch that has plain attention with its log-sum-exp."""
    if f.machine.device == "cpu":
        if f.logit not in needs.OFFSETS:
            return "cpu_scores"
        return "cpu_masks" if f.restrictions or f.logit is Alibi or f.has_bias else "flash_for_cpu"
    return "cudnn" if needs.cudnn(f) is None else "flash2"


# The attention of engines that compose it with the epilogue.
_STOCK: dict[str, Callable[[Facts], str]] = {"fa4": fa4, "sdpa": stock, "triton": lambda f: "flash"}


def _if(condition: bool, value: str) -> str | None:
    return value if condition else None


def why_not(name: str, call: Call, on: str | None = None) -> str | None:
    """Why an engine, or the "sm90 forward" or "sm90 backward", cannot run the call, or None."""
    f = facts_of(call, None if on is None else MACHINES[on])
    if name in _SM90:
        return _SM90[name](f, sizes_of(call, f))
    return ENGINES[name].why_not(f)


_SM90 = {"sm90 forward": needs.sm90_forward, "sm90 backward": needs.sm90_backward}


def explanation(call: Call, name: str, f: Facts, was_asked_for: bool) -> str:
    """Return the plan of a call that the engine ``name`` runs, and for all else why it does not."""
    s = sizes_of(call, f)
    plan = kernels(name, f, s)
    preferred = f"could, but {name} {'was asked for' if was_asked_for else 'is preferred'}"
    lines = {}
    for other, entry in ENGINES.items():
        if other == name:
            lines[other] = f"runs this call ({entry.description})"
        elif (reason := entry.why_not(f)) is not None:
            lines[other] = f"cannot, {reason}"
        elif (reason := entry.only_by_name(f)) is not None:
            lines[other] = f"only by name, {reason}"
        else:
            lines[other] = preferred
    lines["forward"] = f"{plan.forward}, {KERNELS[plan.forward]}"
    if f.value_dim != f.head_dim:
        lines["widths"] = _widths(plan.forward, f)
    lines["epilogue"] = _epilogue(plan, f)
    lines["sums of values"] = "none, as there is no beta" if plan.sums is None else f"{plan.sums}, {SUMS[plan.sums]}"
    lines["backward"] = (
        "none, as nothing requires a gradient"
        if plan.backward is None
        else f"{plan.backward}, {KERNELS[plan.backward]}"
    )
    for kernel, need in _SM90.items():
        is_taken = (plan.forward if kernel == "sm90 forward" else plan.backward) == "sm90"
        if is_taken:
            continue
        reason = need(f, s)
        lines[kernel] = f"not taken, {reason}" if reason is not None else _idle(kernel, name, f)
    if name == "fa4":
        lines["first call"] = "of each configuration compiles for 2 to 10 seconds"
    if f.flash is not None:
        lines["flash operators"] = f"those of {f.flash} (activate_flash_attention_impl)"
    return "\n".join(f"{what}: {text}" for what, text in lines.items())


def _widths(kernel: str, f: Facts) -> str:
    widths = f"{f.head_dim} channels of q and k, {f.value_dim} of v"
    if kernel not in OF_ONE_WIDTH:
        return f"{widths}, as they are"
    wide = max(f.head_dim, f.value_dim)
    share = 200 * wide // (f.head_dim + f.value_dim) - 100
    return f"{widths}, filled with zeros up to {wide}: {share} % more multiplications"


def _epilogue(plan: Plan, f: Facts) -> str:
    if plan.forward == "sm90" and plan.backward in ("sm90", "fa4_sink", None):
        return "in the kernel itself"
    if plan.forward == "sm90":
        return "in the forward itself, fused kernels in the backward"
    if not f.has_stages:
        return "none, as there is no stage after the attention"
    if plan.epilogue is None or plan.forward == "fa4_sink":
        return "in the forward itself"
    # FlexAttention's is torch's whatever the machine has.
    reason = None if plan.forward == "flex" else needs.epilogue(f)
    text = EPILOGUES[plan.epilogue] + (f", since {reason}" if reason is not None else "")
    return f"{text}, in the backward itself" if plan.backward == "sm90" else text


def _idle(kernel: str, name: str, f: Facts) -> str:
    if name != "sdpa":
        return f"could, but engine {name} runs this call"
    assert kernel == "sm90 backward"
    assert not f.has_grad
    return "could, but nothing requires a gradient"
