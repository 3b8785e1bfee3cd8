"""``make gallery``: what of docs/ shows the students of ``make demo``, written from the files in runs/demo.

Figures and the table of gallery.md, and report.png, the picture of the report in the tutorial on it.
"""

import dataclasses
import io
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from affine_attn.demo import REPORT, STUDENTS
from affine_attn.distill.recipes import recipe
from affine_attn.distill.sweep import grid
from affine_attn.report.page import draw_figures
from affine_attn.report.runs import Run, read_runs
from affine_attn.runs.files import write_text
from affine_attn.runs.layout import TEACHER
from benchmarks.readme import rewrite
from tests.support.chromium import chromium, open_page

DOCS = Path(__file__).parent
PAGE, FIGURES, PICTURE = DOCS / "gallery.md", DOCS / "gallery", DOCS / "report.png"
DEMO = DOCS.parent / "runs" / "demo"
# Row, key in result.json, format.
_ROWS = (
    ("held-out loss", "valid_loss", ".4f"),
    ("held-out perplexity", "valid_perplexity", ".2f"),
    ("gradient norm: mean", "mean", ".3f"),
    ("… standard deviation", "std", ".3f"),
    ("… variance", "variance", ".4f"),
    ("… CV", "cv", ".3f"),
    ("… spikes, k = 6", "spikes_6", "d"),
    ("… spikes, k = 9", "spikes_9", "d"),
)
_WIDTH = 1180
# Of the page's figures, those in the picture, with the map of the last layer.
_IN_PICTURE = ("loss", "row-sums", "maps")
_LEAVE = """
const shown = (part) => arguments[0].some((id) => part.querySelector(`#${id}-0`));
for (const part of document.querySelectorAll('section, section > *'))
  part.style.display = shown(part) ? '' : 'none';
const layer = document.getElementById('maps-picker-0');
layer.value = layer.options[layer.options.length - 1].value;
layer.dispatchEvent(new Event('change'));
"""


def students(folder: Path = DEMO) -> list[Run]:
    """The finished students of the demo, under the names of their attention."""
    labels = [label for label in grid(recipe("demo"), STUDENTS, folder) if label != TEACHER]
    runs = read_runs([folder / label for label in labels])
    for run in runs:
        if not run.finished or not run.analyses:
            raise ValueError(f"{run.folder} is not finished: run make demo")
    return [dataclasses.replace(run, name=str(run.variant)) for run in runs]


def draw(runs: Sequence[Run], page: str, folder: Path) -> None:
    """The figures that the page shows, as SVG, and no other file."""
    shown = figures_of(page)
    with tempfile.TemporaryDirectory() as drawn:
        found = {path.name: path for path in draw_figures(runs, Path(drawn))}
        if missing := shown - found.keys():
            raise ValueError(f"{PAGE.name} shows {sorted(missing)}, which these runs have no numbers for")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in shown:
            shutil.copy(found[name], folder)


def figures_of(page: str) -> set[str]:
    return set(re.findall(r"\(gallery/([a-z_]+\.svg)\)", page))


def table(runs: Sequence[Run]) -> str:
    """List where the students come from, and their losses and gradients: Tables 4 and 5 of the paper."""
    chosen, environment = runs[0].recipe, runs[0].environment
    tokens = chosen["global_batch"] * chosen["sequence_length"]
    commit, _, dirty = environment.get("commit", "unknown").partition("-")
    origin = (
        f"`{chosen['student']}` students, {chosen['steps']} steps of {tokens:,} tokens, seed {chosen['seed']};\n"
        f"gradient norms of the first {runs[0].result['gradients']['steps']} steps.\n"
        f"torch {environment['torch']}, transformers {environment['transformers']}, {environment['device']}, "
        f"commit {commit[:7]}{' with changes' if dirty else ''}."
    )
    lines = ["| | " + " | ".join(run.name for run in runs) + " |", "|---|" + "---:|" * len(runs)]
    for title, key, form in _ROWS:
        cells = (format({**run.result, **run.result["gradients"]}[key], form) for run in runs)
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return origin + "\n\n" + "\n".join(lines)


def photograph(page: Path, picture: Path) -> None:
    """A few figures of the report as a browser shows them, in 256 colours."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as downloads, chromium(Path(downloads)) as driver:
        open_page(driver, page, _WIDTH)
        driver.execute_script(_LEAVE, _IN_PICTURE)
        driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        height = driver.execute_script("return document.body.scrollHeight")
        screen: dict[str, Any] = {"width": _WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        # Plots redraw in the next frames.
        driver.execute_async_script("setTimeout(arguments[0], 1000)")
        image = Image.open(io.BytesIO(driver.get_screenshot_as_png()))
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    try:
        if not (DEMO / REPORT).exists():
            raise ValueError(f"there is no {DEMO / REPORT}: run make demo first")
        runs, page = students(), PAGE.read_text(encoding="utf-8")
        draw(runs, page, FIGURES)
        write_text(PAGE, rewrite(page, {"students": table(runs)}))
        photograph(DEMO / REPORT, PICTURE)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"gallery: {error}")


if __name__ == "__main__":
    main()
