"""The scripts and the notebook of examples/ run, and show what they say."""

import json
import runpy
from pathlib import Path

import matplotlib
import torch

from affine_attn.models import AffineAttnForCausalLM, preset

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> dict:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_own_gpt_learns_from_packed_documents():
    losses = example("own_gpt")["train"](steps=20)
    assert losses[-1] < losses[0] / 2


def test_fine_tuning_lowers_the_loss():
    found = example("fine_tune")
    first, last = found["fine_tune"](found["small_llama"](), steps=8)
    assert last < first


def test_gpt_oss_is_that_of_eager_attention():
    differences = example("gpt_oss_sinks")["compare"]()
    assert len(differences) == 2
    assert max(differences.values()) < 1e-5


def test_a_custom_variant_is_right_and_learns(family, capsys):
    found = example("custom_variant")
    assert max(found["errors"]().values()) < 1e-5
    assert ("flex" if torch.cuda.is_available() else "sdpa") + ": runs this call" in capsys.readouterr().out
    first, last = found["train"](steps=20)
    assert last < first


def test_statistics_are_plotted(tmp_path):
    found = example("statistics_plot")
    layers = found["statistics"](AffineAttnForCausalLM(preset("nano", "affine")), length=32)
    found["plot"](layers, str(tmp_path / "statistics.png"))
    assert (tmp_path / "statistics.png").stat().st_size > 10_000


def test_the_notebook_runs(capsys):
    """Without Jupyter: a notebook is a file of JSON, and its cells run from top to bottom."""
    matplotlib.use("Agg")
    cells = json.loads((EXAMPLES / "story.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "committed without outputs"
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code[0] += "\nSTEPS = 25\n"
    namespace: dict = {}
    for cell in code:
        exec(cell, namespace)
    for _, losses in namespace["students"].values():
        assert losses[-1] < losses[0]
    assert "softmax: row sum 1.000" in capsys.readouterr().out
    assert namespace["alpha"].shape == (2, 4)
