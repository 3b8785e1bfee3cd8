"""Groups one after the other, until the time is up."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from affine_attn.distill.compiled import compile_layers
from affine_attn.distill.recipes import Recipe
from affine_attn.distill.run import training_arguments
from affine_attn.distill.teacher import frozen
from affine_attn.models.load import load
from affine_attn.runs.provenance import environment
from experiments.grid import Group
from experiments.learner import device_here
from experiments.side_by_side import train


def carry_out(groups: Sequence[Group], output: Path, deadline: float, commit: str | None = None) -> bool:
    """True: all are finished. Groups share the teacher of the first."""
    first = groups[0].recipe
    if any((group.recipe.teacher, group.recipe.dtype) != (first.teacher, first.dtype) for group in groups):
        raise ValueError("groups that are carried out together must have one teacher")
    logging.disable_progress_bar()
    teacher = _teacher(first)
    # Also switches on TF32 for what autocast leaves in fp32, as in affine-attn distill.
    about: dict[str, Any] = environment(training_arguments(first, output))
    commit = commit or about.get("commit")
    if commit is None:
        raise ValueError("git cannot be asked for the commit of this code: give --commit")
    for group in groups:
        seeded = about | {"commit": commit, "seed": group.recipe.seed, "data_seed": group.recipe.seed}
        if not train(group, teacher, output / group.name, deadline, seeded):
            return False
        # Compiled models are cycles, which reference counts do not end, and the next group needs their room.
        gc.collect()
        torch.cuda.empty_cache()
    return True


def _teacher(recipe: Recipe) -> PreTrainedModel | None:
    if recipe.teacher is None:
        return None
    teacher = frozen(load(recipe.teacher, dtype=getattr(torch, recipe.dtype)), device_here())
    if recipe.compile:
        compile_layers(teacher)
    return teacher
