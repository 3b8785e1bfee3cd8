"""Decoding with whole models: ``generate`` over a static cache, compiled by transformers on CUDA; ms per token.

``python benchmarks/generation.py`` writes rows of mode "generation" into the device's CSV. Every model is
transformers' Llama architecture of one preset with random weights: transformers' own with SDPA attention (the
baseline), and ours with each attention. A time is the median between two tokens of one generation, after its first
few; the models take turns in every round. Settings are processes of their own, which compile at the same time and are
timed one after another.
"""

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier, Lock
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn.measure import summary
from affine_attn.models import AffineAttnForCausalLM, export, preset
from benchmarks import readme, record

BASELINE = "transformers Llama (sdpa)"
console = Console(width=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama3.2-1b", help="architecture (default: %(default)s)")
    parser.add_argument("--attention", nargs="*", default=["softmax", "affine"], help="variants of ours to time")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32], help="sequences at once")
    parser.add_argument("--contexts", nargs="*", type=int, default=[2048, 8192], help="tokens in the cache at the end")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a generation")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="CSV to update; default benchmarks/results/<device>.csv")
    arguments = parser.parse_args()
    settings = list(itertools.product(arguments.batches, arguments.contexts))
    spawn = multiprocessing.get_context("spawn")
    compiled, turn = spawn.Barrier(len(settings)), spawn.Lock()
    processes = [spawn.Process(target=measure, args=(arguments, *setting, compiled, turn)) for setting in settings]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a setting failed, see above")
    if arguments.output is None:
        readme.main()


def measure(arguments: argparse.Namespace, batch: int, context: int, compiled: Barrier, turn: Lock) -> None:
    """One setting, in its process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = arguments.output or record.results_path(device)
    try:
        models = build(arguments.preset, arguments.attention, device)
        time_once = runner(models, batch, context, arguments.tokens)
        time_once()
    except BaseException:
        # The others must not wait for it.
        compiled.abort()
        raise
    compiled.wait()
    with turn:
        rounds = [time_once() for _ in range(arguments.rounds)]
        rows = rows_of(rounds, f"{arguments.preset} {context} x{batch}")
        for row in rows:
            console.print(f"{row['shape']}  {row['what']:28}  {row['ms_p50']} ms/token  x {row['ratio']}")
        # After every setting: an interrupted run keeps what it measured.
        old = record.read(path) if path.exists() else []
        record.write(path, record.merged(old, [row | record.provenance(device) for row in rows]))


def build(name: str, attentions: list[str], device: torch.device) -> dict[str, PreTrainedModel]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    softmax = AffineAttnForCausalLM(preset(name, "softmax")).to(device, dtype).eval()
    plain = export(softmax)
    plain.set_attn_implementation("sdpa")
    models = {BASELINE: plain}
    for attention in attentions:
        models[attention] = (
            softmax
            if attention == "softmax"
            else AffineAttnForCausalLM(preset(name, attention)).to(device, dtype).eval()
        )
    return models


def runner(models: dict[str, PreTrainedModel], batch: int, context: int, tokens: int) -> Callable[[], dict[str, float]]:
    """A function that gives the milliseconds per token of every model; its first call compiles."""
    vocabulary, device = models[BASELINE].config.vocab_size, models[BASELINE].device
    prompt = torch.randint(0, vocabulary, (batch, context - tokens), device=device)
    return lambda: {name: _token_ms(model, prompt, tokens, context) for name, model in models.items()}


def rows_of(rounds: list[dict[str, float]], shape: str) -> list[record.Row]:
    rows = []
    for name in rounds[0]:
        timing = summary([times[name] for times in rounds], [times[BASELINE] for times in rounds])
        rows.append(
            {
                "shape": shape,
                "what": name,
                "mode": "generation",
                "ms_p20": f"{timing.p20:.4f}",
                "ms_p50": f"{timing.p50:.4f}",
                "ms_p80": f"{timing.p80:.4f}",
                "ratio": f"{timing.ratio:.4f}",
                "baseline": BASELINE,
            }
        )
    return rows


class Clock(StoppingCriteria):
    """Never stops; notes when each token is there."""

    def __init__(self):
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _token_ms(model: PreTrainedModel, prompt: torch.Tensor, tokens: int, context: int) -> float:
    clock = Clock()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        max_cache_len=context,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    # The first ones warm up; what is compiled is compiled in them.
    waits = [later - earlier for earlier, later in itertools.pairwise(clock.seconds[tokens // 4 :])]
    return median(waits) * 1e3


if __name__ == "__main__":
    main()
