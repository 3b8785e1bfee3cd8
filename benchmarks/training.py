"""Trains whole models for a few steps and says how fast: python benchmarks/training.py

Every case is ``DistillTrainer`` on random tokens, or on the text of --data: plain pretraining with each attention, then
distillation from a random teacher. Cases take turns; a step's time is between two logged steps, the first ones left
out: they compile. With text let --warm-up leave out more of them: the clocks of a GPU at its power limit depend on the
numbers it multiplies, and random weights are no fair sample of those (docs/scaling.md). MFU counts matmuls and
causal attention of the student's training and the teacher's forward, recomputation not, as
``estimate.flops_per_token``. Rows go to benchmarks/results/training/<device>.csv.
"""

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import Dataset
from transformers.trainer_utils import SaveStrategy

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn.bench.timing import summary
from affine_attn.data.shards import TokenShards, read_manifest
from affine_attn.distill.estimate import PEAKS, flops_per_token, size, teacher_config
from affine_attn.distill.recipes import Recipe
from affine_attn.distill.run import training_arguments
from affine_attn.distill.trainer import DistillTrainer
from affine_attn.models import AffineAttnForCausalLM, preset
from affine_attn.runs.layout import RunFolder
from benchmarks import record

console = Console(width=140)


class RandomTokens(Dataset):
    """Sequences as shards give them, of one document each."""

    def __init__(self, sequences: int, sequence_length: int, vocab_size: int):
        self.sequences, self.sequence_length, self.vocab_size = sequences, sequence_length, vocab_size

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(i)
        tokens = torch.randint(self.vocab_size, (self.sequence_length + 1,), generator=generator)
        return {"input_ids": tokens[:-1], "shift_labels": tokens[1:]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", default="llama3.2-1b", help="preset (default: %(default)s)")
    parser.add_argument("--teacher", default="llama3.2-3b", help="preset, or none (default: %(default)s)")
    parser.add_argument("--attention", nargs="*", default=["softmax", "affine"])
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences of a forward")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--data", help="folder of shards (affine-attn prepare); default: random tokens")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before the timed ones (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of every turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="decoder layers as they are")
    parser.add_argument("--output", type=Path, help="CSV to update")
    options = parser.parse_args(arguments)
    if options.data is not None:
        _require_text(options.data, options.student)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = options.output or record.RESULTS / "training" / record.results_path(device).name
    machine = record.provenance(device)
    for teacher in dict.fromkeys([None, None if options.teacher == "none" else options.teacher]):
        rows = timed([recipe_of(options, attention, teacher) for attention in options.attention], options, device)
        for row in rows:
            console.print(
                f"{row['shape']}  {row['mode']}  {row['what']:10} {row['ms_p50']} ms/step  x {row['ratio']}  "
                f"{row['tokens_per_second']} tokens/s  MFU {row['mfu'] or 'unknown'}  {row['peak_mib']} MiB",
                markup=False,
            )
        # After every group: an interrupted run keeps what it measured.
        record.update(path, [row | machine for row in rows])


def _require_text(data: str, student: str) -> None:
    try:
        found = read_manifest(data)["vocab_size"]
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if found > (known := preset(student, "softmax").vocab_size):
        raise SystemExit(f"{data} has {found} token ids, {student} only {known}")


def recipe_of(options: argparse.Namespace, attention: str, teacher: str | None) -> Recipe:
    steps = options.warm_up + options.steps
    return Recipe(
        student=options.student, attention=attention, teacher=teacher, sequence_length=options.sequence_length,
        micro_batch=options.micro_batch, global_batch=options.micro_batch * options.accumulation,
        steps=steps, warmup_steps=0, decay_steps=0, save_steps=steps + 1, compile=options.compile,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
    )  # fmt: skip


def timed(recipes: list[Recipe], options: argparse.Namespace, device: torch.device) -> list[record.Row]:
    # One number per round; every second round backwards, so that a machine that warms up favours nobody.
    ms: dict[str, list[float]] = {recipe.attention: [] for recipe in recipes}
    memory: dict[str, float] = {}
    for number in range(options.rounds):
        for recipe in recipes if number % 2 == 0 else reversed(recipes):
            step_ms, memory[recipe.attention] = trained(recipe, device, options.data, options.warm_up)
            ms[recipe.attention].append(step_ms)
    rows, baseline, peak = [], recipes[0].attention, PEAKS.get(record.device_name(device))
    for recipe in recipes:
        timing = summary(ms[recipe.attention], ms[baseline])
        config = teacher_config(recipe)
        flops = flops_per_token(recipe, size(recipe.student_config), None if config is None else size(config))
        rate = recipe.global_batch * recipe.sequence_length / timing.p50 * 1e3
        rows.append({
            "shape": recipe.student, "what": recipe.attention, "engine": "DistillTrainer",
            "mode": f"{'pretraining' if recipe.teacher is None else f'distillation from {recipe.teacher}'}, "
            f"{options.accumulation} x {recipe.micro_batch} sequences of {recipe.sequence_length}, "
            f"{'text' if options.data else 'random tokens'} after {options.warm_up} steps",
            "ms_p20": f"{timing.p20:.1f}", "ms_p50": f"{timing.p50:.1f}", "ms_p80": f"{timing.p80:.1f}",
            "ratio": f"{timing.ratio:.4f}", "baseline": baseline, "tokens_per_second": f"{rate:.0f}",
            "tflops": f"{rate * flops / 1e12:.1f}", "mfu": "" if peak is None else f"{rate * flops / peak:.4f}",
            "peak_mib": f"{memory[recipe.attention]:.0f}",
        })  # fmt: skip
    return rows


def trained(recipe: Recipe, device: torch.device, data: str | None, warm_up: int) -> tuple[float, float]:
    """Milliseconds of a step after the warm-up, and the peak of memory."""
    # What a trainer takes of shards is their sequences and their length.
    dataset: Any
    if data is None:
        vocabulary = recipe.student_config.vocab_size
        dataset = RandomTokens(recipe.steps * recipe.global_batch, recipe.sequence_length, vocabulary)
    else:
        dataset = TokenShards(data, recipe.sequence_length, documents=False)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with torch.device(device):
        model = AffineAttnForCausalLM(recipe.student_config)
        teacher = None
        if recipe.teacher is not None:
            config = preset(recipe.teacher, "softmax", vocab_size=recipe.student_config.vocab_size)
            teacher = AffineAttnForCausalLM(config).to(getattr(torch, recipe.dtype))  # pyright: ignore[reportArgumentType]
    # Outside that context, as users train: under it torch.compile sees other functions.
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(recipe, Path(folder))
        args.save_strategy = SaveStrategy.NO
        trainer = DistillTrainer(model, args, dataset, teacher=teacher, loss=recipe.loss_spec, compile=recipe.compile)
        trainer.train()
        lines = RunFolder(Path(folder)).metrics.rows()
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
    tokens = recipe.global_batch * recipe.sequence_length
    del trainer, model, teacher
    gc.collect()
    torch.cuda.empty_cache()
    return median(tokens / line["tokens_per_second"] * 1e3 for line in lines[warm_up:]), peak


if __name__ == "__main__":
    main()
