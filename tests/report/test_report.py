"""The report: what it says of the files of runs, and that the page works in a browser and lets nothing in."""

import csv
import dataclasses
import json
import re
import shutil
import tracemalloc
import zipfile
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from affine_attn import Affine, AttentionSpec
from affine_attn.analyze.run import Request, analyze_all
from affine_attn.cli import app
from affine_attn.core.variants import at_length, variant
from affine_attn.distill.run import run
from affine_attn.evaluate.results import TABLE_1
from affine_attn.evaluate.run import Request as Measures
from affine_attn.evaluate.run import evaluate
from affine_attn.figures.style import RUN_COLOURS
from affine_attn.models import preset
from affine_attn.models.load import ModelHandle
from affine_attn.report import figures, write_report
from affine_attn.report.page import html
from affine_attn.report.runs import read_runs
from affine_attn.runs.analysis import FILE, MAPS, analyses_in, read_analysis, write_analysis
from tests.support.chromium import MISSING, chromium, open_page, programs, wait
from tests.support.tiny_runs import counting_shards, metrics, tiny

HOSTILE = ["<script>alert(1)</script>", "</script>", '"><img src=x onerror=alert(1)>', "<b>&amp;</b>", "\u202e\n\x00"]
# A name that a folder can have.
IMAGE = '"><img src=x onerror=alert(1)>'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with all that a report can show, one of them with hostile tokens and a hostile name."""
    data = counting_shards(tmp_path_factory.mktemp("shards"))
    folders = []
    for name, attention in (("plain", "softmax"), (IMAGE, "affine")):
        folder = tmp_path_factory.mktemp("runs") / name
        chosen = tiny(data, attention=attention, steps=12, statistics_steps=3, valid_sequences=4, valid_steps=4)
        model = run(chosen, folder)
        evaluate(ModelHandle(str(model)), Measures(shards=[data], lengths=[16]))
        evaluate(ModelHandle(str(model)), Measures(shards=[data], lengths=[32], by_position=True, limit=4))
        needles = {"name": "needle-long-400", "identity": {"measure": "needle", "model": {"dtype": "float32"}}}
        needles["metrics"] = {"accuracy": {"value": 0.5, "stderr": 0.1}}
        needles["depths"] = [{"depth": 1.0, "value": 0.75, "stderr": 0.1}, {"depth": 0.0, "value": 0.25, "stderr": 0.1}]
        (model / "evaluation" / "needle-long-400-0.json").write_text(json.dumps(needles))
        task = {"name": "arc_easy", "identity": {"task": "arc_easy", "model": {"dtype": "float32"}}, "limit": None}
        task["metrics"] = {"acc": {"value": 0.25, "stderr": 0.01}, "acc_norm": {"value": 0.3, "stderr": 0.02}}
        (model / "evaluation" / "arc_easy-0.json").write_text(json.dumps(task))
        folders.append(folder)
    _, analyses = analyze_all([str(folder / "model") for folder in folders], Request(data, length=16, sequences=4))
    found = read_analysis(analyses[1])
    window = found.content["map"] | {"tokens": [HOSTILE[i % len(HOSTILE)] for i in range(16)]}
    write_analysis(analyses[1], dataclasses.replace(found, content=found.content | {"map": window}))
    return folders


def analysis_of(run):
    (only,) = analyses_in(run / "model" / "analysis")
    return only


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    return write_report(runs, tmp_path_factory.mktemp("page") / "report.html")


# What it says


def cells(text: str, row: str) -> list[str]:
    """Entries of the first table row with this heading."""
    found = re.search(rf"<th scope=\"row\">{re.escape(row)}</th>(.*?)</tr>", text)
    assert found, f"there is no row {row}"
    return re.findall(r"<td>(.*?)</td>", found[1])


def test_tables_have_the_numbers_of_the_files(runs, page):
    text = page.read_text()
    results = [json.loads((folder / "result.json").read_text()) for folder in runs]
    assert cells(text, "attention") == ["softmax", "affine"]
    assert cells(text, "held-out loss") == [f"{result['valid_loss']:.4g}" for result in results]
    assert cells(text, "gradient norm, first 12 steps: mean") == [f"{r['gradients']['mean']:.4g}" for r in results]
    assert cells(text, "… spikes, g &gt; median + 6 MAD") == [str(r["gradients"]["spikes_6"]) for r in results]
    assert cells(text, "arc_easy acc_norm") == ["30 ± 2 [26.08, 33.92]"] * 2
    commits = [json.loads((folder / "environment.json").read_text()).get("commit", "") for folder in runs]
    assert [cell for cell in cells(text, "commit") if cell] == [commit for commit in commits if commit]
    scalars = [read_analysis(analysis_of(folder)).content["scalars"] for folder in runs]
    assert cells(text, "sum of weights per query") == [f"{values['row_sum']:.4g}" for values in scalars]
    assert cells(text, "mean α") == ["", f"{scalars[1]['alpha']:.4g}"]


def test_only_sequences_as_in_training_are_called_so(runs):
    said = {
        result["length"]: result["boundaries"]
        for path in (runs[0] / "model" / "evaluation").glob("p*-shards*.json")
        for result in [json.loads(path.read_text())]
    }
    assert said == {
        16: "packed as in training: documents do not see each other, first tokens are not predicted",
        32: "documents are joined and see each other",
    }


def zero_shot(model: Path, file: str, task: str, value: float, limit: int | None) -> None:
    result = {"name": task, "identity": {"task": task, "limit": limit, "model": {}}, "limit": limit}
    result["metrics"] = {"acc": {"value": value, "stderr": 0.01}}
    (model / "evaluation").mkdir(parents=True, exist_ok=True)
    (model / "evaluation" / f"{file}.json").write_text(json.dumps(result))


def test_a_trial_with_a_limit_does_not_stand_for_the_whole_task(tmp_path):
    for task in TABLE_1:
        # Whichever name, which is a hash, comes first.
        zero_shot(tmp_path, f"{task}-0", task, 0.1, limit=5)
        zero_shot(tmp_path, f"{task}-1", task, 0.5, limit=None)
        zero_shot(tmp_path, f"{task}-2", task, 0.2, limit=20)
    (shown,) = figures.evaluation(read_runs([tmp_path]))
    assert shown.panels[0].traces[""][0]["y"] == [50.0] * len(TABLE_1)
    assert (
        cells(write_report([tmp_path], tmp_path / "report.html").read_text(), "average of the six %")[0][:4] == "50 ±"
    )


def test_shares_are_in_percent_and_nothing_else(tmp_path):
    """Of any task, and by the name of the metric: the caption names which."""
    zero_shot(tmp_path, "arc", "arc_easy", 0.25, None)
    result = {"name": "lambada_openai", "identity": {"task": "lambada_openai", "model": {}}, "limit": None}
    result["metrics"] = {
        "acc": {"value": 0.1875, "stderr": 0.02},
        "exact_match,strict-match": {"value": 0.5, "stderr": None},
        "perplexity": {"value": 12.5, "stderr": 0.5},
    }
    (tmp_path / "evaluation" / "lambada.json").write_text(json.dumps(result))
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert cells(text, "lambada_openai acc") == ["18.75 ± 2 [14.83, 22.67]"]
    assert cells(text, "lambada_openai exact_match,strict-match") == ["50"]
    assert cells(text, "lambada_openai perplexity") == ["12.5 ± 0.5 [11.52, 13.48]"]
    assert cells(text, "arc_easy acc")[0][:4] == "25 ±"
    assert "In %: acc, exact_match; all else as it is." in text


def test_attention_without_a_name_is_told_by_its_stages(tmp_path):
    own = AttentionSpec(sink="learned", affine=Affine(length=16, alpha_range=3.0), gate="headwise")
    for attention, expected in (
        (own, "sink learned + Affine(length=16, alpha_range=3.0) + headwise gate"),
        (at_length(variant("affine"), 16), "affine"),
        (
            [variant("softmax"), own, variant("softmax")],
            "2 × softmax, 1 × sink learned + Affine(length=16, alpha_range",
        ),
    ):
        config = preset("nano", attention, num_hidden_layers=len(attention) if isinstance(attention, list) else 2)
        zero_shot(tmp_path, "arc", "arc_easy", 0.25, None)
        path = tmp_path / "evaluation" / "arc.json"
        about = {"model_type": "affine_attn", "attention": config.to_dict()["attention"], "parameters": 7}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model": about}))
        (shown,) = cells(write_report([tmp_path], tmp_path / "report.html").read_text(), "attention")
        assert shown.startswith(expected)
        assert "{" not in shown
    about |= {"model_type": "foreign", "attention": {"kind": "theirs"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": about}))
    assert cells(write_report([tmp_path], tmp_path / "report.html").read_text(), "attention") == ["foreign"]


def test_a_model_that_another_trainer_trained_is_not_called_untrained(tmp_path):
    zero_shot(tmp_path, "arc", "arc_easy", 0.25, None)
    (tmp_path / "trainer_state.json").write_text("{}")
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert f"so there are no curves of <code>{tmp_path.name}</code>" in text
    assert "not trained" not in text


DAMAGES = {
    "value": lambda result: result["metrics"]["acc"].update(value="high"),
    "stderr": lambda result: result["metrics"]["acc"].update(stderr=[1]),
    "truth": lambda result: result["metrics"]["acc"].update(value=True),
    "cell": lambda result: result["metrics"].update(acc=0.5),
    "metrics": lambda result: result.update(metrics=[]),
    "no accuracy": lambda result: result.update(metrics={}),
    "limit": lambda result: result.update(limit="all"),
    "name": lambda result: result.pop("name"),
    "identity": lambda result: result.update(identity="x"),
    "positions": lambda result: result.update(positions=[{"first": 0, "last": "x", "value": 1.0, "stderr": None}]),
    "depths": lambda result: result.update(depths=[{"depth": 0.5, "value": "x", "stderr": None}]),
    "depth": lambda result: result.update(depths=3),
    "parameters": lambda result: result.update(model={"parameters": "many"}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_result_is_named(name, tmp_path):
    zero_shot(tmp_path, "arc", "arc_easy", 0.25, None)
    path = tmp_path / "evaluation" / "arc.json"
    result = json.loads(path.read_text())
    DAMAGES[name](result)
    path.write_text(json.dumps(result))
    answer = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "no.html")])
    assert answer.exit_code == 2, answer.exception
    assert answer.output.startswith(f"{path} is damaged (")
    assert len(answer.output.splitlines()) == 1


def test_damaged_files_of_a_run_are_named(runs, tmp_path):
    for file, change, message in (
        ("recipe.json", lambda _: "{}", "recipe.json is damaged: attention is None"),
        ("recipe.json", lambda _: "[]", "recipe.json is damaged: it is not a JSON object"),
        ("recipe.json", lambda _: "[" * 100_000, "recipe.json is damaged"),
        (
            "metrics.jsonl",
            lambda text: text.replace('"loss": ', '"loss": "x", "l": ', 1),
            "line 1, is damaged: loss is 'x'",
        ),
        (
            "metrics.jsonl",
            lambda text: text.replace('"grad_norm"', '"norm"', 1),
            "line 1, is damaged: grad_norm is None",
        ),
        ("metrics.jsonl", lambda text: text.replace('"step": 1,', '"step": null,'), "line 1, is damaged: step is None"),
        ("statistics.jsonl", lambda text: text.replace("[[", '[["x", ', 1), "line 1, is damaged: entropy is [['x'"),
    ):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(runs[0], folder, ignore=shutil.ignore_patterns("model", "checkpoint-*"))
        (folder / file).write_text(change((folder / file).read_text()))
        with pytest.raises(ValueError, match=re.escape(message)):
            read_runs([folder])


def damaged(content: dict, place: str, value: object) -> dict:
    """The analysis with another value at a place of dots."""
    changed = json.loads(json.dumps(content))
    *path, last = place.split(".")
    table = changed
    for name in path:
        table = table[int(name) if isinstance(table, list) else name]
    table[int(last) if isinstance(table, list) else last] = value
    return changed


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("heads.entropy.0.1", "x"), ("heads.entropy.0", [1.0]), ("heads.alpha", 3), ("layers.entropy.1", {}),
        ("scalars.row_sum", "x"), ("row_sums.counts.0.3", None), ("row_sums.edges", []), ("row_sums.all.mean", "x"),
        ("histograms.alpha.counts.0.0.0", "x"), ("histograms.alpha.counts", [None, None]), ("model.layers", 0),
        ("model.heads", 10**9), ("model.variant", []), ("map.layers", [7]), ("map.stop", 10**9),
        ("map.tokens.0", 3), ("data.tokens", "x"), ("name", None), ("versions", 3), ("heads", []), ("map", None),
    ],
)  # fmt: skip
def test_a_damaged_analysis_is_named(place, value, runs, tmp_path):
    folder = tmp_path / "model" / "analysis"
    shutil.copytree(analysis_of(runs[1]), folder)
    content = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(damaged(content, place, value)))
    answer = CliRunner().invoke(app, ["report", str(tmp_path / "model"), "-o", str(tmp_path / "no.html")])
    assert answer.exit_code == 2, answer.exception
    assert answer.output.startswith(f"{folder} is damaged: remove it, and analyze the model again (")
    assert len(answer.output.splitlines()) == 1


def test_what_would_fill_the_memory_is_refused_before_it_is_unpacked(runs, tmp_path, monkeypatch):
    """A small file can unpack to any size, with or without the rest of the analysis agreeing."""
    folder = tmp_path / "analysis"
    shutil.copytree(analysis_of(runs[1]), folder)
    content = json.loads((folder / FILE).read_text())
    whole = content | {"map": content["map"] | {"start": 0, "stop": 1024, "tokens": ["a"] * 1024}}
    np.savez_compressed(folder / MAPS, weights=np.zeros((2, 4, 1024, 1024), np.float32))
    assert (folder / MAPS).stat().st_size < 100_000

    def most_memory(match: str) -> int:
        tracemalloc.start()
        with pytest.raises(ValueError, match=match):
            read_analysis(folder)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    # The array is none that the analysis speaks of.
    assert (
        most_memory(r"has an array \(2, 4, 1024, 1024\) of float32 where analysis.json says \(2, 4, 16, 16\)") < 1 << 20
    )
    # It is, and is larger than any analysis writes.
    (folder / FILE).write_text(json.dumps(whole))
    monkeypatch.setattr("affine_attn.runs.analysis.MOST_MAP_BYTES", 1 << 24)
    assert most_memory(r"its maps would take 0.0 GiB") < 1 << 20
    monkeypatch.undo()
    # The report keeps the part that it shows, and unpacks map by map.
    tracemalloc.start()
    kept = read_analysis(folder, 80_000).weights
    assert kept.shape == (2, 4, 100, 100)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
    # The directory of a zip file may say what it wants.
    with zipfile.ZipFile(folder / MAPS, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weights.npy", bytes(1 << 25))
    assert most_memory("is damaged") < 1 << 20
    monkeypatch.setattr("affine_attn.runs.analysis.MOST_BYTES", 1000)
    assert most_memory("more than 0 MiB, which no analysis has") < 1 << 20


def test_histograms_of_single_heads_are_left_out_where_the_page_would_burst(runs, monkeypatch):
    shown = {figure.id: figure for figure in figures.analysis(read_runs(runs))}["alpha-beta"]
    assert shown.pickers[1].options == ["all", "0", "1", "2", "3"]
    monkeypatch.setattr(figures, "HISTOGRAM_NUMBERS", 1000)
    few = {figure.id: figure for figure in figures.analysis(read_runs(runs))}["alpha-beta"]
    assert few.pickers[1].options == ["all"]
    assert "Single heads are left out" in few.caption
    assert [panel.traces["0/0"] for panel in few.panels] == [panel.traces["0/0"] for panel in shown.panels]


def test_parts_of_different_size_have_no_average(tmp_path):
    for limit, task in enumerate(TABLE_1, start=5):
        zero_shot(tmp_path, task, task, 0.5, limit)
    assert "average of the six" not in write_report([tmp_path], tmp_path / "report.html").read_text()


def test_texts_of_one_name_are_told_apart(tmp_path):
    (tmp_path / "evaluation").mkdir()
    for name in ("books", "news"):
        result = {"name": "positions-valid-32", "identity": {"data": name, "model": {}}, "limit": None}
        result |= {"data": f"texts/{name}/valid.jsonl", "metrics": {"loss": {"value": float(len(name)), "stderr": 0.1}}}
        result["positions"] = [{"first": 0, "last": 0, "value": 1.0, "stderr": 0.1}]
        (tmp_path / "evaluation" / f"{name}.json").write_text(json.dumps(result))
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert cells(text, "positions-valid-32 loss · books/valid.jsonl")[0][:3] == "5 ±"
    assert cells(text, "positions-valid-32 loss · news/valid.jsonl")[0][:3] == "4 ±"
    (shown,) = figures.evaluation(read_runs([tmp_path]))
    assert [(panel.title, len(panel.traces[""])) for panel in shown.panels] == [
        ("positions-valid-32 · books/valid.jsonl", 1),
        ("positions-valid-32 · news/valid.jsonl", 1),
    ]


def test_curves_are_those_of_the_metrics(runs):
    shown = {figure.id: figure for figure in figures.training(read_runs(runs))}
    rows = metrics(runs[1])
    whole, late = (panel.traces[""][-1] for panel in shown["gradient-norm"].panels)
    norms = [row["grad_norm"] for row in rows]
    assert whole["x"] == [row["step"] for row in rows]
    assert whole["y"] == pytest.approx(norms, rel=1e-4)
    assert late["x"] == [10, 11, 12]
    assert late["y"] == pytest.approx(norms[9:], rel=1e-4)


def test_more_runs_than_colours_are_told_apart(runs, tmp_path):
    """As of a sweep over rates and variants."""
    many = [shutil.copytree(runs[0], tmp_path / f"{i:02d}") for i in range(2 * len(RUN_COLOURS))]
    shown = figures.training(read_runs(many))[1].panels[0].traces[""]
    assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in shown}) == len(many)
    text = write_report(many, tmp_path / "report.html").read_text()
    dots = re.findall(r'data-run="\d+".*?<span class="dot" style="(.*?)">', text)
    assert len(set(dots)) == len(dots) == len(many)


def test_needles_are_found_by_depth(runs):
    (figure,) = (figure for figure in figures.evaluation(read_runs(runs)) if figure.id == "needles")
    (panel,) = figure.panels
    assert panel.title == "needle-long-400"
    assert [(trace["x"], trace["y"]) for trace in panel.traces[""]] == [([0.0, 1.0], [25.0, 75.0])] * 2
    assert panel.traces[""][0]["error_y"]["array"] == [19.6, 19.6]


def test_the_activations_stand_beside_the_alpha_that_they_made(runs):
    shown = {figure.id: figure for figure in figures.analysis(read_runs(runs))}["activations"]
    clipping, sigmoid = shown.panels[0].traces[""]
    at = dict(zip(clipping["x"], zip(clipping["y"], sigmoid["y"], strict=True), strict=True))
    assert (at[-5.0], at[0.0], at[2.0]) == ((0.0, 0.0066929), (0.5, 0.5), (0.7, 0.8808))
    (own,) = shown.panels[1].traces[""]
    content = read_analysis(analysis_of(runs[1])).content
    counts = np.array(content["histograms"]["alpha"]["counts"]).sum((0, 1))
    np.testing.assert_allclose(own["y"], counts / counts.max(), atol=1e-5)
    assert own["meta"] == 1
    # Softmax alone has no alpha to show.
    assert "activations" not in {figure.id for figure in figures.analysis(read_runs(runs[:1]))}


def test_the_same_files_give_the_same_page_and_a_small_one(runs, page):
    assert html(read_runs(runs)) == page.read_text()
    assert page.stat().st_size < 3e6


def test_what_is_missing_is_left_out_with_the_command_that_makes_it(runs, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    spaced = tmp_path / "two words & $more"
    for name in ("recipe.json", "environment.json", "metrics.jsonl"):
        shutil.copy(runs[0] / name, bare)
    text = write_report([bare], tmp_path / "report.html").read_text()
    assert f"<code>affine-attn eval {bare}/model</code>" in text
    assert f"<code>affine-attn analyze {bare}/model --data DATA</code>" in text
    assert "<code>statistics_steps=100</code>" in text
    assert cells(text, "steps") == ["12 of 12, unfinished"]
    assert 'id="loss-0"' in text
    assert 'id="maps-0"' not in text
    # A shell must take it as it stands.
    bare.rename(spaced)
    text = unescape(write_report([spaced], tmp_path / "report.html").read_text())
    assert f"<code>affine-attn eval '{spaced}/model'</code>" in text
    assert f"<code>affine-attn analyze '{spaced}/model' --data DATA</code>" in text
    # And the other way round: a model that was not trained here.
    text = write_report([runs[0] / "model"], tmp_path / "report.html").read_text()
    assert "Without metrics.jsonl, which affine-attn distill writes, so there are no curves of" in text
    assert "not trained here" not in text
    assert 'id="loss-0"' not in text
    assert 'id="maps-0"' in text


def test_a_long_curve_keeps_its_spikes():
    values = np.sin(np.arange(50_000)) + 10
    values[[77, 31_111]] = 500.0, -3.0
    steps, kept = figures.thinned(np.arange(50_000), values)
    assert len(steps) <= 2002
    points = dict(zip(steps, kept, strict=True))
    assert (points[77], points[31_111], steps[0], steps[-1]) == (500.0, -3.0, 0, 49_999)


def test_maps_are_cut_where_the_page_would_burst(runs, monkeypatch):
    monkeypatch.setattr(figures, "MAP_NUMBERS", 1500)
    maps = {figure.id: figure for figure in figures.analysis(read_runs(runs))}["maps"]
    shown = [trace["z"] for panel in maps.panels for traces in panel.traces.values() for trace in traces]
    assert len(shown) == 20
    assert {(len(z), len(z[0])) for z in shown} == {(8, 8)}
    assert "8 tokens of the first sequence" in maps.caption


def test_labels_are_text():
    assert figures.label("<b>x</b> &amp;\n\t\u202e") == "&lt;b&gt;x&lt;/b&gt; &amp;amp;↵→\\u202e"


def test_analyses_of_other_lengths_and_from_other_folders_stand_side_by_side(runs, tmp_path):
    """One page: what analyze left beside the model, and in folders of --output, new and as older versions wrote it."""
    data = read_analysis(analysis_of(runs[0])).content["data"]["path"]
    out = tmp_path / "out"
    longer, _ = analyze_all([str(folder) for folder in runs], Request(Path(data), length=32, sequences=4), out)
    old = tmp_path / "old" / "plain"
    shutil.copytree(analysis_of(runs[0]), old)
    # The folder of --output alone: its models under their names.
    alone = read_runs([out])
    assert {run.name for run in alone} == {"plain", IMAGE}
    assert [analysis.content["data"]["length"] for run in alone for analysis in run.analyses] == [32, 32]
    assert [run.name for run in read_runs([old])] == ["plain"]
    assert len(read_runs([tmp_path / "old"])) == 1
    # With the runs themselves it joins them.
    both = read_runs([*runs, out])
    assert [run.folder for run in both] == list(runs)
    assert [[a.content["data"]["length"] for a in run.analyses] for run in both] == [[16, 32], [16, 32]]
    text = unescape(html(both))
    means = [
        f"{values['row_sum']:.4g}"
        for before, after in zip(runs, longer, strict=True)
        for values in (read_analysis(analysis_of(before)).content["scalars"], after.content["scalars"])
    ]
    assert cells(text, "sum of weights per query") == means
    for told in (f"4 × 16 tokens of {data}, packed as in training", f"4 × 32 tokens of {data}, documents do not see"):
        assert text.count(told) > 3
    for figure in figures.analysis(both):
        assert f"solid lines: 4 × 16 tokens of {data}" in figure.caption, figure.id
        assert f"dashed lines: 4 × 32 tokens of {data}" in figure.caption, figure.id
    layers = {figure.id: figure for figure in figures.analysis(both)}["per-layer"].panels[0].traces[""]
    assert [trace["line"]["dash"] for trace in layers] == ["solid", "dash"] * 2
    assert [trace["meta"] for trace in layers] == [0, 0, 1, 1]
    assert [trace["name"] for trace in layers[:2]] == ["plain · 16 tokens", "plain · 32 tokens"]
    maps = {figure.id: figure for figure in figures.analysis(both)}["maps"].panels
    assert len(maps) == 4
    np.testing.assert_allclose(maps[1].traces["0/1"][0]["z"], longer[0].map(0)[0], atol=1e-4)


# The command


def test_the_command_prints_where_the_page_is(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report", str(runs[0])])
    assert (result.exit_code, result.output) == (0, "report.html\n")
    assert Path("report.html").read_text().startswith("<!doctype html>")


def test_a_report_of_other_runs_is_not_replaced_unless_it_is_named(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in runs:
        first = CliRunner().invoke(app, ["report", str(folder)])
        assert first.exit_code == 0, first.output
        before = Path("report.html").read_bytes()
        other = CliRunner().invoke(app, ["report", *map(str, runs)])
        assert (other.exit_code, len(other.stderr.splitlines())) == (2, 1)
        assert "report.html is there, and is no report of" in other.stderr
        assert Path("report.html").read_bytes() == before
        # The same again, and by name.
        assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
        assert CliRunner().invoke(app, ["report", *map(str, runs), "-o", "report.html"]).exit_code == 0
        Path("report.html").unlink()


def test_mistakes_are_one_sentence(runs, tmp_path):
    empty, begun = tmp_path / "empty", tmp_path / "begun"
    empty.mkdir()
    begun.mkdir()
    shutil.copy(runs[0] / "recipe.json", begun)
    for folders, message in (
        ([tmp_path / "nowhere"], "there is no file or folder"),
        ([empty], "is no run of affine-attn distill (it has no recipe.json)"),
        ([begun], "has no step in metrics.jsonl yet"),
        ([runs[0], runs[0]], "the same folder is given twice"),
    ):
        result = CliRunner().invoke(app, ["report", *map(str, folders), "-o", str(tmp_path / "no.html")])
        assert result.exit_code == 2
        assert message in result.output
        assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "no.html").exists()


def test_figures_for_papers_are_those_of_the_runs(runs, tmp_path):
    arguments = [*map(str, runs), "-o", str(tmp_path / "report.html"), "--figures", str(tmp_path / "figures")]
    assert CliRunner().invoke(app, ["report", *arguments]).exit_code == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    for name in ("loss", "late_loss", "gradient_norm", "row_sums", "entropy", "attention_maps", "distributions"):
        assert {f"{name}.png", f"{name}.svg"} <= names
    with (tmp_path / "figures" / "gradients.csv").open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["plain", IMAGE]


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if programs() is None:
        pytest.skip(MISSING)
    saved = tmp_path_factory.mktemp("saved")
    with chromium(saved) as driver:
        driver.saved = saved
        yield driver


@pytest.fixture
def opened(browser, page):
    return open_page(browser, page)


@pytest.mark.browser
def test_every_figure_is_drawn_without_a_complaint(opened):
    plots = opened.execute_script(
        """return [...document.querySelectorAll('.plot')].map((plot) => ({
             id: plot.id,
             marks: [...plot.querySelectorAll('.js-line, .point')].filter((p) => (p.getAttribute('d') || '').length > 8)
                 .length + plot.querySelectorAll('.heatmaplayer image[*|href^="data:"]').length,
             // What a kind of figure has no use for is no mistake.
             wrong: (Plotly.validate(plot.data, plot.layout) || []).filter((one) => one.code !== 'unused'),
           }))"""
    )
    assert {plot["id"].rsplit("-", 1)[0] for plot in plots} == {
        "loss", "gradient-norm", "validation", "while-training", "tasks", "positions", "needles", "row-sums",
        "per-layer", "per-head", "activations", "alpha-beta", "maps",
    }  # fmt: skip
    assert [plot["id"] for plot in plots if not plot["marks"]] == []
    assert [plot["wrong"] for plot in plots if plot["wrong"]] == []
    assert opened.get_log("browser") == []


@pytest.mark.browser
def test_the_picker_shows_the_map_of_its_layer_and_head(opened, runs):
    from selenium.webdriver.support.select import Select

    def shown(n):
        image = f"document.querySelector('#maps-{n} .heatmaplayer image').getAttribute('href')"
        return opened.execute_script(f"return [document.querySelector('#maps-{n}').data[0].z, {image}]")

    before = [shown(n) for n in range(2)]
    Select(opened.find_element("id", "maps-picker-0")).select_by_visible_text("1")
    Select(opened.find_element("id", "maps-picker-1")).select_by_visible_text("2")
    for n, folder in enumerate(runs):
        wait(lambda n=n: shown(n)[1] != before[n][1])
        expected = read_analysis(analysis_of(folder)).map(1)
        np.testing.assert_allclose(shown(n)[0], expected[2], atol=6e-5)
        mean = read_analysis(analysis_of(folder)).map(0).mean(0)
        np.testing.assert_allclose(before[n][0], mean, atol=6e-5)


@pytest.mark.browser
def test_hostile_text_is_shown_and_does_nothing(opened):
    alerts, images, scripts, loaded = opened.execute_script(
        """return [window.alerted || 0, document.querySelectorAll('img').length,
                   document.querySelectorAll('script:not([type])').length,
                   performance.getEntriesByType('resource').length]"""
    )
    # This page's script, and plotly.js that it has unpacked.
    assert (alerts, images, scripts, loaded) == (0, 0, 2, 0)
    ticks = "return [...document.querySelectorAll('#maps-1 .ytick text')].map((tick) => tick.textContent)"
    labels = opened.execute_script(ticks)
    assert "0 <script>alert(1)</script>" in labels
    assert IMAGE in opened.find_element("css selector", "h1").text
    for place in (".chip[data-run='1']", "thead th:nth-child(3)"):
        assert opened.find_element("css selector", place).text == IMAGE
    assert opened.get_log("browser") == []
    # If something did get in, it would not run.
    opened.execute_script(
        """const script = document.createElement('script');
           script.textContent = 'window.injected = 1';
           document.body.append(script);
           document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.injected = 1">')"""
    )
    wait(lambda: len(opened.get_log("browser")) > 0)
    assert opened.execute_script("return window.injected") is None


@pytest.mark.browser
def test_the_page_is_dark_where_people_like_it_and_has_a_switch(browser, page):
    state = """const tick = document.querySelector('#loss-0 .xtick text');
               return [getComputedStyle(document.body).backgroundColor, getComputedStyle(tick).fill]"""
    dark = open_page(browser, page, scheme="dark").execute_script(state)
    browser.find_element("css selector", ".theme").click()
    light = wait(lambda: (now := browser.execute_script(state)) != dark and now)
    browser.find_element("css selector", ".theme").click()
    wait(lambda: browser.execute_script(state) == dark)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    assert light[0] == "rgb(251, 251, 250)"


@pytest.mark.browser
def test_a_phone_needs_no_sideways_scrolling(browser, page, runs, tmp_path):
    # As a sweep calls it, and of the length that folders may have.
    long = tmp_path / ("attention=scale_invariant+affine_gated_learning_rate=0.0005" * 3)
    shutil.copytree(runs[0], long)
    for shown in (page, write_report([long, runs[1]], tmp_path / "long.html")):
        width = open_page(browser, shown, width=390).execute_script("return document.documentElement.scrollWidth")
        assert width == 390


@pytest.mark.browser
def test_values_under_the_pointer_and_runs_that_are_hidden(opened):
    from selenium.webdriver import ActionChains

    plot = opened.find_element("id", "loss-0")
    ActionChains(opened).scroll_to_element(plot).move_to_element(plot).perform()
    hover = "return document.querySelector('#loss-0 .hoverlayer').textContent"
    wait(lambda: re.search(r"plain : \d\.\d+", opened.execute_script(hover)))
    curves = "return document.querySelectorAll('#loss-0 .scatterlayer .js-line').length"
    assert opened.execute_script(curves) == 4
    opened.find_element("css selector", ".chip[data-run='0']").click()
    wait(lambda: opened.execute_script(curves) == 2)


@pytest.mark.browser
def test_figures_are_saved_for_papers(opened):
    for kind, start in (("svg", b"<svg"), ("png", b"\x89PNG")):
        button = opened.find_element("css selector", f"[data-save={kind}][data-figure=maps][data-panel='0']")
        button.click()
        file = opened.saved / f"maps-0.{kind}"
        wait(file.exists)
        assert file.read_bytes().startswith(start)
