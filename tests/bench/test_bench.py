"""The benchmark: what it lists, what it refuses to time, and what it makes of its rows."""

import argparse
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from affine_attn import VARIANTS, attention, attention_stats
from affine_attn.bench import peers
from affine_attn.bench import timing as measure
from affine_attn.bench.accuracy import Shape
from affine_attn.bench.timing import Timing, side_by_side
from benchmarks import cases, checks, decoders, generation, masks, options, plot, readme, record, run, steps, training
from benchmarks.cases import MODES, STOCK, Case, Group, groups
from benchmarks.checks import largest_error
from tests.support.tiny_runs import counting_shards

CPU = torch.device("cpu")
TINY = Shape(2, 4, 2, 32, 32, 16)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(run, "ROUND_MS", 0.1)
    # On the CPU a peak starts a process.
    monkeypatch.setattr(run, "peak_mib", lambda *_: 1.0)


def _tiny(group: Group) -> Group:
    return replace(group, shape=replace(TINY, tq=1) if group.mode == "decode" else TINY)


@pytest.fixture
def _on_hopper(monkeypatch):
    monkeypatch.setattr(cases, "capability", lambda _: (9, 0))


@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_listed_case_has_a_method_and_a_row_of_its_own(device):
    listed = groups(torch.device(device), list(MODES), list(VARIANTS))
    assert {group.mode for group in listed} == set(MODES)
    keys = [(g.name, c.what, g.mode) for g in listed for c in g.cases if c != STOCK[device][0]]
    assert len(set(keys)) == len(keys)
    for group in listed:
        for case in group.cases:
            assert case.variant in VARIANTS
            assert case.method in {*steps._METHODS, "finish", "gradients", "rows", "statistics"}


@pytest.mark.usefixtures("_on_hopper")
def test_quick_leaves_out_what_compiles():
    listed = groups(torch.device("cuda"), list(MODES), list(VARIANTS), quick=True)
    methods = {case.method for group in listed for case in group.cases}
    assert "dense" in methods
    assert not {"flex", "dense compiled", "multiply"} & methods


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_timed_rows(mode):
    for group in groups(CPU, [mode], ["softmax", "affine", "affine_gated"]):
        for row in run.group_rows(_tiny(group), CPU, rounds=2, copy_gbps=10.0):
            assert "note" not in row, row
            assert float(row["ms_p20"]) <= float(row["ms_p50"]) <= float(row["ms_p80"])
            assert ("ratio" in row) == (mode != "epilogue")
            assert ("fraction_of_copy" in row) == (mode in ("decode", "epilogue"))


def test_bytes_of_an_epilogue_count_each_tensor_once():
    rows, q, v = 2 * 4 * 32, 2 * 4 * 32 * 16 * 4, 2 * 2 * 32 * 16 * 4  # row statistics; bytes of q and v in fp32
    moved = {
        ("sink", "finish"): 2 * q + 2 * 4 * rows,
        ("sink", "gradients"): 2 * q + 4 * rows,
        ("affine", "finish"): 2 * q + v + 2 * 4 * rows,
        ("affine", "gradients"): 2 * q + 3 * v + 4 * 4 * rows,
        ("affine_gated", "finish"): 3 * q + v + 2 * 4 * rows,
        ("affine_gated", "gradients"): 5 * q + 3 * v + 4 * 4 * rows,
    }
    for (variant, method), expected in moved.items():
        assert steps.prepare(Case("", method, variant), TINY, "epilogue", CPU).moved == expected


def test_a_wrong_case_is_not_timed(monkeypatch):
    monkeypatch.setitem(steps._METHODS, "auto", lambda **inputs: attention(**inputs) * 1.01)
    group = Group("tiny", TINY, "forward", (*STOCK["cpu"], Case("sink", "auto", "sink")))
    _, row = run.group_rows(group, CPU, rounds=1, copy_gbps=10.0)
    assert "wrong: y" in row["note"]
    assert "ms_p50" not in row
    assert run.is_failure(row)


def test_wrong_statistics_are_not_timed(monkeypatch):
    def rough(**inputs):
        found = attention_stats(**inputs)
        return found if inputs["q"].dtype == torch.float64 else found._replace(entropy=found.entropy + 0.01)

    monkeypatch.setattr(checks, "attention_stats", rough)
    group = Group("tiny", TINY, "statistics", (*STOCK["cpu"], Case("sink", "statistics", "sink")))
    _, row = run.group_rows(group, CPU, rounds=1, copy_gbps=10.0)
    assert re.fullmatch(r"WrongResult: wrong: entropy \S+ > 1e-04", row["note"])
    assert "ms_p50" not in row


def test_a_backend_that_refuses_leaves_its_reason_and_the_next_one_is_the_baseline():
    refused, plain, softmax = Case("plain SDPA (cuDNN)", "cudnn"), *STOCK["cpu"], Case("softmax")
    group = Group("tiny", TINY, "forward", (refused, plain, softmax))
    rows = run.group_rows(group, CPU, rounds=1, copy_gbps=10.0)
    assert rows[0]["note"]
    assert not run.is_failure(rows[0])
    assert rows[2]["baseline"] == plain.what


def test_what_compiles_is_checked_at_the_timed_batch(monkeypatch):
    batches = []

    def flex(**inputs):
        batches.append(len(inputs["q"]))
        return attention(**inputs)

    monkeypatch.setitem(steps._METHODS, "flex", flex)
    assert largest_error(Case("affine, FlexAttention", "flex", "affine"), TINY, "forward", CPU) < 1e-5
    assert batches == [TINY.batch]


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds(monkeypatch):
    times = {"a": iter([1.0, 2.0, 4.0]), "b": iter([3.0, 2.0, 8.0])}
    monkeypatch.setattr("affine_attn.bench.timing._warm_up", lambda *_: None)
    monkeypatch.setattr("affine_attn.bench.timing._run", lambda function, *_: next(times[function()]))
    result = side_by_side({name: lambda name=name: name for name in times}, "a", CPU, rounds=3)
    assert result["b"].ratio == 2.0
    assert result["b"].p50 == 3.0


class _FullQueue:
    """Events of a GPU whose queue holds a thousand launches: with more, the first calls run while others are queued."""

    launches = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return _FullQueue.launches > 1000

    def elapsed_time(self, _) -> float:
        return 1.0


@pytest.mark.parametrize(("launches", "calls"), [(1, 32), (60, 8), (2000, 1)])
def test_no_more_calls_are_timed_than_the_queue_of_the_gpu_holds(launches, calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", _FullQueue)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: setattr(_FullQueue, "launches", 0))
    function = lambda: setattr(_FullQueue, "launches", _FullQueue.launches + launches)  # noqa: E731
    assert measure._warm_up(function, torch.device("cuda"), 50.0, time.perf_counter).calls == calls


def _row(shape: str, what: str, mode: str, **columns: str) -> record.Row:
    return dict.fromkeys(record.COLUMNS, "") | {"shape": shape, "what": what, "mode": mode, "ms_p50": "1"} | columns


def test_new_rows_replace_old_ones_and_a_baseline_counts_once(tmp_path):
    old = [_row("3B", "affine", "forward"), _row("3B", "sink", "forward")]
    new = [_row("3B", "sink", "forward", ratio="1.1"), _row("3B", "plain", "forward", ratio="1")]
    rows = record.merged(old, [*new, _row("3B", "plain", "forward", ratio="0.9")])
    assert [(row["what"], row["ratio"]) for row in rows] == [("affine", ""), ("sink", "1.1"), ("plain", "1")]
    record.write(tmp_path / "x.csv", rows)
    assert record.read(tmp_path / "x.csv") == rows


def test_tables_and_picture_are_made_of_the_rows(tmp_path):
    named = {"baseline": "plain SDPA (cuDNN)", "peak_mib": "10"}
    rows = [_row(shape, "affine", "forward+backward", ratio="1.05", **named) for shape in plot.LENGTHS]
    rows += [_row("3B", "sink", "forward+backward", ratio="0.99", **named)]
    rows += [_row("3B", named["baseline"], "forward+backward", ratio="1", **named)]
    rows += [_row("d", "affine", "decode", ratio="0.9", fraction_of_copy="0.8", **named)]
    parts = ("affine, forward", "affine, backward", "sink, forward")
    rows += [_row("3B", part, "epilogue", fraction_of_copy="0.75") for part in parts]
    attention, decoding, epilogue = readme.tables(rows)[1::2]
    assert "| affine | 1.05 (1) | 1.05 (1) | 1.05 (1) | 10 |" in attention
    assert "| affine | 0.90 (80%) |" in decoding
    unsteady = rows[-4] | {"ms_p20": "1", "ms_p80": "1.6"}
    assert "| affine | 0.90 (80%) ~ |" in readme.tables([unsteady])[1]
    assert "| affine, forward | 1000 (75%) |" in epilogue
    pytest.importorskip("matplotlib")
    assert plot.draw(rows, tmp_path / "x.svg")
    assert not plot.draw(rows[:1], tmp_path / "y.svg")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("make", masks.CASES)
def test_masks_are_timed_against_peers_that_are_right(make, monkeypatch):
    monkeypatch.setattr(masks, "CHECKED", 128)
    monkeypatch.setattr(peers, "compiled", lambda function: function)
    masks.check(case := make(128))
    wrong = case._replace(peers={"wrong": lambda q, k, v: 1.01 * next(iter(case.peers.values()))(q, k, v)})
    with pytest.raises(SystemExit, match=rf"^{case.what}, wrong is wrong: "):
        masks.check(wrong)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_masks_are_rows_over_the_fastest_peer(monkeypatch, tmp_path, capsys):
    timed = []

    def turns(functions, baseline, *_, clock):
        assert clock is time.process_time
        timed.append((list(functions), baseline))
        return {name: Timing(1.0, 1.0, 1.0, 1.0 / (1 + place)) for place, name in enumerate(functions)}

    monkeypatch.setattr(masks, "side_by_side", turns)
    monkeypatch.setattr(peers, "compiled", lambda function: function)
    monkeypatch.setattr(masks, "TOKENS", (128,))
    monkeypatch.setattr(masks, "CHECKED", 128)
    masks.main(["--output", str(tmp_path / "cpu.csv")])
    rows = record.read(tmp_path / "cpu.csv")
    of_window = [row for row in rows if row["what"].startswith("window of 128:")]
    assert [row["what"] for row in of_window] == [f"window of 128: {x}" for x in ("torch", "softmax", "affine")]
    assert {row["baseline"] for row in of_window} == {"SDPA with a float mask"}  # the last is the fastest here
    assert {row["mode"] for row in rows} == {"masks"}
    assert "| window of 128: affine |" in "".join(readme.tables(rows))


def test_options_are_timed_against_the_same_said_with_a_float_mask(monkeypatch, tmp_path):
    monkeypatch.setattr(options, "SHAPE", replace(options.SHAPE, tq=96, tk=96))
    monkeypatch.setattr(options, "CHECKED", 64)
    ratios = iter((1.0, 1.2, 1.0, 1.2, 1.2, 1.2))

    def turns(functions, baseline, *_, clock):
        for function in functions.values():
            function()
        ratio = next(ratios)
        return {name: Timing(1.0, 1.0, 1.0, 1.0 if name == baseline else ratio) for name in functions}

    monkeypatch.setattr(options, "side_by_side", turns)
    said = "bias, causal takes 1.2000, not 1.1; values of 32 channels takes 1.2000, not 1.05"
    with pytest.raises(SystemExit, match=f"^{said}$"):
        options.main(["--output", str(tmp_path / "cpu.csv")])
    rows = record.read(tmp_path / "cpu.csv")
    assert len(rows) == 12
    assert {row["baseline"] for row in rows} == {options.SDPA, options.WIDE}


@pytest.mark.parametrize("what", ["bias, causal", "allowed"])
def test_a_float_mask_that_says_something_else_is_not_timed(what, monkeypatch):
    monkeypatch.setattr(options, "CHECKED", 64)
    monkeypatch.setattr(options, "float_mask", lambda case, tokens: torch.zeros(tokens, tokens))
    with pytest.raises(SystemExit, match=r"^SDPA with the float mask is wrong: y"):
        options.check(what, options.cases(64)[what])


def test_decoders_are_rows_over_llama_and_memory_over_sdpa(monkeypatch, tmp_path):
    monkeypatch.setattr(decoders, "TRAINED", (1, 8))
    monkeypatch.setattr(decoders, "PADDED", (2, 3, 8))
    monkeypatch.setattr(decoders, "KEYS", 128)
    monkeypatch.setattr(decoders.multiprocessing, "get_context", lambda _: SimpleNamespace(Pool=_InThisProcess))
    decoders.main(["--output", str(tmp_path / "cpu.csv"), "--rounds", "1"])
    rows = record.read(tmp_path / "cpu.csv")
    assert [row["what"] for row in rows] == [
        *2 * [decoders.LLAMA, *decoders.VARIANTS],
        decoders.SDPA,
        *decoders.VARIANTS,
    ]
    of_memory = [row for row in rows if row["mode"] == "memory"]
    # At least y, and the gradients of q, k and v.
    assert all(float(row["peak_mib"]) > 128 * 64 * (2 * 8 + 2 * 2) * 4 / 2**20 for row in of_memory)
    tables = "".join(readme.tables(rows))
    assert "nano, left-padded" in tables
    assert f"| {decoders.SDPA} | 1.00 (" in tables


class _InThisProcess:
    def __init__(self, _):
        pass

    def __enter__(self):
        return SimpleNamespace(apply=lambda function, arguments: function(*arguments))

    def __exit__(self, *_):
        pass


def test_generation_times_every_model(monkeypatch, tmp_path):
    path = tmp_path / "cpu.csv"
    size = ["--preset", "nano", "--batches", "1", "--contexts", "24", "--tokens", "12", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["generation.py", *size, "--attention", "affine", "--output", str(path)])
    generation.main()
    rows = record.read(path)
    assert [row["what"] for row in rows] == [generation.BASELINE, "affine"]
    assert all(row["shape"] == "nano 24 x1" and float(row["ms_p50"]) > 0 for row in rows)
    assert "nano 24 x1" in "\n".join(readme.tables(rows))


def test_a_model_that_cannot_be_timed_is_named(monkeypatch, tmp_path, capfd):
    size = ["--preset", "nano", "--batches", "1", "--contexts", "24", "--tokens", "12"]
    monkeypatch.setattr(
        sys, "argv", ["generation.py", *size, "--attention", "nothing", "--output", str(tmp_path / "cpu.csv")]
    )
    with pytest.raises(SystemExit, match="nothing, 24 x1 failed"):
        generation.main()
    assert "nothing" in capfd.readouterr().err


def test_training_times_every_attention(tmp_path):
    small = ["--student", "nano", "--teacher", "nano", "--sequence-length", "8", "--micro-batch", "1", "--steps", "2"]
    training.main([*small, "--rounds", "2", "--no-compile", "--output", str(tmp_path / "x.csv")])
    rows = record.read(tmp_path / "x.csv")
    assert [row["what"] for row in rows] == ["softmax", "affine"] * 2
    assert [row["mode"].split(",")[0] for row in rows] == ["pretraining"] * 2 + ["distillation from nano"] * 2
    assert all(float(row["tokens_per_second"]) > 0 and not row["mfu"] for row in rows)


def test_training_on_text_has_rows_of_its_own(tmp_path):
    data, output = counting_shards(tmp_path), tmp_path / "x.csv"
    small = ["--student", "nano", "--teacher", "none", "--sequence-length", "8", "--micro-batch", "1", "--no-compile"]
    few = [*small, "--attention", "affine", "--warm-up", "1", "--steps", "2", "--rounds", "1", "--output", str(output)]
    for more in ([], ["--data", str(data)]):
        training.main([*few, *more])
    modes = [row["mode"].split(", ")[-1] for row in record.read(output)]
    assert modes == ["random tokens after 1 steps", "text after 1 steps"]
    manifest = json.loads((data / "manifest.json").read_text())
    (data / "manifest.json").write_text(json.dumps(manifest | {"vocab_size": 10**6}))
    with pytest.raises(SystemExit, match="has 1000000 token ids, nano only"):
        training.main([*few, "--data", str(data)])


def test_tracked_files_are_written_only_where_that_is_asked_for(tmp_path):
    where = {"output": None, "update_docs": False}
    assert run.destination(argparse.Namespace(**where), CPU).parent == Path("runs/bench")
    assert run.destination(argparse.Namespace(**where | {"output": tmp_path}), CPU) == tmp_path
    tracked = run.destination(argparse.Namespace(**where | {"update_docs": True}), CPU)
    assert tracked == record.results_path(CPU)
