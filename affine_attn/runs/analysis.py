"""The files of an analysis: everything that figures and reports show, and all that they may read.

A folder has ``analysis.json`` and ``maps.npz``. L layers and H heads are counted from 0. A number that does not exist
is null: alpha of a layer that has none, a correlation with what never changes. docs/metrics.md defines every metric.

``analysis.json``::

    version      1
    name         what figures call the model
    model        path, model_type, attention (the spec as a dict, or a list with one per layer), variant (its name in
                 affine_attn.VARIANTS, whatever its training length; null for any other), parameters, layers, heads,
                 kv_heads, head_dim, dtype, device
    run          the folder of the training run, with metrics.jsonl and statistics.jsonl; null where there is none
    data         path, length (tokens of a sequence), sequences, tokens (queries in all), boundaries (in words),
                 training_length (of the model's own sequences; null where that is not known, or not there)
    identity     what decides all of this: another one is another analysis, in another folder; older files have none
    versions     of affine-attn, torch, transformers
    commit       of this package; null where it is not run from a checkout
    heads        {metric: [L][H]}, or null instead of [H]
    layers       {metric: [L]}, means over heads (of max_logit: the largest)
    scalars      {metric: number}, means over layers and heads
    row_sums     {"edges": [K+1], "counts": [L][K], "mean": [L], "median": [L],
                  "all": {"counts": [K], "mean": number, "median": number}}
                 Figure 3: row sums of queries, averaged over heads; "all" has those of every layer together
    histograms   {"alpha" | "beta" | "beta_sum": {"edges": [K+1], "counts": [L][H][K] or null instead of [H][K]}}
                 one value per query and head; empty where no layer has alpha
    map          {"layers": [M], "start", "stop", "tokens": [stop - start]}: which layers, and which queries and keys
                 of the first sequence maps.npz holds, and the text of these tokens as the data has it, so anything:
                 markup, line ends, half characters. Whoever shows it escapes it.

    metrics      entropy, entropy_clipped, entropy_absolute (nats), first_token, row_sum, sink_mass, negative (a
                 fraction), mean_logit, max_logit; with alpha also alpha, alpha_saturated (a fraction), alpha_ma,
                 alpha_entropy (a correlation)

``maps.npz``: ``weights`` float32 [M, H, stop - start, stop - start], the weights w of query (row) and key (column), 0
on keys that are not visible; their mean over axis 1 is the head-averaged map of Figure 9.
"""

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from affine_attn.checks import is_count
from affine_attn.errors import UserError
from affine_attn.runs.files import write_json, written

VERSION = 1
FILE, MAPS = "analysis.json", "maps.npz"
# What is read at most, and of maps also written: those of 16,384 heads with 64 tokens take a quarter of it.
MOST_MAP_BYTES = 1 << 30
MOST_BYTES = 1 << 26
# Maps that are cut when they are read keep so many tokens at least: the window that is written by default.
LEAST_TOKENS = 64
# What is there is not measured a second time.
_AGAIN = "remove it, and analyze the model again"


@dataclass(frozen=True)
class Analysis:
    """``content`` is that of analysis.json, ``weights`` that of maps.npz."""

    content: dict[str, Any]
    weights: np.ndarray

    @property
    def name(self) -> str:
        return self.content["name"]

    @property
    def alpha_counts(self) -> np.ndarray | None:
        """The histogram of alpha of all layers and heads together [K]; None for a model without alpha."""
        if "alpha" not in self.content["histograms"]:
            return None
        layers = self.content["histograms"]["alpha"]["counts"]
        return np.concatenate([layer for layer in layers if layer is not None]).sum(0)

    def map(self, layer: int) -> np.ndarray:
        """Weights [H, queries, keys] of a layer in the window."""
        layers = self.content["map"]["layers"]
        if layer not in layers:
            raise UserError(f"{self.name}: maps were kept of layers {', '.join(map(str, layers))}, not of {layer}")
        return self.weights[layers.index(layer)]


def write_analysis(folder: Path, analysis: Analysis) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with written(folder / MAPS) as file:
        np.savez_compressed(file, weights=analysis.weights)
    # Last: where it is, the other one is.
    write_json(folder / FILE, analysis.content)


def map_bytes(layers: int, heads: int, tokens: int) -> int:
    """What maps take once they are unpacked."""
    return 4 * layers * heads * tokens**2


def has_analysis(folder: Path) -> bool:
    return (folder / FILE).is_file()


def analyses_in(folder: Path) -> list[Path]:
    """Folders of analyses: this one, or those in it, as the folder beside a model and that of --output have them."""
    found = [folder / FILE, *(path for depth in ("*", "*/*") for path in sorted(folder.glob(f"{depth}/{FILE}")))]
    return [path.parent for path in found if path.is_file()]


def read_analysis(folder: Path, map_numbers: int | None = None) -> Analysis:
    """map_numbers: of the maps, about so many numbers are kept, their first queries and keys; None keeps all."""
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{folder} has no {FILE}: make it with affine-attn analyze")
    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES >> 20} MiB, which no analysis has: {_AGAIN}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{folder} is damaged: {_AGAIN}") from error
    if version != VERSION:
        raise UserError(f"{path} is of format version {version}, this package reads {VERSION}: {_AGAIN}")
    try:
        _check(content)
        return Analysis(content, _read_maps(folder / MAPS, content, map_numbers))
    except (ValueError, TypeError, KeyError, AttributeError, OSError, EOFError, BadZipFile, zlib.error) as error:
        raise UserError(f"{folder} is damaged: {_AGAIN} ({error})") from error


def _read_maps(path: Path, content: dict[str, Any], map_numbers: int | None) -> np.ndarray:
    """Maps one by one: a small file may unpack to many times the memory, so sizes are compared before."""
    shown, heads = content["map"], content["model"]["heads"]
    layers, tokens = len(shown["layers"]), shown["stop"] - shown["start"]
    size = map_bytes(layers, heads, tokens)
    if size > MOST_MAP_BYTES:
        raise UserError(f"its maps would take {size / 2**30:.1f} GiB, more than {MOST_MAP_BYTES >> 30}")
    kept = tokens
    if map_numbers is not None:
        kept = min(tokens, max(LEAST_TOKENS, math.isqrt(map_numbers // (layers * heads))))
    with ZipFile(path) as archive, archive.open("weights.npy") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise UserError(f"{MAPS} is of a numpy format {version} that is not written here")
        found = np.lib.format.read_array_header_1_0(file)
        expected = ((layers, heads, tokens, tokens), False, np.dtype("<f4"))
        if found != expected or archive.getinfo("weights.npy").file_size != file.tell() + size:
            raise UserError(f"{MAPS} has an array {found[0]} of {found[2]} where {FILE} says {expected[0]}")
        maps = np.empty((layers, heads, kept, kept), np.float32)
        for weights in maps.reshape(-1, kept, kept):
            block = np.frombuffer(file.read(4 * tokens**2), np.float32).reshape(tokens, tokens)
            weights[:] = block[:kept, :kept]
    return maps


def _check(content: dict[str, Any]) -> None:
    """Refuse what is no number where figures and tables need one, and tables of other shapes than the docstring's."""
    model, data, shown = content["model"], content["data"], content["map"]
    counts = (
        (model, ("layers", "heads", "parameters")),
        (data, ("length", "sequences", "tokens")),
        (shown, ("start", "stop")),
    )
    for place, names in counts:
        for name in names:
            _require(is_count(place[name]), name, place[name])
    layers, heads = model["layers"], model["heads"]
    _require(layers > 0 and heads > 0, "model", f"of {layers} layers and {heads} heads")
    kept = shown["layers"]
    there = isinstance(kept, list) and len(kept) > 0
    _require(there and all(is_count(layer) and layer < layers for layer in kept), "layers of maps", kept)
    texts = shown["tokens"]
    _require(isinstance(texts, list) and all(isinstance(text, str) for text in texts), "tokens of maps", texts)
    _require(0 < len(texts) == shown["stop"] - shown["start"], "number of tokens of maps", len(texts))
    _require(isinstance(model["variant"], str | None), "variant", model["variant"])
    for name in (content["name"], data["path"], data["boundaries"]):
        _require(isinstance(name, str), "name", name)
    _require(content["run"] is None or isinstance(content["run"], str), "run", content["run"])
    _require(isinstance(content["versions"], dict), "versions", content["versions"])
    for metric, value in content["scalars"].items():
        _numbers(metric, value)
    for metric, values in content["layers"].items():
        _numbers(metric, values, layers)
    for metric, values in content["heads"].items():
        _numbers(metric, values, layers, heads)
    sums = content["row_sums"]
    bins = len(sums["edges"]) - 1
    for name, shape in {"edges": (bins + 1,), "counts": (layers, bins), "mean": (layers,), "median": (layers,)}.items():
        _numbers(name, sums[name], *shape, missing=False)
    for name, shape in {"counts": (bins,), "mean": (), "median": ()}.items():
        _numbers(name, sums["all"][name], *shape, missing=False)
    for name, histogram in content["histograms"].items():
        bins = len(histogram["edges"]) - 1
        _numbers(name, histogram["edges"], bins + 1, missing=False)
        there = [layer for layer in histogram["counts"] if layer is not None]
        _require(bool(there) and len(histogram["counts"]) == layers, name, "not there for any layer")
        _numbers(name, there, len(there), heads, bins, missing=False)


def _numbers(name: str, values: Any, *shape: int, missing: bool = True) -> None:
    """Refuse what is no table of this shape; ``missing``: null may stand for a number, or for a row of them."""
    kinds = {int, float, type(None)} if missing else {int, float}
    if not shape:
        _require(type(values) in kinds, name, values)
        return
    if missing and values is None:
        return
    _require(isinstance(values, list) and len(values) == shape[0], name, values)
    if len(shape) > 1:
        for value in values:
            _numbers(name, value, *shape[1:], missing=missing)
    elif not {type(value) for value in values} <= kinds:
        _require(False, name, next(value for value in values if type(value) not in kinds))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(ok: bool, name: str, value: Any) -> None:
    if not ok:
        raise UserError(f"{name} is {str(value)[:40]}")
