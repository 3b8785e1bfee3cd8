"""Engine ``fa4`` beside plain FlashAttention-4: python3 benchmarks/fa4.py

Needs the package flash-attn-4 and a GPU that it runs on. Each shape has a process, in which everything is compiled and
checked against the tolerance rule, at once with the others; then they time one after the other, forward + backward,
GPU time, with q, k, v and gate laid out as models make them, [B, T, H, D] in memory. Ratios are to plain attention of
FlashAttention-4 under the same mask. A row is a pair of kernels, forward + backward, whichever engine has it. Rows go
to benchmarks/results/fa4/<device>.csv as they are found.

``--timings`` runs nothing: it writes affine_attn/engines/timings.json, by which "auto" chooses, from that file.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from affine_attn import Affine, AttentionSpec, Mask, attention
from affine_attn.bench.accuracy import Shape, deviations, random_inputs
from affine_attn.bench.timing import side_by_side
from affine_attn.core.call import checked_call
from affine_attn.engines import needs, operator, plan, timings
from affine_attn.engines.timings import Pair
from affine_attn.runs.files import write_text
from benchmarks import record
from benchmarks.record import RESULTS, Row

# (shape, window, mean length of documents); those that cost most to leave out come first.
SHAPES: dict[str, tuple[Shape, int | None, int | None]] = {
    "window 128": (Shape(4, 64, 8, 4096, 4096, 64), 128, None),
    "documents 512": (Shape(8, 32, 8, 4096, 4096, 64), None, 512),
    "window 1024": (Shape(2, 32, 8, 8192, 8192, 128), 1024, None),
    "documents 1024": (Shape(2, 32, 8, 8192, 8192, 128), None, 1024),
    "D96": (Shape(4, 32, 8, 4096, 4096, 96), None, None),
    "D256": (Shape(4, 16, 4, 4096, 4096, 256), None, None),
    "1B, T = 1999": (Shape(16, 32, 8, 1999, 1999, 64), None, None),
    "512": (Shape(64, 32, 8, 512, 512, 64), None, None),
    "1024": (Shape(16, 24, 8, 1024, 1024, 128), None, None),
    "0.5B": (Shape(16, 16, 16, 2048, 2048, 64), None, None),
    "1B": (Shape(16, 32, 8, 2048, 2048, 64), None, None),
    "3B": (Shape(8, 24, 8, 2048, 2048, 128), None, None),
    "8k": (Shape(2, 24, 8, 8192, 8192, 128), None, None),
    "16k": (Shape(1, 32, 8, 16384, 16384, 128), None, None),
    "32k": (Shape(1, 24, 8, 32768, 32768, 128), None, None),
}
EVERYTHING = AttentionSpec(sink="learned", affine=Affine(), gate="elementwise")
STAGES = {"sink": ("sink",), "affine": ("alpha", "beta"), "affine_gated": ("alpha", "beta", "gate")}
PLAIN = "FlashAttention-4"
ROUND_MS = 12.0
# Of a check: several tiles, none of them full.
CHECKED_TOKENS, CHECKED_DOCUMENTS, CHECKED_WINDOW = 555, 90, 200
# Shapes that are timed in deterministic mode too, with this stage.
DETERMINISTIC, OF_DETERMINISTIC = ("1B", "3B", "8k", "window 128", "documents 512"), "affine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=ROUND_MS)
    parser.add_argument("--patience", type=float, default=240.0, help="seconds that compiling may take")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further shape is timed")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--timings", action="store_true", help="write the table of the plan, and time nothing")
    options = parser.parse_args()
    if options.timings:
        rows = record.read(options.output or RESULTS / "fa4" / "nvidia-h200.csv")
        write_text(timings.PATH, timings.written(table(rows)))
        return
    start = time.perf_counter()
    device = torch.device("cuda")
    machine, output = record.provenance(device), options.output or RESULTS / "fa4" / record.results_path(device).name
    context = multiprocessing.get_context("spawn")
    turn = context.Lock()
    ready = {name: context.Event() for name in options.shapes}
    go = context.Event()
    workers = [
        context.Process(target=work, args=(name, options, output, machine, ready[name], go, turn, time.time()))
        for name in options.shapes
    ]
    for worker in workers:
        worker.start()
    for name, event in ready.items():
        if not event.wait(max(0.0, options.patience - (time.perf_counter() - start))):
            print(f"{name}: not ready in time", flush=True)
    print(f"all checked after {time.perf_counter() - start:.0f} s", flush=True)
    go.set()
    for worker in workers:
        worker.join()
    print(f"done after {time.perf_counter() - start:.0f} s", flush=True)
    if failed := [name for name, worker in zip(options.shapes, workers, strict=True) if worker.exitcode]:
        raise SystemExit(f"not all of these ran: {', '.join(failed)}")


def work(
    name: str, options: argparse.Namespace, output: Path, machine: Row, ready: Any, go: Any, turn: Any, start: float
) -> None:
    device = torch.device("cuda")
    torch.set_num_threads(1)
    try:
        rows, timed = prepare(name, device)
    finally:
        ready.set()
    go.wait()
    with turn:
        try:
            if time.time() - start > options.budget:
                raise SystemExit(f"{name}: no time left")
            if PLAIN not in timed:
                raise SystemExit(f"{name}: {PLAIN} did not run")
            found = side_by_side(timed, PLAIN, device, options.rounds, options.round_ms)
            for what, timing in found.items():
                rows[what] |= record.times(timing) | {"ratio": f"{timing.ratio:.4f}", "baseline": PLAIN}
        finally:
            # What was checked and could not be timed has its rows too.
            record.update(output, [row | machine for row in rows.values()])
            for row in rows.values():
                print(
                    f"{name:15} {row['what']:34} {row['engine']:12} {row.get('ms_p50', ''):>9} "
                    f"{row.get('ratio', ''):>7} {row.get('error', '')} {row.get('note', '')}",
                    flush=True,
                )


def prepare(name: str, device: torch.device) -> tuple[dict[str, Row], dict[str, Callable[[], object]]]:
    """Return a row per case, and what is to be timed: all that runs, and is right where it is ours."""
    shape, window, mean = SHAPES[name]
    rows: dict[str, Row] = {}
    timed: dict[str, Callable[[], object]] = {}
    inputs, mask = inputs_of(shape, device), mask_of(shape, window, mean, device)
    dy = _by_token(torch.randn_like(inputs["q"]))
    torch.cuda.empty_cache()  # the others have inputs too
    small = Shape(2, 2 * shape.heads // shape.kv_heads, 2, CHECKED_TOKENS, CHECKED_TOKENS, shape.head_dim)
    small_mask = mask_of(small, window and CHECKED_WINDOW, mean and CHECKED_DOCUMENTS, device)

    def add(what: str, engine: str, make: Callable[[], Callable[[], object]]) -> None:
        row = rows[what] = {"shape": name, "what": what, "engine": engine, "mode": "forward+backward"}
        try:
            function = make()
            for _ in range(2):
                function()
            torch.cuda.synchronize()
            timed[what] = function
        except Exception as problem:  # whatever it refuses with becomes the note of its row
            row["note"] = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]

    def ours(stages: tuple[str, ...], impl: str, pair: Pair) -> Callable[[], object]:
        with planned(pair):
            found = deviations(
                impl, _chosen(random_inputs(EVERYTHING, small, torch.bfloat16, device), stages), small_mask
            )
        row = next(reversed(rows.values()))
        row["error"] = f"{max(d.error for d in found):.2e}"
        if wrong := [f"{d.name} {d.error:.2e} > {d.allowed:.2e}" for d in found if not d.within]:
            raise AssertionError(f"wrong: {', '.join(wrong)}")
        chosen = _chosen(inputs, stages)
        leaves = {n: x.detach().requires_grad_() for n, x in chosen.items() if isinstance(x, Tensor)}
        both = partial(_both, partial(attention, **leaves, mask=mask, impl=impl), list(leaves.values()), dy)
        return partial(_planned, pair, both)

    add(PLAIN, "flash-attn-4", lambda: _flash_attn_4(inputs, mask, dy))
    add(f"{PLAIN}, sink", "flash-attn-4", lambda: _flash_attn_4(inputs, mask, dy, inputs["sink"]))
    for variant, stages in STAGES.items():
        for engine, pair in pairs(_chosen(inputs, stages), mask):
            add(f"{variant}, {' + '.join(pair)}", engine, partial(ours, stages, engine, pair))
    if name in DETERMINISTIC:
        add(f"{PLAIN}, deterministic", "flash-attn-4", lambda: _flash_attn_4(inputs, mask, dy, deterministic=True))
        make = partial(ours, STAGES[OF_DETERMINISTIC], "fa4", ("fa4", "fa4"))
        add(f"{OF_DETERMINISTIC}, deterministic", "fa4", lambda: partial(_deterministic, make()))
    torch.cuda.empty_cache()
    return rows, timed


@contextmanager
def planned(pair: Pair) -> Iterator[None]:
    """Let calls have these kernels, whatever the plan says."""
    forward, backward = pair
    # Engines look it up when they run.
    original = operator.kernels
    operator.kernels = lambda name, f, s: original(name, f, s)._replace(forward=forward, backward=backward)
    try:
        yield
    finally:
        operator.kernels = original


def _planned(pair: Pair, function: Callable[[], object]) -> object:
    with planned(pair):
        return function()


def _deterministic(function: Callable[[], object]) -> object:
    # That empty tensors are filled is no part of it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        return function()
    finally:
        torch.use_deterministic_algorithms(False)


def pairs(inputs: dict[str, Any], mask: Mask) -> list[tuple[str, Pair]]:
    """Return (engine, kernels) of all that can run a call in training: those of its plans, and sm90 kernels in turns
    with others."""
    call = checked_call(**inputs, mask=mask)
    f = needs.facts_of(call)._replace(has_grad=True)
    s = needs.sizes_of(call, f)
    others = {name: entry for name, entry in plan.ENGINES.items() if name != "fa4"}
    other = next(name for name, entry in others.items() if entry.only_by_name(f) is None and entry.why_not(f) is None)
    fa4, stock = plan.fa4(f), plan.stock(f) if other == "sdpa" else "flash"
    found = [("fa4", (fa4, fa4))]
    if needs.sm90_forward(f, s) is None:
        found += [("fa4", ("sm90", fa4)), (other, ("sm90", "sm90")), (other, ("sm90", stock))]
    else:
        found += [(other, (stock, stock))]
    if stock == "flash2" and mask.window is None:
        found += [(other, ("cudnn", "cudnn"))]
    return found


def table(rows: list[Row]) -> dict[timings.Point, dict[Pair, float]]:
    """Return what the plan reads: where shapes have all of a point in common, the geometric mean of theirs."""
    found: dict[timings.Point, dict[Pair, list[float]]] = {}
    for row in rows:
        variant, _, pair = row["what"].partition(", ")
        if variant in STAGES and " + " in pair and row["ratio"]:
            shape, window, mean = SHAPES[row["shape"]]
            mask = timings.DOCUMENTS if mean else timings.WINDOW if window else timings.CAUSAL
            heads = timings.OWN if shape.heads == shape.kv_heads else timings.SHARED
            point = timings.Point(mask, shape.head_dim, shape.tq, variant, heads)
            forward, backward = pair.split(" + ")
            found.setdefault(point, {}).setdefault((forward, backward), []).append(float(row["ratio"]))
    return {
        point: {pair: round(prod(times) ** (1 / len(times)), 4) for pair, times in found[point].items()}
        for point in sorted(found)
    }


def inputs_of(shape: Shape, device: torch.device) -> dict[str, Any]:
    inputs = random_inputs(EVERYTHING, shape, torch.bfloat16, device)
    return {n: _by_token(x) if isinstance(x, Tensor) and x.ndim == 4 else x for n, x in inputs.items()}


def mask_of(shape: Shape, window: int | None, mean: int | None, device: torch.device) -> Mask:
    """Return the mask; lengths of documents are exponential with this mean, and at least 16."""
    if mean is None:
        return Mask(window=window)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(shape.batch):
        lengths = torch.empty(shape.tk // 16).exponential_(1 / mean, generator=generator).clamp(min=16).long()
        rows.append(torch.repeat_interleave(torch.arange(lengths.numel()), lengths)[: shape.tk])
    documents = torch.stack(rows)
    count = int((documents.diff(dim=1) != 0).sum()) + shape.batch
    return Mask(window=window, documents=documents.to(device), contiguous=True, most_documents=count)


def _flash_attn_4(
    inputs: dict[str, Any], mask: Mask, dy: Tensor, sink: Tensor | None = None, deterministic: bool = False
) -> Callable[[], object]:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    tensors = [inputs[name].transpose(1, 2) for name in "qkv"]
    dy = dy.transpose(1, 2)
    window = (None, None) if mask.window is None else (mask.window - 1, 0)
    options: dict[str, Any] = {"causal": True, "window_size": window, "learnable_sink": sink}
    options["deterministic"] = deterministic
    function = flash_attn_func
    if mask.documents is not None:
        function = flash_attn_varlen_func
        tokens = inputs["q"].shape[2]
        starts_q, starts_k = mask.cu_seqlens(tokens, tokens)
        options |= {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": tokens, "max_seqlen_k": tokens}
        tensors, dy = [x.flatten(0, 1) for x in tensors], dy.flatten(0, 1)
    leaves = [x.detach().requires_grad_() for x in tensors]
    if sink is not None:
        options["learnable_sink"] = sink.detach().requires_grad_()
    wanted = leaves if sink is None else [*leaves, options["learnable_sink"]]

    def forward() -> Tensor:
        y = function(*leaves, **options)
        return y[0] if isinstance(y, tuple) else y

    return partial(_both, forward, wanted, dy)


def _both(forward: Callable[[], Tensor], tensors: list[Tensor], dy: Tensor) -> object:
    return torch.autograd.grad(forward(), tensors, dy)


def _chosen(inputs: dict[str, Any], stages: tuple[str, ...]) -> dict[str, Any]:
    return {name: inputs[name] for name in ("q", "k", "v", *stages)}


def _by_token(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


if __name__ == "__main__":
    main()
