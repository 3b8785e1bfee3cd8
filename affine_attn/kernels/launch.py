"""Launches as data: which kernel runs on which grid with which arguments, and the one function that runs them.

Whoever replaces ``function`` sees everything that would run, without a GPU.
"""

import functools
import importlib
import math
import os
from typing import Any, NamedTuple

from torch import Tensor

# Kernels exponentiate in base 2.
LOG2E = math.log2(math.e)
# Kinds of sinks and gates; constants.py has them for device code.
NO_SINK, CONSTANT_SINK, LEARNED_SINK = 0, 1, 2
NO_GATE, HEADWISE, ELEMENTWISE = 0, 1, 2
# Where the sums u of visible values come from: nowhere, a running sum under a causal mask, one sum for all queries, or
# a table with a row per query.
NO_SUMS, RUNNING, WHOLE, TABLE = 0, 1, 2, 3

# Triton's CPU interpreter, which the tests use.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Launch(NamedTuple):
    kernel: str  # module and function in this package: "epilogue.kernels.epilogue_kernel"
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # the kernel's parameters by name, and options of the launch: num_warps, num_stages, ...


def run(*launches: Launch) -> None:
    """Launch one after the other on the current device and stream."""
    for kernel, grid, arguments in launches:
        function(kernel)[grid](**arguments)


@functools.cache
def function(kernel: str) -> Any:
    """Return the compiled function; imported when it is first launched, where Triton is known to be there."""
    module, _, name = kernel.rpartition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def strides(x: Tensor | None, letter: str, axes: str = "bht") -> dict[str, int]:
    """Return {"stride_<letter><axis>": stride} of the first dimensions; zeros for an absent tensor."""
    return {f"stride_{letter}{axis}": 0 if x is None else x.stride(n) for n, axis in enumerate(axes)}


def sink_strides(sink: Tensor | None) -> dict[str, int]:
    """Return the strides of a learned sink, [H] or [B, H, Tq]."""
    if sink is None or sink.ndim == 3:
        return strides(sink, "s")
    return {"stride_sb": 0, "stride_sh": sink.stride(0), "stride_st": 0}


def sink_kind(sink: Tensor | float | None) -> int:
    return NO_SINK if sink is None else CONSTANT_SINK if isinstance(sink, float) else LEARNED_SINK


def gate_kind(gate: Tensor | None) -> int:
    return NO_GATE if gate is None else HEADWISE if gate.shape[-1] == 1 else ELEMENTWISE
