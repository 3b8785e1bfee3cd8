"""Times distillation on a CPU against its parts: python -m benchmarks.distillation --teacher FOLDER

loss: the distillation loss forward and backward, against plain torch with full logits (``losses.eager``).
step: a step of ``DistillTrainer`` with the teacher of a folder and a nano student, against the same step as a loop by
hand: teacher's forward, plain torch's loss, backward, clipping, optimizer.

Milliseconds are of process CPU time (--wall: of the clock); both take turns, and the ratio is the median of the ratios
within a round. Compiling is not counted: its seconds are in the note. Peak memory is above the inputs, in a process of
its own. Rows go to benchmarks/results/distillation/<device>.csv.
"""

import argparse
import functools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn.bench.timing import summary
from affine_attn.distill import LossSpec, Teacher, chunked_loss
from affine_attn.distill.recipes import Recipe
from affine_attn.distill.run import training_arguments
from affine_attn.distill.trainer import DistillTrainer
from affine_attn.models import AffineAttnForCausalLM
from affine_attn.models.convert import load
from benchmarks import losses, record
from benchmarks.memory import reset_peak, resident_mib
from benchmarks.run import show
from benchmarks.training import RandomTokens

CPU = torch.device("cpu")
PLAIN, OURS = "plain torch, full logits", "chunked_loss, compiled"
BY_HAND, TRAINER = "loop by hand", "DistillTrainer"
# More than the 50 calls below which nothing is compiled.
FEWEST_STEPS = 64

Clock = Callable[[], float]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", help="folder of a model; without it the loss alone is timed")
    parser.add_argument("--tokens", type=int, default=2048, help="of the loss")
    parser.add_argument("--vocabulary", type=int, default=49152, help="of the loss")
    parser.add_argument("--hidden", type=int, nargs="*", default=[64, 576], help="sizes of student and teacher alike")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wall", action="store_true", help="time by the clock instead of process CPU time")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    clock, unit = (time.perf_counter, "wall clock") if options.wall else (time.process_time, "CPU time")
    path = options.output or record.RESULTS / "distillation" / record.results_path(CPU).name
    groups = [functools.partial(loss_rows, width, options, clock) for width in options.hidden]
    if options.teacher is not None:
        groups.append(functools.partial(step_rows, options, clock))
    for group in groups:
        rows = [row | record.provenance(CPU) | {"mode": f"{row['mode']}, {unit}"} for row in group()]
        show(rows[0]["mode"], rows)
        record.update(path, rows)
    print(f"wrote {path}")


def loss_rows(width: int, options: argparse.Namespace, clock: Clock) -> list[record.Row]:
    size = (options.tokens, options.vocabulary, width)
    steps = {what: loss_step(what, *size) for what in (PLAIN, OURS)}
    first = {what: seconds(step, clock) for what, step in steps.items()}
    times: dict[str, list[float]] = {what: [] for what in steps}
    for _ in range(options.rounds):
        for what, step in steps.items():
            times[what].append(seconds(step, clock))
    peaks = {}
    for what in steps:
        # An allocator keeps what it once had, so each has a process of its own.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peaks[what] = {"peak_mib": f"{pool.apply(peak_mib, (what, *size)):.0f}"}
    shape = f"T{options.tokens} V{options.vocabulary} D{width}"
    rows = rows_of(times, PLAIN, shape, "forward_kl forward+backward", first[OURS])
    return [row | peaks[row["what"]] for row in rows]


def loss_step(what: str, tokens: int, vocabulary: int, width: int) -> Callable[[], object]:
    inputs = losses.made(tokens, vocabulary, width, CPU)

    def step() -> object:
        if what == PLAIN:
            loss = losses.eager("forward_kl", inputs)
        else:
            loss = chunked_loss(*inputs, spec=LossSpec("forward_kl"), compiled=True).loss
        return torch.autograd.grad(loss, (inputs.hidden, inputs.weight))

    return step


def peak_mib(what: str, tokens: int, vocabulary: int, width: int) -> float:
    torch.set_num_threads(1)
    # The same vocabulary and more than a chunk: compiled here, which takes memory of its own.
    loss_step(what, min(tokens, 256), vocabulary, width)()
    step = loss_step(what, tokens, vocabulary, width)
    reset_peak()
    before = resident_mib("VmRSS")
    step()
    return resident_mib("VmHWM") - before


def step_rows(options: argparse.Namespace, clock: Clock) -> list[record.Row]:
    teacher = load(options.teacher, dtype=torch.float32)
    recipe = Recipe(
        student="nano", attention="softmax", teacher=options.teacher, vocab_size=teacher.config.vocab_size,
        sequence_length=options.sequence_length, micro_batch=options.batch, global_batch=options.batch,
        steps=FEWEST_STEPS, warmup_steps=0, decay_steps=0, save_steps=FEWEST_STEPS + 1, dtype="float32",
        compile=False, workers=0,
    )  # fmt: skip
    # What a trainer takes of shards is their sequences and their length.
    data: Any = RandomTokens(recipe.steps * options.batch, recipe.sequence_length, teacher.config.vocab_size)
    torch.manual_seed(0)
    by_hand = hand_step(AffineAttnForCausalLM(recipe.student_config), teacher, recipe)
    turns = _Turns(options.rounds, lambda i: by_hand(_batch(data, i, options.batch)), clock)
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(recipe, Path(folder))
        args.save_strategy, args.disable_tqdm = "no", True
        student = AffineAttnForCausalLM(recipe.student_config)
        trainer = DistillTrainer(student, args, data, teacher=teacher, loss=recipe.loss_spec)
        trainer.add_callback(turns)
        trainer.train()
    shape = f"{Path(options.teacher).name} into nano, {options.batch} x {recipe.sequence_length}"
    return rows_of(turns.times, BY_HAND, shape, "distillation step", turns.first)


class _Turns(TrainerCallback):
    """Times a step of the trainer from the end of a step to that of the next, and after each one by hand."""

    def __init__(self, rounds: int, by_hand: Callable[[int], object], clock: Clock):
        self.rounds, self.by_hand, self.clock = rounds, by_hand, clock
        self.times: dict[str, list[float]] = {BY_HAND: [], TRAINER: []}
        self.first = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        seconds(lambda: self.by_hand(0), self.clock)
        self.start = self.clock()

    def on_log(self, args, state, control, **kwargs) -> None:
        if len(self.times[TRAINER]) == self.rounds:
            return
        took = self.clock() - self.start
        by_hand = seconds(lambda: self.by_hand(state.global_step), self.clock)
        if state.global_step == 1:
            self.first = took
        else:
            self.times[TRAINER].append(took)
            self.times[BY_HAND].append(by_hand)
        if len(self.times[TRAINER]) == self.rounds:
            control.should_training_stop = True
        self.start = self.clock()


def hand_step(
    student: AffineAttnForCausalLM, teacher: PreTrainedModel, recipe: Recipe
) -> Callable[[dict[str, Tensor]], None]:
    optimizer = torch.optim.AdamW(student.parameters(), lr=recipe.learning_rate, fused=True)

    def step(batch: dict[str, Tensor]) -> None:
        ids = batch["input_ids"]
        with torch.no_grad():
            states = teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state
        hidden = student.base_model(input_ids=ids, use_cache=False).last_hidden_state
        heads = student.get_output_embeddings().weight, teacher.get_output_embeddings().weight
        target = Teacher(states.flatten(0, 1), heads[1])
        losses.eager("forward_kl", losses.Inputs(hidden.flatten(0, 1), heads[0], target)).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _batch(data: RandomTokens, i: int, size: int) -> dict[str, Tensor]:
    items = [data[i * size + j] for j in range(size)]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def seconds(step: Callable[[], object], clock: Clock) -> float:
    start = clock()
    step()
    return clock() - start


def rows_of(times: dict[str, list[float]], baseline: str, shape: str, mode: str, first: float) -> list[record.Row]:
    """Rows of all; ``first`` is what the first call of the compiled one took."""
    rows = []
    for what, values in times.items():
        timing = summary([1e3 * value for value in values], [1e3 * value for value in times[baseline]])
        compiled = f"the first call, which compiles: {first:.1f} s" if what != baseline else ""
        rows.append(
            {"shape": shape, "what": what, "engine": "torch.compile" if compiled else "torch", "mode": mode}
            | record.times(timing)
            | {"ratio": f"{timing.ratio:.4f}", "baseline": baseline, "note": compiled}
        )
    return rows


if __name__ == "__main__":
    main()
