"""Trains the students of a group side by side: each batch is read once, and the teacher asked once, for all of them.

The numbers are those of ``DistillTrainer`` for each student alone (tested). What it leaves out is what an experiment on
one device does without: several ranks, recomputation. Of a step with several micro-batches each is read and asked for
once, and the norm of the first one's gradient is kept beside that of the whole.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedModel

from affine_attn.data.progress import token_progress
from affine_attn.data.shards import TokenShards
from affine_attn.distill.data import sequences
from affine_attn.distill.estimate import Size, duration, size_of
from affine_attn.distill.losses import Logits, chunked_loss
from affine_attn.distill.recipes import Recipe
from affine_attn.distill.statistics import SEQUENCES
from affine_attn.distill.teacher import ask, logits
from affine_attn.distill.validation import perplexity
from affine_attn.models.collect import evaluating
from affine_attn.runs.files import written
from experiments import needles, runs
from experiments.grid import Group
from experiments.learner import Learner, batches_of, context, counted, device_here, loss_of, on_device, room_for_graphs

# Batches between two looks at the clock and at what was measured, for which the host waits.
LOOK_BATCHES = 10
_CHECKPOINT = "checkpoint.pt"


def train(group: Group, teacher: PreTrainedModel | None, folder: Path, deadline: float, environment: dict) -> bool:
    """Train what is not finished in ``folder``. False: ``deadline`` (of time.monotonic) came first, go on later."""
    recipe, device = group.recipe, device_here()
    waiting = [student for student in group.students if not runs.is_finished(folder / student.name, group, student)]
    if not waiting:
        return True
    if time.monotonic() > deadline:
        return False
    begin = time.perf_counter()
    print(f"{group.name}: {len(waiting)} of {len(group.students)} students to train", flush=True)
    learners = [Learner(student, recipe, device) for student in waiting]
    seconds, speeds, step = _resume(folder / _CHECKPOINT, learners)
    text = sequences(recipe)
    few = _few(recipe, device)
    cost = flops(group, [size_of(learner.model) for learner in learners], teacher and size_of(teacher))
    tokens, batch_tokens = 0, recipe.global_batch * recipe.sequence_length
    micro_batches = recipe.accumulation(1)
    look_steps = max(1, LOOK_BATCHES // micro_batches)
    target: Logits | None = None
    with room_for_graphs(), token_progress(Console(stderr=True)) as progress:
        task = progress.add_task("", total=recipe.steps, completed=step, tokens=0)
        batches = batches_of(recipe, text, step, device)
        while step < recipe.steps and (going := _going(learners)):
            if recipe.statistics_steps and step % recipe.statistics_steps < look_steps:
                for learner in going:
                    learner.watch(few)
            start, before = time.perf_counter(), step
            for _ in range(min(look_steps, recipe.steps - step)):
                *parts, last = islice(batches, micro_batches)
                trained = counted((*parts, last))
                for part in parts:
                    target = _asked(teacher, part, target)
                    for learner in going:
                        learner.accumulate(part, target, trained)
                target = _asked(teacher, last, target)
                for learner in going:
                    # Counted anew inside a step that is recorded, which a whole batch is.
                    learner.step(last, target, trained if parts else None)
                step += 1
            for learner in going:
                learner.look()
            took = time.perf_counter() - start
            seconds += took
            speeds.append((step - before) * batch_tokens / took)
            tokens += (step - before) * batch_tokens * len(going)
            progress.update(task, completed=step, tokens=tokens)
            late = time.monotonic() > deadline
            if step < recipe.steps and (late or step % recipe.save_steps < look_steps):
                _save(folder / _CHECKPOINT, learners, seconds, speeds, step)
                for learner in learners:
                    runs.write_series(folder / learner.student.name, group, learner, environment)
                if late:
                    return False
    going = _going(learners)
    if recipe.statistics_steps:
        for learner in going:
            learner.watch(few)
    measured = validate(group, [learner.model for learner in going], teacher) if going else []
    valid: dict[str, dict[str, Any]] = {learner.student.name: row for learner, row in zip(going, measured, strict=True)}
    speed = {"seconds": round(seconds, 1), "students": len(learners)}
    speed["student_tokens_per_second"] = round(len(learners) * median(speeds)) if speeds else None
    speed["flops_per_second"] = round(cost * median(speeds)) if speeds else None
    for learner in learners:
        own, measured = folder / learner.student.name, valid.get(learner.student.name)
        runs.write_series(own, group, learner, environment)
        if measured is not None:
            if group.is_kept:
                runs.write_model(own, learner.model, text.tokenizer)
            if group.is_analysed(learner.student):
                runs.analyze_model(own, recipe, learner.model.config.num_hidden_layers)
            if group.needles is not None:
                # After all else: it changes the model.
                measured |= needles.found(learner.student, learner.model, group, group.needles)
        # Last: a folder with a result is a finished run.
        runs.write_result(own, group, learner, measured, speed, environment)
    (folder / _CHECKPOINT).unlink(missing_ok=True)
    took = duration(time.perf_counter() - begin)
    print(f"{group.name}: finished after {took}, {duration(seconds)} of training", flush=True)
    return True


def _asked(teacher: PreTrainedModel | None, batch: dict[str, Tensor], before: Logits | None) -> Logits | None:
    """Return where those of the first batch were: see Learner.step."""
    return None if teacher is None else logits(ask(teacher, context(batch)), instead_of=before)


def _going(learners: Sequence[Learner]) -> list[Learner]:
    return [learner for learner in learners if learner.diverged is None]


def flops(group: Group, students: Sequence[Size], teacher: Size | None) -> int:
    """Count a token's FLOPs for the whole group: every student's training, and the teacher's forward once."""
    length = group.recipe.sequence_length
    total = sum(student.training_flops(length) for student in students)
    return total if teacher is None else total + teacher.forward_flops(length)


@torch.no_grad()
def validate(
    group: Group, models: Sequence[PreTrainedModel], teacher: PreTrainedModel | None
) -> list[dict[str, float | int]]:
    """Measure each model on all the held-out text: ``ce``, and ``kd``, ``entropy`` and ``teacher_ce`` where
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
                target = None if asked is None else ask(asked, context(batch))
                tokens += int((batch["shift_labels"] != -100).sum())
                taught = (
                    0.0 if target is None else float(chunked_loss(*target, None, batch["shift_labels"], tokens=1).hard)
                )
                for i, model in enumerate(models):
                    with evaluating(model):
                        loss = loss_of(model, batch, target, group.recipe, tokens=1)
                    sums[i] += torch.tensor([float(loss.kd), float(loss.hard), float(loss.entropy), taught])
            for row, (kd, ce, entropy, taught) in zip(found, (sums / max(tokens, 1)).tolist(), strict=True):
                if asked is not None:
                    row |= {"kd": kd, "entropy": entropy, "teacher_ce": taught}
                row |= {"ce": ce, "ppl": perplexity(ce), "tokens": tokens} if own else {f"ce_{length}": ce}
    return found


def _held_out(recipe: Recipe, length: int) -> Iterator[dict[str, Tensor]]:
    """Give batches of as many tokens as a micro-batch of training."""
    text = TokenShards(recipe.data, length, "valid", recipe.documents)
    size = max(1, recipe.micro_batch * recipe.sequence_length // length)
    return on_device(device_here(), Subset(text, range(min(len(text), recipe.valid_sequences))), size)


def _few(recipe: Recipe, device: torch.device) -> list[dict[str, Tensor]]:
    """The sequences of the statistics, one by one."""
    text = TokenShards(recipe.data, recipe.sequence_length, "valid", recipe.documents)
    items = (context(text[i]) for i in range(min(SEQUENCES, len(text))))
    return [{name: tensor[None].to(device) for name, tensor in item.items()} for item in items]


def _save(path: Path, learners: Sequence[Learner], seconds: float, speeds: list[float], step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    students = {learner.student.name: learner.state_dict() for learner in learners}
    with written(path) as file:
        torch.save({"step": step, "seconds": seconds, "speeds": speeds, "students": students}, file)


def _resume(path: Path, learners: Sequence[Learner]) -> tuple[float, list[float], int]:
    if not path.exists():
        return 0.0, [], 0
    state = torch.load(path, map_location=learners[0].model.device, weights_only=True)
    # Students that have their result are no longer among the learners.
    if missing := {learner.student.name for learner in learners} - set(state["students"]):
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}: remove it, or give another --output")
    for learner in learners:
        learner.load_state_dict(state["students"][learner.student.name])
    return state["seconds"], state["speeds"], state["step"]
