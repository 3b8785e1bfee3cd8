"""Export by the reference: any batch and length, and onnxruntime's logits are torch's."""

import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

from affine_attn import AttentionLayer, Rope
from affine_attn.cli import app
from affine_attn.models import onnx as onnx_export
from tests.support.hf import left_padded, tiny_model

# A layer each: what they have in common is traced once.
FOUR = ["affine", "sink", "gated", "scale_invariant"]


def test_logits_of_the_file_are_those_of_torch(tmp_path, monkeypatch):
    model = tiny_model(FOUR, num_hidden_layers=4, window=[None, 7, None, None], qk_norm=True, initializer_range=0.1)
    model.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["export", str(tmp_path), "--onnx"])
    assert result.exit_code == 0, result.output
    assert "differ from torch's by" in result.output
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for batch, length, padded in ((1, 1, 0), (3, 23, 9), (2, 100, 1)):
        tokens, mask = left_padded(batch, length, padded, seed=length)
        (found,) = session.run(None, {"input_ids": tokens.numpy(), "attention_mask": mask.numpy()})
        with torch.no_grad():
            expected = model(tokens, mask).logits
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5)
    monkeypatch.setattr(onnx_export, "_PACKAGES", ("onnx_that_is_not_there",))
    missing = CliRunner().invoke(app, ["export", str(tmp_path), "--onnx"])
    assert missing.exit_code == 2
    assert "pip install 'affine-attn[onnx]'" in missing.stderr


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_torch_export_of_the_reference_takes_any_length(kv_heads):
    class Reference(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = AttentionLayer(32, heads=4, kv_heads=kv_heads, attention="affine", rope=Rope())

        def forward(self, x):
            return self.layer(x, impl="reference")

    module = Reference().eval()
    sizes = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=1)}
    exported = torch.export.export(module, (torch.randn(2, 9, 32),), dynamic_shapes=(sizes,))
    for batch, length in ((1, 1), (3, 40)):
        x = torch.randn(batch, length, 32)
        torch.testing.assert_close(exported.module()(x), module(x))


def test_what_cannot_be_exported_is_said(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    for arguments, message in ((["nowhere", "--onnx"], "there is no folder"), (["model"], "--onnx")):
        result = CliRunner().invoke(app, ["export", str(tmp_path / arguments[0]), *arguments[1:]])
        assert result.exit_code == 2
        assert message in result.output
