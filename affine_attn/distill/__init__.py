"""Distillation pretraining: students trained from scratch against a teacher's soft targets."""

from affine_attn.distill.losses import KINDS, Logits, Loss, LossSpec, Teacher, TopK, chunked_loss, next_tokens

__all__ = ["KINDS", "Logits", "Loss", "LossSpec", "Teacher", "TopK", "chunked_loss", "next_tokens"]
