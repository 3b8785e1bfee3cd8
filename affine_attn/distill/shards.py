"""Moved to :mod:`affine_attn.data.shards`; this name goes with the next release."""

import warnings

from affine_attn.data.shards import *  # noqa: F403

warnings.warn("affine_attn.distill.shards is affine_attn.data.shards now", FutureWarning, stacklevel=2)
