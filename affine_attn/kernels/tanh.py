"""The hyperbolic tangent of kernels, for scores with a soft cap (device code).

The hardware's own instruction has eleven bits only. Here are all of fp32 but two: by an exponential that cannot
overflow, and where that would cancel by a polynomial, without a branch.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(b_x):
    """Return tanh to three units in the last place, and better where it nears 1: the slope there is 1 - tanh^2."""
    b_size = tl.abs(b_x)
    b_exp = tl.exp2(b_size * -2.8853900817779268)  # exp(-2 |x|)
    b_root = tl.rsqrt(b_exp + 1.0)  # its square divides: without the checks of a division
    b_large = 1.0 - 2.0 * (b_exp * (b_root * b_root))
    b_square = b_x * b_x
    b_series = ((0.015612639 * b_square - 0.052211811) * b_square + 0.13313117) * b_square - 0.33332598
    return tl.where(b_size < 0.6, b_x + b_x * (b_series * b_square), tl.where(b_x < 0.0, -b_large, b_large))
