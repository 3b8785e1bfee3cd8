"""PyTorch's operators for CUDA made up in plain torch: cuDNN's, and flash with its windows.

They run on the CPU, which engine ``sdpa`` takes for a Hopper GPU then, and have the arithmetic of the made-up
FlashAttention-4. cuDNN's has values of any width, flash's only those as wide as keys.
"""

import pytest
import torch
from torch import Tensor

from affine_attn.engines import aten, needs
from tests.support import flash_attn_4 as attention


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None = None):
    options = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    rows = (x.transpose(1, 2) for x in (q, k, v))
    o, z, *_ = attention._flash_attn_fwd(*rows, softmax_scale=scale, causal=causal, return_lse=True, **options)
    return o.transpose(1, 2), z


def _backward(do, q, k, v, o, z, causal: bool, scale: float, window: int | None = None):
    options = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
    gradients = attention._flash_attn_bwd(q, k, v, o, do, z.contiguous(), scale, causal, **options)
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


def _of_one_width(function):
    def run(*arguments):
        assert len({x.shape[3] for x in arguments if isinstance(x, Tensor) and x.ndim == 4}) == 1
        return function(*arguments)

    return run


@pytest.fixture
def on_hopper(monkeypatch) -> dict[str, int]:
    """Return how often each operator was called."""
    calls: dict[str, int] = dict.fromkeys(("cudnn", "flash2", "window"), 0)

    def counted(name, function):
        def run(*arguments):
            calls[name] += 1
            return function(*arguments)

        return run

    for table, function in ((aten._FORWARD, _forward), (aten._BACKWARD, _backward)):
        monkeypatch.setitem(table, "cudnn", counted("cudnn", function))
        monkeypatch.setitem(table, "flash2", counted("flash2", _of_one_width(function)))

    def window_forward(q, k, v, scale, window):
        return _forward(q, k, v, True, scale, window)

    def window_backward(do, q, k, v, o, z, scale, window):
        return _backward(do, q, k, v, o, z, True, scale, window)

    monkeypatch.setattr(aten, "_window_forward", counted("window", _of_one_width(window_forward)))
    monkeypatch.setattr(aten, "_window_backward", counted("window", _of_one_width(window_backward)))
    on_cpu = needs.machine_of(torch.device("cpu"), needs.launch.INTERPRETED)
    monkeypatch.setattr(needs, "_known_machine", lambda *_: needs.Machine("cuda", (9, 0), on_cpu.triton))
    return calls
