"""Which CTA computes which tile, and how tiles reach it: the tile scheduler and TMA descriptors of the sm90 kernels."""

import functools
import heapq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.kernels.device import cached, to_device

# Rows of a tile, and keys at a time.
ROWS = 128


class Order(NamedTuple):
    tiles: Tensor  # int32 [programs, most, 4]: batch entry, head, head of k and v, first row; a last one is never used
    counts: Tensor  # int32 [programs]


@cached
def order(
    batch: int,
    heads: int,
    kv_heads: int,
    costs: tuple[float, ...],
    heads_together: int,
    programs: int,
    device: torch.device,
) -> Order:
    """Return the tiles of each CTA: longest processing time first (LPT), each to the CTA that is free first.

    Tiles of ``heads_together`` heads come before those of the next ones; ``costs`` are those of a head's tiles.
    """
    lists: list[list[tuple[int, int, int, int]]] = [[] for _ in range(programs)]
    busy = [(0.0, program) for program in range(programs)]
    places = [(entry, head, head * kv_heads // heads) for entry in range(batch) for head in range(heads)]
    longest_first = sorted(range(len(costs)), key=lambda tile: -costs[tile])
    for first in range(0, len(places), heads_together):
        for tile in longest_first:
            for place in places[first : first + heads_together]:
                until, program = busy[0]
                lists[program].append((*place, tile * ROWS))
                heapq.heapreplace(busy, (until + costs[tile], program))
    most = max(map(len, lists)) + 1
    padded = [tiles + [(0, 0, 0, 0)] * (most - len(tiles)) for tiles in lists]
    options: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}  # whatever the default device is
    tables = torch.tensor(padded, **options), torch.tensor(list(map(len, lists)), **options)
    return Order(*to_device(tables, device))


def can_be_copied(x: Tensor) -> bool:
    """Return True if TMA can load ``x``: unit inner stride, 16-byte aligned rows."""
    return x.stride(-1) == 1 and not x.data_ptr() % 16 and all(n > 0 and not n % 8 for n in x.stride()[:3])


def descriptor(x: Tensor, rows: int) -> Any:
    """Return a TMA descriptor of ``x`` for blocks of so many rows."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = (1, 1, rows, *x.shape[3:])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), _shared_layout(block, x.dtype))


@functools.cache
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kind = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for(list(block), kind)
