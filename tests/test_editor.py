"""What editors and notebooks see: an install that they can follow, fields in ``help``, layers that name themselves."""

import pydoc
import subprocess
import sys
import zipfile
from dataclasses import fields
from pathlib import Path

import pytest

from affine_attn import Affine, AttentionLayer, AttentionSpec, Mask
from affine_attn.models import AffineAttnForCausalLM, preset
from tests.support.run_mutations import ROOT


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path):
    """Not the import hook that setuptools makes of several folders."""
    project = tmp_path / "project"
    (project / "affine_attn").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (project / name).write_text((ROOT / name).read_text())
    for folder in ("affine_attn", "tests", "experiments"):
        (project / folder).mkdir(exist_ok=True)
        (project / folder / "__init__.py").write_text('__version__ = "1"\n')
    program = f"from setuptools.build_meta import build_editable; print(build_editable({str(tmp_path)!r}))"
    built = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]) as wheel:
        files = [name for name in wheel.namelist() if "dist-info" not in name]
        assert files == ["__editable__.affine_attn-1.pth"]
        assert Path(wheel.read(files[0]).decode().strip()) == project


@pytest.mark.parametrize("kind", [Mask, Affine, AttentionSpec])
def test_help_explains_every_field(kind):
    text = pydoc.plain(pydoc.render_doc(kind))
    for field in fields(kind):
        assert f"\n |  {field.name}: " in text, field.name


def test_layers_say_what_they_are():
    layer = AttentionLayer(dim=32, heads=4, kv_heads=2, attention="sink")
    assert repr(layer).splitlines()[1].strip() == "sink, heads=4, kv_heads=2, head_dim=8"
    spec = AttentionSpec(affine=Affine(length="keys"), gate=0.5)
    unnamed = repr(AttentionLayer(dim=32, heads=4, attention=spec))
    assert f"{spec!r}, heads=4" in unnamed
    assert "(alpha): AlphaGate(dim=32, heads=4, phi=linear_clipping, length='keys')" in unnamed
    model = repr(AffineAttnForCausalLM(preset("nano", "affine", window=[None, 7])))
    assert "affine, heads=4, kv_heads=2, head_dim=16\n" in model
    assert "affine, heads=4, kv_heads=2, head_dim=16, window=7\n" in model
    assert "phi=linear_clipping, length=128" in model
