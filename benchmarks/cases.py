"""What the benchmark times: shapes, and the strongest stock attention to compare with."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from affine_attn.core.accuracy import Shape

# Attention of the paper's students at their training length, and the 3B one at longer contexts (B, H, Hkv, Tq, Tk, D).
CUDA_SHAPES = {
    "1B": Shape(16, 32, 8, 2048, 2048, 64),
    "3B": Shape(8, 24, 8, 2048, 2048, 128),
    "0.5B": Shape(16, 16, 16, 2048, 2048, 64),
    "3B-8k": Shape(2, 24, 8, 8192, 8192, 128),
    "3B-32k": Shape(1, 24, 8, 32768, 32768, 128),
}
CPU_SHAPES = {"cpu": Shape(2, 8, 2, 2048, 2048, 64)}


def plain_attention(backend: SDPBackend | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal F.scaled_dot_product_attention pinned to one backend (None: the CPU's flash kernel)."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def baselines(device: torch.device) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Stock attention by the name of its engine; the first is the one ratios refer to."""
    if device.type == "cpu":
        return {"plain SDPA (flash_for_cpu)": plain_attention(None)}
    return {
        "plain SDPA (cuDNN)": plain_attention(SDPBackend.CUDNN_ATTENTION),
        "plain SDPA (flash)": plain_attention(SDPBackend.FLASH_ATTENTION),
    }
