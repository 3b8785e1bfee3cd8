import os
import subprocess
import sys

import pytest
import torch

from affine_attn.core import spec
from affine_attn.core.variants import VARIANTS

# One thread per worker: two busy OpenMP pools on two cores slow each other down many times over.
torch.set_num_threads(1)

# These need the clients, which `make test-clients` installs in an environment of its own.
collect_ignore = ["clients"]

# Triton chooses its CPU interpreter when kernels are imported, so cases that use it run in a process of their own.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter, started by a test of this file")


def rerun_in_interpreter(file: str) -> None:
    """Run a test file again with the interpreter on."""
    if INTERPRETED:
        pytest.skip("this is the run in the interpreter")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:]
    assert "passed" in result.stdout


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        # Not in item.keywords: those have the names of folders too.
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeded_and_poisoned():
    """Fixed seeds, and NaN in every fresh allocation, so that an entry nobody wrote cannot pass for a zero."""
    torch.manual_seed(0)
    # The private switch: the public one imports the compiler's configuration, which takes seconds.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch._C._set_deterministic_algorithms(False)


os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def family():
    """Take away after a test what it added to the family."""
    tables = (VARIANTS, spec._LOGITS, spec.ACTIVATIONS, spec.GATES)
    kept = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, kept, strict=True):
        table.clear()
        table.update(entries)
