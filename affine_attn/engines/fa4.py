"""Engine ``fa4``: FlashAttention-4 where the package flash-attn-4 is installed, plus the row-wise epilogue.

Its kernels for Hopper and Blackwell have windows and packed documents. A sink with no stage after it is theirs too;
every other stage is the epilogue's, and the backward is handed (o', z'). On Hopper a forward or a backward may be the
sm90 kernel's, where the two in turn take least time.
"""

from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.engines import flash_attn_4
from affine_attn.engines.compose import compose
from affine_attn.kernels.sm90 import backward, forward


def _attend(call: Call, _: str | None) -> tuple[Tensor, Tensor]:
    return flash_attn_4.forward(call)


def _attend_backward(call: Call, _: str | None, do: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return flash_attn_4.backward(call, do, out, lse)[:3]


run = compose(
    "fa4",
    _attend,
    _attend_backward,
    (),
    {"fa4_sink": flash_attn_4.forward_with_sink, "sm90": forward.forward},
    {"fa4_sink": flash_attn_4.backward_with_sink, "sm90": backward.backward},
)
