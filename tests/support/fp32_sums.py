"""What the backward of an epilogue adds up, against float64 sums of the same 16-bit numbers."""

from types import ModuleType

import torch

from affine_attn import Affine, AttentionSpec, Mask
from affine_attn.bench.accuracy import Shape, random_inputs
from affine_attn.core.call import checked_call

SHAPE = Shape(2, 4, 2, 100, 133, 32)


def assert_fp32_sums(epilogue: ModuleType, dtype: torch.dtype, causal: bool, is_dv_rounded_once: bool = True) -> None:
    """Gradients of sink, alpha and beta are fp32 sums of exact products, and dv is rounded once, at its end.

    The tolerance rule alone would allow roundings to 16 bits on the way.
    """
    inputs = random_inputs(AttentionSpec(sink="learned", affine=Affine()), SHAPE, dtype)
    call = checked_call(**inputs, mask=Mask(causal=causal))
    z, dy = 2 * torch.randn(call.q.shape[:3]), torch.randn_like(call.q)
    output = epilogue.apply_epilogue(call, torch.randn_like(call.q), z.clone(), epilogue.begin(call))

    visible = call.visible(slice(None), slice(None)).double()
    sink, alpha, beta = (inputs[name].double() for name in ("sink", "alpha", "beta"))
    p_sink = (sink[:, None] - torch.logaddexp(z.double(), sink[:, None])).exp()
    group = SHAPE.heads // SHAPE.kv_heads

    def sums(sign) -> dict[str, torch.Tensor]:
        """The gradients, or with abs as ``sign`` the sizes of all that is added up."""
        g = sign(dy.double())
        along = (g * sign(output.saved_out.double())).sum(-1)
        u = (visible @ sign(call.v.double())).repeat_interleave(group, 1)
        weighted = (sign(beta)[..., None] * g).unflatten(1, (-1, group)).sum(2)
        rows = sign(-p_sink * alpha) * along
        return {"dsink": rows.sum((0, 2)), "dalpha": along, "dbeta": (g * u).sum(-1), "dv": visible.mT @ weighted}

    exact, size = sums(lambda x: x), sums(torch.abs)
    # A start that cancels the sum shows roundings of the sum that the rounding of dv would hide.
    start = -exact["dv"].to(dtype)
    rows = epilogue.RowGradients(call, dy, output)
    with rows.incoming():
        of_attention = torch.zeros_like(call.q), torch.zeros_like(call.k), start.clone()
    gradients = rows.finish(*of_attention)
    for name in ("dsink", "dalpha", "dbeta"):
        found = getattr(gradients, name[1:])
        assert found.dtype == torch.float32
        assert ((found - exact[name]).abs() <= 2**-19 * size[name]).all(), name
    if is_dv_rounded_once:
        left = exact["dv"] + start.double()
        assert ((gradients.v - left).abs() <= 2**-19 * size["dv"] + torch.finfo(dtype).eps * left.abs()).all()
