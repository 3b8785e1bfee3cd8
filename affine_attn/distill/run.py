"""``affine-attn distill``: a recipe carried out in a folder, whose files are those of ``runs.layout.RunFolder``."""

import dataclasses
import importlib.util
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from affine_attn.core.variants import at_length
from affine_attn.data.shards import fingerprint
from affine_attn.data.tokenizer import copy_files, require_regular_files, require_same_tokens
from affine_attn.distill.data import held_out, sequences
from affine_attn.distill.estimate import duration
from affine_attn.distill.recipes import Recipe, title
from affine_attn.distill.statistics import SEQUENCES, Statistics
from affine_attn.distill.trainer import DistillTrainer, all_or_nothing
from affine_attn.distill.validation import Validation
from affine_attn.errors import UserError
from affine_attn.models import PRESETS, AffineAttnForCausalLM, preset
from affine_attn.models.folder import CARD, model_card
from affine_attn.models.load import load
from affine_attn.runs.files import read_object, write_json, write_text
from affine_attn.runs.layout import IDENTITY, RECIPE, RunFolder, result_name
from affine_attn.runs.locks import alone_in_run
from affine_attn.runs.provenance import device_name, environment
from affine_attn.runs.series import LOSSES, result

# They decide how a run is carried out; another value may be given on resuming.
_FREE = {
    "micro_batch", "gradient_checkpointing", "compile", "workers", "save_steps", "keep_checkpoints",
    "valid_steps", "statistics_steps", "report_to",
}  # fmt: skip


class Terminated(Exception):
    """A signal came, SIGTERM or that of Ctrl-C: the run has ended early, after a checkpoint."""

    def __init__(self, message: str, number: int = signal.SIGTERM):
        super().__init__(message)
        self.number = number


def run(
    recipe: Recipe,
    output: str | Path,
    resume: bool | None = False,
    tell: Callable[[str], object] = lambda line: None,
) -> Path:
    """Train the student of ``recipe`` and return the folder of the finished model.

    resume: go on with what the folder holds. False refuses a folder in which a run was begun; None takes any.
    tell: called with lines for a person, before training and after it, in one process of the job.
    """
    output = Path(output)
    folder = RunFolder(output)
    args = training_arguments(recipe, output)
    # A finished run stays as it is. What else the folder holds counts once it is locked: another process may be at it.
    if _is_finished(recipe, folder, resume):
        return folder.model
    dataset, config = sequences(recipe), recipe.student_config
    require_regular_files(dataset.tokenizer)
    needed = dataset.manifest["vocab_size"]
    has = f"{recipe.data} has tokens up to {needed - 1},"
    if needed > config.vocab_size:
        raise UserError(
            f"{has} the student's vocabulary {config.vocab_size} entries: give vocab_size={needed} or other data"
        )
    if recipe.shared_vocab is not None and needed > recipe.shared_vocab:
        raise UserError(f"{has} shared_vocab={recipe.shared_vocab} leaves some of them out: give at least {needed}")
    teacher = _teacher(recipe, folder)
    if teacher is not None and needed > (known := teacher.config.get_text_config().vocab_size):
        raise UserError(f"{has} teacher={recipe.teacher} knows {known}: it was made for another tokenizer")
    _require_target(recipe, config.vocab_size, teacher)
    tokens = fingerprint(Path(recipe.data), dataset.manifest)
    identity = _decisive(recipe) | {"data_sha256": tokens}
    # After the teacher: a student starts from the same weights whoever teaches it.
    set_seed(recipe.seed)
    trainer = DistillTrainer(
        _student(recipe),
        args,
        dataset,
        teacher=teacher,
        loss=recipe.loss_spec,
        shared=recipe.shared_vocab,
        compile=recipe.compile,
        top_k=recipe.top_k,
        identity=identity,
    )
    valid = held_out(recipe)
    if valid is not None:
        trainer.add_callback(Validation(trainer, valid, recipe.valid_steps))
    if recipe.statistics_steps:
        looked_at: Any = dataset if valid is None else valid
        few = [looked_at[i] for i in range(min(SEQUENCES, len(looked_at)))]
        trainer.add_callback(Statistics(folder, recipe.statistics_steps, few, trainer.metrics))
    with alone_in_run(folder) if args.should_save else nullcontext():
        trainer.accelerator.wait_for_everyone()
        if _is_finished(recipe, folder, resume):
            return folder.model
        checkpoint = get_last_checkpoint(str(output)) if output.is_dir() else None
        if checkpoint:
            _require_own(checkpoint, identity)
        if (resume or folder.recipe.exists()) and args.should_save:
            found = f"going on after {checkpoint}" if checkpoint else f"{output} has no checkpoint, starting at step 1"
            logging.getLogger(__name__).warning("%s", found)
        # All ranks look before the first one writes.
        trainer.accelerator.wait_for_everyone()
        if args.should_save:
            write_json(folder.recipe, dataclasses.asdict(recipe))
            write_json(folder.environment, environment(args) | {"data_sha256": tokens})
            student: Any = trainer.model
            for line in _header(recipe, output, args, student.num_parameters()):
                tell(line)
        began = time.perf_counter()
        with _on_signals(trainer.stop) as received:
            trainer.train(resume_from_checkpoint=checkpoint)
        seconds = time.perf_counter() - began
        if trainer.state.global_step < recipe.steps:
            number = received[0] if received else signal.SIGTERM  # of another rank
            by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            last = get_last_checkpoint(str(output))
            raise Terminated(f"stopped by {by}: {last} is complete, the same command goes on", number)
        unfinished = folder.unfinished_model
        with all_or_nothing(unfinished, str(folder.model)):
            trainer.save_model(str(unfinished))
            if args.should_save:
                copy_files(dataset.tokenizer, unfinished)
                name = f"{output.resolve().name}/{folder.model.name}"
                write_text(unfinished / CARD, model_card(config, name, _training(recipe, result(folder))))
        if args.should_save:
            write_json(folder.result, result(folder))
            unfinished.replace(folder.model)
            for line in _outcome(recipe, folder, seconds):
                tell(line)
        trainer.accelerator.wait_for_everyone()
    return folder.model


def default_output(recipe: Recipe, name: str, assignments: Sequence[str]) -> Path:
    """Return where a run of a recipe goes: one with other fields beside it, unless it was begun in the recipe's own."""
    own = Path("runs") / title(name)
    if not assignments:
        return own
    begun = RunFolder(own).recipe
    if begun.exists() and not _difference(read_object(begun), _decisive(recipe)):
        return own
    fields = "-".join([title(name), *assignments])
    # What shells, file systems and people read without trouble.
    plain = len(fields) < 100 and re.fullmatch(r"[\w.,=+-]+", fields)
    return own.with_name(fields if plain else result_name(title(name), {"fields": list(assignments)}))


def _header(recipe: Recipe, output: Path, args: TrainingArguments, parameters: int) -> Iterator[str]:
    """What is about to be trained, and where."""
    where = f"{args.device.type} ({device_name(args.device)})"
    many = f" x {args.world_size}" if args.world_size > 1 else ""
    learns = f"teacher {recipe.teacher}" if recipe.teacher else "no teacher"
    yield f"student   {recipe.student}, {recipe.attention} attention, {parameters:,} parameters; {learns}"
    yield f"tokens    {recipe.tokens:,} in {recipe.steps:,} steps, from {recipe.data}"
    yield f"device    {where}{many}, {recipe.dtype}"
    yield f"output    {output}"


def _outcome(recipe: Recipe, folder: RunFolder, seconds: float) -> Iterator[str]:
    """What came of it, and what one may do with it."""
    found = result(folder)
    perplexity = f", held-out perplexity {found['valid_perplexity']:.2f}" if "valid_perplexity" in found else ""
    memory = next((found[name] for name in ("peak_memory_bytes", "max_rss_bytes") if name in found), 0)
    yield f"loss {found['loss']:.4f}{perplexity}"
    yield f"{duration(seconds)}, {found['tokens_per_second']:,.0f} tokens/s, {memory / 2**30:.2f} GiB at most"
    model, run, data = (quote(str(path)) for path in (folder.model, folder.path, recipe.data))
    modules = sorted(set().union(*(spec.modules for spec in recipe.specs)))
    own = "".join(f" --import {name}" for name in modules)
    yield "next:"
    yield f"  affine-attn eval {model} --shards {data}{own}"
    yield f"  affine-attn analyze {run} --data {data}{own}"
    yield f"  affine-attn report {run}{own}"


def _training(recipe: Recipe, result: dict[str, Any]) -> str:
    """What the model card says of the run: its last losses and its recipe."""
    how = "with `affine-attn distill`" + (f" against the teacher {recipe.teacher}" if recipe.teacher else "")
    losses = [f"| {name} | {result[name]:.4f} |" for name in LOSSES if name in result]
    fields = [f"    {name}={value}" for name, value in _decisive(recipe).items()]
    table = ["| after the last step | |", "|---|---|", *losses]
    return "\n".join(["", f"{recipe.steps} steps {how}.", "", *table, "", "What decides its numbers:", "", *fields, ""])


def _require_target(recipe: Recipe, entries: int, teacher: PreTrainedModel | None) -> None:
    """What the loss would refuse in the first step, when the folder holds a run with that recipe."""
    sizes = {f"student={recipe.student}": entries}
    if teacher is not None:
        sizes[f"teacher={recipe.teacher}"] = teacher.get_output_embeddings().weight.shape[0]
    has = f"{' and '.join(f'{who} has {size}' for who, size in sizes.items())} vocabulary entries"
    if recipe.shared_vocab is None and len(set(sizes.values())) > 1:
        raise UserError(f"{has}: give shared_vocab, the number of leading ones that mean the same")
    count = recipe.shared_vocab or entries
    if count > min(sizes.values()):
        raise UserError(f"{has}, fewer than shared_vocab={count}")
    if recipe.top_k is not None and recipe.top_k > count:
        raise UserError(f"top_k={recipe.top_k} is more than the {count} vocabulary entries of the target")


def take_up(recipe: Recipe, output: Path) -> Path:
    """``run``, with what an earlier call has finished or begun."""
    return run(recipe, output, resume=None)


@contextmanager
def _on_signals(action: Callable[[], None]) -> Iterator[list[int]]:
    """Act on SIGTERM and on Ctrl-C, and gather which came; a second Ctrl-C does what the first would have done.

    Python lets the main thread alone handle signals; elsewhere they do what they did.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, _: Any) -> None:
        if number == signal.SIGINT:
            if number in received:
                raise KeyboardInterrupt
            print("\nCtrl-C: a checkpoint after this step; again leaves at once", file=sys.stderr)
        received.append(number)
        action()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        # A shell lets what runs in its background ignore Ctrl-C.
        if handler is not signal.SIG_IGN:
            signal.signal(number, receive)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def training_arguments(recipe: Recipe, output: Path) -> TrainingArguments:
    """Trainer's words for a recipe, on the devices there are."""
    args = TrainingArguments(
        output_dir=str(output),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=recipe.micro_batch,
        max_steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adam_beta1=recipe.beta1,
        adam_beta2=recipe.beta2,
        max_grad_norm=recipe.max_grad_norm,
        lr_scheduler_type="warmup_stable_decay",
        warmup_steps=recipe.warmup_steps,
        lr_scheduler_kwargs={"num_decay_steps": recipe.decay_steps, "decay_type": recipe.decay},
        bf16=recipe.dtype == "bfloat16",
        # For products that autocast leaves in fp32, which are slow without tensor cores.
        tf32=recipe.dtype == "bfloat16" and torch.cuda.is_available(),
        gradient_checkpointing=recipe.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=recipe.seed,
        save_steps=recipe.save_steps,
        save_total_limit=recipe.keep_checkpoints,
        dataloader_num_workers=recipe.workers,
        logging_steps=1,
        # Otherwise a loss that is not finite would be logged as the mean of those before it.
        logging_nan_inf_filter=False,
        # The batches have shift_labels, which no forward of transformers names.
        remove_unused_columns=False,
        average_tokens_across_devices=True,
        ddp_find_unused_parameters=False,
        # Of the configuration that is saved; training itself keeps no cache.
        use_cache=True,
        report_to=_reporter(recipe.report_to),
    )
    args.gradient_accumulation_steps = recipe.accumulation(args.world_size)
    return args


def _reporter(name: str) -> str:
    # transformers would answer with several lines, after the data and the teacher have been loaded.
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UserError(f"report_to={name} needs that package: pip install {name}")
    return name


def _decisive(recipe: Recipe) -> dict[str, Any]:
    """The fields that decide the numbers of a run."""
    return {name: value for name, value in dataclasses.asdict(recipe).items() if name not in _FREE}


def _is_finished(recipe: Recipe, folder: RunFolder, resume: bool | None) -> bool:
    """Return True if the folder has this run's model. A folder of another run is refused, or of nobody knows which."""
    if not folder.recipe.exists():
        if found := next(folder.after_recipe(), None):
            raise UserError(
                f"{folder.path} holds {found.name}, but no {RECIPE} that says of which run: give a new folder"
            )
        return False
    if resume is False:
        raise UserError(f"{folder.path} holds a run: give --resume to go on with it, or a new folder")
    if differs := _difference(read_object(folder.recipe, "student"), _decisive(recipe)):
        raise UserError(f"{folder.path} was begun with {differs}; give the same")
    return folder.model.exists()


def _require_own(checkpoint: str, identity: dict[str, Any]) -> None:
    """Refuse a checkpoint of another run: its steps would be mixed with those of this one."""
    path = Path(checkpoint) / IDENTITY
    if not path.exists():
        raise UserError(f"{checkpoint} does not say of which run it is (it has no {IDENTITY}): give a new folder")
    written = read_object(path, "student", "data_sha256")
    if written == identity | {"data_sha256": written["data_sha256"]} != identity:
        began = f"when {Path(checkpoint).parent} was begun"
        raise UserError(f"{identity['data']} has other tokens than {began}: give a new folder")
    if differs := _difference(written, identity):
        raise UserError(f"{checkpoint} is of another run, with {differs}: give a new folder")


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    return next(
        (f"{name}={before.get(name)}, not {value}" for name, value in now.items() if before.get(name) != value), None
    )


def _student(recipe: Recipe) -> AffineAttnForCausalLM:
    """Make a student from random numbers, or take a folder's model with the length in its attention's formula."""
    config = recipe.student_config
    if recipe.start is None:
        return AffineAttnForCausalLM(config)
    model = load(recipe.start, dtype=torch.float32)
    require_same_tokens(Path(recipe.data), recipe.start)
    if not isinstance(model, AffineAttnForCausalLM):
        raise UserError(
            f"start={recipe.start} is a {type(model).__name__}: give it an attention with affine-attn convert"
        )
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if getattr(model.config, name) != getattr(config, name):
            raise UserError(
                f"start={recipe.start} has {name} {getattr(model.config, name)}, student={recipe.student} "
                f"{getattr(config, name)}: give the student and the vocab_size it was trained with"
            )
    if any(
        at_length(model.config.spec(i), recipe.sequence_length) != at_length(config.spec(i), recipe.sequence_length)
        for i in range(config.num_hidden_layers)
    ):
        raise UserError(
            f"start={recipe.start} has another attention than attention={recipe.attention}, rho={recipe.rho}: "
            "give those it was trained with"
        )
    return model


def _teacher(recipe: Recipe, folder: RunFolder) -> PreTrainedModel | None:
    if recipe.teacher is None or recipe.teacher_cache:
        return None
    dtype = getattr(torch, recipe.dtype)
    if trained := recipe.teacher_recipe:
        return load(take_up(trained, folder.teacher.path), dtype=dtype)
    if recipe.teacher in PRESETS:
        set_seed(recipe.seed)
        config = preset(recipe.teacher, "softmax", vocab_size=recipe.student_config.vocab_size)
        return AffineAttnForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType]
    teacher = load(recipe.teacher, dtype=dtype)
    require_same_tokens(Path(recipe.data), recipe.teacher)
    return teacher
