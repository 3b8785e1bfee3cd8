"""python -m affine_attn.cli, as torchrun starts it."""

from affine_attn.cli import app

app()
