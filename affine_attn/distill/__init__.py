"""Distillation pretraining: data, losses, teachers and the trainer."""
