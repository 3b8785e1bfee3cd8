"""Runs that end badly, and what --resume makes of what they left.

Each run is a process of its own, forked from a Python that has only done its imports: those take seconds, a run less.
"""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from affine_attn.cli import app
from affine_attn.distill import run as _  # noqa: F401  (what a command imports late is imported before the fork)
from tests.support.tiny_runs import counting_shards, metrics, tiny

STEPS, SAVE_STEPS = 8, 2
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload([__name__])


class Fault(NamedTuple):
    """What happens to a run just before change ``number`` in its folder of those that match ``pattern``."""

    pattern: str = ""
    number: int | None = None
    act: Callable[[], object] = partial(signal.raise_signal, signal.SIGKILL)


# Lines of the metrics are written while steps are logged.
LINE = r"open .*/metrics\.jsonl$"


def command(data: Path, output: Path, *more: str, **changes) -> list[str]:
    fields = asdict(tiny(data, **({"steps": STEPS, "save_steps": SAVE_STEPS} | changes)))
    return ["distill", "demo", *(f"{name}={value}" for name, value in fields.items()), f"--output={output}", *more]


def matching(pattern: str, changes: list[str]) -> int:
    return sum(re.match(pattern, change) is not None for change in changes)


def _child(arguments: list[str], output: Path, fault: Fault, environment: dict[str, str]) -> None:
    # A group of processes of its own, as a terminal's shell gives to a command.
    os.setpgid(0, 0)
    rank = environment.get("RANK", "")
    descriptor = os.open(output.with_suffix(f".log{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    # A process in the background of a shell ignores it, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seen = []

    def watch(event: str, details: tuple) -> None:
        # A relative path is a name inside a folder that is being deleted.
        if event in CHANGES and (Path(str(details[0])).is_relative_to(output) or not os.path.isabs(str(details[0]))):
            seen.append(f"{event} {details[0]}")
            if re.match(fault.pattern, seen[-1]) and matching(fault.pattern, seen) - 1 == fault.number:
                fault.act()

    sys.addaudithook(watch)
    try:
        app(arguments)
    finally:
        output.with_suffix(f".changes{rank}").write_text(json.dumps(seen))


def start(arguments: list[str], output: Path, fault: Fault = Fault(), **environment: str):
    """The command as a process."""
    process = processes.Process(target=_child, args=(arguments, output, fault, environment))
    process.start()
    return process


def ended(process, seconds: float = 120) -> int | None:
    """Its exit code; negative: the signal that ended it; None: it is still there."""
    process.join(seconds)
    return process.exitcode


def killed_after(seconds: float, process) -> int | None:
    """Its exit code, which is 0 if it ended before the signal came."""
    ended(process, seconds)
    process.kill()
    return ended(process)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return counting_shards(tmp_path_factory.mktemp("shards"))


class Whole(NamedTuple):
    """The run to which nothing happens: its folder with all checkpoints, its time, its changes with the usual ones."""

    folder: Path
    seconds: float
    changes: list[str]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Whole:
    folder, usual = (tmp_path_factory.mktemp("whole") / name for name in ("run", "usual"))
    assert ended(start(command(data, usual), usual)) == 0
    begin = time.monotonic()
    assert ended(start(command(data, folder, keep_checkpoints=9), folder)) == 0
    return Whole(folder, time.monotonic() - begin, json.loads(usual.with_suffix(".changes").read_text()))


def content(folder: Path) -> dict[str, bytes]:
    # The arguments hold the name of the folder, the state the seconds that steps took.
    return {
        path.name: b"" if path.name in ("training_args.bin", "trainer_state.json") else path.read_bytes()
        for path in folder.iterdir()
    }


def losses(folder: Path) -> list[dict]:
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "lr")} for row in metrics(folder)]


def resumes(data: Path, output: Path, whole: Whole) -> bool:
    """To the very numbers and bytes of the run to which nothing happened."""
    assert ended(start(command(data, output, "--resume"), output)) == 0
    assert losses(output) == losses(whole.folder)
    assert (output / "statistics.jsonl").read_text() == (whole.folder / "statistics.jsonl").read_text()
    for name in ("model", f"checkpoint-{STEPS}"):
        assert content(output / name) == content(whole.folder / name)
    return not list(output.glob("*.tmp"))


def log(output: Path, rank: str = "") -> str:
    return output.with_suffix(f".log{rank}").read_text()


# kill -9


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(3, 20))])
def test_a_killed_run_resumes_to_the_run_that_was_not(seed, data, whole, tmp_path):
    """In turn: killed while a checkpoint is written; while files are moved and deleted; any time at all."""
    output, chance = tmp_path / "run", random.Random(seed)
    if seed % 3 == 2:
        seconds = chance.uniform(0, whole.seconds)
        while killed_after(seconds, process := start(command(data, output), output)) == 0:
            # It was faster than the clock.
            shutil.rmtree(output)
            seconds *= 0.7
    else:
        pattern = r"open .*checkpoint\.tmp/checkpoint-" if seed % 3 == 0 else r"os\.(rename|remove|rmdir) "
        process = start(
            command(data, output), output, Fault(pattern, chance.randrange(matching(pattern, whole.changes)))
        )
    assert ended(process) == -signal.SIGKILL
    if seed % 3 == 0:
        assert list(output.glob("checkpoint.tmp/checkpoint-*"))
    left = list(output.glob("checkpoint-*"))
    for checkpoint in left:
        assert content(checkpoint) == content(whole.folder / checkpoint.name)
    # At most the steps since the last one are lost.
    done = len(metrics(output)) if (output / "metrics.jsonl").exists() else 0
    assert max([int(checkpoint.name.split("-")[1]) for checkpoint in left], default=0) >= done - SAVE_STEPS
    assert resumes(data, output, whole)


# SIGTERM


def test_sigterm_ends_a_run_with_a_checkpoint(data, whole, tmp_path):
    output = tmp_path / "run"
    # While the fourth line of the metrics is written: the fifth step is the next that is logged.
    fault = Fault(LINE, 3, partial(signal.raise_signal, signal.SIGTERM))
    assert ended(start(command(data, output), output, fault)) == 143
    stopped = f"stopped by SIGTERM: {output}/checkpoint-5 is complete, the same command goes on"
    assert log(output).splitlines()[-1] == stopped
    assert len(metrics(output)) == 5
    assert not (output / "model").exists()
    assert resumes(data, output, whole)
    assert f"going on after {output}/checkpoint-5" in log(output)


# Ctrl-C


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_ends_a_run_with_a_checkpoint_and_the_same_command_goes_on(workers, data, whole, tmp_path):
    """Whatever the step; with workers, whom a terminal sends it too."""
    output, step = tmp_path / "run", random.Random(workers).randrange(1, STEPS - 2)
    own = command(data, output, workers=workers)
    assert ended(start(own, output, Fault(LINE, step, partial(os.killpg, 0, signal.SIGINT)))) == 130
    done = len(metrics(output))
    assert done < STEPS
    assert log(output).splitlines()[-1] == (
        f"stopped by Ctrl-C: {output}/checkpoint-{done} is complete, the same command goes on"
    )
    assert log(output).count("Ctrl-C: a checkpoint after this step; again leaves at once") == 1
    assert "Traceback" not in log(output)
    assert ended(start(own, output)) == 0
    assert losses(output) == losses(whole.folder)


def twice() -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def test_a_second_ctrl_c_ends_a_run_at_once(data, whole, tmp_path):
    output = tmp_path / "run"
    assert ended(start(command(data, output), output, Fault(LINE, 4, twice))) == 130
    stopped = "stopped by Ctrl-C: the same command goes on after the last checkpoint, if there is one"
    assert log(output).splitlines()[-1] == stopped
    assert "Traceback" not in log(output)
    assert resumes(data, output, whole)


# Two processes with one folder


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_a_process_that_comes_late_leaves_a_finished_run_alone(data, whole, tmp_path):
    """It is about to lock the folder while the other one, which has the lock, trains to the end."""
    output = tmp_path / "run"
    late = start(
        command(data, output, "--resume"), output, Fault(r"open .*/\.lock$", 0, partial(wait_for, output / "model"))
    )
    first = start(command(data, output, "--resume"), output)
    assert ended(first) == 0
    done = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file() and path.name != ".lock"}
    assert ended(late) == 0
    assert done == {
        path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file() and path.name != ".lock"
    }
    assert resumes(data, output, whole)


# A full disk


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_full_disk_leaves_the_last_good_checkpoint(file, data, whole, tmp_path):
    """Simulated by a limit on the size of files, from the moment at which checkpoint-4 is begun."""
    output, limit = tmp_path / "run", (whole.folder / "checkpoint-4" / file).stat().st_size - 1
    fill = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    fault = Fault(r"os\.mkdir .*/checkpoint\.tmp/checkpoint-4", 0, fill)
    assert ended(start(command(data, output), output, fault)) == 2
    message = r"^checkpoint-4 could not be written \(.+\): is the disk full, .*; the last good checkpoint is (.*)$"
    assert re.findall(message, log(output), re.MULTILINE) == [f"{output}/checkpoint-2"]
    assert "Traceback" not in log(output)
    assert [path.name for path in output.glob("checkpoint*")] == ["checkpoint-2"]
    assert content(output / "checkpoint-2") == content(whole.folder / "checkpoint-2")
    assert resumes(data, output, whole)


# Two ranks


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def start_ranks(arguments: list[str], output: Path, fault: Fault):
    """Two processes as torchrun starts them; it is rank 0 to which something happens."""
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    faults = (fault, Fault())
    return [start(arguments, output, faults[r], RANK=str(r), LOCAL_RANK=str(r), **names) for r in range(2)]


@pytest.mark.parametrize("line", [4, 5])
def test_a_lost_rank_ends_the_other(line, data, tmp_path):
    """Which is in the next backward then, or about to write a checkpoint."""
    output = tmp_path / "run"
    first, second = start_ranks(command(data, output, micro_batch=2), output, Fault(LINE, line))
    assert ended(first) == -signal.SIGKILL
    try:
        assert ended(second, 20) == (1 if line == 4 else 2)
    finally:
        second.kill()
    if line == 5:
        assert f"or is a rank lost?; the last good checkpoint is {output}/checkpoint-4" in log(output, "1")
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("ranks", [(1, 2), pytest.param((2, 1), marks=pytest.mark.faults)])
def test_a_run_goes_on_with_another_number_of_ranks(ranks, data, whole, tmp_path):
    """With the same sequences, to the rounding of another order of sums."""
    output, killed = tmp_path / "run", Fault(LINE, 5)

    def started(count, fault, *more):
        if count == 2:
            return start_ranks(command(data, output, *more, micro_batch=2), output, fault)
        return [start(command(data, output, *more), output, fault)]

    before, after = ranks
    first, *others = started(before, killed)
    assert ended(first) == -signal.SIGKILL
    assert all(ended(other) != 0 for other in others)
    kept = losses(output)[:4]
    assert [ended(process) for process in started(after, Fault(), "--resume")] == [0] * after
    assert losses(output)[:4] == kept
    for a, b in zip(losses(whole.folder), losses(output), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_sigterm_to_one_rank_ends_both_with_one_checkpoint(data, tmp_path):
    output = tmp_path / "run"
    fault = Fault(LINE, 3, partial(signal.raise_signal, signal.SIGTERM))
    assert [ended(rank) for rank in start_ranks(command(data, output, micro_batch=2), output, fault)] == [143, 143]
    for rank in "01":
        assert f"{output}/checkpoint-5 is complete, the same command goes on" in log(output, rank)
    assert {f"rng_state_{rank}.pth" for rank in "01"} <= content(output / "checkpoint-5").keys()


def ranks_of(launcher: int) -> dict[str, int]:
    """The process of each rank below a launcher."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = dict(entry.partition("=")[::2] for entry in Path(f"/proc/{child}/environ").read_text().split("\0"))
        found |= {variables["RANK"]: int(child)} if "RANK" in variables else {}
    return found


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in Linux's /proc")
@pytest.mark.parametrize("nodes", [1, 2])
def test_torchrun_restarts_and_resumes_after_a_lost_rank(nodes, data, tmp_path):
    """One command from the start: --resume finds no checkpoint first, and one after the restart.

    With the store of the first attempt, which torchrun shares with its ranks, those of the second would wait for the
    dead (pytorch issue 135712).
    """
    output, alone, steps = tmp_path / "run", tmp_path / "alone", 40
    many = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    place = [*(["--standalone"] if nodes == 1 else many), f"--nproc-per-node={2 // nodes}"]
    launch = [sys.executable, "-m", "torch.distributed.run", *place, "--max-restarts=1"]
    arguments = command(data, output, "--resume", steps=steps, micro_batch=2)
    with output.with_suffix(".log").open("w") as file:
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        torchruns = [
            subprocess.Popen([*launch, "-m", "affine_attn.cli", *arguments], env=environment, stdout=file, stderr=file)
            for _ in range(nodes)
        ]
    try:
        while not list(output.glob("checkpoint-*")):
            assert all(torchrun.poll() is None for torchrun in torchruns), log(output)
            time.sleep(0.01)
        ranks = {rank: process for torchrun in torchruns for rank, process in ranks_of(torchrun.pid).items()}
        os.kill(ranks["1"], signal.SIGKILL)
        assert [torchrun.wait(120) for torchrun in torchruns] == [0] * nodes, log(output)
    finally:
        for torchrun in torchruns:
            torchrun.terminate()
    assert f"{output} has no checkpoint, starting at step 1" in log(output)
    assert f"going on after {output}/checkpoint-" in log(output)
    assert ended(start(command(data, alone, steps=steps), alone)) == 0
    for a, b in zip(losses(alone), losses(output), strict=True):
        # Two ranks add in another order than one, and that rounding grows with the steps.
        assert a == pytest.approx(b, abs=1e-5 if a["step"] <= 20 else 1e-4)


@pytest.mark.faults
@pytest.mark.parametrize(
    "launcher", [["torch.distributed.run", "--standalone"], ["accelerate.commands.launch", "--multi_gpu"]]
)
def test_launchers_of_the_readme(launcher, data, whole, tmp_path):
    """torchrun and accelerate launch, as modules: the environment may be another than that of the shell."""
    output, (module, option) = tmp_path / "run", launcher
    processes = "--nproc-per-node=2" if "torch" in module else "--num_processes=2"
    arguments = command(data, output, micro_batch=2)
    launch = [sys.executable, "-m", module, option, processes, "-m", "affine_attn.cli", *arguments]
    result = subprocess.run(launch, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((output / "environment.json").read_text())["processes"] == 2
    for a, b in zip(losses(whole.folder), losses(output), strict=True):
        assert a == pytest.approx(b, abs=1e-5)
