"""What values of another width than keys cost on a GPU: python3 benchmarks/widths.py

Engine ``sdpa``, which fills zeros up where its kernel has one width, and engine ``triton``, whose kernels read each as
it is, over ``sdpa`` with both as wide as the wider; bfloat16, GPU time, with a causal mask and with a window. Each case
is first checked against the tolerance rule, on a smaller shape. Rows go to benchmarks/results/widths/.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from affine_attn import Mask
from affine_attn.bench.accuracy import Shape
from affine_attn.bench.timing import side_by_side
from benchmarks import record
from benchmarks.record import RESULTS, Row
from benchmarks.softcap import ROUND_MS, error, step

# Of keys and of values.
WIDTHS = ((64, 32), (32, 64), (128, 64), (64, 128), (192, 128))
MASKS = {"causal": Mask(), "window 128": Mask(window=128)}
MODES = ("forward", "forward+backward")
ENGINES = ("sdpa", "triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="CSV to write; default: that of the device")
    options = parser.parse_args()
    device = torch.device("cuda")
    machine = record.provenance(device)
    output = options.output or RESULTS / "widths" / record.results_path(device).name
    for head_dim, value_dim in WIDTHS:
        shape = Shape(4, 16, 4, options.tokens, options.tokens, head_dim, value_dim)
        for mask in MASKS:
            rows = [row for mode in MODES for row in timed(shape, mask, mode, device, options.rounds)]
            record.update(output, [row | machine for row in rows])
            for row in rows:
                shown = (row[x] for x in ("shape", "mode", "what", "ms_p50", "ratio", "error"))
                print(" ".join(f"{x:32}" for x in shown), flush=True)


def timed(shape: Shape, mask: str, mode: str, device: torch.device, rounds: int) -> list[Row]:
    """Return a row for the wide call, and one for each engine."""
    assert shape.value_dim is not None
    wide = max(shape.head_dim, shape.value_dim)
    shapes = {f"sdpa, {wide} channels": replace(shape, head_dim=wide, value_dim=None), **dict.fromkeys(ENGINES, shape)}
    baseline = next(iter(shapes))
    errors, functions = {}, {}
    for what, of_case in shapes.items():
        engine = what.partition(",")[0]
        small = replace(of_case, batch=1, heads=4, kv_heads=1, tq=300, tk=300)
        errors[what] = error(small, device, None, engine, MASKS[mask])
        functions[what] = step(of_case, mode, device, None, engine, MASKS[mask])
    timings = side_by_side(functions, baseline, device, rounds, ROUND_MS)
    return [
        {
            "shape": f"{shape}, {mask}", "what": what, "engine": what.partition(",")[0], "mode": mode,
            "ratio": f"{timing.ratio:.4f}", "baseline": baseline, "error": f"{errors[what]:.2e}",
            **record.times(timing),
        }
        for what, timing in timings.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
