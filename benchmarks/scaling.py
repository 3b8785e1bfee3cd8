"""The tables of docs/scaling.md: what one GPU reaches, and by calculation the paper's sizes on many.

What one GPU reaches is read from the training measurements (benchmarks/results/training); a size without one is
calculated with the MFU that ``affine-attn distill --dry-run`` assumes, and says so. ``python -m benchmarks.readme``
writes them.
"""

import dataclasses
from pathlib import Path

from affine_attn.distill import estimate
from affine_attn.distill.recipes import RECIPES, Recipe
from benchmarks.record import RESULTS, ROOT, Row, read

MEASURED = RESULTS / "training" / "nvidia-h200.csv"
SIZES = ("paper-0.5b", "paper-1b", "paper-3b")
GPUS = (8, 64, 512)
HEADS = (
    "GPUs", "micro-batch x accumulation", "GiB per GPU, DDP", "FSDP2", "tokens/s", "recipe takes",
    "s per step", "GB sent per GPU and step, DDP", "FSDP2", "GB/s that hides it, DDP", "FSDP2",
)  # fmt: skip


def measurements(measured: Path = MEASURED) -> str:
    """A row per measurement, as benchmarks/training.py wrote it."""
    lines = [
        "| model | what is trained | attention | ms per step | over softmax | tokens/s | MFU | GiB | commit |",
        "|---" * 9 + "|",
    ]
    for row in read(measured):
        cells = (
            row["shape"], row["mode"], row["what"], f"{float(row['ms_p50']):.0f}", f"{float(row['ratio']):.3f}",
            f"{int(row['tokens_per_second']):,}", f"{float(row['mfu']):.1%}", f"{float(row['peak_mib']) / 1024:.1f}",
            row["commit"],
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(measured: Path = MEASURED) -> str:
    """A caption and a table per size."""
    rows = read(measured) if measured.exists() else []
    parts = [part for name in SIZES for part in _size(name, RECIPES[name](), rows)]
    return "\n\n".join(parts)


def measured_row(name: str, recipe: Recipe, rows: list[Row]) -> Row | None:
    """The measurement of a recipe: its shape is the recipe, its student or its size; distilling before pretraining, and
    text before random tokens."""
    shapes = {name, recipe.student, name.removeprefix("paper-")}
    fitting = [
        row
        for row in rows
        if row["shape"].lower() in shapes and row["what"] == recipe.attention and row.get("mfu") not in (None, "")
    ]
    return min(fitting, key=lambda row: ("distill" not in row["mode"], "text" not in row["mode"]), default=None)


def _size(name: str, recipe: Recipe, rows: list[Row]) -> list[str]:
    student, config = estimate.size(recipe.student_config), estimate.teacher_config(recipe)
    teacher = None if config is None else estimate.size(config)
    row = measured_row(name, recipe, rows)
    if row is None:
        mfu, source = estimate.ASSUMED_MFU, f"not measured yet, {estimate.ASSUMED_MFU:.0%} MFU is assumed"
    else:
        mfu = float(row["mfu"])
        where = MEASURED.relative_to(ROOT)
        source = f"{mfu:.1%} MFU as measured on one {row['device']} ({row['what']}, {row['mode']}, {where})"
    flops = estimate.flops_per_token(recipe, student, teacher)
    caption = (
        f"**{name}**: {student.parameters / 1e9:.2f}B parameters, teacher {recipe.teacher}, "
        f"{flops / 1e9:.2f} GFLOPs per token with the teacher's forward; {source}."
    )
    lines = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    for gpus in GPUS:
        # As many sequences at a time as the recipe says, where the global batch has that many for every GPU.
        on_these = dataclasses.replace(recipe, micro_batch=min(recipe.micro_batch, recipe.global_batch // gpus))
        memory = estimate.memory(on_these, student, teacher, gpus)
        moved = estimate.bytes_moved(on_these, student, gpus)
        speed = gpus * estimate.PEAK_FLOPS * mfu / flops
        step = recipe.global_batch * recipe.sequence_length / speed
        cells = [
            f"{gpus}",
            f"{on_these.micro_batch} x {on_these.accumulation(gpus)}",
            *(f"{memory[kind] / 2**30:.0f}" for kind in ("DDP", "FSDP")),
            f"{speed:,.0f}",
            estimate.duration(recipe.tokens / speed),
            f"{step:.2f}",
            *(f"{moved[kind] / 1e9:.1f}" for kind in ("DDP", "FSDP")),
            *(f"{moved[kind] / 1e9 / step:.1f}" for kind in ("DDP", "FSDP")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [caption, "\n".join(lines)]
