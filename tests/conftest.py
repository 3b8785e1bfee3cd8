import os

import pytest
import torch

# One thread per worker: two busy OpenMP pools on two cores slow each other down many times over.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
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
