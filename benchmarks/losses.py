"""Times the distillation loss, forward and backward, against its floor and its rivals: python -m benchmarks.losses

The floor is the time of its four matmuls (logits of student and teacher, two gradients) at the rate of a large
matmul measured in the same rounds. Rivals: eager torch with full logits, and Liger's chunked loss where its package is
installed. Peak memory is above the inputs, weights and gradients. Rows go to benchmarks/results/losses/<device>.csv;
one whose gradients are wrong is not timed, and the command fails.
"""

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn.bench.timing import Timing, side_by_side
from affine_attn.distill import LossSpec, Teacher, chunked_loss
from benchmarks import record
from benchmarks.record import Row
from benchmarks.run import show
from benchmarks.steps import ceilings

FLOOR = "four products at the matmul rate"
# Relative to the largest entry of eager torch's gradient on the same numbers: twice what bf16 logits cost.
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}
# Liger's beta: its limits are the two divergences.
LIGER_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}

Step = Callable[[], tuple[Tensor, Tensor]]


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    teacher: Teacher


def main(arguments: list[str] | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = parsed(arguments)
    path = options.output or record.RESULTS / "losses" / record.results_path(device).name
    machine, failures = record.provenance(device), []
    for width in options.hidden:
        for kind in options.kinds:
            rows = [row | machine for row in rows_of(kind, width, options, device)]
            show(f"{kind}, {rows[0]['shape']}", rows)
            # After every group: an interrupted run keeps what it measured.
            record.update(path, rows)
            failures += [f"{row['shape']} {row['what']}: {row['note']}" for row in rows if row.get("note")]
    print(f"wrote {path}")
    if failures:
        raise SystemExit("not timed:\n" + "\n".join(failures))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument(
        "--hidden", type=int, nargs="+", default=[2048, 4096], help="sizes of student and teacher alike"
    )
    parser.add_argument("--kinds", nargs="+", default=["forward_kl", "jsd"], choices=list(LIGER_BETA))
    parser.add_argument(
        "--chunk-mib", type=int, nargs="+", default=[128, 256, 512, 1024], help="budgets for a chunk's logits"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=100.0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(arguments)


def rows_of(kind: str, width: int, options: argparse.Namespace, device: torch.device) -> list[Row]:
    inputs = made(options.tokens, options.vocabulary, width, device)
    shape = f"T{options.tokens} V{options.vocabulary} D{width}"
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    truth = None
    for what, engine, step in methods(kind, inputs, options.chunk_mib):
        row = rows[what] = {"shape": shape, "what": what, "engine": engine, "mode": f"{kind} forward+backward"}
        try:
            gradients = step()
        except Exception as problem:  # whatever a rival refuses with becomes the note of its row
            row["note"] = " ".join(f"{type(problem).__name__}: {problem}".split())[:400]
            continue
        truth = gradients if truth is None else truth
        error = max(_error(x, y) for x, y in zip(gradients, truth, strict=True))
        row["error"] = f"{error:.2e}"
        if error > TOLERANCE[inputs.hidden.dtype]:
            row["note"] = f"wrong: gradients differ by {error:.2e} from eager torch's"
            continue
        del gradients
        row["peak_mib"] = peak_mib(step, device)
        steps[what] = step
    del truth
    matmul, ceiling = next((what, step) for what, step in ceilings(device).items() if step.flops is not None)
    timings = side_by_side({matmul: ceiling.run, **steps}, matmul, device, options.rounds, options.round_ms)
    rate = ceiling.flops / timings[matmul].p50
    flops = 4 * 2.0 * options.tokens * options.vocabulary * width
    floor = Timing(*(flops / rate for _ in range(3)), 1.0)
    rows = {FLOOR: {"shape": shape, "what": FLOOR, "engine": "torch", "mode": f"{kind} forward+backward"}} | rows
    for what, timing in {FLOOR: floor, **timings}.items():
        if what in rows:
            rows[what] |= record.times(timing) | {
                "ratio": f"{timing.p50 / floor.p50:.4f}", "baseline": FLOOR,
                "tflops": f"{flops / timing.p50 / 1e9:.2f}",
            }  # fmt: skip
    return list(rows.values())


def made(tokens: int, vocabulary: int, width: int, device: torch.device) -> Inputs:
    """Logits with a spread of a few units, as a model's."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)

    def normal(rows: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, width, device=device, dtype=dtype) * scale

    teacher = Teacher(normal(tokens), normal(vocabulary, 2.0 * width**-0.5))
    return Inputs(normal(tokens).requires_grad_(), normal(vocabulary, 2.0 * width**-0.5).requires_grad_(), teacher)


def methods(kind: str, inputs: Inputs, budgets: list[int]) -> Iterator[tuple[str, str, Step]]:
    """Name, engine and step of each; the first defines what is right."""
    leaves = (inputs.hidden, inputs.weight)

    def differentiated(loss: Callable[[], Tensor]) -> Step:
        return lambda: torch.autograd.grad(loss(), leaves)

    yield "eager torch, full logits", "torch", differentiated(functools.partial(eager, kind, inputs))
    for mib in budgets:
        ours = functools.partial(ours_of, kind, inputs, mib * 2**20)
        yield f"chunked_loss, {mib} MiB", "torch.compile" if inputs.hidden.is_cuda else "torch", differentiated(ours)
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        liger = LigerFusedLinearJSDLoss(0.0, 1.0, beta=LIGER_BETA[kind], compiled=inputs.hidden.is_cuda)
        labels = torch.zeros(inputs.hidden.shape[0], dtype=torch.long, device=inputs.hidden.device)
        states = (*leaves, *inputs.teacher, labels, None, None)
        yield "Liger chunked", "liger", differentiated(lambda: liger(*states))


def ours_of(kind: str, inputs: Inputs, chunk_bytes: int) -> Tensor:
    return chunked_loss(*inputs, spec=LossSpec(kind), chunk_bytes=chunk_bytes).loss


def eager(kind: str, inputs: Inputs) -> Tensor:
    log_p = (inputs.hidden @ inputs.weight.T).float().log_softmax(-1)
    with torch.no_grad():
        log_q = (inputs.teacher.hidden @ inputs.teacher.weight.T).float().log_softmax(-1)
    divergence = functools.partial(F.kl_div, reduction="batchmean", log_target=True)
    if kind == "forward_kl":
        return divergence(log_p, log_q)
    if kind == "reverse_kl":
        return divergence(log_q, log_p)
    log_m = (0.5 * log_p.exp() + 0.5 * log_q.exp()).log()
    return 0.5 * divergence(log_m, log_q) + 0.5 * divergence(log_m, log_p)


def peak_mib(step: Step, device: torch.device) -> str:
    """Return the peak above the inputs and the gradients that the step returns; on CUDA alone."""
    if device.type != "cuda":
        return ""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = step()
    torch.cuda.synchronize()
    returned = sum(x.numel() * x.element_size() for x in gradients)
    return f"{(torch.cuda.max_memory_allocated() - before - returned) / 2**20:.1f}"


def _error(x: Tensor, truth: Tensor) -> float:
    return ((x - truth).abs().max() / truth.abs().max()).item()


if __name__ == "__main__":
    main()
