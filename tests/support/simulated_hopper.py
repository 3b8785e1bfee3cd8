"""Places for tests of the sm90 kernels: on such a GPU, or simulated on the CPU, in Triton's interpreter."""

from functools import partial

import pytest
import torch

from affine_attn.engines import needs
from affine_attn.kernels import launch
from affine_attn.kernels.sm90 import backward as sm90_backward
from affine_attn.kernels.sm90 import forward as sm90_forward

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


@pytest.fixture
def simulate(monkeypatch):
    """Turns to the simulated kernels, in the order of a seed; ``forward``, ``backward`` and ``rows`` may change their
    source."""
    monkeypatch.setattr(needs, "_known_machine", lambda device, _: needs.Machine(device.type, (9, 0), None))
    return partial(_turn_to, monkeypatch)


def _as_it_is(source: str) -> str:
    return source


def _turn_to(monkeypatch, seed: int, forward=_as_it_is, backward=_as_it_is, rows=_as_it_is) -> None:
    # Here, not above: without the interpreter Triton is no concern of these tests.
    from affine_attn.kernels.sm90 import backward_kernel as backward_kernels
    from affine_attn.kernels.sm90 import forward_kernel as forward_kernels
    from affine_attn.kernels.sm90 import preprocess_kernel as row_kernels
    from tests.support.gluon_on_cpu import Simulated

    kernels = {
        "sm90.forward_kernel.sm90_forward_kernel": Simulated(forward_kernels, "sm90_forward_kernel", seed, forward),
        "sm90.backward_kernel.sm90_backward_kernel": Simulated(
            backward_kernels, "sm90_backward_kernel", seed, backward
        ),
        "sm90.preprocess_kernel.sm90_preprocess_kernel": Simulated(row_kernels, "sm90_preprocess_kernel", seed, rows),
    }
    compiled = launch.function
    monkeypatch.setattr(launch, "function", lambda name: kernels.get(name) or compiled(name))
    for launcher in (sm90_forward, sm90_backward):
        monkeypatch.setattr(launcher, "num_sms", lambda _: 2)
