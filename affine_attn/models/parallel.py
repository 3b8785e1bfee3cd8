"""Tensor-parallel styles of the stages: a rank has the parameters of its own query heads, as plain tensors.

The plan that names them is in ``AffineAttnConfig``.
"""

# The annotations of transformers are narrower than what it takes.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel, TensorParallelLayer

from affine_attn.core.alpha import AlphaGate
from affine_attn.core.layer import AttentionLayer
from affine_attn.core.spec import Alibi


class HeadParallel(TensorParallelLayer):
    """For the attention layer: its own per-head parameters (sinks, scales) are this rank's shard during the forward."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def install_forward(self, module: AttentionLayer, mesh: DeviceMesh) -> nn.Module:
        if isinstance(module.spec.logit, Alibi):
            raise ValueError(
                "tensor parallelism: ALiBi's slopes depend on the number of a head, a rank counts only its own"
            )
        return super().install_forward(module, mesh)


class AlphaParallel(ColwiseParallel):
    """For ``AlphaGate``: W_a is sharded by heads, and the gradient of x is summed over the ranks."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def install_forward(self, module: AlphaGate, mesh: DeviceMesh) -> nn.Module:
        module.first_head = mesh.get_local_rank() * (module.alpha_ma.numel() // mesh.size())
        return super().install_forward(module, mesh)


ALL_PARALLEL_STYLES.register("affine_attn_heads", HeadParallel())
ALL_PARALLEL_STYLES.register("affine_attn_alpha", AlphaParallel())
