"""``affine-attn cache-teacher``: a teacher's largest logits for every token of the data, and training from them.

A cache is made for packed sequences of one length, because a token's targets depend on what comes before it in its
sequence. Its folder holds ``<split>-<number>.top`` and ``manifest.json``. A file is a row of records, one per token of
whole sequences in the order of the data: k entries (uint16 or uint32), their logits in the teacher's dtype and the
log-sum-exp of all logits (fp32), little endian. Logits as the teacher computed them lose nothing, where
log-probabilities (logit - log-sum-exp, see ``Largest``) would take fp32 to be exact.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from affine_attn.data import shards
from affine_attn.data.progress import token_progress
from affine_attn.data.shards import SPLITS, MappedFiles, TokenShards
from affine_attn.data.tokenizer import require_same_tokens
from affine_attn.distill.losses import TopK
from affine_attn.distill.teacher import Largest, ask, fingerprint, frozen, largest
from affine_attn.errors import NotFinite, UserError
from affine_attn.models.load import load, usable_device
from affine_attn.runs.files import errors_naming, settle, write_json
from affine_attn.runs.locks import alone_in, claimed

COMMAND = "cache-teacher"
# The fields of an item that CachedShards adds to those of TokenShards.
FIELDS = ("teacher_ids", "teacher_logits", "teacher_log_sum_exp")
# numpy has no bfloat16: its bits are kept.
_STORED = {"bfloat16": "<u2", "float32": "<f4"}
_REMEDY = "cache the teacher in another folder (affine-attn cache-teacher DATA TEACHER --output FOLDER)"


def record_dtype(k: int, vocabulary: int, dtype: str) -> np.dtype:
    """What is kept of a token."""
    ids = "<u2" if vocabulary <= 1 << 16 else "<u4"
    return np.dtype([("ids", ids, k), ("logits", _STORED[dtype], k), ("log_sum_exp", "<f4")])


@dataclass(frozen=True)
class CachePlan:
    """What decides the content of a cache."""

    data: Path
    out: Path
    sequence_length: int
    k: int
    vocabulary: int  # leading entries of the teacher's head that count
    documents: bool = True
    dtype: str = "bfloat16"
    shard_tokens: int = 1 << 22

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.vocabulary:
            raise UserError(f"top_k must be between 1 and the {self.vocabulary} vocabulary entries, got {self.k}")
        if self.dtype not in _STORED:
            raise UserError(f"dtype must be one of {', '.join(_STORED)}, got {self.dtype}")
        if self.shard_tokens < 1:
            raise UserError(f"a shard must hold at least one token, got {self.shard_tokens}")
        needed = shards.read_manifest(self.data)["vocab_size"]
        if needed > self.vocabulary:
            raise UserError(
                f"{self.data} has tokens up to {needed - 1}, the teacher {self.vocabulary} vocabulary entries that "
                "count: it was made for another tokenizer"
            )

    @property
    def record(self) -> np.dtype:
        return record_dtype(self.k, self.vocabulary, self.dtype)

    def splits(self) -> Iterator[tuple[str, TokenShards]]:
        """Those with a whole sequence."""
        counts = shards.read_manifest(self.data)["shards"]
        for split in SPLITS:
            if sum(entry["tokens"] for entry in counts[split]) >= self.sequence_length or split == SPLITS[0]:
                yield split, TokenShards(self.data, self.sequence_length, split, self.documents)

    def pieces(self) -> Iterator[tuple[str, TokenShards, int, int]]:
        """Every file of the cache: its name, the data it is of, and its first and last sequence."""
        length = _sequences_per_file(self.shard_tokens, self.sequence_length)
        for split, data in self.splits():
            for number, start in enumerate(range(0, len(data), length)):
                yield _file_name(split, number), data, start, min(start + length, len(data))

    @property
    def tokens(self) -> int:
        return sum(len(data) for _, data in self.splits()) * self.sequence_length

    @property
    def bytes(self) -> int:
        return self.tokens * self.record.itemsize

    def explain(self) -> str:
        """How large the cache is, before it is written."""
        ids = self.record["ids"].base.itemsize
        logits = self.record["logits"].base.itemsize
        each = f"{self.k} x ({ids}-byte entry + {self.dtype} logit of {logits} bytes) + 4"
        return (
            f"{self.out}: {self.record.itemsize:,} bytes per token ({each}) x {self.tokens:,} tokens = "
            f"{self.bytes / 2**30:,.1f} GiB"
        )

    def settings(self) -> dict[str, Any]:
        manifest = shards.read_manifest(self.data)
        return {
            "tokenizer_sha256": manifest.get("tokenizer_sha256"),
            "data_sha256": shards.fingerprint(self.data, manifest),
            "sequence_length": self.sequence_length,
            "documents": self.documents,
            "top_k": self.k,
            "vocabulary": self.vocabulary,
            "dtype": self.dtype,
            "shard_tokens": self.shard_tokens,
        }


def cache_teacher(
    plan: CachePlan,
    teacher: str,
    batch: int = 8,
    device: str | None = None,
    console: Console | None = None,
) -> dict[str, Any] | None:
    """Write the cache and return its manifest; None if other processes are still at the last files.

    Killed at any moment and run again it goes on after the last complete file. Any number of processes may do it at the
    same time, say one per GPU: each takes the files that nobody has.
    """
    if batch < 1:
        raise UserError(f"batch must be at least 1, got {batch}")
    place = usable_device(device)
    network = load(teacher, dtype=getattr(torch, plan.dtype))
    require_same_tokens(plan.data, teacher)
    if (entries := network.get_output_embeddings().weight.shape[0]) < plan.vocabulary:
        raise UserError(f"the teacher has {entries} vocabulary entries, fewer than {plan.vocabulary}")
    settings = {"teacher_sha256": fingerprint(network), **plan.settings()}
    out = plan.out
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out, wait=True):
        if (out / shards.MANIFEST).exists():
            manifest = shards.read_json(out / shards.MANIFEST)
            shards.require_same(manifest["settings"], settings, out)
            return manifest
        _begin(out, settings, plan)
    missing = [piece for piece in plan.pieces() if not (out / piece[0]).exists()]
    network = frozen(network, place)
    with token_progress(console or Console(stderr=True)) as progress:
        left = sum(stop - start for *_, start, stop in missing) * plan.sequence_length
        task = progress.add_task("", total=plan.tokens, completed=plan.tokens - left, tokens=0)
        for name, data, start, stop in missing:
            with errors_naming(out / name), claimed(out / name) as file:
                if file is None:
                    progress.advance(task, (stop - start) * plan.sequence_length)
                    continue
                for first in range(start, stop, batch):
                    part = range(first, min(first + batch, stop))
                    file.write(_records(network, data, part, plan).tobytes())
                    tokens = len(part) * plan.sequence_length
                    progress.update(task, advance=tokens, tokens=progress.tasks[task].fields["tokens"] + tokens)
                settle(file, out / name)
    manifest = {
        "version": shards.VERSION,
        "teacher": teacher,
        "parameters": network.num_parameters(),
        "settings": settings,
        "bytes_per_token": plan.record.itemsize,
        "sequences": {split: len(data) for split, data in plan.splits()},
    }
    with alone_in(out, wait=True):
        if not all((out / name).exists() for name, *_ in plan.pieces()):
            return None
        write_json(out / shards.MANIFEST, manifest)
        (out / shards.PROGRESS).unlink(missing_ok=True)
    return manifest


def _begin(out: Path, settings: dict[str, Any], plan: CachePlan) -> None:
    if (out / shards.PROGRESS).exists():
        shards.require_same(shards.read_json(out / shards.PROGRESS)["settings"], settings, out)
    elif others := sorted(path.name for path in out.iterdir() if path.suffix != ".tmp"):
        raise UserError(f"{out} is not empty ({others[0]}) and was not begun by this command; give a new folder")
    left = plan.bytes - sum(path.stat().st_size for path in out.glob("*.top*"))
    if (free := shutil.disk_usage(out).free) < left:
        raise UserError(
            f"{out} needs {left / 2**30:,.1f} GiB more, its disk has {free / 2**30:,.1f} GiB: "
            "lower --top-k or give --output"
        )
    if not (out / shards.PROGRESS).exists():
        write_json(out / shards.PROGRESS, {"version": shards.VERSION, "settings": settings})


def _records(teacher: PreTrainedModel, data: TokenShards, sequences: range, plan: CachePlan) -> np.ndarray:
    items = [data[i] for i in sequences]
    names = [name for name in ("input_ids", "position_ids") if name in items[0]]
    context = {name: torch.stack([item[name] for item in items]).to(teacher.device) for name in names}
    found = Largest(*(x.cpu() for x in largest(ask(teacher, context), plan.k, plan.vocabulary)))
    if not math.isfinite(found.log_sum_exp.sum()):
        raise NotFinite(f"the teacher's logits are not finite in sequences {sequences[0]} to {sequences[-1]}")
    records = np.empty(found.log_sum_exp.shape, plan.record)
    for name, tensor in found._asdict().items():
        records[name] = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return records


class CachedShards(TokenShards):
    """``TokenShards`` whose items also have the targets of a cached teacher, under the names of ``FIELDS``.

    vocabulary: entries that the student's loss is over; they must be those that the cache is over.
    top_k: as many as the cache must have per token; None takes what it has.
    """

    def __init__(
        self,
        folder: str | Path,
        sequence_length: int,
        split: str = "train",
        documents: bool = True,
        *,
        cache: str | Path,
        vocabulary: int,
        top_k: int | None = None,
    ):
        super().__init__(folder, sequence_length, split, documents)
        self.cache = Path(cache)
        self.cache_manifest = shards.read_manifest(cache, COMMAND)
        made = self.cache_manifest["settings"]
        if made["tokenizer_sha256"] != self.manifest.get("tokenizer_sha256"):
            raise UserError(f"{cache} was made for another tokenizer than that of {folder}: {_REMEDY}")
        if made["data_sha256"] != shards.fingerprint(self.folder, self.manifest):
            raise UserError(f"{cache} was made for other tokens than those of {folder}: {_REMEDY}")
        needed = {"sequence_length": sequence_length, "documents": documents, "vocabulary": vocabulary}
        for name, value in (needed if top_k is None else needed | {"top_k": top_k}).items():
            if made[name] != value:
                raise UserError(f"{cache} was made with {name}={made[name]}, not {value}: give the same, or {_REMEDY}")
        self._record = record_dtype(made["top_k"], made["vocabulary"], made["dtype"])
        self._is_bfloat16 = made["dtype"] == "bfloat16"
        self._per_file, self._split = _sequences_per_file(made["shard_tokens"], sequence_length), split
        for start in range(0, len(self), self._per_file):
            sequences = min(self._per_file, len(self) - start)
            size = sequences * sequence_length * self._record.itemsize
            shards.require_size(self.cache / _file_name(split, start // self._per_file), size)
        self._map_cache = MappedFiles(self.cache)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        item = super().__getitem__(i)
        number, row = divmod(i % len(self), self._per_file)
        first = row * self.sequence_length
        file = self._map_cache(_file_name(self._split, number), self._record)
        records = file[first : first + self.sequence_length]
        logits = torch.from_numpy(records["logits"].copy())
        found = Largest(
            ids=torch.from_numpy(records["ids"].astype(np.int32)),
            logits=logits.view(torch.bfloat16) if self._is_bfloat16 else logits,
            log_sum_exp=torch.from_numpy(records["log_sum_exp"].copy()),
        )
        return item | dict(zip(FIELDS, found, strict=True))


def cached_target(inputs: dict[str, Tensor]) -> TopK | None:
    """The targets in a batch of ``CachedShards``; None in one without."""
    return Largest(*(inputs[name] for name in FIELDS)).target if FIELDS[0] in inputs else None


def describe(plan: CachePlan, manifest: dict[str, Any] | None) -> str:
    """What was written, and how much of the teacher it is: over the first sequences."""
    if manifest is None:
        return "other processes are at the last files; the one that ends last completes the cache"
    place: tuple[Any, ...] = (plan.data, plan.sequence_length, SPLITS[0], plan.documents)
    cached = CachedShards(*place, cache=plan.out, vocabulary=plan.vocabulary)
    items = (cached[i] for i in range(min(16, len(cached))))
    mass = np.mean([Largest(*(item[name] for name in FIELDS)).mass.mean().item() for item in items])
    return f"the largest {plan.k} of {plan.vocabulary:,} entries hold {mass:.1%} of the probability, on average"


def _file_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.top"


def _sequences_per_file(shard_tokens: int, sequence_length: int) -> int:
    return max(1, shard_tokens // sequence_length)
