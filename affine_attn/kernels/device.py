"""The device as launchers see it: its properties, the sizes that tiles may have, and constant tables on it."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

_Table = TypeVar("_Table")


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; (0, 0) of all else: AMD numbers its GPUs otherwise."""
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (SMs); without a GPU that of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def must_be_deterministic() -> bool:
    """Return True if sums in no fixed order are forbidden, and not only warned of."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def padded(size: int) -> int:
    """Return the size of a tile for so many channels or rows: a power of two, at least 16, as an MMA needs."""
    return max(16, 1 << (size - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up: the tiles of b that cover a."""
    return -(-a // b)


def cached(make: Callable[..., _Table]) -> Callable[..., _Table]:
    """Decorate a function that makes a table for kernels: it runs once for the same arguments.

    No table is ever dropped, because CUDA graphs go on reading it where it lies. If two threads made the same one, the
    cache would drop one of them while a kernel may still read it, so they wait for each other.
    """
    made, lock = functools.cache(make), threading.Lock()

    @functools.wraps(make)
    def get(*arguments) -> _Table:
        with lock:
            return made(*arguments)

    return get


def to_device(tables: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Copy CPU tensors to a device.

    Not while a CUDA graph is being captured: like all work that is done once, it belongs into the calls before that.
    """
    if device.type != "cuda":
        return tuple(x.to(device) for x in tables)
    # In a thread of its own: what this one allocates may belong to a CUDA graph that is being made.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_copied, tables, device).result()


def _copied(tables: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        result = tuple(x.pin_memory().to(device, non_blocking=True) for x in tables)
    stream.synchronize()
    return result
