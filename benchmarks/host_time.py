"""Time of the host for a call: what attention costs before a kernel has anything to do, on the CPU.

``python benchmarks/host_time.py --against COMMIT`` writes benchmarks/results/host/cpu.csv. The peer is
F.scaled_dot_product_attention. Of every tree, this one and the commit's, a process runs the cases; the processes take
turns, and in each so do ours and the peer. What counts is CPU time, with one thread; a number is the median of the
rounds, ratios are taken within a round.

With ``--cuda`` the cases are small eager calls on a GPU and their wall time, which goes to host/cuda.csv: "cuda" is one
call and its backward, "layers" a call of 16, each of which takes the output of the one before, with one backward. A
lone call waits twice for torch's thread of the device to wake up, and finds its caches cold.
``--against`` takes a folder as well, for a machine that has no git repository.

Case "sm90": forward and backward as on Hopper, with tensors on the CPU, an invented GPU and launches that do nothing.
Case "generate": whole models, [sequences, tokens of the prompt, new tokens]; the peer is transformers' Llama with SDPA,
of the same shape and weights.
"""

import argparse
import csv
import functools
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "host"
# [batch, heads, kv heads, tokens, head_dim].
SMALL, TINY, HOPPER = (1, 16, 4, 16, 64), (1, 4, 4, 1, 64), (1, 4, 2, 2048, 64)
ON_GPU, GENERATED = (1, 16, 4, 256, 64), (1, 16, 64)
STAGES, MASKS = ("softmax", "affine"), ("window", "documents", "padding", "lengths")
CASES = [
    *((shape, stages, "causal", mode) for shape in (SMALL, TINY) for stages in STAGES for mode in ("forward", "both")),
    *((SMALL, stages, mask, "forward") for stages in STAGES for mask in MASKS),
    (HOPPER, "affine", "causal", "sm90"),
    (HOPPER, "affine_gated", "causal", "sm90"),
    *((GENERATED, stages, "mini", "generate") for stages in STAGES),
    *((ON_GPU, stages, "causal", mode) for mode in ("cuda", "layers") for stages in (*STAGES, "affine_gated")),
]
MODES_ON_GPU, LAYERS = ("cuda", "layers"), 16
Case = tuple[tuple[int, ...], str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="COMMIT_OR_FOLDER", help="whose time is measured in turns")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--cuda", action="store_true", help="measure wall time of small calls on a GPU")
    parser.add_argument("--serve", metavar="TREE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        trees = {"now": str(ROOT)}
        if options.against is not None and Path(options.against).is_dir():
            trees["then"] = str(Path(options.against).resolve())
        elif options.against is not None:
            archive = subprocess.run(["git", "archive", options.against], cwd=ROOT, check=True, capture_output=True)
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tree:
                tree.extractall(folder, filter="data")
            trees["then"] = folder
        cases = [case for case in CASES if options.only in name_of(case) and (case[3] in MODES_ON_GPU) == options.cuda]
        rows = compare(trees, cases, options.rounds)
    if not options.only:
        file_name = "cuda.csv" if options.cuda else "cpu.csv"
        with (RESULTS / file_name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def name_of(case: Case) -> str:
    shape, stages, mask, mode = case
    return f"{'x'.join(map(str, shape))} {stages} {mask} {mode}"


def compare(trees: dict[str, str], cases: list[Case], rounds: int) -> list[dict[str, str]]:
    """Return a row for each case: microseconds of a call, over the peer's, and the surplus over that of ``then``."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    rows = []
    for is_sm90 in (False, True):
        chosen = [case for case in cases if (case[3] == "sm90") == is_sm90]
        if not chosen:
            continue
        interpreted = environment | ({"TRITON_INTERPRET": "1"} if is_sm90 else {})
        workers = {name: start(tree, interpreted) for name, tree in trees.items()}
        for case in chosen:
            rows.append(row(case, workers, rounds))
            print(*(f"{key} {value}" for key, value in rows[-1].items() if value), sep="  ", flush=True)
        for worker in workers.values():
            worker.communicate()
    return rows


def row(case: Case, workers: dict[str, subprocess.Popen], rounds: int) -> dict[str, str]:
    times = {name: [] for name in workers}
    for n in range(rounds + 1):
        for name, worker in workers.items() if n % 2 else reversed(workers.items()):
            print(CASES.index(case), file=worker.stdin, flush=True)
            times[name].append([float(number) for number in worker.stdout.readline().split()])
    (ours, peer), *then = ([list(x) for x in zip(*found[1:], strict=True)] for found in times.values())
    has_peer = min(peer) > 0
    found = {"case": name_of(case), "us": f"{median(ours):.1f}", "peer_us": "", "ratio": "", "surplus_ratio": ""}
    if has_peer:
        found["peer_us"] = f"{median(peer):.1f}"
        found["ratio"] = f"{median(a / b for a, b in zip(ours, peer, strict=True)):.2f}"
    if then:
        before, peer_before = then[0]
        surplus = [(a - b) / (c - d) for a, b, c, d in zip(ours, peer, before, peer_before, strict=True)]
        found["surplus_ratio"] = f"{median(surplus):.2f}"
    return found


def start(tree: str, environment: dict[str, str]) -> subprocess.Popen:
    command = [sys.executable, __file__, "--serve", tree]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment | {"PYTHONPATH": tree}, cwd=tree, **pipes)


def serve(tree: str) -> None:
    """Measure the case of each line of the input: microseconds of a call, and of the peer's."""
    sys.path.insert(0, tree)
    import torch

    torch.set_num_threads(1)
    made: dict[int, tuple[Callable, Callable | None]] = {}
    for line in sys.stdin:
        at = int(line)
        if at not in made:
            made[at] = calls(CASES[at])
        ours, peer = made[at]
        # In turns, so that what slows the machine slows both.
        # A generation is many calls already.
        turns, many = (1, 1) if CASES[at][3] == "generate" else (5, 10)
        timed = functools.partial(seconds, is_cuda=CASES[at][3] in MODES_ON_GPU, many=many)
        parts = [(timed(ours), 0.0 if peer is None else timed(peer)) for _ in range(turns)]
        print(*(1e6 * median(part) for part in zip(*parts, strict=True)), flush=True)


def seconds(call: Callable, is_cuda: bool, many: int, budget: float = 0.03) -> float:
    """Return the CPU time of a call, or its wall time on a GPU, from as many as take the budget, so many at a time."""
    import torch

    clock, finish = (time.perf_counter, torch.cuda.synchronize) if is_cuda else (time.process_time, lambda: None)
    call()
    finish()
    start, count = clock(), 0
    while clock() - start < budget:
        for _ in range(many):
            call()
        count += many
        finish()
    return (clock() - start) / count


def calls(case: Case) -> tuple[Callable, Callable | None]:
    """Return our call and the peer's."""
    import torch
    import torch.nn.functional as F

    from affine_attn import Mask, attention

    if case[3] == "generate":
        return generations(case)
    (batch, heads, kv_heads, tokens, dim), stages, mask_name, mode = case
    torch.manual_seed(0)
    dtype = torch.bfloat16 if mode in ("sm90", *MODES_ON_GPU) else torch.float32
    # Not as the default device, which is a mode that slows every function of torch.
    device = "cuda" if mode in MODES_ON_GPU else "cpu"
    q, dy = (torch.randn(batch, heads, tokens, dim, dtype=dtype, device=device) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, tokens, dim, dtype=dtype, device=device) for _ in range(2))
    tensors = [q, k, v]
    named = {}
    if stages.startswith("affine"):
        named = {name: torch.rand(batch, heads, tokens, device=device) for name in ("alpha", "beta")}
    if stages == "affine_gated":
        named["gate"] = torch.rand(batch, heads, tokens, dim, dtype=dtype, device=device)
    tensors += named.values()
    slots = torch.arange(tokens, device=device)[None].expand(batch, -1)
    masks = {
        "causal": lambda: Mask(),
        "window": lambda: Mask(window=4),
        "documents": lambda: Mask(documents=(slots // 7).contiguous()),
        "padding": lambda: Mask(padding=slots >= 2),
        "lengths": lambda: Mask(lengths=torch.full((batch,), tokens - 1, device=device)),
    }
    mask, backward = masks[mask_name](), mode != "forward"
    for x in tensors:
        x.requires_grad_(backward)
    grad = nullcontext if backward else torch.no_grad
    if mode == "sm90":
        invent_hopper()

    layers = LAYERS if mode == "layers" else 1

    def run(y_of: Callable, inputs: list) -> None:
        y = q
        with grad():
            for _ in range(layers):
                y = y_of(y)
        if backward:
            torch.autograd.grad(y, inputs, dy)

    def peer(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, k, v, is_causal=True, enable_gqa=True)

    ours = lambda: run(lambda x: attention(x, k, v, mask, **named), tensors)  # noqa: E731
    return ours, None if mode == "sm90" else lambda: run(peer, [q, k, v])


def generations(case: Case) -> tuple[Callable, Callable]:
    """Return greedy generations of our model and of the peer's, with caches that grow."""
    import torch

    from affine_attn.models import AffineAttnForCausalLM, export, preset

    (batch, prompted, new), stages, size, _ = case
    torch.manual_seed(0)
    plain = AffineAttnForCausalLM(preset(size, "softmax"))
    model = AffineAttnForCausalLM(preset(size, stages))
    model.load_state_dict(plain.state_dict(), strict=False)
    peer = export(plain)
    peer.set_attn_implementation("sdpa")
    prompt = torch.randint(0, peer.config.vocab_size, (batch, prompted))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new, "min_new_tokens": new}
    ours, theirs = (lambda m=m.eval(): m.generate(prompt, **options, do_sample=False) for m in (model, peer))
    return ours, theirs


def invent_hopper() -> None:
    """Let every module take the CPU for a GPU of compute capability 9.0, and every launch do nothing."""
    from triton.runtime import interpreter, jit

    for module in [m for name, m in list(sys.modules.items()) if name.startswith("affine_attn")]:
        if hasattr(module, "capability"):
            module.capability = lambda _: (9, 0)
    for kind in (jit.KernelInterface, interpreter.InterpretedFunction):
        kind.__getitem__ = lambda *_: lambda *_, **__: None


if __name__ == "__main__":
    main()
