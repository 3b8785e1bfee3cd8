"""Reasons why Triton kernels cannot run here, or cannot take a call."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from affine_attn.core.call import Call
from affine_attn.kernels import launch

# Heads of all sequences together: CUDA's limit for the second axis of a grid.
_MOST_HEADS = 65535


def _triton_problem() -> str | None:
    """Why Triton cannot be used at all, or None; found without importing it, which takes a while."""
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return None  # the module comes from a distribution of another name, as in ROCm builds
    oldest = (3, 6)
    return None if tuple(int(part) for part in installed.split(".")[:2]) >= oldest else f"triton {installed} is too old"


# Constants of the process, so that a compiler tracing why_not has nothing to look up.
_TRITON_PROBLEM = _triton_problem()


def why_no_fused_epilogue(call: Call) -> str | None:
    """Why the fused epilogue cannot serve this call, or None."""
    if (reason := why_no_triton(call)) is not None:
        return reason
    # Said of the batch alone: torch.export can name no limit of a product.
    if call.q.shape[0] > _MOST_HEADS // max(call.heads, 1):
        heads = call.q.shape[0] * call.heads
        return f"the fused epilogue takes at most {_MOST_HEADS} heads of all sequences together, not {heads}"
    return None


def why_no_triton(call: Call) -> str | None:
    """Why no kernel of Triton can serve this call, or None."""
    if _TRITON_PROBLEM is not None:
        return _TRITON_PROBLEM
    if call.q.device.type != "cuda" and not launch.INTERPRETED:
        return "Triton kernels need a CUDA device"
    if call.q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"Triton kernels take bfloat16, float16 or float32, not {call.q.dtype}"
    if call.q.shape[-1] > 256:
        return f"Triton kernels take head_dim up to 256, not {call.q.shape[-1]}"
    return None
