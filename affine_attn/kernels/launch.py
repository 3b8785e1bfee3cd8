"""Launches as data: which kernel runs on which grid with which arguments, and what runs them.

Whoever replaces ``function`` sees everything that would run, without a GPU.
"""

import functools
import importlib
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.core.spec import Logit, SoftCap

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


class Tiles(NamedTuple):
    """How TMA copies tiles of a tensor: its descriptor but for the address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    dtype: torch.dtype

    def of(self, x: Tensor) -> Any:
        """Return the descriptor of ``x``."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        layout = _shared_layout(self.block, self.dtype)
        return TensorDescriptor(x.view(self.shape), list(self.shape), list(self.strides), list(self.block), layout)


@functools.cache
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kind = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for(list(block), kind)


class Prepared:
    """A launch but for its tensors: what their layouts decide. Call it with the tensors, by name, to launch.

    At each launch Triton looks at every argument to find the kernel that it has compiled for such ones, which takes
    longer than a small kernel runs. Here the numbers are always the same, so that a compiled kernel is remembered by
    what else Triton's choice depends on, and started as torch's own compiled programs start theirs.
    """

    def __init__(
        self,
        kernel: str,
        grid: tuple[int, ...],
        numbers: dict[str, Any],  # arguments and options of the launch
        tiles: dict[str, Tiles] | None = None,  # of the tensors that TMA copies
    ):
        self.kernel, self.grid, self.numbers, self.tiles = kernel, grid, numbers, tiles or {}
        self._function: Any = None
        self._known: dict[tuple, _Compiled] = {}

    def __call__(self, **tensors: Tensor | None) -> None:
        kernel = function(self.kernel)
        if kernel is self._function and not _is_watched(kernel):
            device = _triton().driver.active.get_current_device()
            known = self._known.get(_key(device, tensors))
            if known is not None:
                known.launch(device, tensors)
                return
        given = {
            name: self.tiles[name].of(x) if name in self.tiles and x is not None else x for name, x in tensors.items()
        }
        compiled = kernel[self.grid](**given, **self.numbers)
        # An interpreter compiles nothing, and on AMD the choice depends on more.
        if compiled is None or torch.version.hip is not None or not isinstance(compiled, _triton().compiled_kernel):
            return
        if kernel is not self._function:
            self._function, self._known = kernel, {}
        device = _triton().driver.active.get_current_device()
        self._known[_key(device, tensors)] = _Compiled.of(compiled, self.grid, kernel.arg_names, given, self.numbers)


def prepared(make: Callable[..., Prepared]) -> Callable[..., Prepared]:
    """Decorate a function that prepares a launch: it runs once for the same layouts, of which the last are kept."""
    # To Triton an int and a float that are equal are two types.
    return functools.lru_cache(1024, typed=True)(make)


class _Compiled(NamedTuple):
    """A compiled kernel with its arguments in order."""

    run: Callable[..., None]
    grid: tuple[int, ...]  # of three axes
    function: Any
    metadata: Any
    arguments: list[Any]
    places: dict[str, int]  # of tensors among them
    descriptors: dict[str, tuple[type, dict[str, Any]]]  # class and attributes of those that TMA copies

    @classmethod
    def of(
        cls, compiled: Any, grid: tuple[int, ...], names: list[str], given: dict[str, Any], numbers: dict[str, Any]
    ) -> "_Compiled":
        """Keep no tensor, whose memory would never be free again."""
        arguments = [None if name in given else numbers[name] for name in names]
        descriptors = {
            name: (type(x), vars(x) | {"base": None})
            for name, x in given.items()
            if x is not None and not isinstance(x, Tensor)
        }
        places = {name: names.index(name) for name, x in given.items() if x is not None}
        kernel = compiled.run, (*grid, 1, 1)[:3], compiled.function, compiled.packed_metadata
        return cls(*kernel, arguments, places, descriptors)

    def launch(self, device: int, tensors: dict[str, Tensor | None]) -> None:
        arguments = self.arguments.copy()
        for name, place in self.places.items():
            x = tensors[name]
            if name not in self.descriptors:
                # An address: of a tensor Triton would ask the driver whether it is one of the device.
                arguments[place] = x.data_ptr()
                continue
            kind, attributes = self.descriptors[name]
            # Not by its constructor, which would check again what does not change.
            arguments[place] = descriptor = object.__new__(kind)
            vars(descriptor).update(attributes, base=x)
        stream = _triton().driver.active.get_current_stream(device)
        self.run(*self.grid, stream, self.function, self.metadata, None, None, None, *arguments)


class _Triton(NamedTuple):
    """What of Triton is needed, imported when a kernel has been launched."""

    driver: Any
    runtime: Any
    compilation: Any
    compiled_kernel: type


@functools.cache
def _triton() -> _Triton:
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime import driver

    return _Triton(driver, knobs.runtime, knobs.compilation, CompiledKernel)


def _is_watched(kernel: Any) -> bool:
    """Return True if somebody, a profiler say, asked Triton to be told of launches."""
    runtime = _triton().runtime
    return bool(kernel.pre_run_hooks or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def _key(device: int, tensors: dict[str, Tensor | None]) -> tuple:
    """Return what Triton's choice of a compiled kernel depends on besides numbers: the device, settings, types, and
    whether addresses are multiples of 16."""
    _, runtime, compilation, _ = _triton()
    inspection = getattr(runtime, "add_stages_inspection_hook", None)  # since Triton 3.7
    kinds = [None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors.values()]
    return (device, runtime.debug, compilation.instrumentation_mode, inspection, *tensors, *kinds)


def strides(x: Tensor | tuple[int, ...] | None, letter: str, axes: str = "bht") -> dict[str, int]:
    """Return {"stride_<letter><axis>": stride} of the first dimensions of a tensor, or of what its strides are; zeros
    for an absent one."""
    steps = x.stride() if isinstance(x, Tensor) else x
    return {f"stride_{letter}{axis}": 0 if steps is None else steps[n] for n, axis in enumerate(axes)}


def steps(x: Tensor | None) -> tuple[int, ...] | None:
    """Return the strides of a tensor that may be absent."""
    return None if x is None else x.stride()


def sink_strides(sink: Tensor | tuple[int, ...] | None) -> dict[str, int]:
    """Return the strides of a learned sink, [H] or [B, H, Tq]."""
    steps = sink.stride() if isinstance(sink, Tensor) else sink
    if steps is None or len(steps) == 3:
        return strides(steps, "s")
    return {"stride_sb": 0, "stride_sh": steps[0], "stride_st": 0}


def sink_kind(sink: Tensor | float | None) -> int:
    return NO_SINK if sink is None else CONSTANT_SINK if isinstance(sink, float) else LEARNED_SINK


def cap_of(curve: Logit | None) -> float | None:
    """Return the cap of a soft cap, which is the one curve that kernels know."""
    assert curve is None or isinstance(curve, SoftCap)
    return None if curve is None else curve.cap


def gate_kind(gate: Tensor | None) -> int:
    return NO_GATE if gate is None else HEADWISE if gate.shape[-1] == 1 else ELEMENTWISE
