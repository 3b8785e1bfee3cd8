"""Data for training: text to shards (resumable to the byte) and packed sequences; test_sampler.py has their order."""

import gzip
import json
import lzma
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from affine_attn.cli import app
from affine_attn.data import prepare as preparing
from affine_attn.data import shards
from affine_attn.data.corpus import find_sources, standard_library
from affine_attn.data.prepare import prepare
from affine_attn.data.sampler import GlobalSampler
from affine_attn.data.shards import TokenShards, read_manifest
from affine_attn.data.tokenizer import load_tokenizer, tokenizer_hash
from affine_attn.runs.files import write_json

WORDS = ["attention", "need", "not", "über", "注意", "def", "return\n\tself", "<|endoftext|>", "0"]


def _texts(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, 60))) for _ in range(count)]


def _write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def _files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _shard_files(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in _files(folder).items() if name.endswith((".bin", ".idx"))}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return _write_jsonl(tmp_path_factory.mktemp("text") / "corpus.jsonl", _texts(300))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, corpus) -> str:
    prepare(tmp_path_factory.mktemp("tokenizer") / "out", [str(corpus)], vocab_size=300)
    return str(tmp_path_factory.getbasetemp() / "tokenizer0" / "out" / "tokenizer")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, corpus, tokenizer) -> Path:
    """Many small shards, so that sequences cross them."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare(out, [str(corpus)], tokenizer, valid=0.2, shard_tokens=500)
    return out


# --- what the shards hold


def test_shards_hold_every_document_once_with_its_end(prepared, tokenizer):
    manifest = read_manifest(prepared)
    encoder = load_tokenizer(Path(tokenizer) / "tokenizer.json")
    end = manifest["end_of_document"]["id"]
    seen = {}
    for split in shards.SPLITS:
        data = TokenShards(prepared, 8, split)
        starts = [*data.starts(0, data.tokens), data.tokens]
        assert len(starts) - 1 == manifest["documents"][split]
        documents = [data.read(a, b).tolist() for a, b in pairwise(starts)]
        assert all(document[-1] == end and end not in document[:-1] for document in documents)
        seen[split] = [encoder.decode(document[:-1], skip_special_tokens=False) for document in documents]
    assert sorted(seen["train"] + seen["valid"]) == sorted(_texts(300))
    # Order is kept within a split, and a fifth of the documents is held out.
    assert [text for text in _texts(300) if text in set(seen["train"])] == seen["train"]
    assert 30 < len(seen["valid"]) < 90
    assert len(manifest["shards"]["train"]) > 5


def test_manifest(prepared, tokenizer, corpus):
    manifest = read_manifest(prepared)
    assert manifest["version"] == shards.VERSION
    assert manifest["tokenizer_sha256"] == tokenizer_hash(tokenizer) == tokenizer_hash(prepared / "tokenizer")
    assert manifest["vocab_size"] == 300
    assert manifest["dtype"] == "uint16"
    assert manifest["end_of_document"] == {"token": "<|endoftext|>", "id": 0}
    assert manifest["settings"]["sources"][0]["name"] == corpus.as_posix()
    for split, entries in manifest["shards"].items():
        assert manifest["tokens"][split] == sum(entry["tokens"] for entry in entries)
        for entry in entries:
            assert (prepared / f"{entry['name']}.bin").stat().st_size == 2 * entry["tokens"]
    assert not list(prepared.glob("*.tmp"))
    assert not (prepared / shards.PROGRESS).exists()

    from transformers import AutoTokenizer

    text = "def attention(self):\n\treturn 1"
    loaded = AutoTokenizer.from_pretrained(prepared / "tokenizer")
    assert loaded.eos_token == "<|endoftext|>"
    assert loaded.decode(loaded(text).input_ids) == text


def test_more_than_65536_tokens_need_four_bytes(tmp_path, corpus):
    from tokenizers import Tokenizer, models, pre_tokenizers

    large = Tokenizer(models.WordLevel({"<eos>": 70_000, "<unk>": 1, "attention": 69_999}, unk_token="<unk>"))
    large.pre_tokenizer = pre_tokenizers.Whitespace()
    large.save(str(tmp_path / "words.json"))
    arguments = (tmp_path / "out", [str(corpus)], str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match="give --end-of-document"):
        prepare(*arguments)
    manifest = prepare(*arguments, end_token="<eos>", valid=0)
    assert (manifest["dtype"], manifest["vocab_size"]) == ("uint32", 70_001)
    assert TokenShards(tmp_path / "out", 16).read(0, 10_000).max() == 70_000


def test_what_the_tokenizer_adds_stays(tmp_path, corpus, tokenizer):
    """A begin token where the tokenizer puts one, and no second end token."""
    from tokenizers import Tokenizer, processors

    own = Tokenizer.from_file(tokenizer + "/tokenizer.json")
    own.post_processor = processors.TemplateProcessing("d $A <|endoftext|>", None, [("d", 7), ("<|endoftext|>", 0)])
    own.save(str(tmp_path / "tokenizer.json"))
    prepare(tmp_path / "out", [str(corpus)], str(tmp_path), end_token="<|endoftext|>", valid=0)
    data = TokenShards(tmp_path / "out", 16)
    starts = data.starts(0, data.tokens)
    tokens = data.read(0, data.tokens)
    assert (tokens[starts] == 7).all()
    assert (np.flatnonzero(tokens == 0) == [*(starts[1:] - 1), data.tokens - 1]).all()


# --- sources


def test_every_format_gives_the_same_shards(tmp_path, tokenizer):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = _texts(60, seed=1)
    texts[10] = ""
    lines = _write_jsonl(tmp_path / "a.jsonl", texts, "content").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(lines))
    with pa.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as stream:
        stream.write(lines)
    pq.write_table(pa.table({"id": range(60), "content": texts}), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "a.txt").write_text("\n=====\n".join(texts))
    (tmp_path / "files").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "files" / f"{i:03d}.txt").write_text(text)

    results = {}
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst", "a.parquet", "a.txt", "files"):
        out = tmp_path / f"out-{name}"
        prepare(out, [str(tmp_path / name)], tokenizer, "content", "=====", valid=0.3, shard_tokens=300)
        results[name] = _shard_files(out)
        # From any document on, a source gives the rest.
        if name != "files":
            (source,) = find_sources([str(tmp_path / name)], "content", "=====")
            assert [text for text, _ in source.read(9)] == texts[9:]
            assert [position for _, position in source.read(0)][-1] == source.bytes
    assert all(result == results["a.jsonl"] for result in results.values())


def test_suffixes_may_be_in_capitals(tmp_path):
    line = b'{"text": "one"}\n'
    (tmp_path / "A.JSONL").write_bytes(line)
    (tmp_path / "B.Jsonl.GZ").write_bytes(gzip.compress(line))
    (tmp_path / "C.TXT").write_bytes(b"one")
    found = [text for source in find_sources([str(tmp_path)]) for text, _ in source.read(0)]
    assert found == ["one"] * 3


def test_a_hub_dataset_is_streamed(tmp_path, monkeypatch, tokenizer):
    texts = _texts(40, seed=2)
    lines = _write_jsonl(tmp_path / "a.jsonl", texts)

    class Stream(list):
        def skip(self, count):
            return self[count:]

    class Datasets:
        @staticmethod
        def load_dataset(name, config, split, streaming):
            assert (name, config, split, streaming) == ("owner/name", "sample", "train", True)
            return Stream({"text": text} for text in texts)

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    prepare(tmp_path / "hub", ["owner/name:sample"], tokenizer)
    prepare(tmp_path / "file", [str(lines)], tokenizer)
    assert _shard_files(tmp_path / "hub") == _shard_files(tmp_path / "file")


@pytest.mark.parametrize(
    ("module", "source"), [("datasets", "owner/name"), ("pyarrow", "a.parquet"), ("pyarrow", "a.jsonl.zst")]
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, tokenizer, module, source):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    if module == "pyarrow":
        Path(source).touch()
    result = CliRunner().invoke(app, ["prepare", "out", source, "--tokenizer", tokenizer])
    assert result.exit_code == 2
    assert f"needs {module}: pip install 'affine-attn[data]'" in result.output
    assert "Traceback" not in result.output


def test_the_standard_library_is_the_default(tmp_path):
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "out"), "--max-files", "12", "--vocab-size", "320"])
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert manifest["settings"]["sources"] == [standard_library(12).identity]
    assert manifest["documents"]["train"] + manifest["documents"]["valid"] == 12
    assert manifest["vocab_size"] == 320
    # Trained again, the tokenizer is the same, so the shards are.
    prepare(tmp_path / "again", vocab_size=320, max_files=12)
    assert _files(tmp_path / "again") == _files(tmp_path / "out")


# --- going on after a kill

ARGUMENTS = ("--valid", "0.1", "--shard-tokens", "8000")


def _killed_at(shard: int, command: list[str], out: Path) -> int:
    """Kill -9 as soon as that shard is there; the number of shards counted as complete."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (out / f"train-{shard:05d}.bin").exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it had ended before"
    return len(json.loads((out / shards.PROGRESS).read_text())["shards"]["train"])


def test_killed_and_run_again_ends_with_the_same_bytes(tmp_path, tokenizer):
    source = str(_write_jsonl(tmp_path / "corpus.jsonl", _texts(8_000, seed=3)))
    other = str(_write_jsonl(tmp_path / "other.jsonl", _texts(50, seed=4)))
    command = ["prepare", "OUT", source, other, "--tokenizer", tokenizer, *ARGUMENTS]
    whole, out = tmp_path / "whole", tmp_path / "out"
    result = CliRunner().invoke(app, [str(whole) if word == "OUT" else word for word in command])
    assert result.exit_code == 0, result.output

    program = [sys.executable, "-m", "affine_attn.cli", *(str(out) if word == "OUT" else word for word in command)]
    first = _killed_at(3, program, out)
    with pytest.raises(ValueError, match="is not complete: run affine-attn prepare again"):
        TokenShards(out, 8)
    second = _killed_at(first + 4, program, out)
    assert 3 <= first < second < len(read_manifest(whole)["shards"]["train"])
    # Neither other sources nor another tokenizer may go on.
    with pytest.raises(ValueError, match="was begun with 2 sources, not 1"):
        prepare(out, [source], tokenizer, valid=0.1, shard_tokens=8000)
    with pytest.raises(ValueError, match=r"was begun with tokenizer .*; give the same, or a new folder"):
        prepare(out, [source, other], None, valid=0.1, shard_tokens=8000)
    manifest = prepare(out, [source, other], tokenizer, valid=0.1, shard_tokens=8000)
    assert _files(out) == _files(whole)
    assert manifest == read_manifest(whole)
    # A finished folder is left alone.
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare(out, [source, other], tokenizer, valid=0.1, shard_tokens=8000) == manifest
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}


def test_an_edit_that_leaves_the_size_is_noticed(tmp_path, monkeypatch, tokenizer):
    """Before a stopped run goes on, and where it is finished."""
    source = _write_jsonl(tmp_path / "corpus.jsonl", _texts(60))
    options = {"tokenizer": tokenizer, "valid": 0.2, "shard_tokens": 400}
    prepare(tmp_path / "whole", [str(source)], **options)
    calls = 0

    def killed(path, content):
        nonlocal calls
        calls += 1
        if calls > 3:
            raise KeyboardInterrupt
        write_json(path, content)

    monkeypatch.setattr(preparing, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "out", [str(source)], **options)
    monkeypatch.undo()
    first, begun, edited = source.stat(), source.read_text(), source.read_text().replace("attention", "intention")
    source.write_text(edited)
    # As cp -p and rsync leave it.
    os.utime(source, ns=(first.st_atime_ns, first.st_mtime_ns))
    assert edited != begun
    assert source.stat().st_size == first.st_size
    for folder in ("out", "whole"):
        with pytest.raises(ValueError, match=rf"{folder} was begun with another content of the source .*corpus.jsonl"):
            prepare(tmp_path / folder, [str(source)], **options)
    source.write_text(begun)
    prepare(tmp_path / "out", [str(source)], **options)
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")


def test_a_folder_that_did_not_record_the_content_of_its_sources_says_so(tmp_path, corpus, tokenizer):
    manifest = prepare(tmp_path / "out", [str(corpus)], tokenizer)
    manifest["settings"]["sources"][0]["sha256"] = None
    write_json(tmp_path / "out" / shards.MANIFEST, manifest)
    with pytest.raises(ValueError, match=r"begun with the source .*corpus.jsonl, whose content was not recorded then"):
        prepare(tmp_path / "out", [str(corpus)], tokenizer)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = _write_jsonl(tmp_path / "corpus.jsonl", _texts(60))
    (source,) = find_sources([str(path)])
    documents = source.read(0)
    next(documents)
    with path.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(ValueError, match=r"corpus.jsonl was changed while it was read"):
        list(documents)


@pytest.mark.parametrize("stop_at", range(0, 24, 3))
def test_stopped_at_any_rename_it_goes_on(tmp_path, monkeypatch, tokenizer, stop_at):
    """Files change names at the only moments that matter: stop before each of the first ones."""
    source = [str(_write_jsonl(tmp_path / "corpus.jsonl", _texts(60)))]
    options = {"tokenizer": tokenizer, "valid": 0.2, "shard_tokens": 400}
    prepare(tmp_path / "whole", source, **options)
    real, calls = Path.replace, 0

    def replace(self, target):
        nonlocal calls
        calls += 1
        if calls > stop_at:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "out", source, **options)
    monkeypatch.undo()
    prepare(tmp_path / "out", source, **options)
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")


def test_refusals(tmp_path, monkeypatch, corpus, tokenizer):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    (tmp_path / "cut.jsonl").write_text('{"text": "good"}\n{"text": "cu')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes())[:-40])
    stored = bytearray(gzip.compress(corpus.read_bytes(), 0))
    stored[10] = 0xFF  # a block of a kind that does not exist
    (tmp_path / "block.jsonl.gz").write_bytes(stored)
    for suffix in ("gz", "bz2", "zst"):
        (tmp_path / f"plain.jsonl.{suffix}").write_bytes(corpus.read_bytes())
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "half.jsonl").write_text('{"text": "half a pair: \\ud83d"}\n')
    for source, message in {
        "bad.jsonl": "line 2, has a int in field 'text', not text",
        "cut.jsonl": "line 2, is not JSON",
        "cut.jsonl.gz": "cut.jsonl.gz is damaged or cut short",
        "block.jsonl.gz": "block.jsonl.gz is damaged or cut short",
        "plain.jsonl.gz": "plain.jsonl.gz is damaged or cut short",
        "plain.jsonl.bz2": "plain.jsonl.bz2 is damaged or cut short",
        "plain.jsonl.zst": "plain.jsonl.zst is damaged or cut short",
        "deep.jsonl": "line 1, is not JSON",
        "latin.txt": "is not UTF-8 text",
        "empty.txt": "there is no text in",
        "nothing.jsonl": "there is no file or folder",
    }.items():
        with pytest.raises(ValueError, match=message):
            prepare(tmp_path / f"out-{source}", [str(tmp_path / source)], tokenizer)
    with pytest.raises(ValueError, match="has no field 'body', only 'id', 'text'; give --text-field"):
        prepare(tmp_path / "out", [str(corpus)], tokenizer, text_field="body")
    # With no shard complete there is nothing to refuse for: the right command just works.
    prepare(tmp_path / "out", [str(corpus)], tokenizer)
    with pytest.raises(ValueError, match=r"mine is not empty \(thesis.txt\) and was not begun by this command"):
        prepare(tmp_path / "mine", [str(corpus)], tokenizer)
    with pytest.raises(ValueError, match=r"is neither a tokenizer.json nor a folder with one"):
        prepare(tmp_path / "out2", [str(corpus)], str(tmp_path))
    with pytest.raises(ValueError, match=r"is not a tokenizer.json of the tokenizers library"):
        prepare(tmp_path / "out3", [str(corpus)], str(corpus))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^owner/typo is no folder here, nor read from the hub: "):
        prepare(tmp_path / "out5", [str(corpus)], "owner/typo")
    assert prepare(tmp_path / "out4", [str(tmp_path / "half.jsonl")], tokenizer)["tokens"]["train"] > 0


def test_a_damaged_page_of_parquet_names_its_file(tmp_path, tokenizer):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "page.parquet"
    pq.write_table(pa.table({"text": ["a" * 100] * 100}), path, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[1000:3000] = b"\xff" * 2000
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"page.parquet cannot be read as parquet"):
        prepare(tmp_path / "out", [str(path)], tokenizer)


def test_a_folder_inside_the_sources_is_none_of_them(tmp_path, monkeypatch, tokenizer):
    """Its manifest and its tokenizer are JSON too."""
    (tmp_path / "text").mkdir()
    _write_jsonl(tmp_path / "text" / "a.jsonl", _texts(30))
    monkeypatch.chdir(tmp_path)
    made = prepare("text/shards", ["text"], tokenizer)
    assert made["documents"]["train"] + made["documents"]["valid"] == 30
    assert prepare("text/shards", ["text"], tokenizer) == made
    assert prepare("text/../text/shards", ["text"], tokenizer) == made
    with pytest.raises(ValueError, match=r"text is not empty \(a.jsonl\)"):
        prepare("text", ["text"], tokenizer)


def test_two_processes_do_not_share_a_folder(tmp_path, corpus, tokenizer):
    import fcntl

    (tmp_path / "out").mkdir()
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process is preparing"):
        prepare(tmp_path / "out", [str(corpus)], tokenizer)
    os.close(handle)
    prepare(tmp_path / "out", [str(corpus)], tokenizer)


# --- packed sequences


def _expected(data: TokenShards, i: int) -> dict[str, list[int]]:
    """Token by token, from the whole split."""
    stream, length = data.read(0, data.tokens).tolist(), data.sequence_length
    starts = set(data.starts(0, data.tokens).tolist())
    item = {"input_ids": [], "labels": [], "shift_labels": [], "position_ids": []}
    position = -1
    for place in range(i * length, (i + 1) * length):
        position = 0 if place in starts else position + 1
        last = place + 1 in starts or place + 1 == len(stream)
        item["input_ids"].append(stream[place])
        item["labels"].append(-100 if place in starts and place > i * length else stream[place])
        item["shift_labels"].append(-100 if last else stream[place + 1])
        item["position_ids"].append(position)
    return item


@pytest.mark.parametrize("length", [1, 7, 64, 1999])
def test_packing_against_the_formula(prepared, length):
    data = TokenShards(prepared, length)
    assert len(data) == data.tokens // length
    for i in {0, 1, len(data) // 2, len(data) - 1}:
        item = data[i]
        assert all(tensor.dtype == torch.int64 for tensor in item.values())
        assert {name: tensor.tolist() for name, tensor in item.items()} == _expected(data, i)
        assert (item["labels"][1:] == item["shift_labels"][:-1]).all()
    assert data[-1]["input_ids"].equal(data[len(data) - 1]["input_ids"])
    with pytest.raises(IndexError):
        data[len(data)]
    plain = TokenShards(prepared, length, documents=False)[0]
    assert "position_ids" not in plain
    assert plain["shift_labels"].tolist() == data.read(1, length + 1).tolist()


def test_the_model_keeps_documents_apart(prepared):
    """Logits of a packed sequence are those of its documents alone; the loss is the mean over shift_labels."""
    from affine_attn.models import AffineAttnForCausalLM, preset

    item = TokenShards(prepared, 256)[3]
    torch.manual_seed(0)
    model = AffineAttnForCausalLM(preset("nano", "affine", vocab_size=300)).eval()
    out = model(**{name: tensor[None] for name, tensor in item.items()})
    starts = [*torch.nonzero(item["position_ids"] == 0).flatten().tolist(), 256]
    assert len(starts) > 3
    for a, b in pairwise(starts):
        torch.testing.assert_close(out.logits[:, a:b], model(item["input_ids"][None, a:b]).logits, rtol=1e-4, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(out.logits[0].float(), item["shift_labels"])
    torch.testing.assert_close(out.loss, loss)


def test_pickling_and_workers(prepared):
    data = TokenShards(prepared, 32)
    data[5]
    assert len(pickle.dumps(data)) < 20_000 < data.tokens * 2
    assert pickle.loads(pickle.dumps(data))[5]["labels"].equal(data[5]["labels"])
    sampler = GlobalSampler(len(data), samples=24, seed=1)
    alone = [batch["input_ids"] for batch in DataLoader(data, batch_size=8, sampler=sampler)]
    workers = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    assert all(a.equal(b["input_ids"]) for a, b in zip(alone, workers, strict=True))


def test_bad_folders(tmp_path, prepared):
    import shutil

    def changed(name: str) -> Path:
        shutil.copytree(prepared, tmp_path / name)
        return tmp_path / name

    with pytest.raises(ValueError, match=r"has no manifest.json: make it with affine-attn prepare"):
        TokenShards(tmp_path, 8)
    with pytest.raises(
        ValueError, match=r"sequence_length must be between 1 and the \d+ train tokens of .*, got 10000000"
    ):
        TokenShards(prepared, 10_000_000)
    with pytest.raises(ValueError, match="split must be one of train, valid, got 'test'"):
        TokenShards(prepared, 8, "test")
    folder = changed("truncated")
    with (folder / "train-00002.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(
        ValueError, match=r"train-00002.bin has 100 bytes where the manifest says \d+: it was cut or changed"
    ):
        TokenShards(folder, 8)
    (changed("missing") / "train-00002.idx").unlink()
    with pytest.raises(ValueError, match=r"train-00002.idx is missing: the manifest lists it"):
        TokenShards(tmp_path / "missing", 8)
    manifest = changed("version") / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ValueError, match="is of format version 9, this package reads 1: make the folder again"):
        TokenShards(manifest.parent, 8)
    manifest.write_text("[]")
    with pytest.raises(ValueError, match="is damaged"):
        TokenShards(manifest.parent, 8)


# --- in training


@pytest.mark.parametrize("room", ["data", "distill"], ids=["now", "before"])
def test_training_needs_neither_tokenizers_nor_datasets(room):
    program = (
        f"import sys; import affine_attn.{room}.shards, affine_attn.{room}.sampler\n"
        "print({'datasets', 'pyarrow', 'tokenizers', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_trainer_resumes_to_the_token(prepared, tmp_path):
    """Over the end of an epoch, with accumulation: the resumed run has the batches and losses of the whole one."""
    from transformers import Trainer, TrainingArguments

    from affine_attn.models import AffineAttnForCausalLM, preset

    data = TokenShards(prepared, 512)
    global_batch, steps = 4, 9
    assert steps * global_batch > len(data), "the run must cross the end of an epoch"

    class Recorded(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return GlobalSampler(len(data), samples=steps * global_batch, seed=7)

        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            seen.append((inputs["input_ids"].clone(), loss.detach().clone()))
            return loss

    def train(**resume) -> None:
        torch.manual_seed(0)
        model = AffineAttnForCausalLM(preset("nano", "softmax", vocab_size=300, num_hidden_layers=1))
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_steps=3,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            remove_unused_columns=False,
        )
        Recorded(model, arguments, train_dataset=data).train(**resume)

    seen = []
    train()
    whole = seen
    order = GlobalSampler(len(data), samples=steps * global_batch, seed=7)
    expected = torch.stack([data[i]["input_ids"] for i in order])
    assert torch.cat([ids for ids, _ in whole]).equal(expected)
    seen = []
    train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(seen) == (steps - 3) * 2
    for (ids, loss), (again, loss_again) in zip(whole[6:], seen, strict=True):
        assert ids.equal(again)
        assert loss.equal(loss_again)
