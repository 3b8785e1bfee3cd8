"""Code in README and docs runs, their tables are the generated ones, their links and the trees of files exist."""

import dataclasses
import re
import shlex
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from affine_attn import Mask, attention, explain, variant
from affine_attn.analyze.run import Request, analyze_all
from affine_attn.cli import app as cli
from affine_attn.core.variants import variants_table
from affine_attn.distill import estimate
from affine_attn.distill.recipes import recipe
from affine_attn.distill.run import run
from affine_attn.engines import needs
from affine_attn.models import AffineAttnForCausalLM, preset
from benchmarks import record, scaling
from benchmarks.readme import documents, rewrite
from docs import call, gallery
from tests.clients import page as clients
from tests.support.tiny_runs import counting_shards, tiny

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
VARIANT = (DOCS / "adding-a-variant.md").read_text()
GALLERY = (DOCS / "gallery.md").read_text()
SCALING = (DOCS / "scaling.md").read_text()
DESIGN = (DOCS / "design.md").read_text()
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))


def code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def run_all(page: str) -> dict[str, Any]:
    """Run the code of a page from top to bottom and return its names."""
    namespace: dict[str, Any] = {}
    for code in code_of(page):
        exec(code, namespace)
    return namespace


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_the_quickstart_of_the_readme_runs():
    (quickstart,) = code_of(README)
    assert len(quickstart.splitlines()) <= 12
    found = run_all(README)
    assert found["y"].shape == (2, 8, 128, 64)
    assert found["layer"].alpha.alpha_ma.abs().min() > 0


def test_the_quickstart_of_the_docs_runs():
    page = (DOCS / "quickstart.md").read_text()
    found = run_all(page)
    assert found["layer"].alpha.alpha_ma.abs().min() > 0
    if not torch.cuda.is_available():
        assert textwrap.indent(explain(found["q"], found["k"], found["v"], **found["arguments"]), "    ") in page


def test_the_tutorial_on_an_own_model_runs():
    found = run_all((DOCS / "tutorials" / "own-gpt.md").read_text())
    # The average is still 0, so beta = -alpha / 128.
    q, k, v, alpha = (found[name] for name in ("q", "k", "v", "alpha"))
    torch.testing.assert_close(found["y"], attention(q, k, v, alpha=alpha, beta=-alpha / 128))


def test_the_page_of_clients_is_that_of_their_tests():
    assert (DOCS / "clients.md").read_text() == clients.page()


def test_the_tutorial_on_hugging_face_models_runs():
    found = run_all((DOCS / "tutorials" / "hugging-face.md").read_text())
    assert found["endless"].shape == (1, 80) or found["endless"][0, -1] == 0
    before, after = (found[name].eval()(found["prompt"]).logits for name in ("softmax", "affine"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


def test_the_tutorial_on_analysis_runs():
    assert run_all((DOCS / "tutorials" / "analyse.md").read_text())["row_sums"].shape == (2, 4)


@pytest.mark.parametrize("name", ["masks", "engines", "options"])
def test_the_pages_on_concepts_run(name):
    run_all((DOCS / f"{name}.md").read_text())


def test_the_plans_of_three_calls_are_what_explain_prints(monkeypatch):
    """``python -m docs.call`` writes them again. None depends on this machine, but on what is installed there."""
    monkeypatch.setattr(needs, "flash_attn_4_package", lambda: "flash-attn-4 is not installed")
    page = call.PAGE.read_text()
    assert page.count("```text") == 3
    assert call.written(page) == page


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_adding_a_variant_takes_what_its_page_says(family, tmp_path):
    combination, name, logit, engines, activations = code_of(VARIANT)
    found: dict = {}
    exec(combination, found)
    prompt = torch.randint(0, 256, (1, 16))
    assert found["model"](prompt).logits.isfinite().all()
    exec(name, found)
    assert variant("sink_affine") == found["combination"]
    assert "| `sink_affine` |" in variants_table()

    exec(logit, found)
    chosen = found["power_law"]
    model = AffineAttnForCausalLM(preset("nano", chosen)).eval()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(AffineAttnForCausalLM.from_pretrained(tmp_path)(prompt).logits, model(prompt).logits)

    exec(engines, found)
    assert [error.name for error in found["errors"]] == ["y", "dq", "dk", "dv", "dsink", "dalpha", "dbeta"]
    assert all(error.within for error in found["errors"])
    if not torch.cuda.is_available():
        assert textwrap.indent(found["reasons"], "    ") in VARIANT
    inputs = found["inputs"]
    expected = _power_law(**inputs)
    for impl in ("reference", "blocked", "flex"):
        torch.testing.assert_close(attention(**inputs, impl=impl), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="PowerLaw needs a causal mask"):
        attention(**inputs, mask=Mask(causal=False))

    exec(activations, found)
    x = torch.randn(2, 10, 256)
    found["activated"](x).square().sum().backward()
    layer = found["activated"]
    assert layer.attn_gate.weight.grad.abs().max() > 0
    alpha = torch.nn.functional.hardsigmoid(x @ layer.alpha.w_a.T).transpose(1, 2)
    stages = layer.stages(x, *layer.project(x), Mask())
    torch.testing.assert_close(stages["alpha"], alpha)
    torch.testing.assert_close(stages["gate"], torch.tanh(layer.attn_gate(x)).unflatten(-1, (8, -1)).transpose(1, 2))


def _power_law(q, k, v, sink, alpha, beta, logit):
    """The page's formula on its inputs, by hand: two query heads share a key head."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    t = (torch.arange(65)[:, None] - torch.arange(65)).float()
    weights = torch.exp(q @ k.mT / 32**0.5) * (1 + t.clamp(min=0) / 4.0) ** -1.0 * (t >= 0)
    p = weights / (weights.sum(-1, keepdim=True) + torch.exp(sink)[:, None, None])
    return (alpha[..., None] * p + beta[..., None] * (t >= 0)) @ v


def test_generated_sections_are_current():
    for path, parts in documents().items():
        assert rewrite(path.read_text(), parts) == path.read_text(), path.name


def test_plain_attention_is_that_of_torch():
    """As the tutorial says to those who port a model."""
    q, k, v = (torch.randn(2, heads, 10, 16) for heads in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v), expected)


CODE = ("affine_attn", "benchmarks", "experiments", "docs", "tests", "hf_common")


def files_of_the_tree() -> dict[str, set[str]]:
    """Folder -> names, as the tree in docs/design.md has them: by indentation; a long line goes on below."""
    (tree,) = re.findall(r"^    affine_attn/\n(?:    .*\n)+", DESIGN, re.MULTILINE)
    folders, found, here = {0: ""}, {}, ""
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        if indent < 20:
            parent = folders[max(n for n in folders if n < indent)]
            entry = line.split()[0]
            here = parent + entry if entry.endswith("/") else parent
            folders = {n: folder for n, folder in folders.items() if n < indent} | {indent: here}
        found.setdefault(here, set()).update(re.findall(r"[\w-]+\.(?:py|md)\b", line))
    return {folder.rstrip("/"): names for folder, names in found.items()}


def test_the_tree_of_the_readme_has_every_room():
    tree = README.split("## Where things are\n\n")[1].split("\n\n")[0]
    rooms = {path.parent.name for path in (ROOT / "affine_attn").glob("*/__init__.py")}
    assert set(re.findall(r"(\w+)/", tree)) == rooms
    assert len(tree.splitlines()) <= 10


def test_the_tree_has_every_file_and_no_other():
    tree = files_of_the_tree()
    packages = {path.parent for name in CODE[:3] for path in (ROOT / name).rglob("__init__.py")}
    for folder in (*packages, ROOT / "docs"):
        files = {path.name for path in folder.glob("[!_]*") if path.suffix in (".py", ".md")}
        assert tree.get(str(folder.relative_to(ROOT)), set()) == files, folder


def test_versions_and_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    start = (DOCS / "quickstart.md").read_text()
    table = start.partition("| extra | brings | for |")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(extras) - {"test", "lint"}
    oldest = dict(
        re.match(r"([\w-]+)>=([\d.]+)", line).groups()
        for line in sum(extras.values(), project["dependencies"])
        if ">=" in line
    )
    python = project["requires-python"].removeprefix(">=")
    for page in (README, start):
        assert f"Python {python} or newer and PyTorch {oldest['torch']} to" in page
    assert f"transformers {oldest['transformers']} or newer" in start
    assert f"Triton {oldest['triton']} or newer" in start


PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for link, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        target = page.parent / link if link else page
        assert link.startswith("https://") or target.exists(), f"{page.name} links to {link}"
        if heading and not link.startswith("https://"):
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, f"{page.name} links to {link}#{heading}"


_COMMAND = re.compile(r"(?:`|    |-m )affine[-_]attn(?:\.cli)? ([a-z][^`\n#]*)")
_COMMANDS = {
    page: _COMMAND.findall(page.read_text().replace("\\\n", ""))
    for page in (ROOT / "README.md", DOCS / "quickstart.md", DOCS / "scaling.md", *TUTORIALS)
}


def test_pages_have_commands():
    assert sum(map(len, _COMMANDS.values())) > 40


@pytest.mark.parametrize("page", [page for page in _COMMANDS if _COMMANDS[page]], ids=lambda page: page.stem)
def test_every_command_has_its_options_and_fields(page, tmp_path, monkeypatch):
    """With --help a command reads its line and does nothing."""
    monkeypatch.chdir(tmp_path)
    for text in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        Path("mine.toml").write_text(text)
    for line in _COMMANDS[page]:
        name, *arguments = shlex.split(line)
        result = CliRunner().invoke(cli, [name, "--help", *arguments])
        assert result.exit_code == 0, f"{line}\n{result.output}"
        if name == "distill" and not arguments[0].endswith(".json"):
            recipe(arguments[0], [word for word in arguments[1:] if re.match(r"[a-z_]+=[^,]+$", word)])


def test_every_file_that_the_page_on_variants_names_exists():
    names = re.findall(r"`(?:[a-z_]+/)*([a-z_]+\.py)`", VARIANT)
    assert len(names) > 15
    known = {path.name for folder in CODE for path in (ROOT / folder).rglob("*.py")}
    # The reader's own file is not here.
    assert set(names) - known == {"my_variants.py"}, "named but not in the repository"


def test_the_gallery_shows_its_figures_and_all_of_them():
    files = sorted((ROOT / "docs" / "gallery").iterdir())
    assert {path.name for path in files} == gallery.figures_of(GALLERY)
    assert sum(path.stat().st_size for path in files) < 1.5e6
    assert gallery.PICTURE.stat().st_size < 400e3


def test_the_gallery_is_written_from_the_files_of_runs(tmp_path, monkeypatch):
    """The demo in miniature: its folders, and what stands in them."""
    data, runs = tmp_path / "data", tmp_path / "runs"
    data.mkdir()
    counting_shards(data)
    for name in ("softmax", "sink", "affine"):
        chosen = tiny(data, attention=name, steps=6, statistics_steps=3, valid_sequences=4)
        run(chosen, runs / f"attention={name}")
    with pytest.raises(ValueError, match=r"attention=softmax is not finished: run make demo"):
        gallery.students(runs)
    analyze_all([str(folder / "model") for folder in sorted(runs.iterdir())], Request(data, length=16, sequences=4))
    students = gallery.students(runs)
    assert [student.name for student in students] == ["softmax", "sink", "affine"]
    text = rewrite(GALLERY, {"students": gallery.table(students)})
    losses = " | ".join(f"{student.result['valid_loss']:.4f}" for student in students)
    assert f"| held-out loss | {losses} |" in text
    assert "`nano` students, 6 steps of" in text
    shown = "![](gallery/row_sums.svg) ![](gallery/heads_alpha.svg)"
    gallery.draw(students, shown, tmp_path / "figures")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"row_sums.svg", "heads_alpha.svg"}
    monkeypatch.setattr(gallery, "draw_figures", lambda runs, folder: [])
    with pytest.raises(ValueError, match=r"shows \['loss.svg'\], which these runs have no numbers for"):
        gallery.draw(students, "![](gallery/loss.svg)", tmp_path / "figures")
    assert len(list((tmp_path / "figures").iterdir())) == 2


def test_scaling_takes_what_was_measured_and_says_what_was_not(tmp_path):
    assumed = scaling.tables(tmp_path / "nothing.csv")
    assert assumed.count("not measured yet, 40% MFU is assumed") == 3
    columns = ("shape", "what", "mode", "mfu", "device")
    rows = [
        ("1B", "softmax", "distillation", "0.9", "GPU"),
        ("1B", "affine", "pretraining text", "0.8", "GPU"),
        ("1B", "affine", "distillation random", "0.7", "GPU"),
        ("1B", "affine", "distillation text", "0.5", "GPU"),
        ("qwen1.5-0.5b", "affine", "pretraining", "", "GPU"),
    ]
    lines = [",".join(row) for row in (columns, *rows)]
    (tmp_path / "measured.csv").write_text("\n".join(lines))
    measured = scaling.tables(tmp_path / "measured.csv")
    assert measured.count("not measured yet") == 2
    assert "50.0% MFU as measured on one GPU (affine, distillation" in measured
    chosen = recipe("paper-1b")
    student, teacher = (estimate.size(config) for config in (chosen.student_config, estimate.teacher_config(chosen)))
    speed = 64 * 989e12 * 0.5 / estimate.flops_per_token(chosen, student, teacher)
    memory = estimate.memory(dataclasses.replace(chosen, micro_batch=8), student, teacher, 64)
    gib = " | ".join(f"{memory[kind] / 2**30:.0f}" for kind in ("DDP", "FSDP"))
    assert f"| 64 | 8 x 2 | {gib} | {speed:,.0f} |" in measured
    assert scaling.measured_row("paper-1b", chosen, record.read(tmp_path / "measured.csv"))["mfu"] == "0.5"


def test_bytes_that_a_device_sends():
    """Of 8 devices in an all-reduce: 7/8 out in the reduce-scatter, 7/8 in the all-gather."""
    chosen = recipe("paper-1b")
    student = estimate.size(chosen.student_config)
    moved = estimate.bytes_moved(chosen, student, 8)
    assert moved["DDP"] == 7 * student.parameters
    assert moved["FSDP"] == pytest.approx(7 / 8 * student.parameters * (2 * 16 * 2 + 4))
    assert set(estimate.bytes_moved(chosen, student, 1).values()) == {0}


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_reads_its_files(name, monkeypatch):
    """Every field is one that accelerate knows, and what is launched gets the plugin that is meant."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    from affine_attn.models.modeling import AffineAttnDecoderLayer

    path = ROOT / "configs" / "accelerate" / f"{name}.yaml"
    assert load_config_from_file(str(path)).num_processes == 8
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "-m", "affine_attn.cli", "distill"])
    known = vars(arguments)
    for field in load_config_from_file(str(path)).fsdp_config:
        assert field in known, f"accelerate launch has no option {field}"
    arguments, *_ = _validate_launch_command(arguments)
    assert (arguments.num_processes, arguments.mixed_precision) == (8, "bf16")
    environment = prepare_multi_gpu_env(arguments)
    assert ("ACCELERATE_USE_FSDP" in environment) == (name == "fsdp2")
    if name == "fsdp2":
        for key in [key for key in environment if key.startswith("FSDP_")]:
            monkeypatch.setenv(key, environment[key])
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is True
        assert plugin.transformer_cls_names_to_wrap == [AffineAttnDecoderLayer.__name__]
        assert plugin.state_dict_type.name == "FULL_STATE_DICT"
        assert not plugin.activation_checkpointing


def test_the_page_on_kernels_names_what_is_there():
    page = (ROOT / "docs" / "adding-a-kernel.md").read_text()
    places = set(re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", page)) - {"eager.py", "launch.py", "kernels.py"}
    within = (ROOT, ROOT / "affine_attn", ROOT / "benchmarks", ROOT / "affine_attn" / "kernels" / "sm90")
    assert len(places) > 20
    assert not [place for place in places if not any((folder / place).exists() for folder in within)]
    sources = "".join(
        path.read_text()
        for room in ("affine_attn", "tests")
        for path in (ROOT / room).rglob("*.py")
        if path != Path(__file__)
    )
    for name in set(re.findall(r"`(\w+)`", page)) - {"None"}:
        assert re.search(rf"\b{name}\b", sources), name
