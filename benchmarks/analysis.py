"""Time and memory of affine-attn analyze, as a first call has them: python benchmarks/analysis.py

A preset with random weights and random tokens, whose cost is that of any others. ``analysis`` is all that ``affine-attn
analyze`` measures, ``forward`` the same decoder on the same sequences. Each runs once, in this order and in one
process, so times include what is compiled or started for the first time. ``peak_mib`` counts the weights too. Rows go
to benchmarks/results/analysis/<device>.csv.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn.analyze.measure import measure
from affine_attn.analyze.run import WINDOW
from affine_attn.models import AffineAttnForCausalLM, preset
from benchmarks import record

console = Console(width=140)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.2-1b", help="preset (default: %(default)s)")
    parser.add_argument("--attention", nargs="*", default=["softmax", "sink", "affine"])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=10)
    parser.add_argument("--output", type=Path, help="CSV to update")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = options.output or record.RESULTS / "analysis" / record.results_path(device).name
    rows = [row | record.provenance(device) for attention in options.attention for row in rows_of(attention, options)]
    record.update(path, rows)


def rows_of(attention: str, options: argparse.Namespace) -> list[record.Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = AffineAttnForCausalLM(preset(options.model, attention)).to(torch.bfloat16).eval()  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    shape = (options.sequences, 1, options.length)
    tokens = torch.randint(model.config.vocab_size, shape, generator=generator)
    sequences = [{"input_ids": ids} for ids in tokens]

    @torch.no_grad()
    def forward() -> None:
        for sequence in sequences:
            model.base_model(input_ids=sequence["input_ids"].to(device), use_cache=False)

    def analysis() -> None:
        measure(model, sequences, range(model.config.num_hidden_layers), slice(0, min(WINDOW, options.length)))

    rows, plain_peak = [], 0.0
    for name, run in (("forward", forward), ("analysis", analysis)):
        seconds, peak = first_run(run, device)
        plain_peak = plain_peak or peak
        memory = f"memory x {peak / plain_peak:.3f} of the forward's" if plain_peak else "memory not measured"
        rows.append({
            "shape": options.model, "what": attention, "engine": "measure" if name == "analysis" else "decoder",
            "mode": f"{name}, {options.sequences} x {options.length} tokens", "ms_p50": f"{seconds * 1e3:.0f}",
            "peak_mib": f"{peak:.0f}" if peak else "", "note": f"first call; {memory}",
        })  # fmt: skip
        console.print(
            f"{attention:10} {name:9} {seconds:7.2f} s  {peak:7.0f} MiB, {memory}", markup=False, highlight=False
        )
    return rows


def first_run(run: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Seconds, compilation included as users have it, and the peak in MiB (0 on the CPU, which does not count)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    run()
    if device.type != "cuda":
        return time.perf_counter() - begin, 0.0
    torch.cuda.synchronize()
    return time.perf_counter() - begin, torch.cuda.max_memory_allocated() / 2**20


if __name__ == "__main__":
    main()
