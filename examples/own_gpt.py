"""A GPT of your own with affine attention, trained on packed documents: ``python examples/own_gpt.py``.

Documents of different lengths share a row. Each token carries the number of its document, and attention keeps the
documents apart.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from affine_attn import Affine, AlphaGate, Mask, attention, track_alpha

VOCAB, DIM, HEADS, LENGTH = 64, 64, 4, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.alpha = AlphaGate(DIM, HEADS, Affine(length=LENGTH))
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        h = self.norm(x)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(h).chunk(3, dim=2))
        alpha = self.alpha(h)
        beta = self.alpha.beta(alpha, mask, keys=k.shape[2])
        y = attention(q, k, v, mask, alpha=alpha, beta=beta)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        x, mask = self.tokens(ids) + self.positions(positions), Mask(documents=documents)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def packed(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, documents and positions: rows of documents that count up from a random token."""
    ids, documents, positions = (torch.empty(rows, LENGTH, dtype=torch.int64) for _ in range(3))
    for row in range(rows):
        cuts = sorted({0, LENGTH, *torch.randint(1, LENGTH, (4,)).tolist()})
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            here = torch.arange(stop - start)
            ids[row, start:stop] = (torch.randint(VOCAB, ()) + here) % VOCAB
            documents[row, start:stop], positions[row, start:stop] = number, here
    return ids, documents, positions


def train(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    track_alpha(model, optimizer)
    losses = []
    for _ in range(steps):
        ids, documents, positions = packed(rows=8)
        logits = model(ids, documents, positions)
        # The first token of a document is not to be guessed from the one before it.
        targets = ids[:, 1:].where(documents[:, 1:] == documents[:, :-1], -100)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
