"""``affine-attn prepare``: text to token shards, in constant memory, from where it was stopped."""

import hashlib
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tokenizers import Encoding, Tokenizer

from affine_attn.data import shards
from affine_attn.data.corpus import Source, find_sources
from affine_attn.data.progress import token_progress
from affine_attn.data.tokenizer import (
    FILE,
    Pieces,
    bytes_tokenizer,
    copy_tokenizer,
    end_of_document,
    find_tokenizer,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from affine_attn.errors import UserError
from affine_attn.runs.files import write_json
from affine_attn.runs.locks import alone_in

# Text enough for the tokenizer's threads, little enough to hold.
BATCH_CHARACTERS = 1 << 20
# A tokenizer learns little from more, and training holds every different word.
TRAINING_CHARACTERS = 100_000_000
# The beginning of a document, which decides its split.
SPLIT_CHARACTERS = 1 << 20
_BEGIN = {"number": 0, "source": 0, "document": 0, "position": 0}


@dataclass(frozen=True)
class _Piece:
    """A document, or a piece of a long one."""

    text: str
    split: str
    source: int
    # Documents of the source read once this one is done, and bytes.
    number: int
    position: int
    begins: bool  # the document
    ends: bool


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
    max_tokens: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Write shards of the named sources (none: the standard library) to ``out`` and return the manifest.

    Killed at any moment and run again it goes on after the last complete shard and ends with the same bytes as a run
    that was never stopped. A finished folder is left as it is; one made from something else is refused.

    max_tokens: the document with which the training split has so many is the last. Called again with a larger number,
    or with None, it goes on and ends with the bytes that this call alone would have written; a smaller one is refused.
    """
    out = Path(out)
    if not 0 <= valid < 1:
        raise UserError(f"the part for validation must be at least 0 and below 1, got {valid}")
    if shard_tokens < 1:
        raise UserError(f"a shard must hold at least one token, got {shard_tokens}")
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max_tokens must be at least 1, got {max_tokens}")
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
    with alone_in(out):
        if (out / shards.MANIFEST).exists():
            manifest = _same(shards.read_json(out / shards.MANIFEST), settings, out)
            if not _ended_before(max_tokens, manifest, out):
                (out / shards.PROGRESS).unlink(missing_ok=True)
                return manifest
            _reopen(out, manifest)
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
        return _write_shards(out, sources, state, max_tokens, console or Console(stderr=True))


def _same(state: dict[str, Any], settings: dict[str, Any], out: Path) -> dict[str, Any]:
    if (old := state["settings"]["sources"]) != (new := settings["sources"]):
        raise UserError(f"{out} was begun with {_first_difference(old, new)}; give the same, or a new folder")
    shards.require_same(state["settings"], settings, out)
    return state


def _ended_before(max_tokens: int | None, manifest: dict[str, Any], out: Path) -> bool:
    """True if a finished folder ended at fewer tokens than are asked for now, and there is more text."""
    ended_at = manifest.get("max_tokens")
    if max_tokens == ended_at:
        return False
    if max_tokens is not None:
        _require_less(_tokens(manifest)["train"] if ended_at is None else ended_at, max_tokens, out)
    return ended_at is not None


def _require_less(tokens: int, max_tokens: int, out: Path) -> None:
    if tokens >= max_tokens:
        raise UserError(f"{out} was begun for {tokens} training tokens or more, not {max_tokens}; give a new folder")


def _reopen(out: Path, manifest: dict[str, Any]) -> None:
    """Make a folder that ended early what it was before its last shards, which were closed too soon."""
    last = f"-{manifest['next']['number']:05d}"
    state = {key: value for key, value in manifest.items() if key not in ("max_tokens", "tokens", "documents")}
    state["shards"] = {
        split: [entry for entry in entries if not entry["name"].endswith(last)]
        for split, entries in manifest["shards"].items()
    }
    write_json(out / shards.PROGRESS, state)
    (out / shards.MANIFEST).unlink()


def _tokens(state: dict[str, Any]) -> dict[str, int]:
    return {split: sum(entry["tokens"] for entry in entries) for split, entries in state["shards"].items()}


def _first_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    if len(old) != len(new):
        return f"{len(old)} sources, not {len(new)}"
    was, now = next((was, now) for was, now in zip(old, new, strict=True) if was != now)
    if was["name"] != now["name"]:
        return f"the source {was['name']}, not {now['name']}"
    if was["sha256"] is None:
        return f"the source {was['name']}, whose content was not recorded then"
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
        "next": _BEGIN,
    }
    write_json(out / shards.PROGRESS, state)
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
    for piece in _pieces(bytes_tokenizer(), sources, _BEGIN, valid=0.0):
        yield piece.text
        seen += len(piece.text)
        if seen >= TRAINING_CHARACTERS:
            return


def _write_shards(
    out: Path, sources: list[Source], state: dict[str, Any], max_tokens: int | None, console: Console
) -> dict[str, Any]:
    dtype, end = shards.token_dtype(state["dtype"]), state["end_of_document"]["id"]
    encoder = load_tokenizer(out / shards.TOKENIZER / FILE)
    batches = _batches(_pieces(encoder, sources, state["next"], state["settings"]["valid"]))
    before = _tokens(state)["train"]
    if max_tokens is not None:
        _require_less(before, max_tokens, out)

    def open_shards() -> dict[str, shards.ShardWriter]:
        return {
            split: shards.ShardWriter(out, f"{split}-{state['next']['number']:05d}", dtype) for split in shards.SPLITS
        }

    def commit() -> None:
        """Both splits end their shard together, so that one position says where to go on."""
        for split, writer in writers.items():
            state["shards"][split] += writer.commit()

    writers, ended_early = open_shards(), False
    last: int | None = None  # token of the document under way
    with _progress(sources, state["next"], console) as report, closing(_encoded(encoder, batches)) as encoded:
        for piece, tokens in encoded:
            report(piece, len(tokens))
            begins = piece.begins or last is None
            last = tokens[-1] if tokens else None if piece.begins else last
            written = [*tokens, end] if piece.ends and last not in (None, end) else tokens
            if written:
                writers[piece.split].append(np.array(written, dtype), begins)
            if not piece.ends:
                continue
            if ended_early := max_tokens is not None and before + writers["train"].tokens >= max_tokens:
                break
            if sum(writer.tokens for writer in writers.values()) >= state["settings"]["shard_tokens"]:
                commit()
                number = state["next"]["number"] + 1
                place = {"source": piece.source, "document": piece.number, "position": piece.position}
                state["next"] = {"number": number, **place}
                write_json(out / shards.PROGRESS, state)
                writers, before = open_shards(), _tokens(state)["train"]
    commit()
    if not any(state["shards"].values()):
        raise UserError("there is no text in " + ", ".join(source.name for source in sources))
    manifest = {key: value for key, value in state.items() if key != "next"}
    for unit in ("tokens", "documents"):
        manifest[unit] = {split: sum(entry[unit] for entry in entries) for split, entries in state["shards"].items()}
    if ended_early:
        # Where the last shards began: with more tokens they would have become longer.
        manifest |= {"max_tokens": max_tokens, "next": state["next"]}
    write_json(out / shards.MANIFEST, manifest)
    (out / shards.PROGRESS).unlink()
    return manifest


def _pieces(encoder: Tokenizer, sources: list[Source], begin: dict[str, int], valid: float) -> Iterator[_Piece]:
    for number in range(begin["source"], len(sources)):
        count = begin["document"] if number == begin["source"] else 0
        pieces, head, split, begins = Pieces(encoder), "", None, True
        for text, position, ends in sources[number].parts(count):
            if split is None:
                head += text
                if len(head) < SPLIT_CHARACTERS and not ends:
                    continue
                text, split = head, _split(head, valid)
            ready = list(pieces.add(text))
            if ends:
                ready.append(pieces.rest)
                count += 1
            for i, piece in enumerate(ready, start=1):
                yield _Piece(piece, split, number, count, position, begins, ends and i == len(ready))
                begins = False
            if ends:
                pieces, head, split, begins = Pieces(encoder), "", None, True


def _split(text: str, valid: float) -> str:
    """Choose by the content's beginning, so that copies of a document are on the same side, in any order of sources."""
    digest = hashlib.blake2b(text[:SPLIT_CHARACTERS].encode(), digest_size=7).digest()
    return "valid" if int.from_bytes(digest) < valid * (1 << 56) else "train"


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        # One is added for the piece itself: many empty ones must not fill the memory either.
        characters += len(piece.text) + 1
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(encoder: Tokenizer, batches: Iterator[list[_Piece]]) -> Generator[tuple[_Piece, list[int]], None, None]:
    """One batch is tokenised (by the library's own threads, without Python's lock) while the next is read."""

    def encode(batch: list[_Piece]) -> list[tuple[_Piece, list[int]]]:
        encodings = encoder.encode_batch_fast([piece.text for piece in batch])
        return [(piece, _ids(piece, encoding)) for piece, encoding in zip(batch, encodings, strict=True)]

    with ThreadPoolExecutor(max_workers=1) as pool:
        under_way = None
        for batch in batches:
            previous, under_way = under_way, pool.submit(encode, batch)
            if previous is not None:
                yield from previous.result()
        if under_way is not None:
            yield from under_way.result()


def _ids(piece: _Piece, encoding: Encoding) -> list[int]:
    """The piece's tokens, with those that the tokenizer adds before a document and after it only there."""
    if not piece.text:
        return []
    if piece.begins and piece.ends:
        return encoding.ids
    added = np.array(encoding.special_tokens_mask, bool)
    own = np.flatnonzero(~added)
    if not len(own):
        return []
    first, last = 0 if piece.begins else own[0], len(added) if piece.ends else own[-1] + 1
    return encoding.ids[first:last]


@contextmanager
def _progress(
    sources: list[Source], begin: dict[str, int], console: Console
) -> Iterator[Callable[[_Piece, int], None]]:
    """A bar over the bytes of the sources; without their sizes it shows no end."""
    sizes = [source.bytes for source in sources]
    before = np.cumsum([0, *(size or 0 for size in sizes)])
    total = None if None in sizes else int(before[-1])

    with token_progress(console) as progress:
        task = progress.add_task("", total=total, tokens=0, completed=int(before[begin["source"]]) + begin["position"])

        def report(piece: _Piece, tokens: int) -> None:
            now = progress.tasks[task].fields["tokens"] + tokens
            progress.update(task, tokens=now, completed=int(before[piece.source]) + piece.position)

        yield report
