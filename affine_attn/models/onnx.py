"""A model as an ONNX file, by the reference: other programs know no operator of this package's engines."""

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from affine_attn.errors import MissingPackage, UserError
from affine_attn.models.load import load
from affine_attn.models.modeling import AffineAttnForCausalLM
from affine_attn.runs.files import require_writable

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# Batch, length and padding of what is traced, and of what the file is then compared at.
_TRACED = (2, 10, 4)
_COMPARED = ((1, 3, 0), (2, 17, 5), (3, 64, 20))


class _Logits(nn.Module):
    """What the file computes: input_ids and attention_mask [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, model: AffineAttnForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids, attention_mask, use_cache=False, impl="reference").logits


def export_onnx(model: AffineAttnForCausalLM, path: str | Path) -> float:
    """Write the model, for any batch and length, and return how far onnxruntime's logits are from torch's at most.

    They are compared at three lengths, on real tokens. The file takes whole sequences; it has no cache.
    """
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(f"ONNX needs the package {name}: pip install 'affine-attn[onnx]'")
    path, was, logits = Path(path), model.training, _Logits(model.eval())
    batch, length = (torch.export.Dim(name, min=1) for name in ("batch", "length"))
    sizes = {0: batch, 1: length}
    try:
        with warnings.catch_warnings():
            # Of torch, about names and deprecations of its own.
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                logits.eval(),
                _inputs(model, *_TRACED),
                dynamic_shapes=(sizes, sizes),
                input_names=["input_ids", "attention_mask"],
                output_names=["logits"],
                dynamo=True,
                verbose=False,
            )
        # A file of more than 2 GB has another one for its weights, which it knows by name.
        with TemporaryDirectory(dir=path.parent) as folder:
            program.save(Path(folder) / path.name)
            moved = _difference(logits, Path(folder) / path.name)
            for file in sorted(Path(folder).iterdir(), reverse=True):
                file.replace(path.parent / file.name)
    finally:
        model.train(was)
    return moved


def export_folder(source: str, target: Path | None = None) -> Iterator[str]:
    """Export the model of a folder in fp32, by default to model.onnx in it, and say what came of it."""
    path = target or Path(source) / "model.onnx"
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file")
    require_writable(path.parent)
    model = load(source, dtype=torch.float32)
    if not isinstance(model, AffineAttnForCausalLM):
        raise UserError(f"export needs an AffineAttn model, {source} is a {model.config.model_type} model")
    path.parent.mkdir(parents=True, exist_ok=True)
    moved = export_onnx(model, path)
    lengths = ", ".join(str(length) for _, length, _ in _COMPARED)
    yield f"{path}: input_ids and attention_mask [batch, length] to logits, any batch and length, fp32, no cache"
    yield f"onnxruntime's logits differ from torch's by {moved:.1e} at most, at lengths {lengths}"


def _difference(logits: _Logits, path: Path) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    differences = []
    for sizes in _COMPARED:
        tokens, mask = _inputs(logits.model, *sizes)
        given = {"input_ids": tokens.cpu().numpy(), "attention_mask": mask.cpu().numpy()}
        with torch.no_grad():
            expected = logits.model(tokens, mask, use_cache=False).logits
        found = torch.from_numpy(session.run(None, given)[0]).to(expected)
        differences.append((found - expected)[mask.bool()].abs().max().item())
    return max(differences)


def _inputs(model: AffineAttnForCausalLM, batch: int, length: int, padded: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :padded] = 0
    return tokens.to(model.device), mask.to(model.device)
