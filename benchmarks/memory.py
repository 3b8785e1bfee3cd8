"""Memory that one step needs beyond its inputs, in MiB."""

import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from affine_attn.bench.accuracy import Shape
from benchmarks.cases import Case
from benchmarks.steps import prepare


def peak_mib(case: Case, shape: Shape, mode: str, device: torch.device, run: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # An allocator keeps what it once had, so each case has a process of its own.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_of_process, (case, shape, mode))


def _peak_of_process(case: Case, shape: Shape, mode: str) -> float:
    cpu = torch.device("cpu")
    prepare(case, replace(shape, batch=1, tq=64, tk=64), mode, cpu).run()
    run = prepare(case, shape, mode, cpu).run
    # Making the inputs took more than a step does: start the high-water mark afresh.
    reset_peak()
    before = resident_mib("VmRSS")
    run()
    return resident_mib("VmHWM") - before


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s*(\d+) kB", status).group(1)) / 1024
