"""Documents too long to be encoded whole: the same tokens from pieces, in bounded memory, and ending early."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.data import prepare as preparing
from affine_attn.data import shards
from affine_attn.data import tokenizer as tokenizing
from affine_attn.data.corpus import find_sources
from affine_attn.data.prepare import prepare
from affine_attn.data.shards import TokenShards, read_manifest
from affine_attn.data.tokenizer import Pieces, train_tokenizer
from affine_attn.distill.recipes import RECIPES
from affine_attn.runs.files import write_json

WORDS = [
    "attention", "don't", "über", "注意。", "x86_64", "1234567", '"quoted', 'words"', "(a", "b)", "e\u0301",
    "<|endoftext|>", "==", "\u00a0", "I'll", "\U0001f600", "...", "#", "a\u3000b",
]  # fmt: skip
SPACES = [*[" "] * 12, "  ", "     ", "\t", "\n", "\n", "\n\n", "\r\n", " \n", "\n    ", ";\n", ".\n\n"]


def _text(words: int, seed: int = 0) -> str:
    chance = random.Random(seed)
    return "".join(chance.choice(WORDS) + chance.choice(SPACES) for _ in range(words))


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """The tokenizer that prepare trains."""
    folder = tmp_path_factory.mktemp("own") / "tokenizer"
    train_tokenizer([_text(2000, seed=9)], 400, folder)
    return folder


def _byte_level(pre_tokenizer, normalizer=None) -> Tokenizer:
    """BPE on bytes whose merges cross whatever the pre-tokeniser leaves together."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_text(3000, seed=8)], trainer)
    return tokenizer


def _bytes(**options):
    return pre_tokenizers.ByteLevel(**({"add_prefix_space": False} | options))


# As in Llama 3's tokenizer; those of Qwen and GPT-4 differ in how they take numbers.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTING = {
    # As in the SmolLM2 tokenizer.
    "smollm2": lambda: _byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)])
    ),
    "llama 3": lambda: _byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), _bytes(use_regex=False)])
    ),
    "prefix space": lambda: _byte_level(_bytes(add_prefix_space=True)),
    "normalized": lambda: _byte_level(_bytes(), normalizers.NFC()),
    "metaspace": lambda: _byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always"), _bytes(use_regex=False)])
    ),
    # Whitespace is not safe to cut at unless it is the end of a paragraph.
    "paragraphs": lambda: _byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Split("\n\n", "isolated"), _bytes(use_regex=False)])
    ),
}


def _in_pieces(encoder: Tokenizer, text: str, part: int) -> list[str]:
    pieces = Pieces(encoder)
    found = [piece for i in range(0, len(text), part) for piece in pieces.add(text[i : i + part])]
    return [*found, pieces.rest]


def _ids(encoder: Tokenizer, texts: list[str]) -> list[int]:
    encoder.encode_special_tokens = True
    return [i for code in encoder.encode_batch_fast(texts, add_special_tokens=False) for i in code.ids]


@pytest.mark.parametrize("name", ["own", *SPLITTING])
def test_pieces_have_the_tokens_of_the_whole(name, own, monkeypatch):
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 3000)
    encoder = Tokenizer.from_file(str(own / "tokenizer.json")) if name == "own" else SPLITTING[name]()
    text = _text(20_000, seed=1)
    pieces = _in_pieces(encoder, text, 10_000)
    assert "".join(pieces) == text
    assert len(pieces) > 20
    assert max(map(len, pieces)) < 5 * 3000
    assert _ids(encoder, pieces) == _ids(encoder, [text])
    # Wherever the parts end that the text comes in.
    assert _in_pieces(encoder, text, 777) == pieces


def test_where_the_pre_tokeniser_does_not_split_nothing_is_cut(monkeypatch):
    """Tokens that span spaces, as of SentencePiece models without a pre-tokeniser: a cut would change them."""
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 3000)
    spanning = _byte_level(_bytes(use_regex=False))
    text = _text(4000, seed=1)
    cut = text.index(" ", 3000)
    assert _ids(spanning, [text[:cut], text[cut:]]) != _ids(spanning, [text]), "else this shows nothing"
    assert _in_pieces(spanning, text, 1000) == [text]


def test_a_long_text_is_read_in_parts(tmp_path):
    """Blocks end inside characters, line ends and the separator's line."""
    documents = [
        "\ufeff" + "注" * 700_000,
        "\n\nindented\r\n" * 200_000 + "end",
        "",
        "a" * 2_500_000 + "\nx=====\n=====x",
    ]
    path = tmp_path / "long.txt"
    path.write_bytes("\n=====\n".join(documents).encode())
    (source,) = find_sources([str(path)], separator="=====")
    expected = [document.removeprefix("\ufeff").strip("\r\n") for document in documents]
    assert [text for text, _ in source.read(0)] == expected
    assert [text for text, _ in source.read(2)] == expected[2:]
    parts = list(source.parts(0))
    assert sum(part.ends for part in parts) == 4
    assert max(len(part.text) for part in parts) < 1_100_000
    with path.open("ab") as file:
        file.write(b"\xff")
    with pytest.raises(ValueError, match=r"is not UTF-8 text \(invalid start byte at byte 2500014 of a document\)"):
        list(find_sources([str(path)], separator="=====")[0].parts(0))


def test_shards_are_those_of_documents_encoded_whole(own, tmp_path, monkeypatch):
    """A begin and an end token where the tokenizer puts them, once for a document."""
    encoder = Tokenizer.from_file(str(own / "tokenizer.json"))
    encoder.post_processor = processors.TemplateProcessing("d $A <|endoftext|>", None, [("d", 7), ("<|endoftext|>", 0)])
    encoder.save(str(tmp_path / "tokenizer.json"))
    texts = [_text(words, seed=words) for words in (3, 9000, 1, 4000, 700)] + [" \n" * 9000]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "texts.jsonl").write_text(lines)
    options = {"tokenizer": str(tmp_path), "end_token": "<|endoftext|>", "valid": 0.3}
    prepare(tmp_path / "whole", [str(tmp_path / "texts.jsonl")], **options)
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 3000)
    monkeypatch.setattr(preparing, "BATCH_CHARACTERS", 10_000)
    prepare(tmp_path / "cut", [str(tmp_path / "texts.jsonl")], **options)
    for file in (tmp_path / "whole").glob("*-*.*"):
        assert (tmp_path / "cut" / file.name).read_bytes() == file.read_bytes()
    data = TokenShards(tmp_path / "cut", 8)
    starts = data.starts(0, data.tokens)
    assert (data.read(0, data.tokens)[starts] == 7).all()


def test_a_tokenizer_learns_the_same_from_pieces(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(_text(20_000))
    prepare(tmp_path / "whole", [str(tmp_path / "text.txt")], vocab_size=300)
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 3000)
    prepare(tmp_path / "cut", [str(tmp_path / "text.txt")], vocab_size=300)
    learned = [(tmp_path / name / "tokenizer" / "tokenizer.json").read_bytes() for name in ("whole", "cut")]
    assert learned[0] == learned[1]


# Prepares a file with so much more address space than the program itself takes.
LIMITED = """
import json, resource, sys
from affine_attn.data.prepare import prepare
out, source, tokenizer, more = sys.argv[1:]
taken = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (taken * 1024 + int(more),) * 2)
print(json.dumps(prepare(out, [source], tokenizer, valid=0.0)["tokens"]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads what the system says of the process")
def test_memory_does_not_grow_with_a_document(own, tmp_path):
    """20 MB in one document take as much as 2 MB would; encoded whole they take 1.4 GB."""
    path, line = tmp_path / "large.txt", " ".join(["tokenisation" * 2, "überraschungen", "definitely" * 3] * 300)
    path.write_text(f"{line}\n" * (20_000_000 // len(line)))
    # Threads reserve address space that they do not use.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, "-c", LIMITED, tmp_path / "out", path, own, 300 * 2**20]
    result = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout)["train"] > 500_000


# --- ending early


@pytest.fixture
def many(tmp_path) -> str:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": _text(40, seed=i)}) + "\n" for i in range(200)))
    return str(path)


def _content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_ends_with_the_document_that_brings_the_tokens(own, many, tmp_path):
    options = ["--tokenizer", str(own), "--shard-tokens", "3000", "--valid", "0.2"]
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "out"), many, *options, "--max-tokens", "5000"])
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    data = TokenShards(tmp_path / "out", 8)
    assert data.tokens == manifest["tokens"]["train"] >= 5000 > data.starts(0, data.tokens)[-1]
    assert manifest["tokens"]["valid"] > 0
    assert not list((tmp_path / "out").glob("*.tmp"))
    # More than there is: everything, as without the option.
    whole = prepare(tmp_path / "whole", [many], str(own), shard_tokens=3000, valid=0.2)
    assert prepare(tmp_path / "all", [many], str(own), shard_tokens=3000, valid=0.2, max_tokens=10**9) == whole


@pytest.mark.parametrize("stop_at", [2, 5, 7, 9, 11, 13])
def test_more_tokens_go_on_to_the_bytes_of_one_call(stop_at, own, many, tmp_path, monkeypatch):
    """Whatever was stopped before: the first call, or the second when it makes the last shards longer."""
    options = {"tokenizer": str(own), "shard_tokens": 3000, "valid": 0.2}
    for name, most in (("less", 5000), ("more", 12_000), ("everything", None)):
        prepare(tmp_path / name, [many], max_tokens=most, **options)
    real, calls = Path.replace, 0

    def replace(self, target):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return real(self, target)

    def stopped_once(most: int | None) -> None:
        try:
            prepare(tmp_path / "out", [many], max_tokens=most, **options)
        except KeyboardInterrupt:
            prepare(tmp_path / "out", [many], max_tokens=most, **options)

    monkeypatch.setattr(Path, "replace", replace)
    for name, most in (("less", 5000), ("more", 12_000), ("everything", None)):
        stopped_once(most)
        assert _content(tmp_path / "out") == _content(tmp_path / name)
    assert calls > stop_at


def test_fewer_tokens_are_refused(own, many, tmp_path):
    options = {"tokenizer": str(own), "shard_tokens": 3000, "valid": 0.2}
    prepare(tmp_path / "ended", [many], max_tokens=5000, **options)
    there = prepare(tmp_path / "whole", [many], **options)["tokens"]["train"]
    for folder, begun in (("ended", 5000), ("whole", there)):
        with pytest.raises(ValueError, match=rf"{folder} was begun for {begun} training tokens or more, not 4000"):
            prepare(tmp_path / folder, [many], max_tokens=4000, **options)
    manifest = read_manifest(tmp_path / "ended")
    write_json(tmp_path / "ended" / shards.PROGRESS, manifest)
    (tmp_path / "ended" / shards.MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"was begun for \d+ training tokens or more, not 2000"):
        prepare(tmp_path / "ended", [many], max_tokens=2000, **options)


def test_the_papers_recipes_prepare_what_they_train_on():
    for name in ("paper-0.5b", "paper-1b"):
        recipe, words = RECIPES[name](), (RECIPES[name].__doc__ or "").split()
        assert int(words[words.index("--max-tokens") + 1]) == recipe.tokens
