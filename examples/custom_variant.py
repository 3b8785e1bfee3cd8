"""A logit of your own, explained, checked and trained: ``python examples/custom_variant.py``.

A stage 1 is a frozen dataclass with one method. Every engine that takes any logit runs it, with exact gradients.
"""

from dataclasses import dataclass

import torch

from affine_attn import Affine, AttentionLayer, AttentionSpec, explain, track_alpha
from affine_attn.bench.accuracy import Shape, deviations, random_inputs
from affine_attn.core.spec import Coefficients, Logit


@dataclass(frozen=True)
class Recency(Logit):
    """A key t tokens back loses strength * sqrt(t) of its score."""

    strength: float = 0.1
    kind = "recency"
    same_in_all_heads = True

    def coefficients(self, distance, count, head, heads):
        # Keys ahead of the query are masked later; clamping keeps their offset finite.
        return Coefficients(None, -self.strength * distance.clamp(min=0).sqrt())


spec = AttentionSpec(logit=Recency(), sink="learned", affine=Affine(length=64), gate="headwise")


def errors() -> dict[str, float]:
    """Return the error of y and of every gradient over what the tolerance rule allows."""
    inputs = random_inputs(spec, Shape(batch=2, heads=4, kv_heads=2, tq=33, tk=33, head_dim=16))
    print(explain(**inputs))
    found = deviations("blocked", inputs)
    assert all(error.within for error in found)
    return {error.name: error.error for error in found}


def train(steps: int = 60) -> tuple[float, float]:
    """Return the loss before and after learning the mean of all tokens so far."""
    torch.manual_seed(0)
    layer = AttentionLayer(dim=32, heads=4, attention=spec, rope=None)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    track_alpha(layer, optimizer)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 64, 32)
        target = x.cumsum(1) / torch.arange(1, 65)[:, None]
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


if __name__ == "__main__":
    for name, error in errors().items():
        print(f"{name}: {error:.1e}")
    first, last = train()
    print(f"loss {first:.2f} -> {last:.2f}")
