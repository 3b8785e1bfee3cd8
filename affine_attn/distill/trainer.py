"""``DistillTrainer``: transformers' Trainer with the distillation loss, the data order and the log of this package."""

# The annotations of transformers are narrower than what its Trainer takes and gives.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import math
import shutil
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from affine_attn.core.alpha import track_alpha
from affine_attn.distill.estimate import size_of
from affine_attn.distill.losses import Loss, LossSpec, Teacher, chunked_loss
from affine_attn.distill.metrics import Metrics
from affine_attn.distill.needle import NeedleSequences
from affine_attn.distill.sampler import GlobalSampler
from affine_attn.distill.shards import TokenShards

_UNFINISHED = "checkpoint.tmp"

# transformers 5.17 reads the optimizer to the device "cpu:0" where ranks are CPU processes; torch knows "cpu" only.
torch.serialization.register_package(
    50, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


class DistillTrainer(Trainer):
    """Trains ``model`` on token shards against ``teacher``, or on the tokens alone where there is none.

    model: any causal model of transformers with a plain head; affine attention's average is tracked by itself.
    shared: number of leading vocabulary entries that student and teacher share, where their sizes differ.

    ``args`` are Trainer's, with ``max_steps``; everything Trainer and accelerate do with them (DDP, FSDP, accumulation,
    resuming) holds. Next to the checkpoints, ``metrics.jsonl`` has a line for every logged step. While the trainer
    lives, the model's forward returns the loss; ``release`` gives it its own forward back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: TokenShards | NeedleSequences,
        teacher: PreTrainedModel | None = None,
        loss: LossSpec = LossSpec(),
        shared: int | None = None,
        **others: Any,
    ):
        if args.n_gpu > 1:
            raise ValueError(
                f"one process sees {args.n_gpu} GPUs: start one per GPU with torchrun --nproc-per-node {args.n_gpu}, "
                "or choose one with CUDA_VISIBLE_DEVICES"
            )
        if args.max_steps < 1:
            raise ValueError(
                f"max_steps must be given: the order of the data spans the whole run; got {args.max_steps}"
            )
        # Inside the forward, because that is where DDP and FSDP have the weights ready.
        model.forward = MethodType(_loss_forward, model)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **others)
        # What is divided by the tokens of all micro-batches must not be divided by their number too.
        self.model_accepts_loss_kwargs = True
        self.loss_spec, self.shared = loss, shared
        self._folder = Path(args.output_dir or ".")
        self.teacher = None if teacher is None else _frozen(teacher, args.device)
        # Sums of kd, hard and entropy since the last log, and the step they begin after. They stay on the device, so
        # that no micro-batch waits for them.
        self._parts: tuple[Tensor, int] | None = None
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(_Bar)
        self.metrics = Metrics(self._folder, args, self._step_tokens(), self._flops_per_token())
        self.add_callback(self.metrics)

    def release(self) -> PreTrainedModel:
        """The model with its own forward, as before."""
        model: Any = self.accelerator.unwrap_model(self.model)
        model.__dict__.pop("forward", None)
        return model

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        context = {name: inputs[name] for name in ("input_ids", "position_ids") if name in inputs}
        parts: Loss = model(
            **context,
            labels=inputs["shift_labels"],
            target=self._target(context),
            spec=self.loss_spec,
            shared=self.shared,
            tokens=num_items_in_batch,
        )
        loss = parts.loss
        if model.training:
            before, step = self._parts or (0, self.state.global_step)
            self._parts = before + torch.stack((parts.kd, parts.hard, parts.entropy)).float(), step
            if num_items_in_batch is not None and self.args.average_tokens_across_devices:
                # The denominator is that of all ranks, over which gradients and logged losses are averaged.
                loss = loss * self.accelerator.num_processes
        return (loss, parts._asdict()) if return_outputs else loss

    @torch.no_grad()
    def _target(self, context: dict[str, Tensor]) -> Teacher | None:
        if self.teacher is None:
            return None
        # In the teacher's own dtype: autocast would be another teacher.
        with torch.autocast(self.args.device.type, enabled=False):
            hidden = self.teacher.base_model(**context, use_cache=False).last_hidden_state
        return Teacher(hidden, self.teacher.get_output_embeddings().weight)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        student: Any = self.model if model is None else model
        track_alpha(student, optimizer)
        return optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> GlobalSampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return GlobalSampler(len(dataset), self.args.max_steps * self.get_total_train_batch_size(self.args), seed)

    def _step_tokens(self) -> int:
        return self.get_total_train_batch_size(self.args) * self.train_dataset.sequence_length

    def _flops_per_token(self) -> int:
        """Of the student's training and the teacher's forward; recomputation does not count."""
        student: Any = self.model
        length = self.train_dataset.sequence_length
        asked = 0 if self.teacher is None else size_of(self.teacher).forward_flops(length)
        return size_of(student).training_flops(length) + asked

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._parts is not None:
            # Before the checkpoint of this step is written, so none ever holds what a bad step left.
            self._stop_unless_finite(logs)
            sums, step = self._parts
            total: Any = self.accelerator.reduce(sums, "sum")
            kd, hard, entropy = (total / (self.state.global_step - step)).tolist()
            logs |= {"kd": kd, "hard": hard, "entropy": entropy} if self.teacher is not None else {"hard": hard}
            self._parts = None
            logs |= self.metrics.measured(self.state.global_step)
        super().log(logs, start_time)

    def _stop_unless_finite(self, logs: dict[str, float]) -> None:
        for name in ("loss", "grad_norm"):
            if not math.isfinite(value := logs.get(name, 0.0)):
                last = get_last_checkpoint(self._folder)
                good = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
                raise FloatingPointError(f"{name} is {value} at step {self.state.global_step}; {good}")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Written under another name and renamed when complete: a checkpoint that can be seen can be loaded."""
        folder, unfinished = self._folder, self._folder / _UNFINISHED
        if self.args.should_save:
            shutil.rmtree(unfinished, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        # Trainer asks this for the folder in which it makes checkpoint-<step>.
        self._get_output_dir = lambda trial: str(unfinished)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            del self._get_output_dir
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            name = f"checkpoint-{self.state.global_step}"
            # One of that name is left by a run that was stopped after it and resumed from an earlier one.
            shutil.rmtree(folder / name, ignore_errors=True)
            (unfinished / name).replace(folder / name)
            unfinished.rmdir()
            rotate_checkpoints(output_dir=str(folder), save_total_limit=self.args.save_total_limit, use_mtime=False)
        self.accelerator.wait_for_everyone()


def _loss_forward(
    self: Any,
    input_ids: Tensor,
    labels: Tensor,
    target: Teacher | None,
    spec: LossSpec,
    shared: int | None,
    tokens: Tensor | int | None,
    **context: Tensor,
) -> Loss:
    """The forward of a causal model in training: the loss from its hidden states; the logits are never whole."""
    hidden = self.base_model(input_ids=input_ids, use_cache=False, **context).last_hidden_state
    weight = self.get_output_embeddings().weight
    return chunked_loss(hidden, weight, target, labels, spec=spec, tokens=tokens, shared=shared)


@torch.no_grad()
def _frozen(teacher: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Ready to be asked. Heads with more than a product (biases, caps, scales) would silently be another teacher."""
    teacher = teacher.to(device).eval().requires_grad_(False)  # pyright: ignore[reportArgumentType]
    ids = torch.arange(4, device=device)[None]
    hidden = teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state
    product = hidden @ teacher.get_output_embeddings().weight.T
    if not torch.allclose(
        teacher(input_ids=ids, use_cache=False).logits.float(), product.float(), rtol=1e-2, atol=1e-2
    ):
        raise ValueError(
            f"{type(teacher).__name__}: its logits are not the product of its last hidden states and its head, "
            "which is what the loss computes"
        )
    return teacher


class _Bar(ProgressCallback):
    """Trainer's progress bar with the loss on it, instead of a printed line for every logged step."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix(loss=f"{logs['loss']:.4f}", refresh=False)
