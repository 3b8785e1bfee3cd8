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
    data         path, length (tokens of a sequence), sequences, tokens (queries in all), boundaries (in words)
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
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from affine_attn.distill.shards import temporary, write_json
from affine_attn.errors import UserError
from affine_attn.files import written

VERSION = 1
ANALYSIS, MAPS = "analysis.json", "maps.npz"


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


def write(folder: Path, analysis: Analysis) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with written(folder / MAPS) as file:
        np.savez_compressed(file, weights=analysis.weights)
    # Last: where it is, the other one is.
    write_json(folder / ANALYSIS, analysis.content)


def read(folder: Path) -> Analysis:
    path = folder / ANALYSIS
    if not path.is_file():
        raise UserError(f"{folder} has no {ANALYSIS}: make it with affine-attn analyze")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["version"]
        with np.load(folder / MAPS) as arrays:
            weights = arrays["weights"]
    except (ValueError, TypeError, KeyError, OSError, EOFError, BadZipFile, zlib.error) as error:
        raise UserError(f"{folder} is damaged: analyze the model again") from error
    if version != VERSION:
        raise UserError(f"{path} is of format version {version}, this package reads {VERSION}: analyze again")
    return Analysis(content, weights)
