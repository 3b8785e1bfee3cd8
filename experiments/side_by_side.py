"""Trains the students of a group side by side: each batch is read once, and the teacher asked once, for all of them.

The numbers are those of ``DistillTrainer`` for each student alone (tested). What it leaves out is what an experiment on
one device does without: accumulation, several ranks, recomputation. A step is one batch, and so is its validation.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import PreTrainedModel, get_scheduler, set_seed

from affine_attn.core.alpha import alpha_gates, track_alpha
from affine_attn.distill.estimate import Size, size_of
from affine_attn.distill.losses import Loss, Teacher, chunked_loss
from affine_attn.distill.recipes import Recipe
from affine_attn.distill.sampler import GlobalSampler
from affine_attn.distill.shards import TokenShards, temporary
from affine_attn.distill.statistics import SEQUENCES, columns
from affine_attn.distill.teacher import ask
from affine_attn.models import AffineAttnForCausalLM
from affine_attn.models.statistics import collect_statistics, evaluating
from experiments import runs
from experiments.grid import Group, Student
from experiments.replay import Replay

# Steps between two looks at the clock and at what was measured, for which the host waits.
LOOK_STEPS = 10
# Attentions of a process, each compiled for its first layer; torch would go back to uncompiled code after 8.
_MOST_GRAPHS = 64
_CHECKPOINT = "checkpoint.pt"


class Learner:
    """A student under way."""

    def __init__(self, student: Student, recipe: Recipe, device: torch.device):
        self.student, self.recipe = student, recipe
        set_seed(recipe.seed)
        self.model = AffineAttnForCausalLM(student.config(recipe)).to(device)  # pyright: ignore[reportArgumentType]
        if student.w_a == "zeros":
            for gate in alpha_gates(self.model):
                nn.init.zeros_(gate.w_a)
        if recipe.compile:
            compile_layers(self.model)
        self.optimizer = _optimizer(self.model, recipe, torch.tensor(student.learning_rate, device=device))
        track_alpha(self.model, self.optimizer)
        self.schedule: Any = get_scheduler(
            "warmup_stable_decay",
            self.optimizer,
            recipe.warmup_steps,
            recipe.steps,
            {"num_decay_steps": recipe.decay_steps, "decay_type": recipe.decay},
        )
        self.rows: list[list[float]] = []  # of finished steps, see runs.COLUMNS
        self.statistics: list[dict[str, Any]] = []
        self.diverged: int | None = None  # the first step with a loss or a gradient that is not finite
        self._measured: list[tuple[float, Tensor]] = []
        self._replay = Replay()

    def step(self, batch: dict[str, Tensor], target: Teacher | None) -> None:
        """One optimizer step. Nothing waits for its numbers."""
        # Not read from the optimizer, whose rate lies on the device.
        rate = self.student.learning_rate * self.schedule.lr_lambdas[0](self.schedule.last_epoch)
        inputs = [*batch.values(), *(() if target is None else (target.hidden,))]

        def advance(*inputs: Tensor) -> Tensor:
            asked = None if target is None else target._replace(hidden=inputs[-1])
            return self._advance(dict(zip(batch, inputs, strict=False)), asked)

        self._measured.append((rate, self._replay(advance, inputs)))
        self.schedule.step()

    def _advance(self, batch: dict[str, Tensor], target: Teacher | None) -> Tensor:
        """Loss, hard loss and gradient norm of the step it takes, all of it on the device."""
        loss = _loss(self.model, batch, target, self.recipe)
        loss.loss.backward()
        most = self.recipe.max_grad_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), most)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack((loss.loss.detach(), loss.hard, norm)).float()

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
        with _autocast(self.recipe, self.model.device):
            layers = collect_statistics(self.model, sequences)
        self.statistics.append({"step": len(self.rows), **columns(layers)})

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        return parts | {"rows": self.rows, "statistics": self.statistics, "diverged": self.diverged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        self.rows, self.statistics, self.diverged = state["rows"], state["statistics"], state["diverged"]


def train(group: Group, teacher: PreTrainedModel | None, folder: Path, deadline: float, environment: dict) -> bool:
    """Train what is not finished in ``folder``. False: ``deadline`` (of time.monotonic) came first, go on later."""
    recipe, device = group.recipe, device_here()
    waiting = [student for student in group.students if not runs.is_finished(folder / student.name, group, student)]
    if not waiting:
        return True
    if time.monotonic() > deadline:
        return False
    learners = [Learner(student, recipe, device) for student in waiting]
    seconds, speeds, step = _resume(folder / _CHECKPOINT, learners)
    text = TokenShards(recipe.data, recipe.sequence_length, documents=recipe.documents)
    few = _few(recipe, device)
    cost = flops(group, [size_of(learner.model) for learner in learners], teacher and size_of(teacher))
    with _graphs():
        batches = _batches(recipe, text, step, device)
        while step < recipe.steps and (going := _going(learners)):
            if recipe.statistics_steps and step % recipe.statistics_steps < LOOK_STEPS:
                for learner in going:
                    learner.watch(few)
            begin, before = time.perf_counter(), step
            for batch in islice(batches, LOOK_STEPS):
                target = None if teacher is None else ask(teacher, _context(batch))
                for learner in going:
                    learner.step(batch, target)
                step += 1
            for learner in going:
                learner.look()
            took = time.perf_counter() - begin
            seconds += took
            speeds.append((step - before) * recipe.global_batch * recipe.sequence_length / took)
            late = time.monotonic() > deadline
            if step < recipe.steps and (late or step % recipe.save_steps < LOOK_STEPS):
                _save(folder / _CHECKPOINT, learners, seconds, speeds, step)
                for learner in learners:
                    runs.write_series(folder / learner.student.name, group, learner, environment)
                if late:
                    return False
    going = _going(learners)
    if recipe.statistics_steps:
        for learner in going:
            learner.watch(few)
    measured = validate(group, [learner.model for learner in going], teacher)
    valid = {learner.student.name: row for learner, row in zip(going, measured, strict=True)}
    speed = {"seconds": round(seconds, 1), "students": len(learners)}
    speed["student_tokens_per_second"] = round(len(learners) * median(speeds)) if speeds else None
    speed["flops_per_second"] = round(cost * median(speeds)) if speeds else None
    for learner in learners:
        own = folder / learner.student.name
        runs.write_series(own, group, learner, environment)
        if learner.diverged is None:
            runs.write_model(own, learner.model, text.tokenizer)
            if group.is_analysed(learner.student):
                runs.write_analysis(own, recipe, learner.model.config.num_hidden_layers)
        # Last: a folder with a result is a finished run.
        runs.write_result(own, group, learner, valid.get(learner.student.name), speed, environment)
    (folder / _CHECKPOINT).unlink(missing_ok=True)
    return True


def _going(learners: Sequence[Learner]) -> list[Learner]:
    return [learner for learner in learners if learner.diverged is None]


def flops(group: Group, students: Sequence[Size], teacher: Size | None) -> int:
    """Of a token for the whole group: the teacher's hidden states once, its head again for every student."""
    length = group.recipe.sequence_length
    total = sum(student.training_flops(length) for student in students)
    if teacher is not None:
        head = 2 * teacher.hidden * teacher.vocab
        total += teacher.forward_flops(length) - head + len(students) * head
    return total


@torch.no_grad()
def validate(
    group: Group, models: Sequence[PreTrainedModel], teacher: PreTrainedModel | None
) -> list[dict[str, float | int]]:
    """Of each model on all the held-out text: ``ce``, and ``kd``, ``entropy`` and the teacher's ``teacher_ce`` where
    there is a teacher; ``ce_LENGTH`` at the further lengths of the group, whose text counts without the teacher."""
    found: list[dict[str, float | int]] = [{} for _ in models]
    # Uncompiled: there is little of it, and each attention would be compiled once more for it.
    with torch.compiler.set_stance("force_eager"):
        for length in group.lengths:
            own = length == group.recipe.sequence_length
            asked = teacher if own else None
            sums = torch.zeros(len(models), 4, dtype=torch.float64)
            tokens = 0
            for batch in _held_out(group.recipe, length):
                target = None if asked is None else ask(asked, _context(batch))
                tokens += int((batch["shift_labels"] != -100).sum())
                taught = (
                    0.0 if target is None else float(chunked_loss(*target, None, batch["shift_labels"], tokens=1).hard)
                )
                for i, model in enumerate(models):
                    with evaluating(model):
                        loss = _loss(model, batch, target, group.recipe, total=True)
                    sums[i] += torch.tensor([float(loss.kd), float(loss.hard), float(loss.entropy), taught])
            for row, (kd, ce, entropy, taught) in zip(found, (sums / max(tokens, 1)).tolist(), strict=True):
                if asked is not None:
                    row |= {"kd": kd, "entropy": entropy, "teacher_ce": taught}
                row |= {"ce": ce, "ppl": math.exp(ce), "tokens": tokens} if own else {f"ce_{length}": ce}
    return found


def _loss(
    model: PreTrainedModel, batch: dict[str, Tensor], target: Teacher | None, recipe: Recipe, total: bool = False
) -> Loss:
    with _autocast(recipe, model.device):
        hidden = model.base_model(**_context(batch), use_cache=False).last_hidden_state
        return chunked_loss(
            hidden,
            model.get_output_embeddings().weight,
            target,
            batch["shift_labels"],
            spec=recipe.loss_spec,
            shared=recipe.shared_vocab,
            tokens=1 if total else None,
        )


def _optimizer(model: nn.Module, recipe: Recipe, rate: Tensor) -> torch.optim.Optimizer:
    """AdamW as Trainer sets it up: norms and biases do not decay. Its rate is a tensor, which a CUDA graph reads anew
    at every step."""
    parts: dict[float, list[nn.Parameter]] = {recipe.weight_decay: [], 0.0: []}
    for name, parameter in model.named_parameters():
        parts[0.0 if "norm" in name or "bias" in name else recipe.weight_decay].append(parameter)
    entries = [{"params": parameters, "weight_decay": decay} for decay, parameters in parts.items()]
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW(entries, rate, betas=betas, fused=True, capturable=rate.is_cuda)


def compile_layers(model: PreTrainedModel) -> None:
    """Layer by layer: those of one attention share what was compiled for the first, over all students."""
    layers: Any = model.base_model.layers
    for layer in layers:
        layer.compile()


@contextmanager
def _graphs() -> Iterator[None]:
    """Room for every attention of the grid; one too many is an error, where torch would quietly run uncompiled."""
    with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS, fail_on_recompile_limit_hit=True):
        yield


def _autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.dtype == "bfloat16")


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _context(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}


def _batches(recipe: Recipe, text: TokenShards, step: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    sampler = GlobalSampler(len(text), recipe.steps * recipe.global_batch, recipe.seed)
    sampler.advance(step * recipe.global_batch)
    return _on(device, text, recipe.global_batch, sampler=sampler, num_workers=recipe.workers)


def _held_out(recipe: Recipe, length: int) -> Iterator[dict[str, Tensor]]:
    """In batches of as many tokens as in training."""
    text = TokenShards(recipe.data, length, "valid", recipe.documents)
    size = max(1, recipe.global_batch * recipe.sequence_length // length)
    return _on(device_here(), Subset(text, range(min(len(text), recipe.valid_sequences))), size)


def _on(device: torch.device, text: Dataset, size: int, **options: Any) -> Iterator[dict[str, Tensor]]:
    for batch in DataLoader(text, size, pin_memory=device.type == "cuda", **options):
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _few(recipe: Recipe, device: torch.device) -> list[dict[str, Tensor]]:
    """The sequences of the statistics, one by one."""
    text = TokenShards(recipe.data, recipe.sequence_length, "valid", recipe.documents)
    items = (_context(text[i]) for i in range(min(SEQUENCES, len(text))))
    return [{name: tensor[None].to(device) for name, tensor in item.items()} for item in items]


def _save(path: Path, learners: Sequence[Learner], seconds: float, speeds: list[float], step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    students = {learner.student.name: learner.state_dict() for learner in learners}
    torch.save({"step": step, "seconds": seconds, "speeds": speeds, "students": students}, temporary(path))
    temporary(path).replace(path)


def _resume(path: Path, learners: Sequence[Learner]) -> tuple[float, list[float], int]:
    if not path.exists():
        return 0.0, [], 0
    state = torch.load(path, map_location=learners[0].model.device, weights_only=True)
    names = [learner.student.name for learner in learners]
    if sorted(state["students"]) != sorted(names):
        raise ValueError(
            f"{path} holds {', '.join(sorted(state['students']))}, but {', '.join(sorted(names))} are not finished: "
            "remove it, or give another --output"
        )
    for learner in learners:
        learner.load_state_dict(state["students"][learner.student.name])
    return state["seconds"], state["speeds"], state["step"]
