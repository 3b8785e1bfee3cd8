"""Moved to :mod:`affine_attn.models.collect`; this name goes with the next release."""

import warnings

from affine_attn.models.collect import *  # noqa: F403

warnings.warn("affine_attn.models.statistics is affine_attn.models.collect now", FutureWarning, stacklevel=2)
