"""DDP (Trainer) and FSDP2 (torch's fully_shard) on two processes give the numbers of one, for the same global batch."""

import subprocess
import sys

import pytest
import torch

from tests.support.tiny_runs import averages, counting_shards, metrics, trainer
from tests.support.two_ranks import STEPS, WAYS, recipe_of, teacher


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two ranks, in Pythons of their own, have left."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "data").mkdir()
    counting_shards(folder / "data")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*launch, "-m", "tests.support.two_ranks", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def one(folder):
    made = trainer(recipe_of(folder / "data"), folder / "one", teacher())
    made.train()
    return averages(made.model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(kind, way, folder, one):
    for name in (f"{kind}, {way}", *([f"ddp, {way}, resumed"] if kind == "ddp" else [])):
        rows = metrics(folder / name)
        assert len(rows) == STEPS
        for a, b in zip(metrics(folder / "one"), rows, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    first, second = (torch.load(folder / f"{kind}, {way}, {rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, one, rtol=1e-5, atol=1e-6)
