"""Numbers per head that are added up batch by batch: histograms and correlations."""

import torch
from torch import Tensor


class Histogram:
    """Counts [H, bins] between fixed edges; what rounding puts outside counts in the outermost bin."""

    def __init__(self, low: float, high: float, bins: int):
        self.low, self.high, self.bins = low, high, bins
        self.counts: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """values [B, H, T]."""
        heads = values.shape[1]
        place = (values - self.low) * (self.bins / (self.high - self.low))
        place = place.long().clamp(0, self.bins - 1) + self.bins * torch.arange(heads, device=values.device)[:, None]
        counts = torch.bincount(place.flatten(), minlength=heads * self.bins).view(heads, self.bins).cpu()
        self.counts = counts if self.counts is None else self.counts + counts


class Correlation:
    """Pearson's, per head. Moments are merged around their means: sums of squares would cancel."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.moments = torch.zeros(())

    def add(self, x: Tensor, y: Tensor) -> None:
        """x and y [B, H, T]."""
        values = torch.stack((x, y), -1).double().transpose(0, 1).flatten(1, 2)  # [H, n, 2]
        n, mean = values.shape[1], values.mean(1)
        centred = values - mean[:, None]
        moments, mean = (centred.mT @ centred).cpu(), mean.cpu()
        apart = (mean - self.mean)[..., None]
        total = self.count + n
        self.moments = self.moments + moments + apart @ apart.mT * (self.count * n / total)
        self.mean = self.mean + apart[..., 0] * (n / total)
        self.count = total

    def result(self) -> list[float | None]:
        """None where one of the two does not vary."""
        variances = self.moments.diagonal(dim1=-2, dim2=-1)
        # Of a constant, rounding of the mean leaves about n eps^2 mean^2.
        varies = (variances > self.count * (1e-12 * self.mean) ** 2).all(-1)
        r = self.moments[:, 0, 1] / variances.prod(-1).sqrt()
        return [float(value) if ok else None for value, ok in zip(r, varies, strict=True)]
