"""Distillation pretraining: students trained from scratch against a teacher's soft targets."""

from affine_attn.distill.losses import KINDS, Loss, LossSpec, Teacher, TopK, chunked_loss, next_tokens

__all__ = ["KINDS", "Loss", "LossSpec", "Teacher", "TopK", "chunked_loss", "next_tokens"]
