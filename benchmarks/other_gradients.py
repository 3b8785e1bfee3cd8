"""What experiments with other gradients than core/fused.py's share: a command, taking their place, and being right."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch

from affine_attn.core import fused
from affine_attn.core.accuracy import Shape
from affine_attn.core.epilogue import AttentionBackward
from affine_attn.core.ops import Gradients, Output
from affine_attn.measure import side_by_side
from benchmarks.cases import STOCK, TRAINING_SHAPES, Case
from benchmarks.steps import inputs_of, method_of, prepare

AFFINE = Case("affine", "auto", "affine")
GradientsOf = Callable[[Any, torch.Tensor, Output, AttentionBackward], Gradients]
# Of a shape and a number of rounds: a line for each kernel by itself.
Alone = Callable[[Shape, int], Iterator[str]]
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


def run(description: str | None, gradients: GradientsOf, alone: Alone) -> None:
    """The command: for each shape kernels alone, then forward + backward with either gradients over plain cuDNN."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["3B", "1B", "0.5B"], choices=TRAINING_SHAPES["cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("this kernel is for GPUs of compute capability 9.0: H100, H200, GH200")
    device = torch.device("cuda")
    for name in options.shapes:
        shape = TRAINING_SHAPES["cuda"][name]
        if (reason := wrong(gradients, shape, device)) is not None:
            print(f"{name:5} not timed: {reason}", flush=True)
            continue
        for line in alone(shape, options.rounds):
            print(f"{name:5} alone               {line}", flush=True)
        for line in _whole(gradients, shape, options.rounds, device):
            print(f"{name:5} forward + backward  {line}", flush=True)


def _whole(gradients: GradientsOf, shape: Shape, rounds: int, device: torch.device) -> Iterator[str]:
    plain, affine = (prepare(case, shape, "forward+backward", device) for case in (STOCK["cuda"][0], AFFINE))
    functions = {"cuDNN": plain.run, "affine, in use": affine.run, "affine, new": instead(gradients, affine.run)}
    for what, timing in side_by_side(functions, "cuDNN", device, rounds).items():
        yield f"{what:26} {timing.p50 * 1e3:8.1f} us {timing.ratio:8.4f} of cuDNN"
