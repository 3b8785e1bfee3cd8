"""Constant tables that kernels read: copied to their device so that they outlive whatever reads them."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def uploaded(tables: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """CPU tensors on a device. Whoever caches them should never drop them: CUDA graphs go on reading where they are.

    Under the capture of a graph this fails, as torch says of everything that is done for the first time there.
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
