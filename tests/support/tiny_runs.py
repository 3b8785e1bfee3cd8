"""Runs of seconds: shards of counting tokens, a recipe for them, and what a run leaves."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from affine_attn.data import shards
from affine_attn.distill.recipes import Recipe
from affine_attn.distill.run import training_arguments
from affine_attn.distill.trainer import DistillTrainer
from affine_attn.models import AffineAttnForCausalLM
from affine_attn.nn.alpha import alpha_gates
from affine_attn.runs.files import write_json
from experiments import grid

VOCAB, LENGTH = 64, 16


def counting_shards(folder: Path, seed: int = 0, held_out: int = 12) -> Path:
    """Documents of counting tokens: easy to learn, of lengths that put boundaries inside sequences, and the same on
    every machine, whatever its libraries' random numbers."""
    parts = {}
    for split, documents in (("train", range(120)), ("valid", range(120, 120 + held_out))):
        writer = shards.ShardWriter(folder, f"{split}-00000", np.dtype("<u2"))
        for i in documents:
            start, length = (37 * i + seed) % (VOCAB - 1), 5 + 11 * i % 35
            writer.append(np.append((start + np.arange(length)) % (VOCAB - 1) + 1, 0))
        parts[split] = writer.commit()
    manifest = {"version": shards.VERSION, "vocab_size": VOCAB, "dtype": "uint16", "shards": parts}
    write_json(folder / shards.MANIFEST, manifest)
    return folder


def tiny(data: Path, **changes) -> Recipe:
    fields = {
        "student": "nano",
        "teacher": None,
        "vocab_size": VOCAB,
        "data": str(data),
        "sequence_length": LENGTH,
        "global_batch": 4,
        "micro_batch": 4,
        "steps": 6,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "decay_steps": 2,
        "dtype": "float32",
        "compile": False,
        "save_steps": 100,
        "workers": 0,
    }
    return Recipe(**(fields | changes))


def trainer(chosen: Recipe, output: Path, teacher: PreTrainedModel | None = None) -> DistillTrainer:
    torch.manual_seed(chosen.seed)
    student = AffineAttnForCausalLM(chosen.student_config)
    dataset = shards.TokenShards(chosen.data, chosen.sequence_length, documents=chosen.documents)
    args = training_arguments(chosen, output)
    args.disable_tqdm = True
    return DistillTrainer(student, args, dataset, teacher=teacher, loss=chosen.loss_spec, compile=chosen.compile)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def averages(model: torch.nn.Module) -> torch.Tensor:
    return torch.stack([gate.alpha_ma for gate in alpha_gates(model)])


def a_group(recipe, *names: str, name: str = "a-test", rate: float = 1e-2, table: str = "a") -> grid.Group:
    students = tuple(
        grid.Student(variant=entry, attention=spec, learning_rate=rate)
        for entry in names
        for spec in replace(recipe, attention=entry).specs
    )
    return grid.Group(name=name, table=table, recipe=recipe, students=students, lengths=(LENGTH,))
