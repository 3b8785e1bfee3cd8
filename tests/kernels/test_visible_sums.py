"""Sums over what a mask lets be seen, in Triton's CPU interpreter, against the dense formula in float64."""

import pytest
import torch

from affine_attn import Mask
from affine_attn.bench.accuracy import Shape
from affine_attn.core.call import Call, checked_call
from affine_attn.kernels.visible_sums import launch as sums
from tests.conftest import interpreted, rerun_in_interpreter
from tests.support.cases import MASKS

CPU = torch.device("cpu")


def _packed(shape: Shape) -> torch.Tensor:
    """Documents of 11, 22, 44 ... tokens, then the first id again: short ones in a tile and tiles inside long ones."""
    slot = torch.arange(shape.tk) // 11 + 1
    return (slot.float().log2().floor().long() % 4).expand(shape.batch, -1)


def _holes(shape: Shape) -> torch.Tensor:
    return ((torch.arange(shape.tk) // 5) % 3 != 1).expand(shape.batch, -1)


# What MASKS is too short for: windows and documents that see whole tiles, and all restrictions at once.
LONG_MASKS = {
    "window100": lambda s, d: Mask(window=100),
    "packed": lambda s, d: Mask(documents=_packed(s)),
    "packed_tokens_first": lambda s, d: Mask(documents=_packed(s).T.contiguous().T),
    "packed_both_ways": lambda s, d: Mask(causal=False, documents=_packed(s)),
    "packed_padded_window90": lambda s, d: Mask(window=90, documents=_packed(s), padding=_holes(s)),
    "packed_padded_both_ways": lambda s, d: Mask(causal=False, documents=_packed(s), padding=_holes(s)),
}
ALL_MASKS = {name: make for name, make in MASKS.items() if name not in ("lengths", "everything")} | LONG_MASKS
# The two 16-bit types differ in what is loaded and stored alone.
SHAPES = [
    (Shape(2, 2, 1, 37, 37, 32), torch.float32),  # one or two tiles
    (Shape(1, 3, 1, 70, 200, 80), torch.bfloat16),  # queries among older keys, head dim off the power of two
    (Shape(2, 4, 2, 100, 60, 16), torch.float32),  # more queries than keys: rows that see nothing
    (Shape(2, 4, 2, 100, 60, 16), torch.bfloat16),
    (Shape(1, 2, 1, 300, 300, 64), torch.float32),  # tiles seen whole
    (Shape(1, 2, 1, 300, 300, 64), torch.bfloat16),
    (Shape(1, 2, 1, 1, 150, 16), torch.float16),  # one query
]


def test_the_kernels_in_the_interpreter():
    rerun_in_interpreter(__file__)


def _call(shape: Shape, mask: Mask, dtype: torch.dtype) -> Call:
    """Values laid out as [B, T, H, D]: strides that are not those of a contiguous tensor."""
    q = torch.randn(shape.batch, shape.heads, shape.tq, shape.head_dim, dtype=dtype)
    v = torch.randn(shape.batch, shape.tk, shape.kv_heads, shape.head_dim).to(dtype).transpose(1, 2)
    return checked_call(q, v, v, mask)


def _dense(call: Call) -> torch.Tensor:
    return call.visible(slice(None), slice(None)).double()


@interpreted
@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
@pytest.mark.parametrize("mask", ALL_MASKS)
def test_against_the_dense_formula(mask, shape, dtype):
    call = _call(shape, ALL_MASKS[mask](shape, CPU), dtype)
    seen = _dense(call)

    u = sums.visible_sums(call)
    v = call.v.double()
    assert u.dtype == torch.float32
    assert u.is_contiguous()
    # fp32 additions, whatever the values' dtype: 16-bit values are exact in fp32.
    assert ((u - seen @ v).abs() <= 2**-22 * (seen @ v.abs())).all()

    w = torch.randn(u.shape)
    expected = seen.mT @ w.double()
    # A start that cancels the sum shows errors of the sum that the rounding of dv would hide.
    dv = torch.empty_like(call.v).copy_(-expected)
    before = dv.clone()
    expected += before.double()
    sums.add_seen_by(call, w, dv)
    # 16-bit values take w in two bf16 pieces, which the interpreter truncates where a GPU rounds.
    of_sum = 2**-22 if dtype == torch.float32 else 2**-14
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    allowed = of_sum * (seen.mT @ w.double().abs()) + eps * expected.abs().clamp(min=tiny)
    assert ((dv - expected).abs() <= allowed).all()
    unseen = (seen.expand(shape.batch, -1, -1, -1).sum(2) == 0).expand(dv.shape[:3])
    assert torch.equal(dv[unseen], before[unseen])


@interpreted
def test_padded_values_are_never_read():
    shape = Shape(2, 2, 1, 150, 150, 16)
    mask = Mask(window=100, padding=_holes(shape))
    call = _call(shape, mask, torch.float32)
    before = sums.visible_sums(call)
    call.v.masked_fill_(~mask.padding[:, None, :, None], torch.nan)
    assert torch.equal(sums.visible_sums(call), before)
