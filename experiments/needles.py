"""Table D's needles: a student learns to find them at the length of its training, and is asked at longer ones too."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import AutoTokenizer

from affine_attn.data.shards import TokenShards
from affine_attn.data.texts import encode, joined_shards
from affine_attn.distill.data import sequences
from affine_attn.evaluate.long_context import NEEDLES, needle_retrieval
from affine_attn.models import AffineAttnForCausalLM
from affine_attn.models.collect import evaluating
from experiments.grid import Group, Needles, Student
from experiments.learner import Learner, autocast, batches_of, room_for_graphs


def found(student: Student, model: AffineAttnForCausalLM, group: Group, asked: Needles) -> dict[str, float | None]:
    """``needle_LENGTH`` for the lengths of the group: the share found, a mean over depths; None after a training that
    diverged. It trains the model."""
    # As in arXiv 2505.17083: a third each of warmup, constant rate and decay.
    phase = asked.steps // 3
    recipe = replace(
        group.recipe,
        micro_batch=group.recipe.global_batch,
        teacher=None,
        needles=NEEDLES,
        steps=3 * phase,
        warmup_steps=phase,
        decay_steps=phase,
        statistics_steps=0,
    )
    learner = Learner(replace(student, learning_rate=asked.learning_rate), recipe, model.device, model)
    with room_for_graphs():
        for batch in batches_of(recipe, sequences(recipe), 0, model.device):
            learner.step(batch, None)
    learner.look()
    if learner.diverged is not None:
        return {f"needle_{length}": None for length in group.lengths}
    text = joined_shards(Path(recipe.data))
    tokenizer = AutoTokenizer.from_pretrained(TokenShards(recipe.data, 1).tokenizer)
    with torch.compiler.set_stance("force_eager"), evaluating(model), autocast(recipe, model.device):
        measured = {
            length: needle_retrieval(model, text, partial(encode, tokenizer), length, haystacks=asked.haystacks)
            for length in group.lengths
        }
    return {f"needle_{length}": result["metrics"]["accuracy"]["value"] for length, result in measured.items()}
