"""Table D's needles: a student learns to find them at the length of its training, and is asked at longer ones too."""

from dataclasses import replace
from statistics import fmean

import torch

from affine_attn.distill.data import sequences
from affine_attn.distill.needle import retrieval_accuracy
from affine_attn.distill.shards import TokenShards
from affine_attn.models import AffineAttnForCausalLM
from affine_attn.models.statistics import evaluating
from experiments.grid import PAPER_RATE, Group, Student
from experiments.learner import Learner, autocast, batches_of, room_for_graphs

# As in arXiv 2505.17083: 300 steps, a third each of warmup, constant rate and decay, three needles.
STEPS, NEEDLES = 300, 3
# Haystacks of each length and depth.
SAMPLES = 10


def found(student: Student, model: AffineAttnForCausalLM, group: Group) -> dict[str, float]:
    """``needle_LENGTH`` for the lengths of the group: the share found, a mean over depths. It trains the model."""
    phase = min(STEPS, group.recipe.steps) // 3
    recipe = replace(
        group.recipe,
        teacher=None,
        needles=NEEDLES,
        steps=3 * phase,
        warmup_steps=phase,
        decay_steps=phase,
        statistics_steps=0,
    )
    learner = Learner(replace(student, learning_rate=PAPER_RATE), recipe, model.device, model)
    with room_for_graphs():
        for batch in batches_of(recipe, sequences(recipe), 0, model.device):
            learner.step(batch, None)
    text = TokenShards(recipe.data, recipe.sequence_length, "valid", documents=False)
    with torch.compiler.set_stance("force_eager"), evaluating(model), autocast(recipe, model.device):
        rows = retrieval_accuracy(model, text, group.lengths, samples=SAMPLES, needles=NEEDLES)
    return {
        f"needle_{length}": fmean(row["accuracy"] for row in rows if row["length"] == length)
        for length in group.lengths
    }
