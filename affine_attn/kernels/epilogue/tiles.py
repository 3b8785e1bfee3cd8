"""How the tokens are cut into tiles and segments for the epilogue kernels (kernels.py says what for)."""

import functools
from typing import NamedTuple

from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.kernels.device import cdiv, padded
from affine_attn.kernels.launch import NO_SUMS, RUNNING, TABLE, WHOLE


class Tile(NamedTuple):
    """Tokens and columns a program has at a time, forward and backward; tokens of a segment, which it walks down."""

    tokens: int
    columns: int
    backward_columns: int
    segment: int
    warps: int


# By padded head_dim, timed on an H200 (docs/log).
TILES = {
    16: Tile(32, 16, 16, 64, 1),
    32: Tile(16, 32, 32, 64, 1),
    64: Tile(8, 64, 64, 64, 1),
    128: Tile(8, 64, 128, 64, 1),
    256: Tile(8, 64, 128, 64, 1),
}
# Without sums the heads of a group have nothing in common, and tokens neither: one tile of one head per program.
TILES_WITHOUT_SUMS = {
    16: Tile(128, 16, 16, 128, 4),
    32: Tile(64, 32, 32, 64, 4),
    64: Tile(64, 64, 64, 64, 4),
    128: Tile(32, 128, 128, 32, 4),
    256: Tile(16, 256, 256, 16, 4),
}
# Most query heads a program has in flight, and most columns of them: more would not fit its registers.
_CHUNK, _CHUNK_COLUMNS = 4, 384
# Keys of the shortest windows whose sums slide along: they begin before the segment of the row, two segments at most.
SLIDING = 128
# The sums of values go block by block of segments: tokens of a block at least, blocks at most.
_BLOCK, _BLOCKS = 256, 31


class Tiling(NamedTuple):
    """Sizes of a call, its tiles and segments, and where its sums come from."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int  # of the values
    tile: Tile
    sums: int
    restarts: bool  # running sums begin anew with each document
    window: int  # running sums are of so many slots; 0: of all
    d: int  # head_dim rounded up to a power of two
    tiles: int
    query_segments: int
    key_segments: int
    older: int  # keys before the first query's
    n_older: int  # segments of them

    @property
    def first(self) -> int:
        """Slot where the first key segment starts."""
        return self.older - self.n_older * self.tile.segment

    @property
    def block_segments(self) -> int:
        """Segments of a block."""
        return max(_BLOCK // self.tile.segment, cdiv(self.key_segments, _BLOCKS))

    @property
    def blocks(self) -> int:
        return cdiv(self.key_segments, self.block_segments)

    @property
    def walkers(self) -> int:
        """Heads that walk: those of k, each with its group, or without sums those of q."""
        return self.kv_heads if self.sums else self.heads

    def constants(self, columns: int) -> dict[str, int]:
        group = self.heads // self.walkers
        chunk = max(n for n in range(1, min(_CHUNK, _CHUNK_COLUMNS // columns) + 1) if group % n == 0)
        return {
            "SUMS": self.sums, "RESTARTS": self.restarts, "SLIDES": self.window > 0, "window": self.window,
            "CHUNKS": group // chunk, "CHUNK": chunk,
            "HEAD_DIM": self.head_dim, "D": self.d, "SLICE": columns, "T": self.tile.tokens,
            "LENGTH": self.tile.segment, "num_warps": self.tile.warps,
        }  # fmt: skip


def tiling_of(call: Call) -> Tiling:
    mask, sums, restarts, window = call.mask, NO_SUMS, False, 0
    if call.beta is not None:
        restarts = sums_restart(call)
        window = mask.window or 0 if sums_slide(call) else 0
        is_hidden = mask.restrictions and not (restarts or window)
        sums = TABLE if is_hidden else RUNNING if mask.causal else WHOLE
    # Sizes that a compiler keeps open have no hash.
    make = _tiling if type(call.q) is Tensor else _tiling.__wrapped__
    return make(call.q.shape[:3], call.v.shape, mask.causal, sums, restarts, window)


def sums_restart(call: Call) -> bool:
    """Return True if the sums of visible values are running sums along documents that lie side by side."""
    mask = call.mask
    return mask.contiguous and mask.causal and mask.restrictions == ("documents",) and call.tq <= call.tk


def sums_slide(call: Call) -> bool:
    """Return True if the sums of visible values slide along with a window."""
    mask = call.mask
    return mask.causal and mask.restrictions == ("window",) and (mask.window or 0) >= SLIDING and call.tq <= call.tk


@functools.lru_cache(1024)
def _tiling(
    rows: tuple[int, ...], of_v: tuple[int, ...], causal: bool, sums: int, restarts: bool, window: int
) -> Tiling:
    batch, heads, queries = rows
    _, kv_heads, keys, head_dim = of_v
    d = padded(head_dim)
    tile = (TILES if sums else TILES_WITHOUT_SUMS)[d]
    if sums and heads == kv_heads:
        # Heads that share no values with others ask for half as much per token.
        tile = tile._replace(tokens=2 * tile.tokens)
    # Without a causal mask every query sees every key; segments then only cut the sum.
    older, covered = (keys - queries, queries) if causal else (0, keys)
    n_older = max(0, cdiv(older, tile.segment))
    return Tiling(
        batch, heads, kv_heads, queries, keys, head_dim, tile, sums, restarts, window, d, cdiv(queries, tile.tokens),
        cdiv(queries, tile.segment), n_older + cdiv(covered, tile.segment), older, n_older,
    )  # fmt: skip
