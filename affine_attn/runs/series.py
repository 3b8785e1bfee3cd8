"""How steady gradients are: the statistics of the affine paper's Tables 4 and 5 (arXiv 2602.23057).

Both are of the gradient norm of every step, neither smoothed nor clipped, over the first 500 steps. The paper does not
say which deviation and which MAD; here the deviation is that of the steps themselves (divided by their number), and MAD
the plain median of |g - median(g)|, without the factor 1.4826 of normal distributions.
"""

from collections.abc import Sequence

import numpy as np

from affine_attn.errors import UserError

STEPS = 500
SPIKE_FACTORS = (6, 9)


def gradient_statistics(norms: Sequence[float], steps: int = STEPS) -> dict[str, float]:
    """Mean, standard deviation, variance, their ratio CV = std / mean, and spikes: steps with g > median + k MAD."""
    g = np.asarray(norms[:steps], np.float64)
    if not g.size:
        raise UserError("there are no gradient norms")
    mean, std = g.mean(), g.std()
    median = np.median(g)
    mad = np.median(abs(g - median))
    spikes = {f"spikes_{k}": int((g > median + k * mad).sum()) for k in SPIKE_FACTORS}
    cv = float(std / mean) if mean else 0.0
    return {"steps": g.size, "mean": float(mean), "std": float(std), "variance": float(std**2), "cv": cv, **spikes}
