"""Recipes: a run is a function that returns a frozen ``Recipe``; what differs is said as ``field=value``.

Defaults are the affine paper's (arXiv 2602.23057) where it states a value. Fields it leaves open are ours, and
``Recipe.ours`` names them, with every value that is not one of the paper's.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from affine_attn.core.spec import AttentionSpec
from affine_attn.core.variants import variant
from affine_attn.data.shards import TEACHER_CACHE
from affine_attn.distill.losses import LossSpec
from affine_attn.errors import UserError
from affine_attn.models import PRESETS, AffineAttnConfig, preset
from affine_attn.models.presets import at_length, surroundings

# The ends of the paper's sweep; the points between are ours.
LEARNING_RATES = (5e-4, 1e-3, 2e-3, 5e-3)
# Teachers whose architecture is a preset, so that a dry run needs no network.
TEACHERS = {
    "Qwen/Qwen1.5-1.8B": "qwen1.5-1.8b",
    "meta-llama/Llama-3.2-3B": "llama3.2-3b",
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
}


def _paper(*values: Any) -> Any:
    """A field for which the paper states these values; the first is the default."""
    return field(default=values[0], metadata={"paper": values})


def _ours(default: Any) -> Any:
    return field(default=default, metadata={"paper": ()})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides the numbers of a run."""

    # The models: a preset with a variant; and a folder, a hub id, train or train:PRESET (trained first, by the same
    # recipe), cache or cache:FOLDER (affine-attn cache-teacher), a preset (random weights, to measure speed), or none.
    student: str = _paper("llama3.2-1b", "qwen1.5-0.5b", "llama3.2-3b")
    attention: str = _paper("affine", "softmax", "sink", "gated", "affine_gated", "affine_sigmoid")
    teacher: str | None = _paper("meta-llama/Llama-3.2-3B", "Qwen/Qwen1.5-1.8B")
    rho: float = _paper(0.9)  # momentum of affine's alpha_ma
    vocab_size: int | None = _ours(None)  # of the student, where it is not the preset's
    start: str | None = _ours(None)  # folder of a model with the weights this student starts from; none: random

    # A folder of shards (affine-attn prepare), and whether its documents see each other.
    data: str = _ours("data/fineweb-edu")
    documents: bool = _ours(True)
    sequence_length: int = _paper(2048)
    needles: int = _ours(0)  # hidden in every sequence; only the answers about them are learned. 0: all of the text is

    global_batch: int = _paper(1024)  # sequences of an optimizer step
    micro_batch: int = _ours(8)  # sequences of a forward on one device
    steps: int = _paper(9000)
    learning_rate: float = _paper(1e-3)
    weight_decay: float = _paper(0.1)
    warmup_steps: int = _paper(100)
    decay_steps: int = _ours(900)
    decay: Literal["linear", "cosine", "1-sqrt"] = _ours("linear")
    beta1: float = _ours(0.9)
    beta2: float = _ours(0.95)
    max_grad_norm: float = _ours(1.0)  # 0: no clipping

    loss: str = _ours("soft_ce")
    temperature: float = _ours(1.0)
    hard: float = _ours(0.0)  # share of the cross-entropy on the labels
    shared_vocab: int | None = _ours(None)  # leading entries that student and teacher share, where sizes differ
    top_k: int | None = _ours(None)  # the teacher cut to its largest entries and renormalised; of a cache: what it has

    seed: int = _ours(0)
    dtype: Literal["float32", "bfloat16"] = _ours("bfloat16")  # of the arithmetic; the student's weights are float32
    gradient_checkpointing: bool = _ours(False)
    compile: bool = _ours(True)  # decoder layers through torch.compile, at the price of a slow start
    valid_sequences: int = _ours(256)  # of the held-out text, at most; 0: no validation
    valid_steps: int = _ours(0)  # steps between validations; 0: only at the end
    statistics_steps: int = _ours(100)  # steps between lines of statistics.jsonl; 0: no such file
    save_steps: int = _ours(500)
    keep_checkpoints: int = _ours(2)  # the last ones; 0: all
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = _ours("none")  # besides the files of the run
    workers: int = _ours(2)  # processes that read data, per device

    def __post_init__(self) -> None:
        if self.student not in PRESETS:
            raise UserError(f"student={self.student} is no preset{_nearest(self.student, PRESETS)}")
        positive = ("sequence_length", "global_batch", "micro_batch", "steps", "learning_rate", "save_steps")
        sizes = tuple(name for name in ("vocab_size", "shared_vocab") if getattr(self, name) is not None)
        for name in positive + sizes:
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be positive and finite, got {getattr(self, name)}")
        counts = (
            "needles",
            "warmup_steps",
            "decay_steps",
            "workers",
            "valid_sequences",
            "valid_steps",
            "statistics_steps",
            "keep_checkpoints",
        )
        for name in ("weight_decay", "max_grad_norm", *counts):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"seed must be at least 0 and below 2**32, got {self.seed}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.warmup_steps + self.decay_steps > self.steps:
            raise UserError(
                f"warmup_steps={self.warmup_steps} and decay_steps={self.decay_steps} are more than steps={self.steps}"
            )
        # Their own checks: variant, rho, loss, temperature, hard, the preset of a teacher.
        _ = self.spec, self.loss_spec, self.teacher_recipe
        if self.top_k is not None and (self.teacher is None or self.top_k < 1):
            raise UserError(f"top_k={self.top_k} must be positive, and have a teacher to cut")
        if self.loss == "reverse_kl" and (self.top_k or self.teacher_cache):
            raise UserError("loss=reverse_kl needs the whole teacher: it is infinite where a target is 0")
        for name, kind in typing.get_type_hints(type(self)).items():
            allowed = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
            if allowed and getattr(self, name) not in allowed:
                raise UserError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)}")

    @property
    def spec(self) -> AttentionSpec:
        """The variant at the sequence length and momentum of this run."""
        spec = at_length(variant(self.attention), self.sequence_length)
        if spec.affine is None:
            return spec
        return dataclasses.replace(spec, affine=dataclasses.replace(spec.affine, momentum=self.rho))

    @property
    def student_config(self) -> AffineAttnConfig:
        changes = surroundings([self.spec], self.sequence_length)
        if self.vocab_size is not None:
            changes["vocab_size"] = self.vocab_size
        return preset(self.student, self.spec, **changes)

    @property
    def teacher_recipe(self) -> "Recipe | None":
        """Recipe of a teacher that is trained first: softmax attention, on the text alone."""
        kind, _, name = (self.teacher or "").partition(":")
        if kind != "train":
            return None
        vocab_size = self.student_config.vocab_size
        changes = {"student": name or self.student, "attention": "softmax"}
        changes |= {"teacher": None, "shared_vocab": None, "top_k": None, "start": None}
        return dataclasses.replace(self, **changes, vocab_size=vocab_size)

    @property
    def teacher_cache(self) -> Path | None:
        """Folder of a teacher that is read from a cache, by default inside that of the data."""
        kind, _, folder = (self.teacher or "").partition(":")
        return Path(folder or f"{self.data}/{TEACHER_CACHE}") if kind == "cache" else None

    @property
    def loss_spec(self) -> LossSpec:
        return LossSpec(kind=self.loss, temperature=self.temperature, hard=self.hard)

    @property
    def tokens(self) -> int:
        return self.steps * self.global_batch * self.sequence_length

    def accumulation(self, devices: int) -> int:
        """Micro-batches of an optimizer step on each of so many devices."""
        turn = self.micro_batch * devices
        if self.global_batch % turn:
            raise UserError(
                f"global_batch={self.global_batch} is no multiple of micro_batch={self.micro_batch} times "
                f"{devices} device{'s' if devices > 1 else ''}"
            )
        return self.global_batch // turn

    def ours(self) -> dict[str, Any]:
        """The fields whose value is not one that the paper states."""
        values = {
            entry.name: (getattr(self, entry.name), entry.metadata["paper"]) for entry in dataclasses.fields(self)
        }
        return {name: value for name, (value, stated) in values.items() if value not in stated}

    def override(self, assignments: Sequence[str]) -> "Recipe":
        """Return a recipe with ``field=value`` entries applied, each read as the field's type."""
        kinds = typing.get_type_hints(type(self))
        changes = {}
        for assignment in assignments:
            name, equals, text = assignment.partition("=")
            if not equals:
                raise UserError(f"{assignment!r} is not of the form field=value")
            if name not in kinds:
                raise UserError(f"a recipe has no field {name!r}{_nearest(name, kinds)}")
            changes[name] = _parsed(name, text, kinds[name])
        return dataclasses.replace(self, **changes)


def demo() -> Recipe:
    """Two CPU cores, minutes: the standard library's source. Data: affine-attn prepare data/demo --vocab-size 512 --valid 0.05"""  # noqa: E501
    return Recipe(
        student="nano",
        teacher="train:micro",
        vocab_size=512,
        data="data/demo",
        sequence_length=256,
        global_batch=4,
        micro_batch=4,
        steps=700,
        learning_rate=2e-3,
        warmup_steps=30,
        decay_steps=230,
        dtype="float32",
        compile=False,
        save_steps=100,
        workers=0,
    )


def small() -> Recipe:
    """One GPU, minutes: the standard library's source. Data: affine-attn prepare data/small --vocab-size 8192"""
    return Recipe(
        student="mini",
        teacher=None,
        vocab_size=8192,
        data="data/small",
        sequence_length=512,
        global_batch=64,
        micro_batch=64,
        steps=2000,
        # The best of four for affine with these layers and tokens a step; softmax's is lower (docs/reproduction.md).
        learning_rate=3e-3,
        warmup_steps=100,
        decay_steps=400,
    )


def paper_0_5b() -> Recipe:
    """The paper's 0.5B student. Data: affine-attn prepare data/fineweb-edu-qwen HuggingFaceFW/fineweb-edu:sample-100BT --tokenizer Qwen/Qwen1.5-0.5B --max-tokens 18874368000"""  # noqa: E501
    return Recipe(student="qwen1.5-0.5b", teacher="Qwen/Qwen1.5-1.8B", data="data/fineweb-edu-qwen", micro_batch=16)


def paper_1b() -> Recipe:
    """The paper's 1B student. Data: affine-attn prepare data/fineweb-edu-llama HuggingFaceFW/fineweb-edu:sample-100BT --tokenizer meta-llama/Llama-3.2-1B --max-tokens 18874368000"""  # noqa: E501
    return Recipe(student="llama3.2-1b", teacher="meta-llama/Llama-3.2-3B", data="data/fineweb-edu-llama")


def paper_3b() -> Recipe:
    """The paper's 3B student; the teacher it prints, LLaMA3.3-8B, is no public model. Data: as paper-1b"""
    return Recipe(
        student="llama3.2-3b",
        teacher="meta-llama/Llama-3.1-8B",
        data="data/fineweb-edu-llama",
        micro_batch=4,
        gradient_checkpointing=True,
    )


def needle() -> Recipe:
    """Fine-tunes the student of small to find needles (arXiv 2505.17083: 300 steps, answers only). Data: as small"""
    return dataclasses.replace(
        small(),
        start="runs/small/model",
        needles=3,
        documents=False,
        sequence_length=4096,
        micro_batch=8,
        steps=300,
        learning_rate=1e-3,
        warmup_steps=100,
        decay_steps=100,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "small": small,
    "needle": needle,
    "paper-0.5b": paper_0_5b,
    "paper-1b": paper_1b,
    "paper-3b": paper_3b,
}


def recipe(name: str, assignments: Sequence[str] = ()) -> Recipe:
    """The recipe of that name with ``field=value`` entries applied."""
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}{_nearest(name, RECIPES)}")
    return RECIPES[name]().override(assignments)


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def _parsed(name: str, text: str, kind: Any) -> Any:
    if isinstance(kind, types.UnionType):
        if text.lower() == "none":
            return None
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{name} must be true or false, got {text!r}")
        return text.lower() == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError as error:
            what = "an integer" if kind is int else "a number"
            raise UserError(f"{name} must be {what}, got {text!r}") from error
    return text
