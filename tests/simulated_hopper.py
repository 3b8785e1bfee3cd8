"""Where tests of the kernels for Hopper run: on such a GPU, or simulated on the CPU, in Triton's interpreter."""

from functools import partial

import pytest
import torch

from affine_attn.kernels.sm90 import backward as hopper_backward
from affine_attn.kernels.sm90 import forward as hopper

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


@pytest.fixture
def simulate(monkeypatch):
    """Turns to the simulated kernels, in the order of a seed; ``forward``, ``backward`` and ``rows`` may change their
    source."""
    monkeypatch.setattr(hopper, "capability", lambda _: (9, 0))
    return partial(_turn_to, monkeypatch)


def _as_it_is(source: str) -> str:
    return source


def _turn_to(monkeypatch, seed: int, forward=_as_it_is, backward=_as_it_is, rows=_as_it_is) -> None:
    # Here, not above: without the interpreter Triton is no concern of these tests.
    from affine_attn.kernels.sm90 import backward_kernel as backward_kernels
    from affine_attn.kernels.sm90 import forward_kernel as forward_kernels
    from affine_attn.kernels.sm90 import preprocess_kernel as row_kernels
    from tests.gluon_on_cpu import Simulated

    kernels = {
        (hopper, "_kernel"): Simulated(forward_kernels, "hopper_forward_kernel", seed, forward),
        (hopper_backward, "_kernel"): Simulated(backward_kernels, "hopper_backward_kernel", seed, backward),
        (hopper_backward, "_row_kernel"): Simulated(row_kernels, "row_gradients_kernel", seed, rows),
    }
    for (launcher, name), kernel in kernels.items():
        monkeypatch.setattr(launcher, "multiprocessors", lambda _: 2)
        monkeypatch.setattr(launcher, name, lambda kernel=kernel: kernel)
