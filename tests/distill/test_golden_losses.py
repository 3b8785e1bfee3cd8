"""Training gives the committed losses, step by step."""

import json

import pytest

from affine_attn import VARIANTS
from tests.support import golden_losses
from tests.support.tiny_runs import counting_shards

# The same program elsewhere: two threads instead of one moved a loss by 5e-8 of itself, torch's kernels for AVX2 and
# MKL's for any processor by 5e-7, torch's without vector instructions by 2e-6. Ten times that is room for processors
# that were not tried, and below what a formula does: alpha's momentum at 0.901 instead of 0.9 moves losses by 5e-5.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return counting_shards(tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_those_committed(variant, data, tmp_path):
    expected = json.loads(golden_losses.FILE.read_text(encoding="utf-8"))[variant]
    assert len(expected) == 20
    assert golden_losses.losses(variant, data, tmp_path) == pytest.approx(expected, rel=TOLERANCE)
