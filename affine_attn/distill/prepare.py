"""``affine-attn prepare``: text to token shards, in constant memory, from where it was stopped."""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from affine_attn.distill import shards
from affine_attn.distill.corpus import Source, find_sources
from affine_attn.distill.progress import token_progress
from affine_attn.distill.tokenizer import (
    FILE,
    copy_tokenizer,
    end_of_document,
    find_tokenizer,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from affine_attn.errors import UserError

# Text enough for the tokenizer's threads, little enough to hold.
BATCH_CHARACTERS = 1 << 21
# A tokenizer learns little from more, and training holds every different word.
TRAINING_CHARACTERS = 100_000_000


@dataclass(frozen=True)
class _Document:
    text: str
    split: str
    source: int
    # Documents of the source read once this one is done, and bytes.
    number: int
    position: int


def prepare(
    out: str | Path,
    names: Sequence[str] = (),
    tokenizer: str | None = None,
    text_field: str = "text",
    separator: str | None = None,
    valid: float = 0.01,
    shard_tokens: int = 1 << 26,
    vocab_size: int = 4096,
    end_token: str | None = None,
    max_files: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Write shards of the named sources (none: the standard library) to ``out`` and return the manifest.

    Killed at any moment and run again it goes on after the last complete shard and ends with the same bytes as a run
    that was never stopped. A finished folder is left as it is; one made from something else is refused.
    """
    out = Path(out)
    if not 0 <= valid < 1:
        raise UserError(f"the part for validation must be at least 0 and below 1, got {valid}")
    if shard_tokens < 1:
        raise UserError(f"a shard must hold at least one token, got {shard_tokens}")
    sources = find_sources(names, text_field, separator, max_files, shards=out)
    given = None if tokenizer is None else find_tokenizer(tokenizer)
    settings = {
        "sources": [source.identity for source in sources],
        "tokenizer": {"trained": vocab_size} if given is None else {"sha256": tokenizer_hash(given)},
        "end_of_document": end_token if given is None else end_of_document(given, end_token),
        "text_field": text_field,
        "separator": separator,
        "valid": valid,
        "shard_tokens": shard_tokens,
    }
    out.mkdir(parents=True, exist_ok=True)
    with shards.alone_in(out):
        if (out / shards.MANIFEST).exists():
            manifest = _same(shards.read_json(out / shards.MANIFEST), settings, out)
            (out / shards.PROGRESS).unlink(missing_ok=True)
            return manifest
        state = shards.read_json(out / shards.PROGRESS) if (out / shards.PROGRESS).exists() else None
        if state is not None and not state["next"]["number"]:
            _discard(out)
            state = None
        if state is not None:
            _same(state, settings, out)
            if tokenizer_hash(out / shards.TOKENIZER) != state["tokenizer_sha256"]:
                raise UserError(f"{out / shards.TOKENIZER} was changed since this folder was begun; give a new folder")
        else:
            state = _begin(out, sources, given, settings)
        return _write_shards(out, sources, state, console or Console(stderr=True))


def _same(state: dict[str, Any], settings: dict[str, Any], out: Path) -> dict[str, Any]:
    if (old := state["settings"]["sources"]) != (new := settings["sources"]):
        raise UserError(f"{out} was begun with {_first_difference(old, new)}; give the same, or a new folder")
    shards.require_same(state["settings"], settings, out)
    return state


def _first_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    if len(old) != len(new):
        return f"{len(old)} sources, not {len(new)}"
    was, now = next((was, now) for was, now in zip(old, new, strict=True) if was != now)
    if was["name"] != now["name"]:
        return f"the source {was['name']}, not {now['name']}"
    return f"another content of the source {was['name']}"


def _begin(out: Path, sources: list[Source], given: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    if others := sorted(path.name for path in out.iterdir() if path.suffix != ".tmp"):
        raise UserError(f"{out} is not empty ({others[0]}) and was not begun by this command; give a new folder")
    folder = out / f"{shards.TOKENIZER}.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    if given is None:
        train_tokenizer(_first_characters(sources), settings["tokenizer"]["trained"], folder)
    else:
        copy_tokenizer(given, folder, settings["end_of_document"])
    encoder = load_tokenizer(folder / FILE)
    token = end_of_document(folder / FILE, settings["end_of_document"])
    # Numbers need not be dense: what a model's embedding must hold is the largest.
    vocab_size = max(encoder.get_vocab().values()) + 1
    state = {
        "version": shards.VERSION,
        "settings": settings,
        "tokenizer_sha256": tokenizer_hash(folder),
        "vocab_size": vocab_size,
        "dtype": "uint16" if vocab_size <= 1 << 16 else "uint32",
        "end_of_document": {"token": token, "id": encoder.token_to_id(token)},
        "shards": {split: [] for split in shards.SPLITS},
        "next": {"number": 0, "source": 0, "document": 0, "position": 0},
    }
    shards.write_json(out / shards.PROGRESS, state)
    # After the progress file: a folder of that name without one is somebody else's.
    folder.replace(out / shards.TOKENIZER)
    return state


def _discard(out: Path) -> None:
    """A start without one complete shard, say with a wrong --text-field: nothing to go on from, nothing to keep."""
    for first_shard in out.glob("*-00000.*"):
        first_shard.unlink()
    shutil.rmtree(out / shards.TOKENIZER, ignore_errors=True)
    (out / shards.PROGRESS).unlink()


def _first_characters(sources: list[Source]) -> Iterator[str]:
    seen = 0
    for text, _ in chain.from_iterable(source.read(0) for source in sources):
        yield text
        seen += len(text)
        if seen >= TRAINING_CHARACTERS:
            return


def _write_shards(out: Path, sources: list[Source], state: dict[str, Any], console: Console) -> dict[str, Any]:
    dtype, end = shards.token_dtype(state["dtype"]), state["end_of_document"]["id"]
    encoder = load_tokenizer(out / shards.TOKENIZER / FILE)
    batches = _batches(_documents(sources, state["next"], state["settings"]["valid"]))

    def open_shards() -> dict[str, shards.ShardWriter]:
        return {
            split: shards.ShardWriter(out, f"{split}-{state['next']['number']:05d}", dtype) for split in shards.SPLITS
        }

    def commit(writers: dict[str, shards.ShardWriter], last: _Document) -> None:
        """Both splits end their shard together, so that one position says where to go on."""
        for split, writer in writers.items():
            state["shards"][split] += writer.commit()
        number = state["next"]["number"] + 1
        state["next"] = {"number": number, "source": last.source, "document": last.number, "position": last.position}
        shards.write_json(out / shards.PROGRESS, state)

    writers, document = open_shards(), None
    with _progress(sources, state["next"], console) as report:
        for document, tokens in _encoded(encoder, batches):
            report(document, len(tokens))
            if tokens:
                ended = tokens if tokens[-1] == end else [*tokens, end]
                writers[document.split].append(np.array(ended, dtype))
            if sum(writer.tokens for writer in writers.values()) >= state["settings"]["shard_tokens"]:
                commit(writers, document)
                writers, document = open_shards(), None
    if document is not None:
        commit(writers, document)
    if not any(state["shards"].values()):
        raise UserError("there is no text in " + ", ".join(source.name for source in sources))
    manifest = {key: value for key, value in state.items() if key != "next"}
    for unit in ("tokens", "documents"):
        manifest[unit] = {split: sum(entry[unit] for entry in entries) for split, entries in state["shards"].items()}
    shards.write_json(out / shards.MANIFEST, manifest)
    (out / shards.PROGRESS).unlink()
    return manifest


def _documents(sources: list[Source], begin: dict[str, int], valid: float) -> Iterator[_Document]:
    for number in range(begin["source"], len(sources)):
        skip = begin["document"] if number == begin["source"] else 0
        for count, (text, position) in enumerate(sources[number].read(skip), start=skip + 1):
            yield _Document(text, _split(text, valid), number, count, position)


def _split(text: str, valid: float) -> str:
    """By the content alone, so that copies of a document are on the same side, in any order of sources."""
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return "valid" if int.from_bytes(digest) < valid * (1 << 56) else "train"


def _batches(documents: Iterable[_Document]) -> Iterator[list[_Document]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        # One is added for the document itself: many empty ones must not fill the memory either.
        characters += len(document.text) + 1
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(encoder: Tokenizer, batches: Iterator[list[_Document]]) -> Iterator[tuple[_Document, list[int]]]:
    """One batch is tokenised (by the library's own threads, without Python's lock) while the next is read."""

    def encode(batch: list[_Document]) -> list[tuple[_Document, list[int]]]:
        # An empty text stays without tokens, also where the tokenizer would put a begin token before it.
        encodings = encoder.encode_batch_fast([document.text for document in batch])
        return [(document, code.ids if document.text else []) for document, code in zip(batch, encodings, strict=True)]

    with ThreadPoolExecutor(max_workers=1) as pool:
        under_way = None
        for batch in batches:
            previous, under_way = under_way, pool.submit(encode, batch)
            if previous is not None:
                yield from previous.result()
        if under_way is not None:
            yield from under_way.result()


@contextmanager
def _progress(
    sources: list[Source], begin: dict[str, int], console: Console
) -> Iterator[Callable[[_Document, int], None]]:
    """A bar over the bytes of the sources; without their sizes it shows no end."""
    sizes = [source.bytes for source in sources]
    before = np.cumsum([0, *(size or 0 for size in sizes)])
    total = None if None in sizes else int(before[-1])

    with token_progress(console) as progress:
        task = progress.add_task("", total=total, tokens=0, completed=int(before[begin["source"]]) + begin["position"])

        def report(document: _Document, tokens: int) -> None:
            now = progress.tasks[task].fields["tokens"] + tokens
            progress.update(task, tokens=now, completed=int(before[document.source]) + document.position)

        yield report
