"""Engine ``triton``: own flash kernels for distance logits and for masks that stock kernels lack, plus the epilogue."""

from dataclasses import replace

from affine_attn.core.call import Call
from affine_attn.core.spec import LogN
from affine_attn.engines.compose import compose, why_not_beta
from affine_attn.engines.operator import on_its_device
from affine_attn.kernels import availability
from affine_attn.kernels.flash import launch
from affine_attn.kernels.flash.launch import LOGITS

DESCRIPTION = "own flash kernels (distance logits, documents, padding, windows) with a row-wise epilogue"


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
    if (reason := availability.why_no_fused_epilogue(call)) is not None:
        return reason
    if call.mask.lengths is not None:
        return "its kernels have no mask.lengths"
    if not call.mask.causal and call.logit is not None:
        return "its distance logits are causal"
    if isinstance(call.logit, LogN):
        return "LogN scales q, which would be rounded again"
    if type(call.logit) not in LOGITS:
        return f"its kernels do not know the {type(call.logit).__name__} logit"
    if call.q.shape[-1] < 16:
        return f"its kernels need a head_dim of at least 16, not {call.q.shape[-1]}"
    if 0 in (call.tk, call.tq, call.q.shape[0]):
        return "its kernels need at least one query and one key"
    return None


run = compose("triton", launch.forward, launch.backward, guarded_on=())
score_statistics = on_its_device(launch.score_statistics)
