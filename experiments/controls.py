"""Controls of what tables A and B say of affine: its output scale, norms of q and k, the learning rate, the length of
training, beta, parameters and warmup.

docs/reproduction-controls.md has what was decided before the first of them was run. A control has a number, which its
groups begin with: ``python -m experiments run --only 1-`` trains those of the first.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from affine_attn.core.spec import Affine, AttentionSpec
from affine_attn.core.variants import at_length, variant
from affine_attn.distill.recipes import Recipe, demo
from experiments.grid import (
    COMMON_RATE,
    CONTROLS,
    HIGH_RATE,
    MORE_SEEDS,
    PAPER_RATE,
    SEEDS,
    SMALL,
    SWEPT_RATE,
    Group,
    Student,
    slug,
)

# As all before them, but for the start: what softmax has too is drawn first, so that weights of a seed are the same.
_SETTINGS: dict[str, Any] = {"decays_sinks": True, "shared_start": True}
HALF, ROOT_HALF, LEARNED, IDENTITY = "softmax x 0.5", "softmax x 0.707", "softmax x learned", "gate from 1"
NO_BETA, HEADWISE, UNDECAYED = "affine, no beta", "gated_headwise", "sink, not decayed"
# Rates between those of table A, and those that were best there.
LOWER_RATE, HIGHER_RATE = 1.5e-3, 4e-3
BEST = {"softmax": SWEPT_RATE, "sink": PAPER_RATE, "affine": COMMON_RATE, "gated": COMMON_RATE}
# An MLP of 128 more channels has the parameters of an elementwise gate: 3 x 128 x width = width x width at width 384.
WIDER = 1280
# The same questions with the demo's students: a table, rates and seeds of their own.
SMALL_RATES, SMALL_SEEDS = (2e-3, 6e-3), range(1, 11)
NORMED, SLOWLY = ", q/k norm", ", longer warmup"
SLOWER, LONGER = 3, 2  # times the warmup, times the steps
# The paper's architectures for the first steps, at its rate and with as many tokens a step as all other students; and
# with eight times as many while the rate warms up. Micro-batches tell what of a gradient is noise.
EARLY: dict[str, Any] = {"steps": 500, "decay_steps": 0, "sequence_length": 2048, "global_batch": 16, "micro_batch": 4}
EARLY |= {"statistics_steps": 0, "valid_sequences": 64}
LARGER: dict[str, Any] = {"steps": 100, "global_batch": 128}
SIZES = {"0.5b": "qwen1.5-0.5b", "1b": "llama3.2-1b"}
VOCABULARY = 49152  # the teacher's


def groups(recipe: Recipe) -> list[Group]:
    """All of them, in the order in which they are worth having."""
    return [
        *_scale(recipe),
        *_norms(recipe),
        *_between(recipe),
        *_longer(recipe),
        *_neighbours(recipe),
        *_matched(recipe),
        *_warmup(recipe),
        *_early(recipe),
    ]


def small_recipe(data: str, teacher: str) -> Recipe:
    """The demo's students, for one thread of a CPU: 0.1M parameters, 0.7M tokens of Python's standard library."""
    return replace(demo(), data=data, teacher=teacher, documents=False, statistics_steps=0, valid_sequences=1 << 20)


def small_groups(recipe: Recipe) -> list[Group]:
    """Controls 1, 2, 5 and 7 for many seeds at that scale, which decide nothing about the paper's."""
    found = []
    for seed in SMALL_SEEDS:
        students, slower = [], []
        for rate in SMALL_RATES:
            for name in ("softmax", "affine", HALF, ROOT_HALF, LEARNED, IDENTITY, NO_BETA, HEADWISE):
                students.append(_student(name, recipe, rate, decays_sinks=name != LEARNED))
            for name in ("softmax", "affine"):
                normed = _student(name, recipe, rate, qk_norm=True)
                students.append(replace(normed, variant=f"{name}{NORMED}"))
            slower.append(replace(_student("softmax", recipe, rate), variant=f"softmax{SLOWLY}"))
        warmup = replace(recipe, warmup_steps=SLOWER * recipe.warmup_steps)
        of_seed = (("small", recipe, students), ("small-warmup", warmup, slower))
        for name, chosen, each in of_seed:
            found.append(replace(_group(name, chosen, seed, tuple(each)), table=SMALL))
    return found


def _group(name: str, recipe: Recipe, seed: int, students: tuple[Student, ...]) -> Group:
    seeded = replace(recipe, seed=seed)
    lengths = (recipe.sequence_length,)
    return Group(name=f"{name}-seed{seed}", table=CONTROLS, recipe=seeded, students=students, lengths=lengths)


def _student(name: str, recipe: Recipe, rate: float, **more: Any) -> Student:
    return Student(variant=name, attention=_specs(recipe)[name], learning_rate=rate, **(_SETTINGS | more))


def _specs(recipe: Recipe) -> dict[str, AttentionSpec]:
    length = recipe.sequence_length
    named = {name: at_length(variant(name), length) for name in (*BEST, HEADWISE)}
    return named | {
        HALF: AttentionSpec(gate=0.5),
        ROOT_HALF: AttentionSpec(gate=0.707),
        LEARNED: AttentionSpec(gate="learned"),
        IDENTITY: AttentionSpec(gate="headwise_identity"),
        NO_BETA: AttentionSpec(affine=Affine(length=length, beta=False)),
        UNDECAYED: named["sink"],
    }


def _scale(recipe: Recipe) -> Iterator[Group]:
    """1: is it the output scale? At the rate where affine is best first, in all seeds."""

    def scaled(rate: float) -> tuple[Student, ...]:
        return (
            _student(HALF, recipe, rate),
            _student(ROOT_HALF, recipe, rate),
            # A scale that decays would tend to nothing, where affine's alpha tends to a half.
            _student(LEARNED, recipe, rate, decays_sinks=False),
            _student(IDENTITY, recipe, rate),
        )

    for rate in (COMMON_RATE, SWEPT_RATE):
        for seed in SEEDS:
            yield _group(f"1-scale-{rate:g}", recipe, seed, scaled(rate))
    for seed in SEEDS:
        yield _group("1-scale-ends", recipe, seed, (*scaled(PAPER_RATE), *scaled(HIGH_RATE)))


def _norms(recipe: Recipe) -> Iterator[Group]:
    """2: is it what norms of q and k do anyway?"""

    def normed(*rates: float) -> tuple[Student, ...]:
        names = ("softmax", "affine", "gated")
        return tuple(_student(name, recipe, rate, qk_norm=True) for rate in rates for name in names)

    for seed in SEEDS:
        yield _group(f"2-norms-{COMMON_RATE:g}", recipe, seed, normed(COMMON_RATE))
    for seed in SEEDS:
        yield _group("2-norms-others", recipe, seed, normed(SWEPT_RATE, HIGH_RATE))


def _between(recipe: Recipe) -> Iterator[Group]:
    """3: do the rates of table A flatter affine?"""
    for seed in (*SEEDS, *MORE_SEEDS):
        students = (
            _student("softmax", recipe, LOWER_RATE),
            _student("sink", recipe, LOWER_RATE),
            _student("affine", recipe, HIGHER_RATE),
        )
        yield _group("3-rates", recipe, seed, students)


def _longer(recipe: Recipe) -> Iterator[Group]:
    """4: does the lead outlive longer training? Twice as long, with the same warmup and the same share of decay."""
    steps, decay, saved = (LONGER * n for n in (recipe.steps, recipe.decay_steps, recipe.save_steps))
    longer = replace(recipe, steps=steps, decay_steps=decay, save_steps=saved)
    for seed in SEEDS:
        students = tuple(_student(name, recipe, BEST[name]) for name in ("softmax", "affine", "gated"))
        yield _group("4-longer", longer, seed, students)


def _neighbours(recipe: Recipe) -> Iterator[Group]:
    """5: what does beta do, and what the nearest neighbour?"""
    for seed in SEEDS:
        students = tuple(_student(name, recipe, COMMON_RATE) for name in ("affine", NO_BETA, HEADWISE))
        yield _group("5-neighbours", recipe, seed, students)


def _matched(recipe: Recipe) -> Iterator[Group]:
    """6: the parameters of an elementwise gate, in the MLP."""
    for seed in SEEDS:
        students = tuple(_student(name, recipe, BEST[name], intermediate=WIDER) for name in ("softmax", "affine"))
        yield _group("6-matched", recipe, seed, students)


def _warmup(recipe: Recipe) -> Iterator[Group]:
    """7: would a longer warmup do the same, and was the sink decayed away?"""
    slower = replace(recipe, warmup_steps=SLOWER * recipe.warmup_steps)
    for seed in SEEDS:
        students = tuple(_student("softmax", recipe, rate) for rate in (COMMON_RATE, HIGH_RATE))
        yield _group("7-warmup", slower, seed, students)
    for seed in SEEDS:
        students = (_student(UNDECAYED, recipe, BEST["sink"], decays_sinks=False),)
        yield _group("7-undecayed", recipe, seed, students)


def _early(recipe: Recipe) -> Iterator[Group]:
    """9: gradients of the first steps at the paper's architectures, their own rotary embeddings included. Each student
    by itself: side by side they would take longer than a call may, and what they stop with is many gigabytes."""
    pair = ("softmax", "affine")
    for size, batch, names, seeds in (
        ("0.5b", {}, (*pair, HALF, NO_BETA), SEEDS),
        ("1b", {}, (*pair, HALF), SEEDS[:2]),
        ("0.5b", LARGER, pair, SEEDS[:2]),
    ):
        settings = EARLY | batch | {"student": SIZES[size], "vocab_size": recipe.vocab_size or VOCABULARY}
        early = replace(recipe, **settings)
        for seed in seeds:
            for name in names:
                student = _student(name, early, PAPER_RATE, positions="preset")
                yield _group(f"9-{size}-{early.global_batch}-{slug(name)}", early, seed, (student,))
