"""Times whole decoders on a CPU, and the memory of a call: python -m benchmarks.decoders

A training step, optimizer included, and a left-padded forward of ``nano`` over transformers' Llama with SDPA, of the
same shape and weights: CPU time of one thread, in turns. And the peak of memory of a forward and backward over that of
F.scaled_dot_product_attention, each in a fresh process, as torch.profiler sees every allocation. Rows go to
benchmarks/results/<device>.csv. Generation is in benchmarks/host_time.py.
"""

import argparse
import functools
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn import ScaleInvariant, attention, track_alpha
from affine_attn.bench.timing import side_by_side
from affine_attn.models import AffineAttnForCausalLM, export, preset
from benchmarks import record
from benchmarks.record import Row

CPU = torch.device("cpu")
SIZE, TRAINED, PADDED = "nano", (2, 512), (8, 16, 128)  # sequences, tokens; prompts, from so many tokens to so many
LLAMA, VARIANTS = "transformers Llama (sdpa)", ("softmax", "affine", "scale_invariant")
SDPA, KEYS = "plain SDPA", 16384
Step = Callable[[], object]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoders", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="CSV to write; default: that of the device")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        path = options.output or record.results_path(CPU)
        found = decoders(SIZE)
        trained, padded = training_steps(found), padded_forwards(found)
        rows = timed(f"{SIZE}, training step", trained, options.rounds)
        rows += timed(f"{SIZE}, left-padded", padded, options.rounds)
        rows += memory_rows(KEYS)
        record.update(path, [row | record.provenance(CPU) for row in rows])
    finally:
        torch.set_num_threads(threads)
    print(f"wrote {path}")


def decoders(size: str) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = AffineAttnForCausalLM(preset(size, "softmax"))
    found: dict[str, Any] = {LLAMA: export(plain)}
    found[LLAMA].set_attn_implementation("sdpa")
    for name in VARIANTS:
        found[name] = AffineAttnForCausalLM(preset(size, name))
        found[name].load_state_dict(plain.state_dict(), strict=False)
    return found


def training_steps(models: dict[str, Any]) -> dict[str, Step]:
    tokens = torch.randint(0, models[LLAMA].config.vocab_size, TRAINED)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.train()
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    steps = {}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        track_alpha(model, optimizer)
        steps[name] = functools.partial(step, model, optimizer)
    return steps


def padded_forwards(models: dict[str, Any]) -> dict[str, Step]:
    prompts, least, most = PADDED
    lengths = torch.randint(least, most + 1, (prompts,), generator=torch.Generator().manual_seed(0))
    lengths[0], lengths[1] = most, least
    padding = (torch.arange(most) >= most - lengths[:, None]).long()
    tokens = torch.randint(0, models[LLAMA].config.vocab_size, padding.shape) * padding

    @torch.no_grad()
    def forward(model: nn.Module) -> Tensor:
        # Nothing that is remembered of a mask is there for a new one.
        return model.eval()(tokens, attention_mask=padding.clone()).logits

    return {name: functools.partial(forward, model) for name, model in models.items()}


def timed(shape: str, functions: dict[str, Step], rounds: int) -> list[Row]:
    rows = []
    for name, timing in side_by_side(functions, LLAMA, CPU, rounds, clock=time.process_time).items():
        rows.append({
            "shape": shape, "what": name, "mode": "decoders", "engine": "auto" if name != LLAMA else name,
            "ratio": f"{timing.ratio:.4f}", "baseline": LLAMA, **record.times(timing),
        })  # fmt: skip
        print(f"{shape}: {name} {timing.p50:.2f} ms, {timing.ratio:.2f}", flush=True)
    return rows


def memory_rows(tokens: int) -> list[Row]:
    peaks = {}
    for name in (SDPA, *VARIANTS):
        # A process has what it once imported or compiled; no case is measured after another.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peaks[name] = pool.apply(peak_mib, (name, tokens))
        print(f"memory, {tokens}: {name} {peaks[name]:.1f} MiB, {peaks[name] / peaks[SDPA]:.2f}", flush=True)
    return [
        {
            "shape": str(tokens), "what": name, "mode": "memory", "engine": "auto" if name != SDPA else name,
            "ratio": f"{peak / peaks[SDPA]:.4f}", "baseline": SDPA, "peak_mib": f"{peak:.1f}",
        }
        for name, peak in peaks.items()
    ]  # fmt: skip


def peak_mib(name: str, tokens: int) -> float:
    """Return the peak of a forward and backward of 8 query and 2 kv heads of 64 channels, inputs aside."""
    torch.set_num_threads(1)
    _step(name, 64)()
    step = _step(name, tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    recorded: list = profiled.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    allocations = sorted((e for e in recorded if e.name() == "[memory]"), key=lambda e: e.start_ns())
    current = peak = 0
    for event in allocations:
        current += event.nbytes()
        peak = max(peak, current)
    return peak / 2**20


def _step(name: str, tokens: int) -> Step:
    generator = torch.Generator().manual_seed(0)
    q, dy = (torch.randn(1, 8, tokens, 64, generator=generator) for _ in range(2))
    k, v = (torch.randn(1, 2, tokens, 64, generator=generator) for _ in range(2))
    stages = ("alpha", "beta") if name == "affine" else ()
    rows: dict[str, Any] = {x: torch.rand(1, 8, tokens, generator=generator) for x in stages}
    for x in (q, k, v, *rows.values()):
        x.requires_grad_()
    logit = ScaleInvariant() if name == "scale_invariant" else None

    def run() -> None:
        if name == SDPA:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = attention(q, k, v, logit=logit, **rows)
        y.backward(dy)

    return run


if __name__ == "__main__":
    main()
