"""``DistillTrainer``: transformers' Trainer with the distillation loss, the data order and the log of this package."""

# The annotations of transformers are narrower than what its Trainer takes and gives.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import math
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel, ProgressCallback, Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, TrainerState
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

from affine_attn.data.needles import NeedleSequences
from affine_attn.data.sampler import GlobalSampler
from affine_attn.data.shards import TokenShards
from affine_attn.distill.cache import CachedShards, cached_target
from affine_attn.distill.compiled import compile_layers
from affine_attn.distill.estimate import size_of
from affine_attn.distill.losses import Loss, LossSpec, Teacher, TopK, chunked_loss, compiling_pays
from affine_attn.distill.metrics import Metrics
from affine_attn.distill.teacher import ask, frozen, largest
from affine_attn.errors import FileError, NotFinite, UserError, first_line
from affine_attn.models.modeling import not_finite_average
from affine_attn.nn.alpha import track_alpha
from affine_attn.nn.layer import head_parameters
from affine_attn.runs.files import write_json
from affine_attn.runs.layout import IDENTITY, RunFolder

# FSDP2 in bf16. accelerate's own policy would also round what the forward takes and gives, which are cached targets and
# the loss that is logged, and sum gradients over ranks in bf16, where DDP does in fp32.
SHARDED_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

# transformers 5.17 reads the optimizer to the device "cpu:0" where ranks are CPU processes; torch knows "cpu" only.
torch.serialization.register_package(
    50, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
)


class DistillTrainer(Trainer):
    """Trains ``model`` on token shards against ``teacher``, or on the tokens alone where there is none.

    model: any causal model of transformers with a plain head; affine attention's average is tracked by itself.
    shared: number of leading vocabulary entries that student and teacher share, where their sizes differ.
    compile: torch.compile for the decoder layers of both. One by one: they share what was compiled for the first.
    top_k: the teacher's target cut to so many entries (``Largest``), as ``CachedShards`` have it without a teacher.
    identity: what tells this run from others, as JSON; checkpoints hold it.

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
        compile: bool = False,
        top_k: int | None = None,
        identity: dict[str, Any] | None = None,
        **others: Any,
    ):
        if args.n_gpu > 1:
            raise UserError(
                f"one process sees {args.n_gpu} GPUs: start one per GPU with torchrun --nproc-per-node {args.n_gpu}, "
                "or choose one with CUDA_VISIBLE_DEVICES"
            )
        if args.max_steps < 1:
            raise UserError(f"max_steps must be given: the order of the data spans the whole run; got {args.max_steps}")
        # One that a user put there.
        self._own_forward = vars(model).get("forward")
        # Inside the forward, because that is where DDP and FSDP have the weights ready.
        model.forward = MethodType(_loss_forward, model)
        super().__init__(model=model, args=args, train_dataset=train_dataset, **others)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if args.bf16 and plugin is not None and plugin.fsdp_version == 2:
            plugin.mixed_precision_policy = SHARDED_BF16
        # What is divided by the tokens of all micro-batches must not be divided by their number too.
        self.model_accepts_loss_kwargs = True
        self.loss_spec, self.shared, self.top_k, self.identity = loss, shared, top_k, identity
        self._folder = RunFolder(Path(args.output_dir or "."))
        self.teacher = None if teacher is None else frozen(teacher, args.device)
        if compile:
            compile_layers(model)
            if self.teacher is not None:
                compile_layers(self.teacher)
        self._loss_compiled = args.device.type == "cuda" or self._compiling_pays()
        self._stop = False
        # Sums of kd, hard and entropy since the last log, and the step they begin after. They stay on the device, so
        # that no micro-batch waits for them.
        self._parts: tuple[Tensor, int] | None = None
        self._bar = _Bar()
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(self._bar)
        self.metrics = Metrics(self._folder, args, self._step_tokens(), self._flops_per_token())
        self.add_callback(self.metrics)

    @property
    def has_target(self) -> bool:
        """Is there more to learn from than the text: a teacher, or the cache of one."""
        return self.teacher is not None or isinstance(self.train_dataset, CachedShards)

    def release(self) -> PreTrainedModel:
        """The model with its own forward, as before."""
        model: Any = self.accelerator.unwrap_model(self.model)
        vars(model).pop("forward", None)
        if self._own_forward is not None:
            model.forward = self._own_forward
        return model

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Trainer's, which are all but norms and biases, without learned sinks and scales."""
        spared = head_parameters(model)
        return [name for name in super().get_decay_parameter_names(model) if name not in spared]

    def train(self, *args: Any, **others: Any) -> Any:
        if self.args.should_save:
            # What a killed run left.
            shutil.rmtree(self._folder.unfinished_checkpoint, ignore_errors=True)
        try:
            return super().train(*args, **others)
        except (OSError, NotFinite) as error:
            last = get_last_checkpoint(str(self._folder.path)) if self._folder.path.is_dir() else None
            good = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
            raise (FileError if isinstance(error, OSError) else NotFinite)(f"{error}; {good}") from error
        finally:
            self._bar.end()

    def stop(self) -> None:
        """End all ranks with a checkpoint after the next step that is logged. A signal handler may call it."""
        self._stop = True

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
            target=self._target(inputs, context),
            spec=self.loss_spec,
            shared=self.shared,
            tokens=num_items_in_batch,
            compiled=self._loss_compiled and (model.training or self.args.device.type == "cuda"),
        )
        loss = parts.loss
        if model.training:
            before, step = self._parts or (0, self.state.global_step)
            self._parts = before + torch.stack((parts.kd, parts.hard, parts.entropy)).float(), step
            if num_items_in_batch is not None and self.args.average_tokens_across_devices:
                # The denominator is that of all ranks, over which gradients and logged losses are averaged.
                loss = loss * self.accelerator.num_processes
        return (loss, parts._asdict()) if return_outputs else loss

    def _target(self, inputs: dict[str, Tensor], context: dict[str, Tensor]) -> Teacher | TopK | None:
        if self.teacher is None:
            return cached_target(inputs)
        target = ask(self.teacher, context)
        return target if self.top_k is None else largest(target, self.top_k, self.shared).target

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        student: Any = self.model if model is None else model
        track_alpha(student, optimizer)
        return optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> GlobalSampler:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return GlobalSampler(len(dataset), self.args.max_steps * self.get_total_train_batch_size(self.args), seed)

    def get_train_dataloader(self) -> Any:
        """Trainer's, whose workers leave Ctrl-C to this process: a terminal sends it to all of them."""
        loader: Any = super().get_train_dataloader()
        reading = getattr(loader, "base_dataloader", loader)
        reading.worker_init_fn = partial(_start_worker, reading.worker_init_fn)
        return loader

    def _compiling_pays(self) -> bool:
        """Return True if the whole run pays for compiling its loss: a resumed run goes on with the same numbers."""
        student: Any = self.model
        calls = self.args.max_steps * self.args.gradient_accumulation_steps
        tokens = self.args.per_device_train_batch_size * self.train_dataset.sequence_length
        return compiling_pays(calls, calls * tokens * student.get_output_embeddings().weight.shape[0])

    def _step_tokens(self) -> int:
        return self.get_total_train_batch_size(self.args) * self.train_dataset.sequence_length

    def _flops_per_token(self) -> int:
        """Count the student's training and the teacher's forward, not recomputation."""
        student: Any = self.model
        length = self.train_dataset.sequence_length
        asked = 0 if self.teacher is None else size_of(self.teacher).forward_flops(length)
        return size_of(student).training_flops(length) + asked

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._parts is not None:
            # Before the checkpoint of this step is written, so none ever holds what a bad step left.
            self._stop_unless_finite(logs)
            sums, step = self._parts
            # With the losses, so that all ranks hear of it at the same step and at no cost.
            total: Any = self.accelerator.reduce(torch.cat((sums, sums.new_tensor([self._stop]))), "sum")
            *means, stop = total.tolist()
            kd, hard, entropy = (value / (self.state.global_step - step) for value in means)
            if stop:
                self.control.should_save = self.control.should_training_stop = True
            logs |= {"kd": kd, "hard": hard, "entropy": entropy} if self.has_target else {"hard": hard}
            self._parts = None
            logs |= self.metrics.measured(self.state.global_step)
        super().log(logs, start_time)

    def _stop_unless_finite(self, logs: dict[str, float]) -> None:
        for name in ("loss", "grad_norm"):
            if not math.isfinite(value := logs.get(name, 0.0)):
                raise NotFinite(f"{name} is {value} at step {self.state.global_step}")
        student: Any = self.model
        if problem := not_finite_average(student):
            raise NotFinite(f"{problem} at step {self.state.global_step}")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with _loadable(resume_from_checkpoint):
            state = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))
            if Path(resume_from_checkpoint).name != f"checkpoint-{state.global_step}":
                raise UserError(f"its {TRAINER_STATE_NAME} is of step {state.global_step}")
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            student: Any = self.model
            if problem := not_finite_average(student):
                raise UserError(problem)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with _loadable(checkpoint):
            if not (self.is_deepspeed_enabled or self.args.save_only_model):
                # Trainer would begin anew: without moments, at the learning rate of the first step.
                for name in ("optimizer", "scheduler"):
                    if not any(path.name.startswith(name) for path in Path(checkpoint).iterdir()):
                        raise UserError(f"it has no {name}")
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _loadable(checkpoint):
            super()._load_rng_state(checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Trainer would log a line and begin what is missing anew. A head tied to the embedding is not in a checkpoint
        # and not missing.
        student: Any = self.model
        missing = sorted(set(load_result.missing_keys) - set(student.all_tied_weights_keys))
        for problem, names in (("misses", missing), ("has an unknown", sorted(load_result.unexpected_keys))):
            if names:
                more = f" and {len(names) - 1} more" if names[1:] else ""
                raise UserError(f"it {problem} {names[0]}{more}")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Written, and later deleted, under another name: a checkpoint that can be seen can be loaded."""
        folder, unfinished = self._folder.path, self._folder.unfinished_checkpoint
        name = f"checkpoint-{self.state.global_step}"
        # Trainer asks this for the folder in which it makes checkpoint-<step>.
        self._get_output_dir = lambda trial: str(unfinished)
        try:
            with all_or_nothing(unfinished, name):
                super()._save_checkpoint(model, trial)
                if self.args.should_save and self.identity is not None:
                    write_json(unfinished / name / IDENTITY, self.identity)
        finally:
            del self._get_output_dir
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            if (folder / name).exists():
                # Left by a run that was stopped after it and resumed from an earlier one.
                (folder / name).replace(unfinished / "replaced")
            (unfinished / name).replace(folder / name)
            limit = self.args.save_total_limit or 0
            for old in sort_checkpoints(str(folder))[:-limit] if limit > 0 else ():
                Path(old).replace(unfinished / Path(old).name)
            shutil.rmtree(unfinished)
        self.accelerator.wait_for_everyone()


def _start_worker(start: Callable[[int], object] | None, number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if start is not None:
        start(number)


@contextmanager
def all_or_nothing(folder: Path, name: str) -> Iterator[None]:
    """A folder that cannot be written whole is removed. To torch and safetensors a full disk is no OSError."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise FileError(
            f"{name} could not be written ({first_line(error)}): is the disk full, or is a rank lost?"
        ) from error


@contextmanager
def _loadable(checkpoint: str | None) -> Iterator[None]:
    """What is missing, cut short or of another shape is named in a sentence."""
    try:
        yield
    except Exception as error:  # each library has errors of its own, and wrong content can raise any
        reason = first_line(error)
        raise UserError(
            f"{checkpoint} could not be loaded ({reason}): if it is damaged, remove it to go on after the one before"
        ) from error


def _loss_forward(
    self: Any,
    input_ids: Tensor,
    labels: Tensor,
    target: Teacher | TopK | None,
    spec: LossSpec,
    shared: int | None,
    tokens: Tensor | int | None,
    compiled: bool | None = None,
    **context: Tensor,
) -> Loss:
    """The forward of a causal model in training: the loss from its hidden states; the logits are never whole."""
    hidden = self.base_model(input_ids=input_ids, use_cache=False, **context).last_hidden_state
    weight = self.get_output_embeddings().weight
    return chunked_loss(hidden, weight, target, labels, spec=spec, tokens=tokens, shared=shared, compiled=compiled)


class _Bar(ProgressCallback):
    """Trainer's progress bar with the loss on it, instead of a printed line for every logged step."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix(loss=f"{logs['loss']:.4f}", refresh=False)

    def end(self) -> None:
        """End the bar, also when a run fails: what is said about it begins on a line of its own."""
        if self.training_bar is not None:
            self.training_bar.close()
