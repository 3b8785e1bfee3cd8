"""Tensor-parallel styles of the stages: a rank has the parameters of its own query heads, as plain tensors.

The plan that names them is in ``AffineAttnConfig``.
"""

# The annotations of transformers are narrower than what it takes.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

from affine_attn.errors import UserError
from affine_attn.nn.alpha import AlphaGate
from affine_attn.nn.layer import AttentionLayer


class HeadParallel(TensorParallelLayer):
    """Style of the attention layer, whose own parameters (sinks, scales) have one entry per query head."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        whole = getattr(module, param)
        sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        setattr(module, param, nn.Parameter(sharded, requires_grad=whole.requires_grad))

    def install_forward(self, module: AttentionLayer, mesh: DeviceMesh) -> nn.Module:
        for logit in module.spec.scores:
            if logit is not None and not logit.same_in_all_heads:
                name = type(logit).__name__
                raise UserError(f"tensor parallelism: {name} depends on a head's number, a rank counts only its own")
        return super().install_forward(module, mesh)


class AlphaParallel(HeadParallel):
    """Style of ``AlphaGate``: W_a is sharded by heads, so the gradient of x is a sum over ranks."""

    def install_forward(self, module: AlphaGate, mesh: DeviceMesh) -> nn.Module:
        module.first_head = mesh.get_local_rank() * (module.alpha_ma.numel() // mesh.size())
        return TensorParallelLayer.install_forward(self, module, mesh)

    def transform_inputs_pre_forward(
        self, module: AlphaGate, args: tuple, kwargs: dict[str, Any], mesh: DeviceMesh
    ) -> tuple[tuple, dict[str, Any]]:
        x, *rest = args
        replicated = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return (replicated.to_local(grad_placements=[Partial()]), *rest), kwargs


ALL_PARALLEL_STYLES.register("affine_attn_heads", HeadParallel())
ALL_PARALLEL_STYLES.register("affine_attn_alpha", AlphaParallel())
