"""Moved to :mod:`affine_attn.data.sampler`; this name goes with the next release."""

import warnings

from affine_attn.data.sampler import *  # noqa: F403

warnings.warn("affine_attn.distill.sampler is affine_attn.data.sampler now", FutureWarning, stacklevel=2)
