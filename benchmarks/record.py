"""The CSV of a device: its columns, what is said about the machine, reading and writing."""

import csv
import io
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

from affine_attn.bench.timing import Timing
from affine_attn.runs.files import write_text

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = (
    "shape", "what", "engine", "mode", "ms_p20", "ms_p50", "ms_p80", "ratio", "baseline", "gbps", "fraction_of_copy",
    "tflops", "tokens_per_second", "mfu", "peak_mib", "error", "note", "device", "torch", "triton", "cudnn", "commit",
)  # fmt: skip

Row = dict[str, str]


def results_path(device: torch.device) -> Path:
    return RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', device_name(device).lower()).strip('-')}.csv"


def read(path: Path) -> list[Row]:
    """Rows with every column; one that an older file lacks is empty."""
    with path.open(newline="") as file:
        return [dict.fromkeys(COLUMNS, "") | row for row in csv.DictReader(file)]


def write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def update(path: Path, rows: Iterable[Row]) -> None:
    """Rows into the file of a device, in place of older ones of the same shape, what and mode."""
    write(path, merged(read(path) if path.exists() else [], rows))


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Old rows, replaced by new ones of the same shape, what and mode; a baseline timed twice counts once."""
    new_by_key: dict[tuple[str, ...], Row] = {}
    for row in new:
        new_by_key.setdefault(_key(row), row)
    kept = [new_by_key.pop(_key(row), row) for row in old]
    return kept + list(new_by_key.values())


def _key(row: Row) -> tuple[str, ...]:
    return row["shape"], row["what"], row["mode"]


def times(timing: Timing) -> Row:
    return {"ms_p20": f"{timing.p20:.4f}", "ms_p50": f"{timing.p50:.4f}", "ms_p80": f"{timing.p80:.4f}"}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return f"CPU {model.group(1) if model else platform.machine()} {torch.get_num_threads()} threads"


def provenance(device: torch.device) -> Row:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    cudnn = str(torch.backends.cudnn.version()) if device.type == "cuda" else ""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": triton_version,
        "cudnn": cudnn,
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit, with a mark where the code that was timed differs from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", "affine_attn", "benchmarks/*.py")
    return f"{commit}+changes" if commit and changed else commit or "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
