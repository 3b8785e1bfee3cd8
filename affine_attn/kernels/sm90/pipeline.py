"""What the sm90 kernels share: the tiles of a CTA, and the pipeline stages that loads and MMAs hand each other.

The i-th load of a pipeline of STAGES stages lies in stage i % STAGES. A barrier knows one bit of how often it was used,
so whoever waits says which use is meant: full is the end of the i-th load, free the end of the reads before it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def tile_count(order):
    """Return how many tiles this CTA computes; order = (p_order, most, p_tiles), tables of the tile scheduler."""
    return gl.load(order[2] + gl.program_id(0))


@gluon.jit
def nth_tile(order, n):
    """Return the n-th tile of this CTA: batch entry, head, kv head, first row; a list has one more than are used."""
    p_tile = order[0] + (gl.program_id(0) * order[1] + n) * 4
    return gl.load(p_tile), gl.load(p_tile + 1), gl.load(p_tile + 2), gl.load(p_tile + 3)


@gluon.jit
def matrix(s, stage, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """View one stage of shared memory, which has the shape of a TMA block, as a matrix."""
    return s.index(stage).reshape([ROWS, COLUMNS])


@gluon.jit
def wait_full(full, i, stage, STAGES: gl.constexpr):
    """Wait until the i-th load has arrived in its stage."""
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)


@gluon.jit
def wait_free(free, i, stage, STAGES: gl.constexpr):
    """Wait until nobody reads the stage any more that the i-th load goes to."""
    mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
