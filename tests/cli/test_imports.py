"""A user's own definitions through the commands: --import, entry points, recipe files, specs as JSON."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from affine_attn import AttentionSpec
from affine_attn.cli import app
from affine_attn.cli.imports import ENTRY_POINTS, import_definitions
from affine_attn.core.variants import VARIANTS
from affine_attn.distill.recipes import recipe
from affine_attn.distill.run import run
from affine_attn.errors import UserError
from affine_attn.models.configuration import DEFINED_IN
from affine_attn.runs.files import read_object
from affine_attn.runs.layout import RECIPE
from tests.support.tiny_runs import LENGTH, counting_shards, metrics, tiny

ROOT = Path(__file__).parents[2]
OWN = """
from dataclasses import dataclass

import torch
from affine_attn import Affine, AttentionSpec
from affine_attn.core.spec import ACTIVATIONS, GATES, Coefficients, Gate, Logit
from affine_attn.core.variants import VARIANTS, Variant


@dataclass(frozen=True)
class Slope(Logit):
    strength: float = 0.5
    kind = "own_slope"

    def coefficients(self, distance, count, head, heads):
        return Coefficients(None, -self.strength * torch.log1p(distance.clamp(min=0)))


ACTIVATIONS["own_phi"] = torch.nn.functional.hardsigmoid
GATES["own_gate"] = Gate(per_channel=False, activation=torch.tanh)
spec = AttentionSpec(logit=Slope(), affine=Affine(phi="own_phi"), gate="own_gate")
VARIANTS["own"] = Variant(spec, "tanh(w_g·x) (α p + β) v", "own")
"""


@pytest.fixture
def own(family, tmp_path, monkeypatch):
    """The user's file, and what it defines taken back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = set(sys.modules)
    (tmp_path / "my_variants.py").write_text(OWN)
    yield "my_variants.py"
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def test_a_variant_of_ones_own_goes_from_training_to_the_report(own, tmp_path):
    data = counting_shards(tmp_path)
    fields = {name: value for name, value in vars(tiny(data)).items() if value is not None}
    fields |= {"attention": "own", "teacher": "none", "statistics_steps": 3}
    (tmp_path / "mine.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()))
    said = "unknown variant 'own'; allowed are softmax"
    assert said in refused("distill", "mine.toml")
    assert "commands: --import FILE" in refused("distill", "mine.toml")

    trained = printed("distill", "mine.toml", "--import", own)
    run = tmp_path / "runs" / "mine"
    assert len(metrics(run)) == 6
    assert "affine-attn report runs/mine --import my_variants" in trained
    model = str(run / "model")
    printed("--import", own, "eval", model, "--shards", str(data), "--length", str(LENGTH))
    printed("analyze", str(run), "--import", own, "--data", str(data), "--sequences", "3", "--no-figures")
    printed("report", str(run), "--import", own)
    page = (tmp_path / "report.html").read_text()
    assert "<td>own</td>" in page
    (analysis,) = (run / "model" / "analysis").glob("*/analysis.json")
    assert read_object(analysis)["model"]["variant"] == "own"
    assert "histograms" in read_object(analysis)
    assert "| `own` | tanh(w_g·x) (α p + β) v | Slope |" in printed("variants", "--import", own)

    # The record of the run is a recipe: the same losses again.
    printed("distill", str(run / RECIPE), "--output", "again", "--import", own)
    assert [row["loss"] for row in metrics(tmp_path / "again")] == [row["loss"] for row in metrics(run)]


def test_a_checkpoint_of_ones_own_names_the_module_that_is_missing(own, tmp_path):
    """In fresh processes, since this one has imported it."""
    data = counting_shards(tmp_path)
    import_definitions(own)
    run(tiny(data, attention="own"), tmp_path / "run")
    folder = tmp_path / "run" / "model"
    assert read_object(folder / "config.json")[DEFINED_IN] == ["my_variants"]
    assert "Defined in `my_variants`" in (folder / "README.md").read_text()
    said = (
        "the attention of this checkpoint is defined in my_variants: import that first "
        "(commands: --import my_variants, or --import with its file)"
    )
    command = ["-m", "affine_attn.cli", "eval", "run/model", "--shards", str(data), "--length", str(LENGTH)]
    assert fresh(*command) == (2, f"{said}\n")
    assert fresh(*command, "--import", "my_variants")[0] == 0
    load = "from affine_attn.models import AffineAttnForCausalLM as model; model.from_pretrained('run/model')"
    code, error = fresh("-c", load)
    assert code == 1
    assert error.splitlines()[-1] == f"affine_attn.errors.MissingDefinition: {said}"
    assert fresh("-c", f"import my_variants; {load}")[0] == 0


def fresh(*arguments: str) -> tuple[int, str]:
    """The exit code and the errors of a Python of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), "."))}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "spec", [{"logit": {"kind": "own_slope"}}, {"affine": {"phi": "own_phi"}}, {"gate": "own_gate"}, {"gate": 0.5}]
)
def test_a_spec_knows_the_modules_of_its_stages(spec, own):
    import_definitions(own)
    assert AttentionSpec.from_dict(spec).modules == (set() if spec == {"gate": 0.5} else {"my_variants"})


def test_what_cannot_be_imported_is_one_line(own, tmp_path):
    (tmp_path / "my_broken.py").write_text("import torch\n1 / 0\n")
    (tmp_path / "json.py").write_text("")
    assert refused("variants", "--import", "none.py") == "--import none.py: there is no such file\n"
    assert refused("variants", "--import", "my_broken.py") == (
        "--import my_broken.py: ZeroDivisionError: division by zero\n"
    )
    assert "my_broken" not in sys.modules
    assert "a module json is there already" in refused("--import", "json.py", "variants")
    assert "No module named 'my_nothing'" in refused("--import", "my_nothing", "variants")
    # As a module, and twice.
    printed("--import", "my_variants", "variants", "--import", own)
    assert "own" in VARIANTS


def test_installed_packages_name_their_definitions(own, monkeypatch):
    entry = importlib.metadata.EntryPoint("mine", "my_variants", ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == ENTRY_POINTS else [])
    monkeypatch.syspath_prepend(".")
    assert "| `own` |" in printed("variants")
    broken = importlib.metadata.EntryPoint("mine", "my_nothing", ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [broken])
    assert "my_nothing, which an installed package names" in refused("variants")


def test_every_command_can_import():
    for name, command in typer.main.get_command(app).commands.items():
        assert any("--import" in parameter.opts for parameter in command.params), name


def test_a_spec_stands_for_a_name_with_the_length_of_the_run_unless_it_has_its_own():
    chosen = recipe("demo", ['attention={"affine": {}, "logit": {"kind": "logn"}, "gate": "learned"}', "rho=0.5"])
    (spec,) = chosen.specs
    assert (spec.affine.length, spec.affine.momentum, spec.logit.length, spec.gate) == (256, 0.5, 256, "learned")
    chosen = recipe(
        "demo", ['attention={"affine": {"length": 0, "momentum": 0.1}, "logit": {"kind": "logn", "length": 9}}']
    )
    (spec,) = chosen.specs
    assert (spec.affine.length, spec.affine.momentum, spec.logit.length) == (0, 0.1, 9)
    per_layer = recipe("demo", ['attention=["softmax", {"affine": {}}]']).student_config
    assert [per_layer.spec(layer).affine and per_layer.spec(layer).affine.length for layer in range(2)] == [None, 256]
    for wrong, message in (
        ('["softmax", "sink", "affine"]', "attention has 3 entries, num_hidden_layers is 2"),
        ('{"gate": }', "is not JSON"),
        ('{"gates": 1}', "unknown entries"),
        ("[[]]", "must be a variant's name"),
    ):
        with pytest.raises(UserError, match=message):
            recipe("demo", [f"attention={wrong}"])


def test_a_sweep_takes_specs(tmp_path):
    sweep = 'attention=softmax,{"gate":0.5,"sink":0.0},["softmax",{"gate":0.5}]'
    lines = printed("distill", "demo", "teacher=none", "--sweep", sweep, "--dry-run").splitlines()
    assert [line for line in lines if line.startswith("attention=")] == [
        "attention=softmax:", 'attention={"gate":0.5,"sink":0.0}:', 'attention=["softmax",{"gate":0.5}]:',
    ]  # fmt: skip


def test_a_file_is_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "demo"\nlearning_rate = 1\nteacher = "none"\nattention = ["softmax", {gate = 0.5}]\n')
    chosen = recipe("mine.toml", ["steps=500"])
    assert (chosen.student, chosen.learning_rate, chosen.teacher, chosen.steps) == ("nano", 1.0, None, 500)
    assert chosen.specs[1].gate == 0.5
    assert "student     nano" in printed("distill", "mine.toml", "--dry-run")
    for text, message in (
        ("steps = 'x'", "steps must be an integer, got 'x'"),
        ("steps = true", "steps must be an integer, got True"),
        ("hard = 'x'", "hard must be a number, got 'x'"),
        ("stepps = 1", "a recipe has no field 'stepps'; did you mean steps"),
        ("steps = ", "is not TOML"),
        ("recipe = 'dmo'", "there is no recipe 'dmo'; did you mean demo"),
        ("dtype = 'float16'", "dtype must be one of float32, bfloat16"),
    ):
        file.write_text(text)
        assert message in refused("distill", "mine.toml")
    assert "there is no file or folder none.toml" in refused("distill", "none.toml")


def test_fewer_steps_alone_shrink_warmup_and_decay_and_say_so():
    base = recipe("demo")
    few = recipe("demo", ["steps=50"])
    assert (few.warmup_steps, few.decay_steps) == (30 * 50 // 700, 230 * 50 // 700)
    said = printed("distill", "demo", "steps=50", "--dry-run")
    assert said.startswith("steps=50 for 700, so warmup_steps=2 for 30 and decay_steps=16 for 230\n")
    # Where they fit, or are given, they stay.
    assert (recipe("demo", ["steps=600"]).decay_steps, base.decay_steps) == (230, 230)
    assert recipe("demo", ["steps=50", "warmup_steps=10"]).warmup_steps == 10
    assert recipe("demo", ["steps=50", "warmup_steps=0", "decay_steps=50"]).decay_steps == 50
    with pytest.raises(UserError, match="are more than steps=50"):
        recipe("demo", ["steps=50", "decay_steps=60"])


def test_recipes_are_listed_and_explained():
    listed = printed("recipes")
    assert all(name in listed for name in ("demo", "small", "needle", "paper-0.5b", "paper-1b", "paper-3b"))
    rows = {row[0]: row for row in map(str.split, printed("recipes", "small").splitlines()) if len(row) > 2}
    assert rows["learning_rate"][1:3] == ["0.003", "small"]
    assert rows["attention"][1:3] == ["affine", "paper"]
    assert rows["beta2"][1:3] == ["0.95", "default"]
    assert refused("recipes", "smal").startswith("there is no recipe 'smal'; did you mean small")
