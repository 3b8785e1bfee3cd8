"""What is trained: groups of students that see the same data in the same order, most valuable first.

A group is a ``Recipe`` (data, teacher, seed, schedule) and the students that differ within it. Tables A and B read the
groups of table "a", the noise floor compares "noise" with the same students there, C and D have groups of their own.
"""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from affine_attn.core.spec import Affine, Alibi, AttentionSpec, LogN, ScaleInvariant
from affine_attn.core.variants import at_length, variant
from affine_attn.distill.recipes import Recipe
from affine_attn.models import AffineAttnConfig, preset
from affine_attn.models.presets import TURN

LENGTH = 1024
PAPER_RATE, COMMON_RATE = 1e-3, 3e-3  # the affine paper's, and that of all that is done at one rate only
SWEPT_RATE, HIGH_RATE = 2e-3, 5e-3  # the rest of the sweep
BEYOND = (4, 16)  # times the training length, at which table D measures too
SEEDS, MORE_SEEDS = (1, 2, 3), (4, 5)
CONTROLS, SMALL = "controls", "small"  # the tables of experiments/controls.py
CORE, OTHERS = ("softmax", "sink", "affine"), ("off_by_one", "gated", "affine_gated")


# Fields that came after the first runs, with what held for these.
_BEFORE: dict[str, Any] = {"slowest": None, "intermediate": None, "decays_sinks": True, "shared_start": False}
# Of tables A to D and the noise floor: what is still to be run is compared with what was.
RECORDED: dict[str, Any] = {"decays_sinks": True}


@dataclass(frozen=True, kw_only=True)
class Student:
    """What tells a student from the others of its group."""

    variant: str  # its name in tables
    attention: AttentionSpec
    learning_rate: float
    w_a: Literal["normal", "zeros"] = "normal"  # start of alpha's weights
    qk_norm: bool = False
    positions: Literal["default", "p_rope", "nope", "preset"] = "default"  # rotary embeddings
    slowest: int | None = None  # of p_rope, if not its usual one
    intermediate: int | None = None  # width of the MLP, if not the preset's
    decays_sinks: bool = False  # weight decay acts on sinks and scales too, as it did in the first runs
    shared_start: bool = False  # weights that softmax has too are drawn first: those of a seed are the same for all

    @property
    def name(self) -> str:
        """Name of its folder."""
        return slug(f"{self.variant} {self.learning_rate:g}")

    def config(self, recipe: Recipe) -> AffineAttnConfig:
        # Always said: what a preset chooses for an attention may change, and runs must stay what they were.
        positions: dict[str, Any] = {"rope_type": self.positions, "rope_theta": 10000.0}
        if self.slowest is not None:
            positions["slowest"] = self.slowest
        changes: dict[str, Any] = {} if self.positions == "preset" else {"rope_parameters": positions}
        if recipe.vocab_size is not None:
            changes["vocab_size"] = recipe.vocab_size
        if self.intermediate is not None:
            changes["intermediate_size"] = self.intermediate
        return preset(recipe.student, self.attention, qk_norm=self.qk_norm, **changes)

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self) | {"attention": self.attention.to_dict()}
        # Runs that were made before there were such fields must compare equal.
        return {name: value for name, value in fields.items() if name not in _BEFORE or value != _BEFORE[name]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Student":
        """The student of what :meth:`to_dict` gave, or gave before there were as many fields."""
        given: dict[str, Any] = _BEFORE | fields
        given["attention"] = AttentionSpec.from_dict(fields["attention"])
        return cls(**given)


def slug(name: str) -> str:
    """A name as that of a folder."""
    return re.sub(r"[^a-z0-9_.]+", "-", name.lower())


@dataclass(frozen=True)
class Needles:
    """A student's second training, to find needles at its length; it is asked at all lengths of its group."""

    steps: int = 300
    learning_rate: float = 1e-3
    haystacks: int = 10  # of every depth


@dataclass(frozen=True, kw_only=True)
class Group:
    """Students side by side; ``lengths`` are those of the validation, the sequence length of training first."""

    name: str
    table: str
    recipe: Recipe
    students: tuple[Student, ...]
    lengths: tuple[int, ...]
    needles: Needles | None = None

    def is_analysed(self, student: Student) -> bool:
        """Figures compare students of one seed at one rate."""
        is_shown = self.table in ("a", "c", "d")
        return is_shown and self.recipe.seed == SEEDS[0] and student.learning_rate == COMMON_RATE

    @property
    def is_kept(self) -> bool:
        """Models of controls are looked at by nobody, and some are large."""
        return self.table not in (CONTROLS, SMALL)

    def __post_init__(self) -> None:
        if len({student.name for student in self.students}) < len(self.students):
            raise ValueError(f"{self.name}: two students have the same name, so they would share a folder")


def base_recipe(data: str, teacher: str) -> Recipe:
    """33M students, 41M tokens: 1250 steps of 32 sequences, 100 of them warmup and a fifth decay.

    Plain packing, as far as the paper says: documents of a sequence see each other.
    """
    return Recipe(
        student="mini",
        attention="softmax",
        teacher=teacher,
        data=data,
        sequence_length=LENGTH,
        global_batch=32,
        micro_batch=32,
        documents=False,
        steps=1250,
        warmup_steps=100,
        decay_steps=250,
        valid_sequences=1 << 20,
        statistics_steps=250,
        save_steps=650,
    )


def groups(recipe: Recipe) -> list[Group]:
    """All of them, in the order in which they are worth having."""

    def group(name: str, table: str, seed: int, students: tuple[Student, ...]) -> Group:
        seeded = replace(recipe, seed=seed)
        lengths = tuple(factor * recipe.sequence_length for factor in (1, *(BEYOND if table == "d" else ())))
        return Group(
            name=f"{name}-seed{seed}",
            table=table,
            recipe=seeded,
            students=students,
            lengths=lengths,
            needles=Needles() if table == "d" else None,
        )

    def named(names: tuple[str, ...], rates: tuple[float, ...]) -> tuple[Student, ...]:
        specs = {name: at_length(variant(name), recipe.sequence_length) for name in names}
        return tuple(
            Student(variant=name, attention=spec, learning_rate=rate, **RECORDED)
            for rate in rates
            for name, spec in specs.items()
        )

    (first, second, third), (fourth, fifth) = SEEDS, MORE_SEEDS
    others = second, third
    both, every = (PAPER_RATE, COMMON_RATE), (*CORE, *OTHERS)
    up_to_common = PAPER_RATE, SWEPT_RATE, COMMON_RATE
    a_open = ablations(recipe.sequence_length)
    # The slowest pair of p-rope turns once in a sequence. The first runs had that of the paper, which trains at four
    # times the length, and longer text brought angles that they had never seen (docs/log).
    lengthy = distances(recipe.sequence_length, slowest=recipe.sequence_length // TURN)
    return [
        group("a-core", "a", first, named(CORE, both)),
        group("a-others", "a", first, named(OTHERS, both)),
        group("a", "a", second, named(every, both)),
        group("a-core", "a", third, named(CORE, both)),
        # Right after the seed it repeats, so that the same code runs both.
        group("noise", "noise", third, named(("softmax", "affine"), (COMMON_RATE,))),
        group("a-others", "a", third, named(OTHERS, both)),
        group("a-sweep", "a", first, named(every, (SWEPT_RATE, HIGH_RATE))),
        group("c", "c", first, a_open),
        group("d", "d", first, distances(recipe.sequence_length)),
        group("d-slowest", "d", first, tuple(student for student in lengthy if student.slowest is not None)),
        # Without the highest rate, which none of them had as its best with the first seed.
        group("a-core", "a", fourth, named(CORE, up_to_common)),
        group("a-core", "a", fifth, named(CORE, up_to_common)),
        group("noise", "noise", fifth, named(("softmax", "affine"), (PAPER_RATE,))),
        *(group("a-sweep", "a", seed, named(every, (SWEPT_RATE, HIGH_RATE))) for seed in others),
        *(group("8-c", "c", seed, a_open) for seed in others),
        *(group("8-d", "d", seed, lengthy) for seed in others),
    ]


def place(name: str) -> int:
    """Return a variant's place in tables: those of table A in the paper's order, then those of C and D, then others."""
    students = (*ablations(LENGTH), *distances(LENGTH), *distances(LENGTH, slowest=LENGTH // TURN))
    order = (*CORE, *OTHERS, *(student.variant for student in students))
    return order.index(name) if name in order else len(order)


def ablations(length: int) -> tuple[Student, ...]:
    """Table C: one departure each from the affine of table A, with which they are compared at equal seed.

    N = keys of the call is not among them: at the length of training it is the training length, so the same run.
    """
    changes: dict[str, dict[str, Any]] = {
        "affine, N visible": {"length": 0},
        "affine, average from 0.5": {"start": 0.5},
        "affine, average per layer": {"per_head": False},
        "affine, sigmoid": {"phi": "sigmoid"},
        "affine, no beta": {"beta": False},
    }
    base = Affine(length=length)
    common: dict[str, Any] = {"learning_rate": COMMON_RATE} | RECORDED
    students = (
        Student(variant=name, attention=AttentionSpec(affine=replace(base, **change)), **common)
        for name, change in changes.items()
    )
    return (*students, Student(variant="affine, W_a zero", attention=AttentionSpec(affine=base), w_a="zeros", **common))


def distances(length: int, slowest: int | None = None) -> tuple[Student, ...]:
    """Table D, all with norms on q and k; positions as in the scale-invariant paper (arXiv 2505.17083)."""
    of_p_rope: dict[str, Any] = {"positions": "p_rope", "slowest": slowest}
    p_rope = "p-rope" if slowest is None else f"p-rope {slowest}"
    invariant = ScaleInvariant()
    rows: dict[str, tuple[AttentionSpec, dict[str, Any]]] = {
        "rope": (AttentionSpec(), {}),
        p_rope: (AttentionSpec(), of_p_rope),
        f"logn, {p_rope}": (AttentionSpec(logit=LogN(length=length)), of_p_rope),
        "alibi": (AttentionSpec(logit=Alibi()), {"positions": "nope"}),
        f"scale_invariant, {p_rope}": (AttentionSpec(logit=invariant), of_p_rope),
        f"scale_invariant + affine, {p_rope}": (
            AttentionSpec(logit=invariant, affine=Affine(length=length)),
            of_p_rope,
        ),
    }
    return tuple(
        Student(variant=name, attention=spec, learning_rate=COMMON_RATE, qk_norm=True, **RECORDED, **positions)
        for name, (spec, positions) in rows.items()
    )
