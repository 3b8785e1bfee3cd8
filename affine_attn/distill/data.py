"""What a recipe trains on and what it holds out."""

from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from affine_attn.data.needles import NeedleSequences
from affine_attn.data.shards import TokenShards, read_manifest
from affine_attn.distill.cache import CachedShards
from affine_attn.distill.recipes import Recipe

Sequences = TokenShards | NeedleSequences


def sequences(recipe: Recipe, split: str = "train") -> Sequences:
    place: tuple[Any, ...] = (recipe.data, recipe.sequence_length, split, recipe.documents)
    if recipe.teacher_cache is not None:
        vocabulary = recipe.shared_vocab or recipe.student_config.vocab_size
        return CachedShards(*place, cache=recipe.teacher_cache, vocabulary=vocabulary, top_k=recipe.top_k)
    text = TokenShards(*place)
    if recipe.needles == 0:
        return text
    # None of them twice, nor held out: numbers that come back would be learned by heart.
    trained = recipe.steps * recipe.global_batch
    number, first = (trained, 0) if split == "train" else (recipe.valid_sequences, trained)
    return NeedleSequences(text, number, recipe.needles, recipe.seed, first)


def held_out(recipe: Recipe) -> Subset[dict[str, Tensor]] | None:
    """Return at most ``valid_sequences`` held-out ones; None where none are asked for or the data has less than one."""
    tokens = sum(shard["tokens"] for shard in read_manifest(recipe.data)["shards"]["valid"])
    if recipe.valid_sequences == 0 or tokens < recipe.sequence_length:
        return None
    valid = sequences(recipe, "valid")
    return Subset(valid, range(min(recipe.valid_sequences, len(valid))))
