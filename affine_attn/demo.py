"""``affine-attn demo``: the affine paper's comparison in minutes, from text that every machine has to a table and
a page about the students."""

from pathlib import Path

from rich.console import Console

from affine_attn.analyze.run import Request, analyze_all
from affine_attn.data.prepare import prepare
from affine_attn.distill.recipes import Recipe
from affine_attn.distill.sweep import grid, outcome, stopped, table
from affine_attn.errors import FileError, MissingPackage, NotFinite, UserError
from affine_attn.report import write_report
from affine_attn.runs.layout import ANALYSIS, MODEL, TEACHER, RunFolder
from affine_attn.runs.series import STEPS

STUDENTS = "attention=softmax,sink,affine"
REPORT = "report.html"
SEQUENCES = 4  # that the students are looked at with
# A hundredth, the default of prepare, would be four files of the standard library.
VALID = 0.05


def run_demo(recipe: Recipe, output: Path, console: Console, max_files: int | None = None) -> None:
    """Prepare data, train the teacher of ``recipe``, then students that differ in their attention alone.

    What an earlier call has finished is reused, what it has begun goes on. ``max_files``: of the corpus.
    """

    def say(line: str) -> None:
        # On a terminal at words, except in a command, which is there to be copied.
        whole = line.startswith("  affine-attn") or not console.is_terminal
        console.print(line, markup=False, highlight=False, soft_wrap=whole)

    try:
        say(f"Data: the source of Python's standard library, BPE trained on it -> {recipe.data}")
        manifest = prepare(recipe.data, vocab_size=recipe.student_config.vocab_size, valid=VALID, max_files=max_files)
        counts = {split: f"{tokens:,}" for split, tokens in manifest["tokens"].items()}
        say(f"  {counts['train']} tokens to learn, {counts['valid']} held out for validation")
        runs, rows = grid(recipe, STUDENTS, output), []
        for number, (label, each) in enumerate(runs.items(), start=1):
            learns = "from the text" if each.teacher is None else "the teacher's probabilities"
            done = ": finished before, reused" if RunFolder(output / label).model.exists() else ""
            say(
                f"{number} of {len(runs)}, {label}: {each.student}, {each.attention} attention, learns {learns}, "
                f"{each.steps} steps of {each.global_batch * each.sequence_length:,} tokens -> {output / label}{done}"
            )
            rows.append(outcome(label, each, output))
    except (FileError, MissingPackage, NotFinite):
        raise
    except UserError as error:
        # Another version of Python or of the recipe left something else there.
        raise UserError(f"{error}; to begin afresh, delete {recipe.data} and {output}") from error
    page = _report([output / label for label in runs if label != TEACHER], recipe, output / REPORT)
    console.print(table(rows, "the same text in the same order from the same seed"))
    for line in stopped(rows):
        say(line)
    for line in _explanation(recipe, output):
        say(line)
    say(f"Curves, attention maps and statistics of the students, to open in a browser: {page}")


def _report(students: list[Path], recipe: Recipe, page: Path) -> Path:
    """The page about the students; one that is there is made again if there is something new."""
    trained = [model for student in students if (model := RunFolder(student).model).exists()]
    new = [str(model) for model in trained if not (model / ANALYSIS).exists()]
    analyze_all(new, Request(Path(recipe.data), recipe.sequence_length, SEQUENCES))
    return write_report(students, page) if new or not page.exists() else page


def _explanation(recipe: Recipe, output: Path) -> list[str]:
    model, twice = RunFolder(output / "attention=affine").model, 2 * recipe.sequence_length
    teacher = RunFolder(output).teacher.model
    return [
        "kd loss (cross-entropy with the teacher's probabilities, which students minimise) and hard CE (with the text) "
        "are those of the last step, ppl, the perplexity, that of the held-out text.",
        f"mean, std, variance, CV: of the gradient norms of the first {min(recipe.steps, STEPS)} steps, not clipped, "
        "as in the paper's Table 4. Spikes: how many of them lie above median + k MAD, as in its Table 5.",
        "One seed of tiny models: enough to see what is measured, not to say which attention is better.",
        "",
        f"In each folder of {output}: recipe.json, environment.json, metrics.jsonl (every step), statistics.jsonl "
        f"(every layer and head), result.json and {MODEL}. Next:",
        f'  affine-attn generate {model} "def main("',
        f"  affine-attn eval {model} --shards {recipe.data} --by-position --length {twice}",
        f"  affine-attn distill demo teacher={teacher} --sweep attention=gated,affine_gated --output {output}",
        "  affine-attn variants --check     # the engine, the error and the cost of every variant on this machine",
    ]
