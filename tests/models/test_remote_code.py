"""Folders with code: loaded by a Python that cannot import this package, never run without the flag."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from affine_attn import VARIANTS
from affine_attn.models import AffineAttnForCausalLM, convert, save_with_code
from affine_attn.models.remote_code import modeling_source
from tests.support.hf import left_padded, tiny_model

LOAD_THEM = """
import importlib, sys, pathlib, re, torch, warnings
sys.modules["affine_attn"] = None  # importing it fails, as where it is not installed
from transformers import AutoModelForCausalLM
root = pathlib.Path(sys.argv[1])
tokens, mask = torch.load(root / "inputs.pt")
folders = sorted(path for path in root.iterdir() if path.is_dir() and path.name != "modules")
# All before any is used: each has its own copy of the code, and the first must not run into what the last registered.
models = {folder: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) for folder in folders}
for folder, model in models.items():
    expected = torch.load(root / f"{folder.name}.pt")
    torch.testing.assert_close(model(tokens, mask).logits, expected["logits"], rtol=1e-4, atol=1e-4)
    generated = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(generated, expected["generated"]), folder.name
    print(folder.name)
model.save_pretrained(root / "modules" / "again")
model = models[root / "affine"].train()
optimizer = torch.optim.SGD(model.parameters())
with warnings.catch_warnings(record=True) as warned:
    for _ in range(2):
        model(tokens, mask, labels=tokens).loss.backward()
        optimizer.step()
pattern = r"importlib.import_module\\('transformers_modules.*'\\).track_alpha"
(track,) = {re.search(pattern, str(warning.message)).group() for warning in warned}
eval(track)(model, optimizer)
"""


def test_a_python_without_the_package_runs_all_variants_side_by_side(tmp_path, monkeypatch):
    tokens, mask = left_padded()
    torch.save((tokens, mask), tmp_path / "inputs.pt")
    for name in VARIANTS:
        model = tiny_model(name, window=[6, None])
        save_with_code(model, tmp_path / name)
        generated = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
        torch.save({"logits": model(tokens, mask).logits, "generated": generated}, tmp_path / f"{name}.pt")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    command = [sys.executable, "-c", LOAD_THEM, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == sorted(VARIANTS)
    assert (tmp_path / "modules" / "again" / "modeling_affine_attn.py").read_text() == modeling_source()


def test_without_the_flag_the_package_loads_it_and_forgets_the_code(tmp_path):
    model = tiny_model("affine")
    save_with_code(model, tmp_path / "with")
    (tmp_path / "with" / "modeling_affine_attn.py").write_text("raise SystemExit('code was run')")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "with", trust_remote_code=False)
    assert type(again) is AffineAttnForCausalLM
    again.save_pretrained(tmp_path / "without")
    assert "import" in (code := (tmp_path / "without" / "modeling_affine_attn.py").read_text())
    assert len(code.splitlines()) == 3


def test_the_code_needs_torch_and_transformers_alone():
    source = modeling_source()
    assert "affine_attn.core" not in source
    compile(source, "modeling_affine_attn.py", "exec")


def test_foreign_code_is_refused_in_a_sentence(tmp_path):
    PreTrainedConfig().save_pretrained(tmp_path)
    config = {"model_type": "surprise", "auto_map": {"AutoConfig": "x.X", "AutoModelForCausalLM": "x.Y"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "x.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(ValueError, match="brings its own model code, which is not run here"):
        convert(tmp_path)
