"""``affine-attn analyze``: models side by side on the same data, their files and their figures."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from affine_attn.analyze.measure import measure
from affine_attn.core.spec import AttentionSpec
from affine_attn.core.variants import name_of
from affine_attn.data.shards import MANIFEST, TOKENIZER, read_manifest
from affine_attn.data.texts import boundaries, is_shards, load_sequences
from affine_attn.data.tokenizer import require_same_tokens
from affine_attn.errors import UserError
from affine_attn.models.convert import convert
from affine_attn.models.load import ModelHandle, load, tokenizer_of
from affine_attn.models.modeling import AffineAttnForCausalLM
from affine_attn.runs.analysis import (
    MOST_MAP_BYTES,
    VERSION,
    Analysis,
    has_analysis,
    map_bytes,
    read_analysis,
    write_analysis,
)
from affine_attn.runs.files import require_writable, sha256
from affine_attn.runs.layout import ANALYSIS, FIGURES, beside, model_and_run, result_name
from affine_attn.runs.provenance import device_name, provenance

# Queries and keys of the maps, where none are asked for.
WINDOW = 64
# Tokens of a sequence for a model of which no training is known, as the paper has them.
LENGTH = 1024


@dataclass(frozen=True)
class Request:
    """length: that of the models' training if none is given. layers: whose maps are kept; none: all."""

    data: Path
    length: int | None = None
    sequences: int = 10
    layers: Sequence[int] = ()
    window: str | None = None
    join: bool = False

    def tokens(self, handles: Sequence[ModelHandle]) -> int:
        """The length of a sequence, the same for all models: the shortest that one of them was trained on."""
        return self.length or min(
            handle.training_length or min(LENGTH, getattr(handle.config, "max_position_embeddings", LENGTH))
            for handle in handles
        )

    def place(self, length: int) -> slice:
        """The window START:STOP of the maps, within a sequence."""
        if self.window is None:
            return slice(0, min(WINDOW, length))
        start, colon, stop = self.window.partition(":")
        if not (colon and start.isdecimal() and stop.isdecimal() and int(start) < int(stop) <= length):
            raise UserError(f"--window must be START:STOP within the {length} tokens, got {self.window!r}")
        return slice(int(start), int(stop))

    def identity(self, handle: ModelHandle, length: int) -> dict[str, Any]:
        """All that decides an analysis."""
        window = self.place(length)
        return {
            "data": sha256(self.data / MANIFEST if is_shards(self.data) else self.data),
            "length": length,
            "sequences": self.sequences,
            "join": self.join,
            "maps": [sorted(set(self.layers)), window.start, window.stop],
            "model": handle.identity,
        }


class Target(NamedTuple):
    """A model to look at. ``run``: the folder of the training that made it, if it lies in one."""

    name: str
    path: str
    run: Path | None


def targets(models: Sequence[str]) -> list[Target]:
    """Folders of models or of runs, or hub ids, under names of which no two are the same."""
    found: list[Target] = []
    for model in models:
        place, run = model_and_run(model)
        name = (run.path if run else place).resolve().name if place.exists() else place.name
        taken = {target.name for target in found}
        number = next(n for n in range(1, len(taken) + 2) if (f"{name}-{n}" if n > 1 else name) not in taken)
        unique = f"{name}-{number}" if number > 1 else name
        found.append(Target(unique, str(place) if place.exists() else model, run.path if run else None))
    return found


def analyze(target: Target, request: Request, device: str | None = None, dtype: str | None = None) -> Analysis:
    """Look at one model. A plain Llama, Mistral or Qwen model is converted first, which changes none of its numbers."""
    handle = ModelHandle(target.path, device, dtype)
    return _analyze(target, handle, request, request.tokens([handle]))


def _analyze(target: Target, handle: ModelHandle, request: Request, length: int) -> Analysis:
    window = request.place(length)
    tokenizer = tokenizer_of(target.path)
    if is_shards(request.data):
        require_same_tokens(request.data, target.path)
    sequences = load_sequences(request.data, length, request.sequences, tokenizer, request.join)
    source: Any = load(target.path, dtype=handle.dtype)
    # The copy before the move: the device then holds one model.
    model: Any = source if isinstance(source, AffineAttnForCausalLM) else convert(source, "softmax")
    del source
    model.to(handle.device)
    config = model.config
    layers = sorted(set(request.layers)) or list(range(config.num_hidden_layers))
    if layers[0] < 0 or layers[-1] >= config.num_hidden_layers:
        raise UserError(f"--layer must be between 0 and {config.num_hidden_layers - 1} in {target.path}")
    if (needed := map_bytes(len(layers), config.num_attention_heads, window.stop - window.start)) > MOST_MAP_BYTES:
        raise UserError(
            f"maps of {len(layers)} layers and a --window of {window.stop - window.start} tokens take "
            f"{needed / 2**30:.1f} GiB, more than {MOST_MAP_BYTES >> 30}: give fewer with --layer, or a shorter window"
        )
    largest = max(int(sequence["input_ids"].max()) for sequence in sequences)
    if largest >= config.vocab_size:
        raise UserError(f"{request.data} has a token {largest}, {target.path} knows {config.vocab_size}: not its data")
    with tqdm(total=len(sequences), desc=f"Analysing {target.name}") as bar:
        measured, maps = measure(model, sequences, layers, window, bar.update)
    if tokenizer is None and is_shards(request.data) and (request.data / TOKENIZER).is_dir():
        tokenizer = tokenizer_of(str(request.data / TOKENIZER))
    about = {
        "path": target.path,
        "model_type": handle.config.model_type,
        "attention": config.attention,
        "variant": variant_name([config.spec(layer) for layer in range(config.num_hidden_layers)]),
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
    }
    as_trained = is_shards(request.data) and handle.trained_on(length, apart=not request.join)
    data = {
        "path": str(request.data),
        "length": length,
        "sequences": len(sequences),
        "tokens": len(sequences) * length,
        "boundaries": boundaries(not request.join, as_trained),
        "training_length": handle.training_length,
    }
    texts = token_texts(sequences[0]["input_ids"][0, window].tolist(), tokenizer)
    content = {
        "version": VERSION,
        "name": target.name,
        "model": about,
        "run": None if target.run is None else str(target.run),
        "data": data,
        "identity": request.identity(handle, length),
        **provenance(),
        **measured,
        "map": {"layers": layers, "start": window.start, "stop": window.stop, "tokens": texts},
    }
    return Analysis(content, maps)


def analyze_all(
    models: Sequence[str],
    request: Request,
    output: Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> tuple[list[Analysis], list[Path]]:
    """The analyses of all models and their folders, each written as soon as it was done. What an earlier call has
    finished is read: another length, other data or other maps are another analysis beside it."""
    chosen = targets(models)
    places = [output / target.name if output else beside(target.path, ANALYSIS) for target in chosen]
    for place in places:
        require_writable(place)
    handles = [ModelHandle(target.path, device, dtype) for target in chosen]
    if is_shards(request.data):
        read_manifest(request.data)  # says whether it is complete
    length = request.tokens(handles) if handles else 0
    analyses, folders = [], []
    for target, handle, place in zip(chosen, handles, places, strict=True):
        if handle.training_length and length > handle.training_length:
            print(
                f"{target.name} was trained on sequences of {handle.training_length} tokens: at {length}, queries from "
                f"{handle.training_length + 1} on are beyond its training",
                file=sys.stderr,
            )
        folder = place / result_name(f"{request.data.name.split('.')[0]}-{length}", request.identity(handle, length))
        if has_analysis(folder):
            print(f"{target.name}: analysed before, {folder}", file=sys.stderr)
            # The name is of this call: in the one before, two models may have had the same.
            found = read_analysis(folder)
            analyses.append(replace(found, content=found.content | {"name": target.name}))
        else:
            analyses.append(_analyze(target, handle, request, length))
            write_analysis(folder, analyses[-1])
        folders.append(folder)
    return analyses, folders


def token_texts(tokens: list[int], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """One text per token; without a tokenizer its number. Half a character becomes a replacement character."""
    if tokenizer is None:
        return [str(token) for token in tokens]
    return [str(tokenizer.decode([token])).encode("utf-8", "replace").decode() for token in tokens]


def variant_name(specs: Sequence[AttentionSpec]) -> str | None:
    """The variant that all layers have, whatever length it was trained with; None for any other attention."""
    names = {name_of(spec) for spec in specs}
    return names.pop() if len(names) == 1 else None


def table(analyses: Sequence[Analysis]) -> Table:
    """The scalars of all models."""
    shown = Table("metric")
    for analysis in analyses:
        shown.add_column(analysis.name, justify="right")
    names = dict.fromkeys(name for analysis in analyses for name in analysis.content["scalars"])
    for name in names:
        values = [analysis.content["scalars"].get(name) for analysis in analyses]
        shown.add_row(name, *("" if value is None else f"{value:.4g}" for value in values))
    return shown


def caption(analyses: Sequence[Analysis]) -> str:
    """What the table has: a line below it, since as its caption it would be as narrow."""
    first = analyses[0].content["data"]
    data = f"{first['sequences']} x {first['length']} tokens of {first['path']}"
    return f"means (max_logit: the largest) over layers, heads and {data}"


def figure_folder(folders: Sequence[Path], output: Path | None) -> Path:
    """Figures of one analysis lie beside its files, those of several in a folder of their own."""
    if len(folders) == 1:
        return folders[0] / FIGURES
    length = folders[0].name.rpartition("-")[0]
    return (output or Path(ANALYSIS)) / FIGURES / result_name(length, {"analyses": [str(folder) for folder in folders]})


def summary(analyses: Sequence[Analysis], folders: Sequence[Path], figures: Sequence[Path]) -> dict[str, Any]:
    """Return the folders, the figures and the means, for a program."""
    models = [
        {"name": analysis.name, "folder": str(folder), "scalars": analysis.content["scalars"]}
        for analysis, folder in zip(analyses, folders, strict=True)
    ]
    return {"models": models, "figures": [str(path) for path in figures]}
