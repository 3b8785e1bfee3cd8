"""What experiments with other gradients than those of core/fused.py share: taking their place, and being right."""

from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch

from affine_attn.core import fused
from affine_attn.core.accuracy import Shape
from affine_attn.core.epilogue import AttentionBackward
from affine_attn.core.ops import Gradients, Output
from benchmarks.cases import Case
from benchmarks.steps import inputs_of, method_of

AFFINE = Case("affine", "auto", "affine")
GradientsOf = Callable[[Any, torch.Tensor, Output, AttentionBackward], Gradients]
_Result = TypeVar("_Result")


def instead(gradients: GradientsOf, function: Callable[[], _Result]) -> Callable[[], _Result]:
    """The function with these gradients where core/fused.py has its own."""

    # Not as a decorator: that would change a function which another patch has decorated, as steps.py does.
    def run() -> _Result:
        with mock.patch.object(fused, "gradients", gradients):
            return function()

    return run


def wrong(gradients: GradientsOf, shape: Shape, device: torch.device) -> str | None:
    """What differs from core/fused.py by more than 16 bits explain, or None; with an alpha of either sign."""
    inputs = inputs_of(AFFINE, shape, device)
    inputs["alpha"] = inputs["alpha"] - 0.3
    tensors = [inputs[name].requires_grad_() for name in ("q", "k", "v", "alpha", "beta")]
    dy = torch.randn_like(inputs["q"])
    before = dy.clone()

    def differentiate() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(method_of(AFFINE)(**inputs), tensors, dy)

    right, found = differentiate(), instead(gradients, differentiate)()
    if not torch.equal(dy, before):
        return "dy is changed"
    for name, a, b in zip(("dq", "dk", "dv", "dalpha", "dbeta"), right, found, strict=True):
        if not (error := float((a.float() - b.float()).norm() / a.float().norm())) < 5e-3:
            return f"{name} differs by {error:.3g}"
    return None
