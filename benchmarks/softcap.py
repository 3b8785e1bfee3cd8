"""What a soft cap costs: python3 benchmarks/softcap.py

Needs a GPU. Engine ``triton`` with a soft cap beside the same call without one, and beside FlexAttention with the same
score_mod; bfloat16, GPU time. Each case is first checked against the tolerance rule, on a smaller shape. Rows go to
benchmarks/results/softcap/, and ratios are to ``triton`` without a cap.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from affine_attn import AttentionSpec, Mask, SoftCap, attention
from affine_attn.bench.accuracy import Shape, deviations, random_inputs
from affine_attn.bench.timing import side_by_side
from affine_attn.core.spec import Logits
from benchmarks import record
from benchmarks.record import RESULTS, Row

SHAPES = {
    "1B": Shape(16, 32, 8, 2048, 2048, 64),
    "3B": Shape(8, 24, 8, 2048, 2048, 128),
    "3B-8k": Shape(2, 24, 8, 8192, 8192, 128),
}
CAP = SoftCap(50.0)
# (logit, engine)
CASES: dict[str, tuple[Logits, str]] = {
    "plain": (None, "triton"),
    "soft cap": (CAP, "triton"),
    "plain, FlexAttention": (None, "flex"),
    "soft cap, FlexAttention": (CAP, "flex"),
}
BASELINE = "plain"
ROUND_MS = 25.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="CSV to write; default: that of the device")
    options = parser.parse_args()
    device = torch.device("cuda")
    machine = record.provenance(device)
    output = options.output or RESULTS / "softcap" / record.results_path(device).name
    for name in options.shapes:
        for mode in ("forward", "forward+backward"):
            rows = timed(name, SHAPES[name], mode, device, options.rounds)
            record.update(output, [row | machine for row in rows])
            for row in rows:
                shown = (row[x] for x in ("shape", "mode", "what", "ms_p50", "ratio", "error"))
                print(" ".join(f"{x:24}" for x in shown), flush=True)


def timed(name: str, shape: Shape, mode: str, device: torch.device, rounds: int) -> list[Row]:
    """Return a row per case of a shape and mode."""
    small = Shape(2, shape.heads // shape.kv_heads, 1, 300, 555, shape.head_dim)
    errors = {what: error(small, device, *case) for what, case in CASES.items()}
    functions = {what: step(shape, mode, device, *case) for what, case in CASES.items()}
    timings = side_by_side(functions, BASELINE, device, rounds, ROUND_MS)
    return [
        {
            "shape": name, "what": what, "engine": CASES[what][1], "mode": mode, "ratio": f"{timing.ratio:.4f}",
            "baseline": BASELINE, "error": f"{errors[what]:.2e}", **record.times(timing),
        }
        for what, timing in timings.items()
    ]  # fmt: skip


def step(
    shape: Shape, mode: str, device: torch.device, logit: Logits, impl: str, mask: Mask = Mask()
) -> Callable[[], object]:
    """Return a call of attention, with the gradients of all inputs where the mode has them."""
    inputs = random_inputs(AttentionSpec(logit=logit), shape, torch.bfloat16, device)
    run = partial(attention, **inputs, mask=mask, impl=impl)
    if mode == "forward":
        return torch.no_grad()(run)
    leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, Tensor)]
    dy = torch.randn_like(run())
    return lambda: torch.autograd.grad(run(), leaves, dy)


def error(shape: Shape, device: torch.device, logit: Logits, impl: str, mask: Mask = Mask()) -> float:
    """Return the largest error of y and the gradients, or raise if one is larger than the rule allows."""
    found = deviations(impl, random_inputs(AttentionSpec(logit=logit), shape, torch.bfloat16, device), mask)
    if wrong := [f"{d.name} {d.error:.2e} > {d.allowed:.2e}" for d in found if not d.within]:
        raise SystemExit(f"{impl} is wrong with {logit} at {shape}: {', '.join(wrong)}")
    return max(d.error for d in found)


if __name__ == "__main__":
    main()
