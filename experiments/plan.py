"""What the grid will cost, by calculation from FLOPs and from how fast groups have trained so far."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from affine_attn.distill.estimate import Size, size, teacher_config
from experiments import runs
from experiments.grid import Group, Student
from experiments.side_by_side import flops

# A first probe: eight students of 33M with a teacher of 135M, 640k tokens a second of all students together on an H200.
PROBE_STUDENTS, PROBE_TOKENS_PER_SECOND = 8, 640_000
# Of an attention that the process has not trained yet. Assumed, not measured.
COMPILE_SECONDS = 20


def plan(groups: Sequence[Group], done: Sequence[runs.Run]) -> Iterator[str]:
    """A line per group that has something left to do, with the time at which it would end."""
    finished = {(run.config["group"], run.folder.name) for run in done if run.result is not None}
    teacher_size = teacher_config(groups[0].recipe)
    teacher = None if teacher_size is None else size(teacher_size)
    sizes = _sizes(groups)
    measured = [
        run.result["speed"]["flops_per_second"] for run in done if run.result and run.result["speed"]["seconds"]
    ]
    rate = median(measured) if measured else _probe_rate(groups[0], sizes[groups[0].students[0]], teacher)
    yield f"{'group':22} {'students':>8} {'tokens':>8} {'minutes':>8} {'in all':>8}"
    total, seen, runs_left, tokens_left = 0.0, set(), 0, 0
    for group in groups:
        left = [student for student in group.students if (group.name, student.name) not in finished]
        if not left:
            continue
        attentions = {student.attention for student in left} - seen
        seen |= attentions
        cost = flops(group, [sizes[student] for student in left], teacher)
        steps = group.recipe.steps + (group.needles.steps if group.needles else 0)
        tokens = group.recipe.tokens * steps // group.recipe.steps
        minutes = (tokens * cost / rate + COMPILE_SECONDS * len(attentions)) / 60
        total += minutes
        runs_left, tokens_left = runs_left + len(left), tokens_left + len(left) * tokens
        yield (
            f"{group.name:22} {len(left):8} {len(left) * tokens / 1e6:7.0f}M {minutes:8.1f} {total:8.1f}"
            f"   {', '.join(dict.fromkeys(student.variant for student in left))}"
        )
    how = f"measured over {len(measured)} runs" if measured else "from a first probe on an H200"
    yield f"{runs_left} runs, {tokens_left / 1e6:,.0f}M tokens, {total:.0f} minutes"
    yield f"at {rate / 1e12:.0f} TFLOP/s ({how}), with {COMPILE_SECONDS} seconds for each new attention (assumed)"


def _sizes(groups: Sequence[Group]) -> dict[Student, Size]:
    """Those that differ in their learning rate alone are built once."""
    found: dict[Student, Size] = {}
    for group in groups:
        for student in group.students:
            alike = replace(student, learning_rate=1.0, w_a="normal")
            if alike not in found:
                found[alike] = size(student.config(group.recipe))
            found[student] = found[alike]
    return found


def _probe_rate(group: Group, student: Size, teacher: Size | None) -> float:
    of_eight = flops(group, [student] * PROBE_STUDENTS, teacher)
    return of_eight * PROBE_TOKENS_PER_SECOND / PROBE_STUDENTS
