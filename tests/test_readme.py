"""The README's code runs, its tables are the generated ones, and its file tree exists."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from affine_attn.core.variants import variants_table
from affine_attn.distill import estimate
from affine_attn.distill.recipes import recipe
from benchmarks import record, scaling
from benchmarks.readme import rewrite

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SCALING = (ROOT / "docs" / "scaling.md").read_text()


def test_the_quickstart_runs():
    core, models = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    namespace: dict = {}
    exec(core, namespace)
    assert namespace["y"].shape == (2, 8, 128, 64)
    assert namespace["layer"].alpha.alpha_ma.abs().min() > 0
    exec(models, namespace)
    assert namespace["endless"].shape == (1, 80) or namespace["endless"][0, -1] == 0
    prompt = namespace["prompt"]
    before, after = (namespace[name].eval()(prompt).logits for name in ("softmax", "affine"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


def test_the_variants_table_is_current():
    assert variants_table() in README


def test_every_file_of_the_tree_exists():
    tree = README.split("## Where things are")[1].split("Reading order")[0]
    names = re.findall(r"\b([a-z_]+\.py)\b", tree)
    assert len(names) > 15
    for name in names:
        assert list(ROOT.rglob(name)), f"{name} is in the README's tree but not in the repository"


def test_the_tables_of_scaling_are_current():
    assert rewrite(SCALING, {"scaling": scaling.tables()}) == SCALING


def test_scaling_takes_what_was_measured_and_says_what_was_not(tmp_path):
    assumed = scaling.tables(tmp_path / "nothing.csv")
    assert assumed.count("not measured yet, 40% MFU is assumed") == 3
    columns = ("shape", "what", "mode", "mfu", "device")
    rows = [
        ("1B", "softmax", "distillation", "0.9", "GPU"),
        ("1B", "affine", "pretraining", "0.8", "GPU"),
        ("1B", "affine", "distillation", "0.5", "GPU"),
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
