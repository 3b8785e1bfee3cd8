"""Decoding with whole models: ``generate`` over a static cache, compiled by transformers on CUDA; ms per token.

``python benchmarks/generation.py`` writes rows of mode "generation" into the device's CSV. Every model is
transformers' Llama architecture of one preset with random weights: transformers' own with SDPA attention (the
baseline), and ours with each attention. A time is the difference of two generations that differ in length alone, so
the prompt is not in it; the models take turns in every round.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel

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
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of the longer generation")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="CSV to update; default benchmarks/results/<device>.csv")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = arguments.output or record.results_path(device)
    models = build(arguments.preset, arguments.attention, device)
    machine = record.provenance(device)
    for batch in arguments.batches:
        for context in arguments.contexts:
            rows = timed(models, batch, context, arguments.tokens, arguments.rounds, f"{arguments.preset} {context}")
            for row in rows:
                console.print(f"{row['shape']}  {row['what']:28}  {row['ms_p50']} ms/token  x {row['ratio']}")
            # After every setting: an interrupted run keeps what it measured.
            old = record.read(path) if path.exists() else []
            record.write(path, record.merged(old, [row | machine for row in rows]))
    if arguments.output is None:
        readme.main()


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


def timed(
    models: dict[str, PreTrainedModel], batch: int, context: int, tokens: int, rounds: int, shape: str
) -> list[record.Row]:
    """Milliseconds per token of every model, interleaved."""
    device = next(iter(models.values())).device
    prompt = torch.randint(0, models[BASELINE].config.vocab_size, (batch, context - tokens), device=device)
    short = max(1, tokens // 6)
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, model in models.items():
            long_ms, short_ms = (_generate_ms(model, prompt, n, context) for n in (tokens, short))
            # The first round compiles.
            if number:
                times[name].append((long_ms - short_ms) / (tokens - short))
    rows = []
    for name, ms in times.items():
        timing = summary(ms, times[BASELINE])
        rows.append(
            {
                "shape": f"{shape} x{batch}",
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


def _generate_ms(model: PreTrainedModel, prompt: torch.Tensor, tokens: int, context: int) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        # One cache size for both lengths: the compiled step is the same.
        max_cache_len=context,
    )
    wait()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
