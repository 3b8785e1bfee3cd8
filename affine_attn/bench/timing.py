"""Timing side by side: functions take turns in every round, so drift of the machine cancels in their ratio."""

import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import NamedTuple

import torch

# The queue of a stream holds about a thousand launches: twice so many calls should be in it before the first one runs.
_MOST_CALLS = 32
_CYCLES_PER_MS = 2_000_000  # a GPU at 2 GHz; a slower one just waits longer


class Timing(NamedTuple):
    """Milliseconds per call over the rounds, and the median of the per-round ratios to the baseline."""

    p20: float
    p50: float
    p80: float
    ratio: float


class _Turn(NamedTuple):
    calls: int
    lead_ms: float  # host time to queue them twice, for which the GPU is kept waiting


def side_by_side(
    functions: Mapping[str, Callable[[], object]],
    baseline: str,
    device: torch.device,
    rounds: int = 7,
    round_ms: float = 50.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every function against ``baseline``, interleaved; each turn is timed for about ``round_ms``.

    On CUDA this is the time of the GPU, not of the host: a turn is queued behind a wait as long as the queueing takes.
    It begins with as many calls that are not timed: a GPU at its power limit is faster after a function that drew less.
    On the CPU ``clock`` may be that of the process, where others use the cores too.
    A function whose data would stay in the cache between calls must bring several sets of it and rotate.
    """
    turns = {name: _warm_up(function, device, round_ms, clock) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(_run(function, turns[name], device, clock))
    return {name: summary(ms, times[baseline]) for name, ms in times.items()}


def _warm_up(
    function: Callable[[], object], device: torch.device, round_ms: float, clock: Callable[[], float]
) -> _Turn:
    """Compile, fill the caches, and find out how many calls make a turn and how long the host needs for them."""
    on_gpu = device.type == "cuda"
    _run(function, _Turn(2 if on_gpu else 1, 0.0), device, clock)
    host_ms = min(_host_ms(function, clock) for _ in range(3 if on_gpu else 1))
    ms = _run(function, _Turn(2, 8 * host_ms), device, clock) if on_gpu else host_ms
    calls = max(1, round(round_ms / max(ms, 1e-3)))
    calls = min(calls, _MOST_CALLS) if on_gpu else calls
    while on_gpu and calls > 1 and not _fits_the_queue(function, _turn(calls, host_ms)):
        calls //= 2
    return _turn(calls, host_ms)


def _turn(calls: int, host_ms: float) -> _Turn:
    return _Turn(calls, 1.0 + 2.4 * host_ms * calls)


def _fits_the_queue(function: Callable[[], object], turn: _Turn) -> bool:
    """Return True if all calls were queued before the first timed one ran; later ones run at the pace of the host."""
    start, end = _queue(function, turn)
    in_time = not start.query()
    end.synchronize()
    return in_time


def _host_ms(function: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    function()
    return (clock() - start) * 1e3


def _run(function: Callable[[], object], turn: _Turn, device: torch.device, clock: Callable[[], float]) -> float:
    """Milliseconds per call."""
    if device.type != "cuda":
        start = clock()
        for _ in range(turn.calls):
            function()
        return (clock() - start) * 1e3 / turn.calls
    start, end = _queue(function, turn)
    end.synchronize()
    return start.elapsed_time(end) / turn.calls


def _queue(function: Callable[[], object], turn: _Turn) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Events around the timed calls, which come after as many that are not."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(int(turn.lead_ms * _CYCLES_PER_MS))
    for event in (start, end):
        for _ in range(turn.calls):
            function()
        event.record()
    return start, end


def summary(ms: list[float], baseline: list[float]) -> Timing:
    ratio = median(mine / theirs for mine, theirs in zip(ms, baseline, strict=True))
    if len(ms) == 1:
        return Timing(ms[0], ms[0], ms[0], ratio)
    fifths = quantiles(ms, n=5, method="inclusive")
    return Timing(fifths[0], median(ms), fifths[3], ratio)
