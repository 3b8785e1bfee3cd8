"""Decoding with whole models: ``generate`` over a static cache, compiled by transformers on CUDA; ms per token.

``python benchmarks/generation.py`` writes rows of mode "generation" into the device's CSV. Every model is
transformers' Llama architecture of one preset with random weights: transformers' own with SDPA attention (the
baseline), and ours with each attention. A time is the median between two tokens of one generation, after its first
few; the models take turns in every round. Every model of every setting is a process of its own: all compile at the same
time, which takes minutes one after another, and are timed one at a time.
"""

import argparse
import itertools
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._inductor.config
from rich.console import Console
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn.bench.timing import summary
from affine_attn.models import AffineAttnForCausalLM, export, preset
from benchmarks import readme, record

BASELINE = "transformers Llama (sdpa)"
console = Console(width=140)


# Of a prompt that only serves to compile: what is compiled depends on the cache's length, not on the prompt's.
_SHORT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="llama3.2-1b", help="architecture (default: %(default)s)")
    parser.add_argument("--attention", nargs="*", default=["softmax", "affine"], help="variants of ours to time")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32], help="sequences at once")
    parser.add_argument("--contexts", nargs="*", type=int, default=[2048, 8192], help="tokens in the cache at the end")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of a generation")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every model at least")
    parser.add_argument("--seconds", type=float, default=20, help="of turns at least, in each setting")
    parser.add_argument("--output", type=Path, help="CSV to update; default benchmarks/results/<device>.csv")
    arguments = parser.parse_args()
    if min(arguments.contexts) <= arguments.tokens:
        parser.error("--contexts must be longer than --tokens, which are the last of them")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = arguments.output or record.results_path(device)
    settings = list(itertools.product(arguments.batches, arguments.contexts))
    names = [BASELINE, *arguments.attention]
    begin = time.monotonic()
    # The processes share the cores; each would start as many workers as there are.
    threads = max(1, (os.cpu_count() or 1) // (len(settings) * len(names)))
    models = {
        (name, *setting): Timed(arguments.preset, name, *setting, arguments.tokens, threads)
        for setting in settings
        for name in names
    }
    for model in models.values():
        model.answer()
    console.print(f"compiled in {time.monotonic() - begin:.0f} s")
    for batch, context in settings:
        rounds, enough = [], time.monotonic() + arguments.seconds
        # Tokens of a small batch wait for the host, whose times scatter: what is quick gets more turns.
        while len(rounds) < arguments.rounds or time.monotonic() < enough:
            rounds.append({name: models[name, batch, context].ms() for name in names})
        rows = rows_of(rounds, f"{arguments.preset} {context} x{batch}")
        for row in rows:
            console.print(f"{row['shape']}  {row['what']:28}  {row['ms_p50']} ms/token  x {row['ratio']}")
        # After every setting: an interrupted run keeps what it measured.
        record.update(path, [row | record.provenance(device) for row in rows])
    if arguments.output is None:
        readme.main()


class Timed:
    """A model in a process of its own, which compiles at once and then waits to be asked."""

    def __init__(self, preset_name: str, name: str, batch: int, context: int, tokens: int, threads: int):
        spawn = multiprocessing.get_context("spawn")
        self._asked, theirs = spawn.Pipe()
        self.what = f"{name}, {context} x{batch}"
        # Daemons end with this process, however it ends.
        spawn.Process(
            target=_serve, args=(theirs, preset_name, name, batch, context, tokens, threads), daemon=True
        ).start()
        theirs.close()

    def answer(self) -> float:
        try:
            return self._asked.recv()
        except EOFError:
            raise SystemExit(f"{self.what} failed, see above") from None

    def ms(self) -> float:
        """Milliseconds per token of one generation."""
        self._asked.send(None)
        return self.answer()


def _serve(asked: Connection, preset_name: str, name: str, batch: int, context: int, tokens: int, threads: int) -> None:
    # Ctrl-C is for whoever asks, with whom this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch._inductor.config.compile_threads = threads
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(preset_name, name, device)
    prompt = torch.randint(0, model.config.vocab_size, (batch, context - tokens), device=device)
    token_ms(model, prompt[:, :_SHORT], tokens, context)
    asked.send(0.0)
    while _is_asked(asked):
        ms = token_ms(model, prompt, tokens, context)
        # The memory of a long prompt, for the next process.
        torch.cuda.empty_cache()
        asked.send(ms)


def _is_asked(asked: Connection) -> bool:
    try:
        asked.recv()
    except EOFError:
        return False  # whoever asked is done
    return True


def build(preset_name: str, name: str, device: torch.device) -> PreTrainedModel:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = "softmax" if name == BASELINE else name
    model: Any = AffineAttnForCausalLM(preset(preset_name, attention))
    model = model.to(device, dtype).eval()
    if name != BASELINE:
        return model
    plain = export(model)
    plain.set_attn_implementation("sdpa")
    return plain


def rows_of(rounds: list[dict[str, float]], shape: str) -> list[record.Row]:
    rows = []
    for name in rounds[0]:
        timing = summary([times[name] for times in rounds], [times[BASELINE] for times in rounds])
        about = {"shape": shape, "what": name, "mode": "generation", "baseline": BASELINE}
        rows.append(about | record.times(timing) | {"ratio": f"{timing.ratio:.4f}"})
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


def token_ms(model: PreTrainedModel, prompt: torch.Tensor, tokens: int, context: int) -> float:
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
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the settings that were finished are in the CSV") from None
