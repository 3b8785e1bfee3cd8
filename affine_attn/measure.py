"""Timing side by side: functions take turns in every round, so drift of the machine cancels in their ratio."""

import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Milliseconds per call over the rounds, and the median of the per-round ratios to the baseline."""

    p20: float
    p50: float
    p80: float
    ratio: float


def side_by_side(
    functions: Mapping[str, Callable[[], object]],
    baseline: str,
    device: torch.device,
    rounds: int = 7,
    round_ms: float = 50.0,
) -> dict[str, Timing]:
    """Time every function against ``baseline``, interleaved; each turn lasts about ``round_ms`` after a warm-up."""
    repeats = {}
    for name, function in functions.items():
        _run(function, 2, device)
        repeats[name] = max(1, round(round_ms / max(_run(function, 2, device), 1e-3)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(_run(function, repeats[name], device))
    return {name: _summary(ms, times[baseline]) for name, ms in times.items()}


def _run(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Milliseconds per call."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) * 1e3 / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Keep the GPU busy while the first calls are queued: what is measured is the GPU's time, not the host's start.
    torch.cuda._sleep(4_000_000)
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def _summary(ms: list[float], baseline: list[float]) -> Timing:
    ratio = median(mine / theirs for mine, theirs in zip(ms, baseline, strict=True))
    if len(ms) == 1:
        return Timing(ms[0], ms[0], ms[0], ratio)
    fifths = quantiles(ms, n=5, method="inclusive")
    return Timing(fifths[0], median(ms), fifths[3], ratio)
