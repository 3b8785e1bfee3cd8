"""The fused Triton epilogue in Triton's CPU interpreter, against the float64 reference.

The interpreter is chosen when the kernels are imported, so the cases run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from affine_attn import Mask, attention
from affine_attn.core import fused
from affine_attn.core.accuracy import Shape, deviations, random_inputs
from tests.cases import SPECS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = [
    Shape(2, 4, 2, 100, 100, 32),  # two tiles, the second one part filled
    Shape(1, 3, 1, 70, 133, 80),  # chunked prefill, head dim off the power of two, group of 3
    Shape(1, 2, 2, 140, 140, 64),  # three tiles: sums of later tiles travel
]
# What the epilogue sees: the specs whose logit a stock kernel can compute.
EPILOGUES = {name: spec for name, spec in SPECS.items() if spec.logit is None}


def test_the_epilogue_in_the_interpreter():
    """Runs this file again with the interpreter on."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:]
    assert "passed" in result.stdout


interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_the_epilogue_in_the_interpreter")
if INTERPRETED:
    test_the_epilogue_in_the_interpreter = None  # the inner run must not start another


@interpreted
def test_the_kernels_are_really_used():
    assert fused.interpreted()
    q = torch.randn(1, 1, 4, 16)
    assert "TensorHandle" not in repr(attention(q, q, q, sink=0.0))
    from affine_attn.core.call import checked_call

    assert fused.why_not(checked_call(q, q, q, Mask(), None, None, 0.0, None, None, None)) is None


@interpreted
@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
def test_values_and_gradients(name, shape, causal, negative):
    inputs = random_inputs(EPILOGUES[name], shape)
    if negative:
        # Row factors of either sign: their size is folded into the log-sum-exp, their sign is not.
        signed = [x for x in ("alpha", "gate") if x in inputs]
        if not signed:
            pytest.skip("no row factor in this variant")
        for x in signed:
            inputs[x] = inputs[x] - 0.5
    wrong = [d for d in deviations("sdpa", inputs, Mask(causal=causal)) if not d.within]
    assert not wrong


@interpreted
def test_the_incoming_gradient_is_left_as_it_was():
    inputs = random_inputs(SPECS["affine"], SHAPES[0])
    inputs["alpha"] -= 0.5
    leaves = {name: x.requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    dy = torch.randn_like(inputs["q"])
    before = dy.clone()
    attention(**leaves, impl="sdpa").backward(dy)
    assert torch.equal(dy, before)


@interpreted
def test_an_expanded_gradient_is_not_negated_in_place():
    inputs = random_inputs(SPECS["affine"], SHAPES[0])
    inputs["alpha"] -= 0.5
    leaves = {name: x.requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    y = attention(**leaves, impl="sdpa")
    (from_sum,) = torch.autograd.grad(y.sum(), leaves["q"], retain_graph=True)
    (from_ones,) = torch.autograd.grad(y, leaves["q"], torch.ones_like(y))
    torch.testing.assert_close(from_sum, from_ones)


@interpreted
@pytest.mark.parametrize("token_sink", [False, True], ids=["per_head", "per_token"])
def test_sinks_of_both_shapes_and_infinite_ones(token_sink):
    shape = SHAPES[0]
    inputs = random_inputs(SPECS["sink+affine+gate"], shape)
    sink = torch.tensor([-torch.inf, -8.0, 8.0, 40.0])
    inputs["sink"] = sink[None, :, None].expand(shape.batch, shape.heads, shape.tq).clone() if token_sink else sink
    assert not [d for d in deviations("sdpa", inputs) if not d.within]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16], ids=["float16"])
def test_half_precision(dtype):
    inputs = random_inputs(SPECS["affine"], SHAPES[0], dtype)
    assert not [d for d in deviations("sdpa", inputs) if not d.within]
