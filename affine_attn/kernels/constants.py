"""Constants of several kernels. For files of device code alone: launch.py has the plain integers."""

import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_SINK = tl.constexpr(0)
CONSTANT_SINK = tl.constexpr(1)
LEARNED_SINK = tl.constexpr(2)
NO_GATE = tl.constexpr(0)
HEADWISE = tl.constexpr(1)
ELEMENTWISE = tl.constexpr(2)
NO_SUMS = tl.constexpr(0)
RUNNING = tl.constexpr(1)
WHOLE = tl.constexpr(2)
TABLE = tl.constexpr(3)
