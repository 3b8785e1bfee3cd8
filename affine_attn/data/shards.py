"""Token shards: their files, their manifest, and packed sequences read from them.

A folder holds ``<split>-<number>.bin`` (tokens of whole documents, one after the other, uint16 or uint32, little
endian), ``<split>-<number>.idx`` (where each document starts in it, int64), ``manifest.json`` and the folder of the
tokenizer.
"""

import hashlib
import json
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from affine_attn.errors import UserError
from affine_attn.runs.files import errors_naming, read_object, settle, temporary, written

VERSION = 1
MANIFEST = "manifest.json"
# Takes the manifest's place until every shard is there.
PROGRESS = "progress.json"
TOKENIZER = "tokenizer"
# Where affine-attn cache-teacher writes if no other folder is named.
TEACHER_CACHE = "teacher-cache"
SPLITS = ("train", "valid")
INDEX_DTYPE = np.dtype("<i8")
# Label of a position that has nothing to predict, as transformers' losses know it.
IGNORED = -100
# Open files per split: far below the kernel's limit of 65530 mappings a process.
MAX_MAPPED = 4096


def token_dtype(name: str) -> np.dtype:
    """uint16 or uint32 as the manifest names it; files are little endian on every machine."""
    return np.dtype(name).newbyteorder("<")


def read_json(path: Path) -> dict[str, Any]:
    """A manifest or progress file of this version."""
    content = read_object(path, "version")
    version = content["version"]
    if version != VERSION:
        raise UserError(f"{path} is of format version {version}, this package reads {VERSION}: make the folder again")
    return content


def read_manifest(folder: str | Path, command: str = "prepare") -> dict[str, Any]:
    """Read the manifest of a folder that ``affine-attn command`` has finished."""
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        return read_json(folder / MANIFEST)
    if (folder / PROGRESS).exists():
        raise UserError(f"{folder} is not complete: run affine-attn {command} again, it will go on")
    raise UserError(f"{folder} has no {MANIFEST}: make it with affine-attn {command}")


def fingerprint(folder: Path, manifest: dict[str, Any]) -> str:
    """sha256 of the counts of all shards and the beginning of each: cheap for any amount of data."""
    known = {"dtype": manifest["dtype"], "shards": manifest["shards"]}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for entry in chain.from_iterable(manifest["shards"][split] for split in SPLITS):
        with (folder / f"{entry['name']}.bin").open("rb") as file:
            digest.update(file.read(1 << 16))
    return digest.hexdigest()


def require_same(before: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
    """What was begun goes on with the settings it was begun with."""
    for name, value in settings.items():
        if before[name] != value:
            raise UserError(
                f"{folder} was begun with {name} {before[name]!r}, not {value!r}; give the same, or a new folder"
            )


def require_size(path: Path, size: int) -> None:
    if not path.exists():
        raise UserError(f"{path} is missing: the manifest lists it")
    if path.stat().st_size != size:
        raise UserError(f"{path} has {path.stat().st_size} bytes where the manifest says {size}: it was cut or changed")


class MappedFiles:
    """Arrays of a folder's files, mapped when a process first needs them; small to pickle."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._mapped: dict[str, np.ndarray] = {}

    def __call__(self, name: str, dtype: np.dtype) -> np.ndarray:
        if name not in self._mapped:
            if len(self._mapped) >= MAX_MAPPED:
                self._mapped.clear()
            # A view as a plain array: a memmap's own slices are many times slower to make.
            self._mapped[name] = np.memmap(self._folder / name, dtype, mode="r").view(np.ndarray)
        return self._mapped[name]

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array would be pickled with all its content.
        return {**self.__dict__, "_mapped": {}}


class ShardWriter:
    """A shard under way. Tokens go straight to the disk; the names are temporary until ``commit``."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype):
        self.name, self.tokens = name, 0
        self._folder, self._dtype, self._starts = folder, dtype, []
        self._file: BinaryIO | None = None

    def append(self, tokens: np.ndarray, begins: bool = True) -> None:
        """Write tokens of a document, which ``begins`` with them or goes on."""
        path = self._path("bin")
        with errors_naming(path):
            if self._file is None:
                self._file = temporary(path).open("wb", buffering=1 << 20)
            if begins:
                self._starts.append(self.tokens)
            self._file.write(tokens.astype(self._dtype).tobytes())
        self.tokens += len(tokens)

    def commit(self) -> list[dict[str, Any]]:
        """The shard's entry in the manifest; none if it holds no document."""
        if self._file is None:
            return []
        with errors_naming(self._path("bin")):
            settle(self._file, self._path("bin"))
        with written(self._path("idx")) as index:
            index.write(np.array(self._starts, INDEX_DTYPE).tobytes())
        return [{"name": self.name, "tokens": self.tokens, "documents": len(self._starts)}]

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self.name}.{suffix}"


class TokenShards(Dataset[dict[str, Tensor]]):
    """Packed sequences: item i has the tokens i * T up to (i + 1) * T of a split; less than T at the end are left out.

    Every item is a dict of int64 tensors [T], under the names transformers' models and Trainer know:

    - ``input_ids``
    - ``shift_labels``: the next token at every position, also the last one, which looks past the sequence. -100 where
      the document ends: the first token of the next one cannot be known. Every other token is predicted once per epoch.
    - ``labels``: the same in the convention of transformers, which shifts them itself and then has no target at the
      last position: input_ids, -100 at the first token of a document. A model uses ``shift_labels`` instead where it
      gets them, which in Trainer takes ``remove_unused_columns=False``.
    - ``position_ids``: counted from the start of the document or of the sequence, whichever is later. They restart, and
      that is how AffineAttnForCausalLM (and transformers' own models) know that documents must not see each other.

    ``documents=False`` is plain packing: one text without boundaries, every token predicted, no ``position_ids``.
    Files are mapped, not read, and opened when a process first needs them, so the object is small to pickle.
    """

    def __init__(self, folder: str | Path, sequence_length: int, split: str = "train", documents: bool = True):
        self.folder, self.sequence_length, self.documents = Path(folder), sequence_length, documents
        self.manifest = read_manifest(folder)
        self.dtype = token_dtype(self.manifest["dtype"])
        if split not in SPLITS:
            raise UserError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        self._shards = self.manifest["shards"][split]
        for shard in self._shards:
            require_size(self.folder / f"{shard['name']}.bin", shard["tokens"] * self.dtype.itemsize)
            require_size(self.folder / f"{shard['name']}.idx", shard["documents"] * INDEX_DTYPE.itemsize)
        # Where each shard starts in the split, and where the last one ends.
        self._offsets = np.cumsum([0, *(shard["tokens"] for shard in self._shards)], dtype=np.int64)
        self.tokens = int(self._offsets[-1])
        if not 1 <= sequence_length <= self.tokens:
            raise UserError(
                f"sequence_length must be between 1 and the {self.tokens} {split} tokens of {folder}, "
                f"got {sequence_length}"
            )
        self._map = MappedFiles(self.folder)

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer the shards were made with."""
        return self.folder / TOKENIZER

    def __len__(self) -> int:
        return self.tokens // self.sequence_length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)}")
        length = self.sequence_length
        first = i % len(self) * length
        window = self.read(first, min(first + length + 1, self.tokens))
        input_ids = torch.from_numpy(window[:length].astype(np.int64))
        shift_labels = torch.full_like(input_ids, IGNORED)
        shift_labels[: len(window) - 1] = torch.from_numpy(window[1:].astype(np.int64))
        if not self.documents:
            return {"input_ids": input_ids, "labels": input_ids.clone(), "shift_labels": shift_labels}
        # Documents that start inside, or right after the end.
        starts = torch.from_numpy(self.starts(first + 1, first + length + 1) - first)
        inside = starts[starts < length]
        labels = input_ids.clone()
        labels[inside] = IGNORED
        shift_labels[starts - 1] = IGNORED
        own_start = torch.zeros_like(input_ids)
        own_start[inside] = inside
        position_ids = torch.arange(length) - own_start.cummax(0).values
        return {"input_ids": input_ids, "labels": labels, "shift_labels": shift_labels, "position_ids": position_ids}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop of the split, wherever shards begin."""
        return np.concatenate([self._map(name, self.dtype)[a:b] for name, _, a, b in self._pieces(start, stop, "bin")])

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Return the offsets of the split's documents that begin in [start, stop)."""
        found = [np.empty(0, INDEX_DTYPE)]
        for name, offset, a, b in self._pieces(start, min(stop, self.tokens), "idx"):
            index = self._map(name, INDEX_DTYPE)
            lower, upper = np.searchsorted(index, np.array([a, b], INDEX_DTYPE))
            found.append(index[lower:upper] + offset)
        return np.concatenate(found)

    def _pieces(self, start: int, stop: int, suffix: str) -> list[tuple[str, int, int, int]]:
        """Files that hold a range of the split: name, where the shard starts, and the range inside it."""
        pieces = []
        shard = int(np.searchsorted(self._offsets, start, side="right")) - 1
        while start < stop:
            offset, end = int(self._offsets[shard]), min(stop, int(self._offsets[shard + 1]))
            pieces.append((f"{self._shards[shard]['name']}.{suffix}", offset, start - offset, end - offset))
            start, shard = end, shard + 1
        return pieces
