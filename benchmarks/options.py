"""What biases, masks of pairs and narrow values cost on a CPU: python3 benchmarks/options.py

(1, 8, 2, 2048, 64), fp32, forward and backward, with one thread: CPU time, two in turns in every round. Biases and
masks of pairs are timed over ``F.scaled_dot_product_attention`` with the same float mask, values of half the width over
those as wide as keys. Each is first checked against the reference, at a length that suits it. Rows go to
benchmarks/results/options/; a ratio above its limit fails.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from affine_attn import AttentionSpec, Mask, attention
from affine_attn.bench import peers
from affine_attn.bench.accuracy import Shape, deviations, random_inputs
from affine_attn.bench.timing import side_by_side
from benchmarks import record
from benchmarks.record import RESULTS, Row

SHAPE = Shape(1, 8, 2, 2048, 2048, 64)
CHECKED = 320
DEVICE = torch.device("cpu")
SDPA, WIDE = "SDPA with the float mask", "values of 64 channels"


class Case(NamedTuple):
    mask: Mask
    bias: Tensor | None = None
    value_dim: int | None = None
    limit: float | None = None  # of the ratio


def cases(tokens: int) -> dict[str, Case]:
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(SHAPE.heads, tokens, tokens, generator=generator)
    allowed = torch.rand(tokens, tokens, generator=generator) > 0.3
    return {
        "bias": Case(Mask(causal=False), bias, limit=1.1),
        "bias, causal": Case(Mask(), bias, limit=1.1),
        "bias by key": Case(Mask(causal=False), bias[:, :1], limit=1.1),
        "allowed": Case(Mask(causal=False, allowed=allowed)),
        "allowed, causal": Case(Mask(allowed=allowed)),
        "values of 32 channels": Case(Mask(), value_dim=32, limit=1.05),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="CSV to write; default: that of the device")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    above = []
    try:
        machine = record.provenance(DEVICE)
        output = options.output or RESULTS / "options" / record.results_path(DEVICE).name
        small = cases(CHECKED)
        for what, case in cases(SHAPE.tq).items():
            check(what, small[what])
            rows = timed(what, case, options.rounds)
            record.update(output, [row | machine for row in rows])
            ratio = rows[-1]["ratio"]
            print(f"{what}: {ratio} of {rows[-1]['baseline']}", flush=True)
            if case.limit is not None and float(ratio) > case.limit:
                above.append(f"{what} takes {ratio}, not {case.limit}")
    finally:
        torch.set_num_threads(threads)
    if above:
        raise SystemExit("; ".join(above))


def inputs_of(case: Case, tokens: int) -> dict[str, Tensor]:
    shape = Shape(SHAPE.batch, SHAPE.heads, SHAPE.kv_heads, tokens, tokens, SHAPE.head_dim, case.value_dim)
    found = random_inputs(AttentionSpec(), shape)
    return {name: found[name].requires_grad_() for name in ("q", "k", "v")}


def float_mask(case: Case, tokens: int) -> Tensor:
    """Return what says the same to ``F.scaled_dot_product_attention``."""
    everything = slice(0, tokens)
    visible = case.mask.visible(tokens, tokens, DEVICE, everything, everything)
    if case.bias is None:
        return torch.where(visible, 0.0, -torch.inf)
    return case.bias[None] if bool(visible.all()) else torch.where(visible, case.bias[None], -torch.inf)


def check(what: str, case: Case) -> None:
    """Raise if ours or SDPA is further from the reference than the tolerance rule allows."""
    inputs = {name: x.detach() for name, x in inputs_of(case, CHECKED).items()}
    bias = {} if case.bias is None else {"bias": case.bias}
    functions: dict[str, Callable[..., Tensor] | None] = {what: None}
    if case.value_dim is None:
        mask = float_mask(case, CHECKED)
        functions[SDPA] = lambda q, k, v, **_: peers.float_mask(q, k, v, mask)
    for name, function in functions.items():
        found = deviations("auto", inputs | bias, case.mask, function=function, constants=("bias",))
        if wrong := [f"{d.name} {d.error:.2e} > {d.allowed:.2e}" for d in found if not d.within]:
            raise SystemExit(f"{name} is wrong: {', '.join(wrong)}")


def timed(what: str, case: Case, rounds: int) -> list[Row]:
    """Return a row for what it is compared with, and one for ours."""
    inputs = inputs_of(case, SHAPE.tq)
    ours = step(functools.partial(attention, mask=case.mask, bias=case.bias), inputs)
    if case.value_dim is None:
        baseline, other = SDPA, step(functools.partial(peers.float_mask, mask=float_mask(case, SHAPE.tq)), inputs)
    else:
        wide = inputs_of(case._replace(value_dim=None), SHAPE.tq)
        baseline, other = WIDE, step(functools.partial(attention, mask=case.mask), wide)
    timings = side_by_side({baseline: other, what: ours}, baseline, DEVICE, rounds, clock=time.process_time)
    return [
        {
            "shape": str(SHAPE), "what": what if name == what else f"{what}: {baseline}", "mode": "forward+backward",
            "engine": "auto" if name == what or baseline == WIDE else "SDPA", "ratio": f"{timing.ratio:.4f}",
            "baseline": baseline, **record.times(timing),
        }
        for name, timing in timings.items()
    ]  # fmt: skip


def step(function: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Callable[[], object]:
    leaves = list(inputs.values())
    dy = torch.randn(*inputs["q"].shape[:3], inputs["v"].shape[3])
    return lambda: torch.autograd.grad(function(**inputs), leaves, dy)


if __name__ == "__main__":
    main()
