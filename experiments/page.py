"""Figures 2 to 10 of the affine paper and the report page, of the students that were analysed."""

from collections.abc import Iterable
from pathlib import Path

from affine_attn.report import page
from affine_attn.report.runs import Run as Reported
from affine_attn.runs.analysis import Analysis
from affine_attn.runs.files import write_text
from experiments.grid import CORE, OTHERS
from experiments.runs import Run

_ORDER = (*CORE, *OTHERS)


def draw(runs: Iterable[Run], folder: Path) -> list[Path]:
    chosen = pictured(runs)
    return page.draw_figures(chosen, folder) if chosen else []


def write(runs: Iterable[Run], output: Path) -> None:
    chosen = pictured(runs)
    if not chosen:
        raise ValueError("no run of table A was analysed: python -m experiments run does it with the first seed")
    write_text(output, page.html(chosen))


def pictured(runs: Iterable[Run]) -> list[Reported]:
    """Those of table A, softmax first."""
    finished = (run for run in runs if run.table == "a" and run.result)
    analysed = [(run, analysis) for run in finished if (analysis := run.analysis()) is not None]
    return [_reported(*both) for both in sorted(analysed, key=lambda both: _ORDER.index(both[0].variant))]


def _reported(run: Run, analysis: Analysis) -> Reported:
    """A run as the report knows it, from the files of an experiment."""
    series, valid, result = run.series(), run.valid, run.result or {}
    series["step"] = [int(step) for step in series["step"]]
    rows = [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
    held_out = {"valid_loss": valid.get("kd"), "valid_perplexity": valid.get("ppl")}
    student = run.config["student"]
    return Reported(
        name=run.variant,
        variant=run.variant,
        metrics=rows,
        statistics=run.statistics(),
        folder=run.folder,
        model=run.folder,
        recipe=run.config["recipe"] | {"attention": run.variant, "learning_rate": student["learning_rate"]},
        environment=run.environment(),
        result=rows[-1] | held_out | {"gradients": result["gradients"]},
        finished=True,
        evaluations=run.evaluations(),
        analyses=[analysis],
    )
