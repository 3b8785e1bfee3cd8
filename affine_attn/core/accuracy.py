"""Moved to :mod:`affine_attn.bench.accuracy`; this name goes with the next release."""

import warnings

from affine_attn.bench.accuracy import *  # noqa: F403

warnings.warn("affine_attn.core.accuracy is affine_attn.bench.accuracy now", FutureWarning, stacklevel=2)
