"""The README's code runs, its tables are the generated ones, and its file tree exists."""

import re
from pathlib import Path

import torch

from affine_attn.core.variants import variants_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


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
