"""A student that learns: its optimizer, its steps, and the batches it takes them on."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, get_scheduler, set_seed

from affine_attn.core.spec import AttentionSpec
from affine_attn.data.sampler import GlobalSampler
from affine_attn.distill.compiled import compile_layers
from affine_attn.distill.data import Sequences
from affine_attn.distill.losses import IGNORE_INDEX, Logits, Loss, Teacher, chunked_loss
from affine_attn.distill.recipes import Recipe
from affine_attn.distill.statistics import columns
from affine_attn.models import AffineAttnForCausalLM
from affine_attn.models.collect import collect_statistics
from affine_attn.nn.alpha import alpha_gates, track_alpha
from affine_attn.nn.layer import head_parameters
from experiments.grid import Student
from experiments.replay import Replay

# Attentions of a process, each compiled for its first layer; torch would go back to uncompiled code after 8.
_MOST_GRAPHS = 64
# Parameters from which a step takes a GPU longer than the host needs to launch it. A recorded one would keep the memory
# of its activations, and leave none to other students.
_LARGE = 200e6


class Learner:
    """A student under way."""

    def __init__(self, student: Student, recipe: Recipe, device: torch.device, model: Any = None):
        """model: one to go on with, instead of a new one."""
        self.student, self.recipe = student, recipe
        set_seed(recipe.seed)
        self.model = _new_model(student, recipe, device) if model is None else model.train()
        rate = torch.tensor(student.learning_rate, device=device)
        self.optimizer = new_optimizer(self.model, recipe, rate, student.decays_sinks)
        track_alpha(self.model, self.optimizer)
        self.schedule: Any = get_scheduler(
            "warmup_stable_decay",
            self.optimizer,
            recipe.warmup_steps,
            recipe.steps,
            {"num_decay_steps": recipe.decay_steps, "decay_type": recipe.decay},
        )
        self.rows: list[list[float]] = []  # of finished steps, see runs.COLUMNS and runs.MICRO_NORM
        self.statistics: list[dict[str, Any]] = []
        self.diverged: int | None = None  # the first step with a loss or a gradient that is not finite
        self._measured: list[tuple[float, Tensor]] = []
        self._accumulated: list[Loss] = []  # of the micro-batches of a step before its last
        self._micro_norm: Tensor | None = None
        # A step of several micro-batches finds gradients that the ones before have left, each in memory of its own, and
        # so much in one step leaves the host time enough.
        is_whole = recipe.accumulation(1) == 1
        self._replay = Replay(records=is_whole and self.model.num_parameters() < _LARGE)

    def accumulate(self, batch: dict[str, Tensor], target: Logits | None, tokens: Tensor) -> None:
        """Add the gradients of a micro-batch to those of its step, which has more; ``tokens``: see counted."""
        loss = self._differentiate(batch, target, tokens)
        if not self._accumulated:
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            # As if it were a batch of its own: a mean over its tokens.
            self._micro_norm = nn.utils.get_total_norm(gradients) * tokens / loss.tokens
        self._accumulated.append(loss)

    def step(self, batch: dict[str, Tensor], target: Logits | None, tokens: Tensor | None = None) -> None:
        """One optimizer step, of this batch and what was accumulated before. Nothing waits for its numbers. The target
        must lie in the same memory at every step, and is read there by a recorded one: it is too large to be copied for
        each student."""
        # Not read from the optimizer, whose rate lies on the device.
        rate = self.student.learning_rate * self.schedule.lr_lambdas[0](self.schedule.last_epoch)

        def advance(*inputs: Tensor) -> Tensor:
            return self._advance(dict(zip(batch, inputs, strict=True)), target, tokens)

        self._measured.append((rate, self._replay(advance, list(batch.values()))))
        self.schedule.step()

    def _advance(self, batch: dict[str, Tensor], target: Logits | None, tokens: Tensor | None) -> Tensor:
        """Loss, hard loss and gradient norms of the step it takes, all of it on the device."""
        losses = [*self._accumulated, self._differentiate(batch, target, tokens)]
        most = self.recipe.max_grad_norm or math.inf
        norms = [nn.utils.clip_grad_norm_(self.model.parameters(), most)]
        if self._micro_norm is not None:
            norms.append(self._micro_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._accumulated, self._micro_norm = [], None
        loss, hard = (torch.stack(parts).sum(0) for parts in ([x.loss for x in losses], [x.hard for x in losses]))
        return torch.stack((loss, hard, *norms)).float()

    def _differentiate(self, batch: dict[str, Tensor], target: Logits | None, tokens: Tensor | None) -> Loss:
        loss = loss_of(self.model, batch, target, self.recipe, tokens)
        loss.loss.backward()
        return loss._replace(loss=loss.loss.detach())

    def look(self) -> None:
        """Take over what the steps since the last look have measured."""
        if not self._measured:
            return
        rates, values = zip(*self._measured, strict=True)
        self._measured = []
        for rate, row in zip(rates, torch.stack(values).tolist(), strict=True):
            if not all(map(math.isfinite, row)):
                self.diverged = len(self.rows) + 1
                return
            self.rows.append([rate, *row])

    def watch(self, sequences: Sequence[dict[str, Tensor]]) -> None:
        """A line of statistics, without a trace in training."""
        with autocast(self.recipe, self.model.device):
            layers = collect_statistics(self.model, sequences)
        self.statistics.append({"step": len(self.rows), **columns(layers)})

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        return parts | {"rows": self.rows, "statistics": self.statistics, "diverged": self.diverged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        self.rows, self.statistics, self.diverged = state["rows"], state["statistics"], state["diverged"]


def _new_model(student: Student, recipe: Recipe, device: torch.device) -> AffineAttnForCausalLM:
    model: Any = _with_shared_start(student, recipe) if student.shared_start else _drawn(student, recipe)
    model = model.to(device)
    if student.w_a == "zeros":
        for gate in alpha_gates(model):
            nn.init.zeros_(gate.w_a)
    if recipe.compile:
        compile_layers(model)
    return model


def _drawn(student: Student, recipe: Recipe) -> AffineAttnForCausalLM:
    return AffineAttnForCausalLM(student.config(recipe))


def _with_shared_start(student: Student, recipe: Recipe) -> AffineAttnForCausalLM:
    """What a seed gives to softmax, and after that what the student has besides, or in another shape."""
    plain = _drawn(replace(student, attention=AttentionSpec(), intermediate=None), recipe).state_dict()
    model = _drawn(student, recipe)
    own = model.state_dict()
    shared = {name: tensor for name, tensor in plain.items() if name in own and own[name].shape == tensor.shape}
    model.load_state_dict(own | shared)
    return model


def loss_of(
    model: PreTrainedModel,
    batch: dict[str, Tensor],
    target: Teacher | Logits | None,
    recipe: Recipe,
    tokens: int | Tensor | None = None,
) -> Loss:
    """``tokens``: what its sum is divided by, if not those of the batch."""
    with autocast(recipe, model.device):
        hidden = model.base_model(**context(batch), use_cache=False).last_hidden_state
        return chunked_loss(
            hidden,
            model.get_output_embeddings().weight,
            target,
            batch["shift_labels"],
            spec=recipe.loss_spec,
            shared=recipe.shared_vocab,
            tokens=tokens,
        )


def new_optimizer(model: nn.Module, recipe: Recipe, rate: Tensor, decays_sinks: bool = False) -> torch.optim.Optimizer:
    """AdamW as DistillTrainer sets it up: norms and biases do not decay, sinks and scales only where it is asked for.
    Its rate is a tensor, which a CUDA graph reads anew at every step."""
    parts: dict[float, list[nn.Parameter]] = {recipe.weight_decay: [], 0.0: []}
    spared = set() if decays_sinks else head_parameters(model)
    for name, parameter in model.named_parameters():
        is_spared = "norm" in name or "bias" in name or name in spared
        parts[0.0 if is_spared else recipe.weight_decay].append(parameter)
    entries = [{"params": parameters, "weight_decay": decay} for decay, parameters in parts.items()]
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW(entries, rate, betas=betas, fused=True, capturable=rate.is_cuda)


@contextmanager
def room_for_graphs() -> Iterator[None]:
    """Room for every attention of the grid; one too many is an error, where torch would quietly run uncompiled."""
    with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS, fail_on_recompile_limit_hit=True):
        yield


def autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.dtype == "bfloat16")


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def context(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}


def counted(parts: Sequence[dict[str, Tensor]]) -> Tensor:
    """The tokens that count in the micro-batches of a step: a mean over them is what whole batches have."""
    return torch.stack([(part["shift_labels"] != IGNORE_INDEX).sum() for part in parts]).sum()


def batches_of(recipe: Recipe, text: Sequences, step: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Micro-batches, from the first of a step on."""
    sampler = GlobalSampler(len(text), recipe.steps * recipe.global_batch, recipe.seed)
    sampler.advance(step * recipe.global_batch)
    return on_device(device, text, recipe.micro_batch, sampler=sampler, num_workers=recipe.workers)


def on_device(device: torch.device, text: Dataset, size: int, **options: Any) -> Iterator[dict[str, Tensor]]:
    for batch in DataLoader(text, size, pin_memory=device.type == "cuda", **options):
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
