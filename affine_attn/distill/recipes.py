"""Recipes: a run is a function that returns a frozen ``Recipe``, or a file; what differs is said as ``field=value``.

Defaults are the affine paper's (arXiv 2602.23057) where it states a value. Fields it leaves open are ours, and
``Recipe.ours`` names them, with every value that is not one of the paper's.
"""

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from affine_attn.checks import nearest
from affine_attn.core.spec import AttentionSpec
from affine_attn.core.variants import at_length
from affine_attn.data.shards import TEACHER_CACHE
from affine_attn.distill.losses import LossSpec
from affine_attn.errors import UserError, first_line
from affine_attn.models import PRESETS, AffineAttnConfig, preset
from affine_attn.models.configuration import as_given, as_spec
from affine_attn.models.presets import surroundings
from affine_attn.runs.files import read_object
from affine_attn.runs.layout import RECIPE

# The ends of the paper's sweep; the points between are ours.
LEARNING_RATES = (5e-4, 1e-3, 2e-3, 5e-3)
# Teachers whose architecture is a preset, so that a dry run needs no network.
TEACHERS = {
    "Qwen/Qwen1.5-1.8B": "qwen1.5-1.8b",
    "meta-llama/Llama-3.2-3B": "llama3.2-3b",
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
}
# Fields that must fit the steps.
SCHEDULE = ("warmup_steps", "decay_steps")
# In a recipe file: the recipe that it changes.
_BASE = "recipe"
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "none"}


def _paper(*values: Any, says: str) -> Any:
    """A field for which the paper states these values; the first is the default."""
    return field(default=values[0], metadata={"paper": values, "says": says})


def _ours(default: Any, says: str) -> Any:
    return field(default=default, metadata={"paper": (), "says": says})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides the numbers of a run."""

    student: str = _paper("llama3.2-1b", "qwen1.5-0.5b", "llama3.2-3b", says="a preset: the student's architecture")
    attention: str = _paper(
        *("affine", "softmax", "sink", "gated", "affine_gated", "affine_sigmoid"),
        says='a variant, several with +, or as JSON a spec, {"gate": "learned"}, or a list with one per layer',
    )
    teacher: str | None = _paper(
        *("meta-llama/Llama-3.2-3B", "Qwen/Qwen1.5-1.8B"),
        says="a folder or hub id; train or train:PRESET (trained first, by the same recipe); cache or cache:FOLDER "
        "(affine-attn cache-teacher); a preset (random weights, to measure speed); none: the text alone",
    )
    rho: float = _paper(0.9, says="momentum of affine's alpha_ma")
    vocab_size: int | None = _ours(None, "of the student, where it is not the preset's")
    start: str | None = _ours(None, "folder of a model with the weights the student starts from; none: random")

    data: str = _ours("data/fineweb-edu", "a folder of shards (affine-attn prepare)")
    documents: bool = _ours(True, "keep its documents apart; false: they see each other")
    sequence_length: int = _paper(2048, says="tokens of a sequence")
    needles: int = _ours(0, "hidden in every sequence; only the answers about them are learned. 0: all of the text is")

    global_batch: int = _paper(1024, says="sequences of an optimizer step")
    micro_batch: int = _ours(8, "sequences of a forward on one device")
    steps: int = _paper(9000, says="optimizer steps; where warmup and decay no longer fit, they shrink with it")
    learning_rate: float = _paper(1e-3, says="between warmup and decay")
    weight_decay: float = _paper(0.1, says="of AdamW, on weights but not on norms, biases, sinks and scales")
    warmup_steps: int = _paper(100, says="steps in which the learning rate rises")
    decay_steps: int = _ours(900, "last steps, in which it falls")
    decay: Literal["linear", "cosine", "1-sqrt"] = _ours("linear", "how it falls")
    beta1: float = _ours(0.9, "of AdamW")
    beta2: float = _ours(0.95, "of AdamW")
    max_grad_norm: float = _ours(1.0, "where gradients are clipped; 0: not at all")

    loss: str = _ours("soft_ce", "soft_ce, forward_kl, reverse_kl or jsd")
    temperature: float = _ours(1.0, "of both distributions")
    hard: float = _ours(0.0, "share of the cross-entropy on the labels")
    shared_vocab: int | None = _ours(None, "leading entries that student and teacher share, where sizes differ")
    top_k: int | None = _ours(None, "the teacher cut to its largest entries and renormalised; of a cache: what it has")

    seed: int = _ours(0, "of weights and of the order of the data")
    dtype: Literal["float32", "bfloat16"] = _ours("bfloat16", "of the arithmetic; the student's weights are float32")
    gradient_checkpointing: bool = _ours(False, "compute activations twice, keep few")
    compile: bool = _ours(True, "decoder layers through torch.compile, at the price of a slow start")
    valid_sequences: int = _ours(256, "of the held-out text, at most; 0: no validation")
    valid_steps: int = _ours(0, "steps between validations; 0: only at the end")
    statistics_steps: int = _ours(100, "steps between lines of statistics.jsonl; 0: no such file")
    save_steps: int = _ours(500, "steps between checkpoints")
    keep_checkpoints: int = _ours(2, "the last ones; 0: all")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = _ours("none", "besides the files of the run")
    workers: int = _ours(2, "processes that read data, per device")

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
        # Their own checks: variant, rho, loss, temperature, hard, the preset of a teacher, the number of layers.
        _ = self.specs, self.loss_spec, self.teacher_recipe
        if len(self.specs) != 1:
            _ = self.student_config
        if self.top_k is not None and (self.teacher is None or self.top_k < 1):
            raise UserError(f"top_k={self.top_k} must be positive, and have a teacher to cut")
        if self.loss == "reverse_kl" and (self.top_k or self.teacher_cache):
            raise UserError("loss=reverse_kl needs the whole teacher: it is infinite where a target is 0")
        for name, kind in typing.get_type_hints(type(self)).items():
            allowed = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
            if allowed and getattr(self, name) not in allowed:
                raise UserError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)}")

    @property
    def specs(self) -> list[AttentionSpec]:
        """The attention of all layers, or of each, at the sequence length and momentum of this run."""
        found = as_given(self.attention)
        return [self._spec(entry) for entry in (found if isinstance(found, list) else [found])]

    def _spec(self, entry: Any) -> AttentionSpec:
        """A variant gets the length and the momentum of this run; a spec does where it does not say its own."""
        spec = as_spec(entry)
        given = entry if isinstance(entry, dict) else {}
        at_this_length = at_length(spec, self.sequence_length)
        logit = spec.logit if "length" in (given.get("logit") or ()) else at_this_length.logit
        affine = spec.affine
        if affine is not None:
            of_run = {"length": self.sequence_length, "momentum": self.rho}
            own = given.get("affine") or ()
            affine = dataclasses.replace(affine, **{name: value for name, value in of_run.items() if name not in own})
        return dataclasses.replace(spec, logit=logit, affine=affine)

    @property
    def student_config(self) -> AffineAttnConfig:
        specs = self.specs
        changes = surroundings(specs, self.sequence_length)
        if self.vocab_size is not None:
            changes["vocab_size"] = self.vocab_size
        return preset(self.student, specs[0] if len(specs) == 1 else specs, **changes)

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
        return self.changed(changes)

    def changed(self, changes: dict[str, Any]) -> "Recipe":
        """Return a recipe with other values. Of fewer steps, warmup and decay have the part they had, where they would
        not fit and nothing else is said."""
        steps = changes.get("steps", self.steps)
        schedule = {name: getattr(self, name) for name in SCHEDULE}
        if 0 < steps < self.steps and sum((schedule | changes)[name] for name in SCHEDULE) > steps:
            changes = {name: count * steps // self.steps for name, count in schedule.items()} | changes
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
    """The recipe of that name, or of a file .toml or .json, with ``field=value`` entries applied."""
    return _recipe(name).override(assignments)


def _recipe(name: str) -> Recipe:
    if Path(name).suffix in (".toml", ".json"):
        return _from_file(Path(name))
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}{_nearest(name, RECIPES)}, or a file .toml or .json")
    return RECIPES[name]()


def _from_file(file: Path) -> Recipe:
    """Fields of a recipe; what the file leaves out is that of the one it names as ``recipe``, else the defaults."""
    if not file.is_file():
        raise UserError(f"there is no recipe file {file}")
    try:
        fields = read_object(file) if file.suffix == ".json" else tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not TOML: {first_line(error)}") from error
    base = fields.pop(_BASE, None)
    kinds = typing.get_type_hints(Recipe)
    if unknown := next((name for name in fields if name not in kinds), None):
        raise UserError(f"{file}: a recipe has no field {unknown!r}{_nearest(unknown, kinds)}")
    try:
        before = Recipe() if base is None else _recipe(str(base))
        return before.changed({name: _checked(name, value, kinds[name]) for name, value in fields.items()})
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def title(name: str) -> str:
    """Return what runs of a recipe are called; of a run's own recipe.json, its folder."""
    file = Path(name)
    if file.suffix not in (".toml", ".json"):
        return name
    return file.resolve().parent.name if file.name == RECIPE else file.stem


def summary(name: str) -> str:
    """What a recipe is for, in a sentence, and the command that makes its data."""
    return (RECIPES[name].__doc__ or "").strip() if name in RECIPES else "a recipe file"


def schedule_note(name: str, assignments: Sequence[str]) -> str | None:
    """What was shrunk to fit the steps, if anything was."""
    before, after = recipe(name), recipe(name, assignments)
    given = {assignment.partition("=")[0] for assignment in assignments}
    changes = [
        f"{field}={getattr(after, field)} for {getattr(before, field)}"
        for field in SCHEDULE
        if field not in given and getattr(after, field) != getattr(before, field)
    ]
    return f"steps={after.steps} for {before.steps}, so {' and '.join(changes)}" if changes else None


class Explained(NamedTuple):
    """A field of a recipe: its value, who chose it (the paper, this package, or this recipe) and what it means."""

    name: str
    value: Any
    source: str
    says: str


def explained(name: str) -> list[Explained]:
    """Return all fields of a recipe."""
    chosen, found = recipe(name), []
    for entry in dataclasses.fields(Recipe):
        value = getattr(chosen, entry.name)
        by_default = "default" if value == entry.default else title(name)
        source = "paper" if value in entry.metadata["paper"] else by_default
        found.append(Explained(entry.name, value, source, entry.metadata["says"]))
    return found


def _nearest(name: str, known: Any) -> str:
    return nearest(name, known) or f"; there are {', '.join(known)}"


def _checked(name: str, value: Any, kind: Any) -> Any:
    """A value from a file, where it is of the field's type. TOML has no null: "none" stands for it."""
    if name == "attention" and isinstance(value, list | dict):
        return json.dumps(value)
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in kinds and value in (None, "none"):
        return None
    for each in kinds:
        if typing.get_origin(each) is Literal or type(value) is each:
            return value
        if each is float and type(value) is int:
            return float(value)
    raise UserError(f"{name} must be {' or '.join(_KINDS[each] for each in kinds)}, got {value!r}")


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
            raise UserError(f"{name} must be {_KINDS[kind]}, got {text!r}") from error
    return text
