"""Figures: drawn from saved files alone, not empty, the same every time, and safe from the text they show."""

import csv
import json
import warnings
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest

from affine_attn.analyze import figures
from affine_attn.analyze.style import lines, plain, token_labels
from affine_attn.core.variants import VARIANTS
from affine_attn.figures.style import VARIANT_COLOURS
from affine_attn.runs.analysis import Analysis, read_analysis, write_analysis
from affine_attn.runs.series import Run, gradient_table, read_run, runs_of
from tests.support.analyzed import HOSTILE, example_analyses

STEPS = 600


def write_run(folder, level, alpha=None):
    """A loss that falls to ``level``, gradients of 1 and 2 with three spikes of 100, statistics of two layers."""
    folder.mkdir()
    rows = [
        {"step": i, "loss": level + 5 / i, "grad_norm": 100.0 if i in (10, 20, 30) else 1.0 + i % 2}
        for i in range(1, STEPS + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_alpha = {} if alpha is None else {"alpha": [None, [alpha, alpha]]}
    names = ("entropy", "first_token", "row_sum", "mean_logit")
    statistics = [
        {"step": step, **{name: [[step, 1.0], [2.0, 3.0]] for name in names}, **of_alpha} for step in (0, 300, 600)
    ]
    (folder / "statistics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in statistics))
    return folder


@pytest.fixture(scope="module")
def analyses(tmp_path_factory):
    """Three models on hostile text, two of them trained, all under hostile names."""
    folder = tmp_path_factory.mktemp("models")
    found = [read_analysis(place) for place in example_analyses(folder)]
    found[0].content["run"] = str(write_run(folder / "run0", 2.0))
    found[2].content["run"] = str(write_run(folder / "run1", 1.9, alpha=0.4))
    for analysis, name in zip(found, ("_hidden", "$\\frac{1}{0$", "</svg><script>"), strict=True):
        analysis.content["name"] = name
    return found


@pytest.fixture(scope="module")
def drawn(analyses, tmp_path_factory):
    with warnings.catch_warnings():
        # A glyph that the font lacks, a label that a legend drops.
        warnings.simplefilter("error")
        return figures.draw_all(analyses, tmp_path_factory.mktemp("drawn") / "figures")


def test_everything_there_is_to_see_is_drawn(drawn):
    names = {path.stem for path in drawn}
    paper = {"logits", "row_sums", "first_token", "heads_row_sum", "entropy", "loss", "gradient_norm", "attention_maps",
             "late_loss", "activations", "gradients"}  # fmt: skip
    assert paper | {"heads_negative", "heads_alpha_entropy", "distributions", "statistics"} <= names
    assert {path.suffix for path in drawn} == {".png", ".svg", ".csv"}
    for path in drawn:
        if path.suffix == ".png":
            pixels = matplotlib.image.imread(path)[..., :3]
            assert pixels.shape[0] > 300
            # More than an empty frame: pixels that are neither white nor grey.
            assert (np.ptp(pixels, axis=-1) > 0.1).mean() > 0.001, path.stem
        if path.suffix == ".svg":
            tags = {element.tag for element in ElementTree.parse(path).iter()}
            assert not any(tag.endswith("script") for tag in tags)


def test_the_same_files_give_the_same_bytes(analyses, tmp_path):
    write_analysis(tmp_path, analyses[2])
    once = figures.save(lambda: figures.attention_maps([analyses[2]]), tmp_path / "a")
    again = figures.save(lambda: figures.attention_maps([read_analysis(tmp_path)]), tmp_path / "b")
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]


def test_curves_are_those_of_the_files(analyses):
    figure = figures.head_metric(analyses, "row_sum")
    np.testing.assert_array_equal(figure.axes[2].images[0].get_array(), analyses[2].content["heads"]["row_sum"])
    shown = figures.first_token(analyses).axes[0].lines[1].get_ydata()
    assert list(shown) == analyses[1].content["layers"]["first_token"]
    panels = figures.entropy(analyses).axes
    assert [list(axis.lines[2].get_ydata()) for axis in panels] == [
        analyses[2].content["layers"][name] for name in ("entropy", "entropy_clipped", "entropy_absolute")
    ]
    low, high = panels[0].get_ylim()
    assert all(low < value < high for axis in panels for line in axis.lines for value in line.get_ydata())
    maps = figures.attention_maps(analyses, layer=0, tokens=7).axes[0].images[0].get_array()
    np.testing.assert_allclose(np.tril(maps.filled(0)), analyses[0].map(0).mean(0)[:7, :7], atol=1e-6)
    assert maps.mask[0, 1:].all()


def test_the_activations_and_what_they_made(analyses):
    functions, own = figures.activations(analyses).axes
    clipping, sigmoid = (dict(zip(*line.get_data(), strict=True)) for line in functions.lines)
    assert (clipping[-6.0], clipping[2.0], clipping[8.0]) == pytest.approx((0, 0.7, 1))
    assert sigmoid[2.0] == pytest.approx(1 / (1 + np.exp(-2)))
    (bars,) = own.patches
    counts = np.array([layer for layer in analyses[2].content["histograms"]["alpha"]["counts"] if layer]).sum((0, 1))
    np.testing.assert_allclose(bars.get_data().values, counts / counts.sum())
    assert len(figures.activations().axes) == 1


def test_training_curves(analyses):
    runs = runs_of(analyses)
    assert [run.variant for run in runs] == ["softmax", "affine"]
    _, values = runs[1].curve("loss")
    late = figures.late_loss(runs).axes[0].lines
    assert len(late) == 2
    assert late[1].get_xdata()[0] == np.ceil(STEPS * 7 / 9)
    # A running mean over a fiftieth of the steps.
    assert late[1].get_ydata()[-1] == pytest.approx(values[-12:].mean())
    shown = figures.logits(runs).axes[0].lines[0]
    assert list(shown.get_xdata()) == [0, 300, 600]
    assert list(shown.get_ydata()) == [1.5, 76.5, 151.5]
    # Layers without alpha do not count, models without any are not drawn.
    assert list(runs[1].mean_statistic("alpha")[1]) == pytest.approx([0.4] * 3)
    assert len(figures.statistics(runs).axes[3].lines) == 1


def test_tables_4_and_5(drawn, analyses):
    """500 steps: three spikes of 100, and of the rest 250 of one and 247 of two."""
    (table,) = (path for path in drawn if path.suffix == ".csv")
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["_hidden", "</svg><script>"]
    assert rows == [{key: str(value) for key, value in row.items()} for row in gradient_table(runs_of(analyses))]
    mean = (300 + 247 * 1 + 250 * 2) / 500
    assert float(rows[0]["mean"]) == pytest.approx(mean)
    variance = (3 * 100**2 + 247 + 250 * 4) / 500 - mean**2
    assert float(rows[0]["variance"]) == pytest.approx(variance)
    assert float(rows[0]["cv"]) == pytest.approx(variance**0.5 / mean)
    # Median 2, MAD 0: a spike is all that is above 2.
    assert (rows[0]["steps"], rows[0]["spikes_6"], rows[0]["spikes_9"]) == ("500", "3", "3")


def test_models_that_kept_no_map_in_common(analyses):
    content = analyses[1].content
    other = Analysis(content | {"map": content["map"] | {"layers": [0]}}, analyses[1].weights[:1])
    third = Analysis(content | {"map": content["map"] | {"layers": [1]}}, analyses[1].weights[1:])
    with pytest.raises(ValueError, match="the same --layer"):
        figures.attention_maps([other, third])


def test_colours_are_those_of_variants_and_all_different():
    assert VARIANT_COLOURS.keys() <= VARIANTS.keys()
    assert len(set(VARIANT_COLOURS.values())) == len(VARIANT_COLOURS)
    first, second, third = lines(["affine", "sink", "affine"])
    assert first["color"] == third["color"] != second["color"]
    assert first["linestyle"] != third["linestyle"]


def test_text_is_only_text():
    shown = plain(HOSTILE, 1000)
    assert "<script>" in shown
    assert not any(character in shown for character in "\x1b\x00\n\r\u202e漢")
    assert plain("_x") == " _x"
    assert plain("a" * 50).endswith("…")
    assert token_labels([" a", "\n", "$"]) == ["␣a", "↵", r"\$"]


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="not the folder of a training run"):
        read_run(tmp_path, "x", None)
    assert Run("x", None, [{"step": 1, "loss": None}, {"step": 2, "loss": 1.0}], []).curve("loss")[0].tolist() == [2.0]
