"""Runs that are killed, and what --resume makes of what they left.

Each run is a process of its own, forked from a Python that has only done its imports: those take seconds, a run less.
"""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from affine_attn.cli import app
from affine_attn.distill import run as _  # noqa: F401  (what a command imports late is imported before the fork)
from tests.tiny_runs import counting_shards, metrics, tiny

STEPS, SAVE_STEPS = 8, 2
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload([__name__])


class Kill(NamedTuple):
    """SIGKILL before a change of the run's folder (their number), or so many seconds after its start."""

    change: int | None = None
    seconds: float | None = None


def command(data: Path, output: Path, *more: str, **changes) -> list[str]:
    chosen = tiny(data, steps=STEPS, save_steps=SAVE_STEPS, **changes)
    return [
        "distill",
        "demo",
        *(f"{name}={value}" for name, value in asdict(chosen).items()),
        f"--output={output}",
        *more,
    ]


def _child(arguments: list[str], log: Path, folder: Path, kill_at: int | None) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    seen = []

    def watch(event: str, details: tuple) -> None:
        # A relative path is a name inside a folder that is being deleted.
        if event in CHANGES and (Path(str(details[0])).is_relative_to(folder) or not os.path.isabs(str(details[0]))):
            if len(seen) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(f"{event} {details[0]}")

    sys.addaudithook(watch)
    app(arguments, standalone_mode=False)
    log.with_suffix(".changes").write_text(json.dumps(seen))


def train(arguments: list[str], output: Path, kill: Kill = Kill()) -> int:
    """The exit code of the command, carried out in ``output``; negative: the signal that ended it."""
    log = output.with_suffix(".log")
    process = processes.Process(target=_child, args=(arguments, log, output, kill.change))
    process.start()
    if kill.seconds is not None:
        process.join(kill.seconds)
        process.kill()
    process.join(120)
    return process.exitcode


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return counting_shards(tmp_path_factory.mktemp("shards"))


class Whole(NamedTuple):
    folder: Path
    seconds: float
    changes: list[str]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Whole:
    """The run that nobody kills, all its checkpoints kept."""
    folder, usual = (tmp_path_factory.mktemp("whole") / name for name in ("run", "usual"))
    assert train(command(data, usual), usual) == 0
    start = time.monotonic()
    assert train(command(data, folder, keep_checkpoints=9), folder) == 0
    return Whole(folder, time.monotonic() - start, json.loads(usual.with_suffix(".changes").read_text()))


def content(folder: Path) -> dict[str, bytes]:
    # The arguments hold the name of the folder, the state the seconds that steps took.
    return {
        path.name: b"" if path.name in ("training_args.bin", "trainer_state.json") else path.read_bytes()
        for path in folder.iterdir()
    }


def losses(folder: Path) -> list[dict]:
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "lr")} for row in metrics(folder)]


def moment(seed: int, whole: Whole) -> Kill:
    """In turn: while a checkpoint is written; while files are moved and deleted; any time at all."""
    chance = random.Random(seed)
    if seed % 3 == 2:
        return Kill(seconds=chance.uniform(0, whole.seconds))
    pattern = r"open .*checkpoint\.tmp/checkpoint-" if seed % 3 == 0 else r"os\.(rename|remove|rmdir) "
    return Kill(change=chance.choice([i for i, change in enumerate(whole.changes) if re.match(pattern, change)]))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(3, 20))])
def test_a_killed_run_resumes_to_the_run_that_was_not(seed, data, whole, tmp_path):
    output, kill = tmp_path / "run", moment(seed, whole)
    while (code := train(command(data, output), output, kill)) == 0 and kill.seconds:
        # It was faster than the clock.
        shutil.rmtree(output)
        kill = Kill(seconds=0.7 * kill.seconds)
    assert code == -signal.SIGKILL
    if seed % 3 == 0:
        assert list(output.glob("checkpoint.tmp/checkpoint-*"))
    left = list(output.glob("checkpoint-*"))
    for checkpoint in left:
        assert content(checkpoint) == content(whole.folder / checkpoint.name)
    # At most the steps since the last one are lost.
    done = len(metrics(output)) if (output / "metrics.jsonl").exists() else 0
    assert max([int(checkpoint.name.split("-")[1]) for checkpoint in left], default=0) >= done - SAVE_STEPS

    assert train(command(data, output, "--resume"), output) == 0
    assert losses(output) == losses(whole.folder)
    assert content(output / "model") == content(whole.folder / "model")
    assert content(output / f"checkpoint-{STEPS}") == content(whole.folder / f"checkpoint-{STEPS}")
    assert not list(output.glob("*.tmp"))
