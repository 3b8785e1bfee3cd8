"""Which CTA computes which tile, and how tiles reach it by TMA: for the sm90 kernels."""

import heapq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from affine_attn.kernels.device import cached, to_device
from affine_attn.kernels.launch import Tiles

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
    b, h, t, d = x.stride()
    return d == 1 and min(b, h, t) > 0 and not (b % 8 or h % 8 or t % 8 or x.data_ptr() % 16)


def tiles(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int) -> Tiles:
    """Return how TMA copies blocks of so many rows."""
    return Tiles(shape, strides, (1, 1, rows, *shape[3:]), dtype)
