"""The numbers of launch.py as Triton's constants, for files of device code alone: they need Triton."""

import math

import triton.language as tl

from affine_attn.kernels import launch

LOG2E = tl.constexpr(launch.LOG2E)
LN2 = tl.constexpr(math.log(2))
NO_SINK = tl.constexpr(launch.NO_SINK)
CONSTANT_SINK = tl.constexpr(launch.CONSTANT_SINK)
LEARNED_SINK = tl.constexpr(launch.LEARNED_SINK)
NO_GATE = tl.constexpr(launch.NO_GATE)
HEADWISE = tl.constexpr(launch.HEADWISE)
ELEMENTWISE = tl.constexpr(launch.ELEMENTWISE)
NO_SUMS = tl.constexpr(launch.NO_SUMS)
RUNNING = tl.constexpr(launch.RUNNING)
WHOLE = tl.constexpr(launch.WHOLE)
TABLE = tl.constexpr(launch.TABLE)
