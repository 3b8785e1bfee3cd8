"""A prepared launch starts the kernel that Triton would choose, with the same arguments, and asks Triton once."""

import gc
import weakref
from collections import defaultdict
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import driver  # noqa: E402

from affine_attn.kernels import launch as launch_module  # noqa: E402
from affine_attn.kernels.launch import Prepared, Tiles  # noqa: E402

SCALING = "epilogue.kernels.scale_rows_kernel"


class _Launcher:
    """Notes what a compiled kernel is started with."""

    started: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, src: Any, metadata: Any):
        self.src = src

    def __call__(self, *arguments: Any) -> None:
        *grid, stream, _, _, metadata, enter, leave = arguments[:9]
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)
        self.started.append((self.src, *grid, stream, *arguments[9:]))


class _Utilities:
    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 2**18}


class _Driver:
    """Triton's driver of a GPU that is not there."""

    utils, launcher_cls, device = _Utilities(), _Launcher, 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 10 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def started(monkeypatch) -> list[tuple[Any, ...]]:
    """Give the list of all that is started on a GPU that is not there."""
    monkeypatch.setattr(driver, "_active", _Driver())
    monkeypatch.setattr(_Launcher, "started", [])
    kernel = launch_module.function(SCALING)
    # A GPU that is there must not be given what is compiled here.
    monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    return _Launcher.started


def _numbers() -> dict[str, Any]:
    strides = {
        f"stride_{letter}{axis}": step for letter in "xy" for axis, step in zip("bht", (512, 128, 16), strict=True)
    }
    return strides | {
        "scale": 2.0, "stride_sb": 0, "heads": 4, "rows": 8, "tiles": 1, "HAS_ROWS": False, "HEAD_DIM": 16, "D": 16,
        "T": 128, "num_warps": 4,
    }  # fmt: skip


def _tensors(dtype: torch.dtype, first: int = 0) -> dict[str, Tensor | None]:
    """Return tensors whose memory begins ``first`` numbers after a multiple of 16 bytes."""
    x, y = (torch.zeros(first + 1024, dtype=dtype)[first:].view(2, 4, 8, 16) for _ in range(2))
    return {"p_x": x, "p_scale": None, "p_y": y}


def test_each_kind_of_tensors_gets_the_kernel_that_triton_chooses(started, monkeypatch):
    kinds = [_tensors(dtype, first) for dtype in (torch.bfloat16, torch.float32) for first in (0, 1)]
    kinds.append(kinds[0] | {"p_y": kinds[1]["p_y"]})
    kinds.append(kinds[0] | {"p_scale": torch.zeros(16)})
    numbers, grid = _numbers(), (8,)
    kernel = launch_module.function(SCALING)
    for tensors in kinds:
        kernel[grid](**tensors, **numbers)
    chosen = started.copy()
    assert len({id(src) for src, *_ in chosen}) == len(kinds)
    prepared = Prepared(SCALING, grid, numbers)
    for tensors in kinds:
        prepared(**tensors)
    asked = started[len(kinds) :]
    monkeypatch.setattr(type(kernel), "run", None)  # what asks Triton
    for tensors in reversed(kinds):
        prepared(**tensors)
    remembered = started[2 * len(kinds) :]
    assert _same(asked, chosen)
    assert _same(remembered[::-1], chosen)


def _same(launches: list[tuple[Any, ...]], others: list[tuple[Any, ...]]) -> bool:
    """Compare tensors by their addresses, as which remembered kernels get them."""
    addresses = lambda launch: [x.data_ptr() if isinstance(x, Tensor) else x for x in launch]  # noqa: E731
    return [addresses(launch) for launch in launches] == [addresses(launch) for launch in others]


def test_another_device_and_other_settings_ask_triton_again(started, monkeypatch):
    prepared, tensors = Prepared(SCALING, (8,), _numbers()), _tensors(torch.float32)
    kernel, asked = launch_module.function(SCALING), []
    run = type(kernel).run
    monkeypatch.setattr(type(kernel), "run", lambda *a, **k: asked.append(1) or run(*a, **k))
    prepared(**tensors)
    prepared(**tensors)
    assert len(asked) == 1
    monkeypatch.setattr(driver.active, "device", 1)
    prepared(**tensors)
    prepared(**tensors)
    assert len(asked) == 2
    assert [launch[4] for launch in started] == [10, 10, 11, 11]
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        prepared(**tensors)
        assert len(asked) == 3
    prepared(**tensors)
    assert len(asked) == 3
    seen: list[Any] = []
    monkeypatch.setattr(kernel, "pre_run_hooks", [lambda *_, **given: seen.append(given)])
    prepared(**tensors)
    assert len(asked) == 4
    assert seen


def test_hooks_of_launches_see_those_of_remembered_kernels(started):
    prepared, tensors, seen = Prepared(SCALING, (8,), _numbers()), _tensors(torch.float32), []
    prepared(**tensors)
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        prepared(**tensors)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["scale_rows_kernel"]


def test_a_replaced_function_sees_what_would_be_launched(started, monkeypatch):
    prepared, tensors, seen = Prepared(SCALING, (8,), _numbers()), _tensors(torch.float32), []
    prepared(**tensors)
    monkeypatch.setattr(launch_module, "function", lambda _: {(8,): lambda **given: seen.append(given)})
    prepared(**tensors)
    assert seen == [tensors | _numbers()]


class _Made(CompiledKernel):
    """Stands for what Triton compiles of a kernel with TMA."""

    run, function, packed_metadata = None, 2, ()

    def __init__(self):
        self.runs: list[tuple[Any, ...]] = []
        self.run = lambda *arguments: self.runs.append(arguments[9:])


class _Kernel:
    arg_names, pre_run_hooks = ["d_x", "p_y", "n", "N"], []

    def __init__(self):
        self.compiled, self.given = _Made(), []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **given: self.given.append(given) or self.compiled


def test_descriptors_of_a_remembered_kernel_are_those_of_its_tensors(started, monkeypatch):
    kernel, shape = _Kernel(), (1, 2, 256, 64)
    monkeypatch.setattr(launch_module, "function", lambda _: kernel)
    tiles = Tiles(shape, (32768, 16384, 64, 1), (1, 1, 64, 64), torch.bfloat16)
    prepared = Prepared("any", (1,), {"n": 5, "N": 7, "num_warps": 4}, {"d_x": tiles})
    pairs = [(torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(3)) for _ in range(2)]
    for x, y in pairs:
        prepared(d_x=x, p_y=y)
    (given,), ((descriptor, *rest),) = kernel.given, kernel.compiled.runs
    x, y = pairs[1]
    assert rest == [y.data_ptr(), 5, 7]
    assert descriptor.base is x
    assert vars(descriptor) | {"base": None} == vars(given["d_x"]) | {"base": None}
    assert vars(descriptor) | {"base": None} == vars(tiles.of(x)) | {"base": None}
    kept = [weakref.ref(tensor) for pair in pairs for tensor in pair]
    kernel.given.clear()
    kernel.compiled.runs.clear()
    del pairs, given, descriptor, rest, x, y
    gc.collect()
    assert [of() for of in kept] == [None] * 4
