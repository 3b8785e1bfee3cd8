"""The order in which sequences are seen: fixed by a seed, the same for any number of ranks, resumed in no time."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from affine_attn.errors import UserError

ROUNDS = 8
BLOCK = 1 << 14


def shuffled(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Entries of a permutation of range(size), without the rest of it.

    A Feistel network is a bijection of 2h-bit numbers whatever its round function; a result that is not below ``size``
    goes through it again, which makes it one of range(size). At most four passes are expected.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def encrypt(values: np.ndarray) -> np.ndarray:
        left, right = values >> shift, values & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << shift) | right

    result = encrypt(positions.astype(np.uint64))
    while (outside := np.flatnonzero(result >= size)).size:
        result[outside] = encrypt(result[outside])
    return result.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every output bit depends on every input bit (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class GlobalSampler(Sampler[int]):
    """Sample number g of a run is entry g mod size of the permutation of (seed, epoch g // size).

    It spans the whole run, ``samples`` numbers over as many epochs as that takes, so no batch is cut or padded at the
    end of an epoch, and optimizer step s always has the samples s * global_batch up to (s + 1) * global_batch. It is
    one epoch to Trainer: give it max_steps and ``samples=max_steps * global_batch``.

    Under accelerate (so in Trainer) leave rank and world alone: it deals out batches to ranks by itself. In a loop of
    your own, rank r of ``world`` gets every world-th run of ``batch_size`` samples, which is the same layout.

    ``consumed`` counts global samples that were trained on. Iteration starts there, at no cost. The training loop moves
    it on (``advance``): the sampler cannot, because the workers of a DataLoader draw numbers ahead of training. Trainer
    skips by itself when it resumes; there ``consumed`` must stay 0.
    """

    def __init__(
        self, size: int, samples: int | None = None, seed: int = 0, batch_size: int = 1, rank: int = 0, world: int = 1
    ):
        if size < 1 or batch_size < 1 or not 0 <= rank < world:
            raise UserError(
                f"need size and batch_size of 1 or more and 0 <= rank < world, "
                f"got size={size}, batch_size={batch_size}, rank={rank}, world={world}"
            )
        self.size, self.samples, self.seed = size, size if samples is None else samples, seed
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.consumed = 0
        if world > 1 and self.samples % (batch_size * world):
            raise UserError(
                f"{self.samples} samples do not divide into batches of {batch_size} on {world} ranks: "
                "some ranks would run out before others"
            )

    def order(self, start: int, stop: int) -> np.ndarray:
        """Dataset indices of the global samples start to stop."""
        numbers = np.arange(start, stop, dtype=np.int64)
        epochs = numbers // self.size
        parts = [
            shuffled(numbers[epochs == epoch] % self.size, self.size, self.seed, int(epoch))
            for epoch in range(start // self.size, (max(start, stop - 1)) // self.size + 1)
        ]
        return np.concatenate(parts)

    def __iter__(self) -> Iterator[int]:
        start, mine = self.consumed, slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        turn = self.batch_size * self.world
        block = max(1, BLOCK // turn) * turn
        while start < self.samples:
            stop = min(start + block, self.samples)
            order = self.order(start, stop)
            if self.world > 1:
                order = order.reshape(-1, turn)[:, mine].reshape(-1)
            yield from order.tolist()
            start = stop

    def __len__(self) -> int:
        """Return this rank's samples of the whole run, also after resuming: Trainer counts steps and epochs by them."""
        return self.samples // self.world

    def advance(self, samples: int) -> None:
        """Count global samples (of all ranks) as trained on."""
        self.load_state_dict({**self.state_dict(), "consumed": self.consumed + samples})

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed, "seed": self.seed, "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("seed", "size"):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the state is of a sampler with {name} {state[name]}, this one has {getattr(self, name)}: "
                    "its position would mean other data"
                )
        consumed = int(state["consumed"])
        if not 0 <= consumed <= self.samples or consumed % (self.batch_size * self.world):
            raise UserError(
                f"consumed must be a multiple of {self.batch_size * self.world} (all ranks' batches) "
                f"of at most {self.samples}, got {consumed}"
            )
        self.consumed = consumed
