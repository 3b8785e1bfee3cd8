"""Times the attention family side by side with the strongest stock attention; run it with ``make bench``.

Every case is first checked against the tolerance rule on a small shape of its kind: a wrong engine is not timed.
Results go to benchmarks/results/<device>.csv, one row per (shape, what, mode), and from there into the README.
"""

import argparse
import csv
import multiprocessing
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn import VARIANTS, attention
from affine_attn.core.accuracy import Shape, deviations, random_inputs
from affine_attn.core.call import checked_call
from affine_attn.core.dispatch import choose
from affine_attn.measure import side_by_side
from benchmarks import readme
from benchmarks.cases import CPU_SHAPES, CUDA_SHAPES, baselines

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    "shape", "what", "engine", "mode", "ms_p20", "ms_p50", "ms_p80", "ratio", "baseline", "peak_mib", "error",
    "device", "torch", "triton", "commit",
)  # fmt: skip
console = Console(width=140)


def main() -> None:
    parser = argparse.ArgumentParser(prog="affine-attn bench", description=__doc__)
    parser.add_argument("--variants", nargs="*", default=["softmax", *(v for v in VARIANTS if v != "softmax")])
    parser.add_argument("--shapes", nargs="*", help=f"of {[*CPU_SHAPES, *CUDA_SHAPES]}; default: all of this device")
    parser.add_argument("--flex", action="store_true", help="also time FlexAttention, which compiles for a while")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="CSV to write; default benchmarks/results/<device>.csv")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = CUDA_SHAPES if device.type == "cuda" else CPU_SHAPES
    if unknown := set(arguments.shapes or []) - set(shapes):
        parser.error(f"unknown shapes {sorted(unknown)} for this device; allowed are {sorted(shapes)}")
    if unknown := set(arguments.variants) - set(VARIANTS):
        parser.error(f"unknown variants {sorted(unknown)}; allowed are {sorted(VARIANTS)}")
    path = arguments.output or RESULTS / f"{slug(device_name(device))}.csv"
    rows = []
    for name, shape in shapes.items():
        if arguments.shapes is None or name in arguments.shapes:
            rows += bench_shape(name, shape, device, arguments)
            # After every shape: an interrupted run keeps what it measured.
            write(path, rows)
    console.print(f"wrote {path}")
    if arguments.output is None:
        readme.main()


def bench_shape(name: str, shape: Shape, device: torch.device, arguments: argparse.Namespace) -> list[dict]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stock = baselines(device)
    baseline = next(iter(stock))
    functions, errors = {}, {}
    for label, function in stock.items():
        functions[label] = (random_inputs(VARIANTS["softmax"].spec, shape, dtype, device), function)
    for variant in arguments.variants:
        errors[variant] = checked_error(variant, shape, dtype, device)
        functions[variant] = (random_inputs(VARIANTS[variant].spec, shape, dtype, device), attention)
    if device.type == "cpu":
        functions["affine, dense reference"] = (
            random_inputs(VARIANTS["affine"].spec, shape, dtype, device),
            dense_attention,
        )
    if arguments.flex:
        for variant in ("softmax", "scale_invariant"):
            functions[f"{variant}, flex"] = (
                random_inputs(VARIANTS[variant].spec, shape, dtype, device),
                flex_attention,
            )
    rows = []
    for mode in ("forward", "forward+backward"):
        prepared = {label: step(inputs, function, mode) for label, (inputs, function) in functions.items()}
        timings = side_by_side(prepared, baseline, device, arguments.rounds)
        table = Table(title=f"{name} {shape}, {mode}")
        for column in ("what", "ms", "p20..p80", "x " + baseline, "peak MiB"):
            table.add_column(column)
        for label, timing in timings.items():
            peak = peak_mib(label, shape, mode, device, prepared[label])
            table.add_row(
                label, f"{timing.p50:.3f}", f"{timing.p20:.3f}..{timing.p80:.3f}", f"{timing.ratio:.3f}", f"{peak:.0f}"
            )
            rows.append(
                {
                    "shape": name,
                    "what": label,
                    "engine": engine_of(label, functions[label][0]),
                    "mode": mode,
                    "ms_p20": f"{timing.p20:.4f}",
                    "ms_p50": f"{timing.p50:.4f}",
                    "ms_p80": f"{timing.p80:.4f}",
                    "ratio": f"{timing.ratio:.4f}",
                    "baseline": baseline,
                    "peak_mib": f"{peak:.1f}",
                    "error": f"{errors[label]:.2e}" if label in errors else "",
                }
                | provenance(device)
            )
        console.print(table)
    return rows


def checked_error(variant: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of y and all gradients on a smaller shape of the same kind; refuses a wrong engine."""
    small = replace(shape, batch=1, tq=320, tk=320)
    result = deviations("auto", random_inputs(VARIANTS[variant].spec, small, dtype, device))
    if wrong := [f"{d.name} {d.error:.1e} > {d.allowed:.1e}" for d in result if not d.within]:
        raise SystemExit(f"{variant} is wrong on this machine, not timing it: {', '.join(wrong)}")
    return max(d.error for d in result)


def step(inputs: dict, function, mode: str):
    """A function without arguments that runs one forward, or one forward and backward."""
    if mode == "forward":
        return torch.no_grad()(lambda: function(**_known(function, inputs)))
    leaves = {name: x.detach().requires_grad_() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    wanted = [x for x in leaves.values() if isinstance(x, Tensor)]
    dy = torch.randn_like(leaves["q"])
    return lambda: torch.autograd.grad(function(**_known(function, leaves)), wanted, dy)


def _known(function, inputs: dict) -> dict:
    """A stock attention takes q, k and v alone."""
    return (
        inputs if function in (attention, dense_attention, flex_attention) else {name: inputs[name] for name in "qkv"}
    )


def dense_attention(**inputs) -> Tensor:
    return attention(**inputs, impl="reference")


def flex_attention(**inputs) -> Tensor:
    return attention(**inputs, impl="flex")


def engine_of(label: str, inputs: dict) -> str:
    if label not in VARIANTS:
        return label
    leaves = {name: x.requires_grad_() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return choose(checked_call(**leaves), "auto")


def peak_mib(label: str, shape: Shape, mode: str, device: torch.device, run) -> float:
    """Memory one step needs beyond its inputs, in MiB."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    # The high-water mark of a process never falls, so each case has a process of its own.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_of_process, (label, shape, mode))


def _peak_of_process(label: str, shape: Shape, mode: str) -> float:
    stock = baselines(torch.device("cpu"))
    variant = label if label in VARIANTS else "softmax" if label in stock else "affine"
    function = stock.get(label) or (attention if label in VARIANTS else dense_attention)
    tiny = replace(shape, batch=1, tq=64, tk=64)
    step(random_inputs(VARIANTS[variant].spec, tiny), function, mode)()
    run = step(random_inputs(VARIANTS[variant].spec, shape), function, mode)
    # Making the inputs took more than a step does: start the high-water mark afresh.
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory_mib("VmRSS")
    run()
    return _memory_mib("VmHWM") - before


def _memory_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s*(\d+) kB", status).group(1)) / 1024


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return f"CPU {model.group(1) if model else platform.machine()} {torch.get_num_threads()} threads"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def provenance(device: torch.device) -> dict[str, str]:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit,
    }


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
