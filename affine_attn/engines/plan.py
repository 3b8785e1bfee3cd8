"""Who runs a call: the first engine without a reason to refuse; compose.py chooses the kernels inside of an engine."""

from types import ModuleType

import torch
from torch.autograd import forward_ad

from affine_attn.core import reference
from affine_attn.core.call import Call
from affine_attn.engines import blocked, decode, flash, flex, sdpa
from affine_attn.kernels import availability
from affine_attn.kernels.sm90 import backward, forward

# An engine is a module with why_not(call) -> reason | None, run(call) -> y and a DESCRIPTION. Order is preference.
ENGINES: dict[str, ModuleType] = {
    "decode": decode,
    "sdpa": sdpa,
    "triton": flash,
    "flex": flex,
    "blocked": blocked,
    "reference": reference,
}


def explanation(call: Call, impl: str = "auto") -> str:
    """Return a line for each engine: that it runs the call, or why it does not."""
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
    """Return where the stages after the attention run, for the engines that have them apart."""
    if name not in ("sdpa", "triton"):
        return ""
    if (reason := availability.why_no_fused_epilogue(call)) is not None:
        return f"; torch operations after it, since {reason}"
    has_sm90_forward = name == "sdpa" and forward.why_not(call) is None
    has_sm90_backward = name == "sdpa" and backward.why_not(call) is None
    note = "the sm90 forward with that epilogue" if has_sm90_forward else "fused kernels after it"
    return f"; {note}{'; the sm90 backward' if has_sm90_backward else ''}"


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
