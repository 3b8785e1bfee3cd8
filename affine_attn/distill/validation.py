"""Losses on text that is never trained on, as ``valid_`` entries of ``metrics.jsonl``.

They are means over the tokens of the first ``valid_sequences`` sequences of the documents that ``affine-attn prepare``
holds out: ``valid_loss``, what is minimised; with a teacher its parts ``valid_kd`` and ``valid_entropy``;
``valid_hard``, the cross-entropy on the labels; ``valid_perplexity``, its exponential; ``valid_tokens``, their number.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import TrainerCallback

from affine_attn.distill.trainer import DistillTrainer
from affine_attn.models.collect import evaluating


class Validation(TrainerCallback):
    """Validate after the last step, and after each ``every`` steps unless that is 0; training goes on undisturbed."""

    def __init__(self, trainer: DistillTrainer, sequences: Subset[dict[str, Tensor]], every: int):
        self.trainer, self.sequences, self.every = trainer, sequences, every

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == state.max_steps or (self.every and state.global_step % self.every == 0):
            with self.trainer.metrics.paused():
                self.trainer.metrics.validation = validate(self.trainer, self.sequences)


@torch.no_grad()
def validate(trainer: DistillTrainer, sequences: Subset[dict[str, Tensor]]) -> dict[str, float]:
    """Each sequence counts once, whatever the number of ranks and the batch size."""
    # Not the wrapped model: DDP would wait for all ranks in every forward. FSDP does in any case.
    model: Any = trainer.model
    args = trainer.args
    total = torch.zeros(5, dtype=torch.float64, device=args.device)
    with evaluating(model):
        for mine in _turns(len(sequences), args.per_device_train_batch_size, args.process_index, args.world_size):
            # A rank whose turn is empty takes part with a sequence that does not count.
            batch: list[dict[str, Tensor]] = [sequences[i] for i in mine or (0,)]
            inputs = trainer._prepare_inputs(trainer.data_collator(batch))
            # Over one token: sums.
            loss, parts = trainer.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=1)
            values: list[Tensor] = [loss, parts["kd"], parts["hard"], parts["entropy"], parts["tokens"]]
            total += torch.stack([value.double() for value in values]) * bool(mine)
    summed: Any = trainer.accelerator.reduce(total, "sum")
    *sums, tokens = summed.tolist()
    loss, kd, hard, entropy = (value / max(tokens, 1) for value in sums)
    taught = {"valid_kd": kd, "valid_entropy": entropy} if trainer.has_target else {}
    counted = {"valid_perplexity": perplexity(hard), "valid_tokens": int(tokens)}
    return {"valid_loss": loss, **taught, "valid_hard": hard, **counted}


def perplexity(loss: float) -> float:
    """Infinite where a float cannot hold it: a student on its way to diverge is measured as any other."""
    return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)


def _turns(sequences: int, batch: int, rank: int, world: int) -> list[Sequence[int]]:
    """Batches of a rank, as many on each."""
    everywhere = range(0, sequences, batch * world)
    return [
        range(min(sequences, start + batch * rank), min(sequences, start + batch * (rank + 1))) for start in everywhere
    ]
