"""Calls with more elements or sequences than the stock operators can count: cut, with the results of the whole."""

import pytest
import torch

from affine_attn import Mask, attention
from affine_attn.bench.accuracy import Shape, random_inputs
from affine_attn.engines import aten as stock
from tests.support.cases import SPECS

SHAPE = Shape(3, 6, 2, 12, 20, 8)
OF_HEAD = 12 * 8  # elements of a query head; the three that share a kv head have more than it


def _results(inputs, mask: Mask, impl: str = "sdpa") -> list[torch.Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    y = attention(**inputs | leaves, mask=mask, impl=impl)
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))]


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False)], ids=["causal", "none"])
@pytest.mark.parametrize(
    ("most_elements", "most_sequences", "calls"),
    [
        (2 * 6 * OF_HEAD, 65535, 2),  # two sequences, then one
        (10**9, 1, 3),
        (3 * OF_HEAD, 65535, 6),  # a kv head with its three query heads at a time
        (5 * OF_HEAD, 65535, 6),
        (2 * OF_HEAD, 65535, 18),  # one query head: 2 does not divide the group
    ],
)
def test_a_large_call_is_cut_and_nothing_changes(monkeypatch, most_elements, most_sequences, calls, mask):
    inputs = random_inputs(SPECS["sink+affine+gate"], SHAPE, torch.float64)
    whole = _results(inputs, mask)
    made = []

    def counting(function):
        return lambda q, *rest: made.append(q.shape) or function(q, *rest)

    for direction in (stock._FORWARD, stock._BACKWARD):
        monkeypatch.setitem(direction, "flash_for_cpu", counting(direction["flash_for_cpu"]))
    monkeypatch.setattr(stock, "MOST_ELEMENTS", most_elements)
    monkeypatch.setattr(stock, "MOST_SEQUENCES", most_sequences)
    cut = _results(inputs, mask)
    pieces = 2 if mask.causal else 1  # keys before the first query have a call of their own
    assert len(made) == 2 * pieces * calls
    assert all(batch * heads * OF_HEAD <= most_elements and batch <= most_sequences for batch, heads, *_ in made)
    torch.testing.assert_close(cut, whole, rtol=1e-13, atol=1e-13)


# Each has more than 2^31 elements in q, in dq and in o, or more sequences than an axis of a grid has places. What is
# wrong beyond the limit are the last sequences, or the last heads.
LARGE = {
    "causal": (33, 32, 8, 16384, 128),
    "window": (33, 32, 8, 16384, 128),
    "documents": (33, 32, 8, 16384, 128),
    "long window": (1, 32, 32, 2**19 + 2048, 128),
    "short": (70_000, 4, 2, 8, 64),
}
LARGE_MASKS = {"causal": {}, "window": {"window": 128}, "long window": {"window": 256}, "short": {}}


@pytest.mark.gpu
@pytest.mark.parametrize("is_deterministic", [False, True], ids=["any_order", "deterministic"])
@pytest.mark.parametrize("has_stages", [False, True], ids=["softmax", "affine"])
@pytest.mark.parametrize("name", LARGE)
def test_beyond_32_bits_the_last_sequence_is_that_of_a_small_call(name, has_stages, is_deterministic):
    batch, heads, kv_heads, tokens, dim = LARGE[name]
    options = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = {"q": torch.randn(batch, heads, tokens, dim, **options)}
    inputs |= {name: torch.randn(batch, kv_heads, tokens, dim, **options) for name in "kv"}
    if has_stages:
        inputs["alpha"] = torch.rand(batch, heads, tokens, device="cuda")
        inputs["beta"] = (0.5 - inputs["alpha"]) / 128
    documents = (torch.arange(tokens, device="cuda") // 700).expand(batch, -1)
    last = {key: x[-1:] if batch > 1 else x[:, -1:] for key, x in inputs.items()}
    mask, last_mask = (
        Mask(documents=documents[:rows]) if name == "documents" else Mask(**LARGE_MASKS[name]) for rows in (batch, 1)
    )
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        expected, large = _results(last, last_mask, "auto"), _results(inputs, mask, "auto")
    finally:
        torch.use_deterministic_algorithms(False)
    for part, whole in zip(expected, large, strict=True):
        end = whole[-1:] if batch > 1 else whole[:, -1:]
        error = ((end.double() - part.double()).norm() / part.double().norm()).item()
        assert error < 5e-3, f"the last sequence is off by {error:.3f}"


@pytest.mark.gpu
def test_a_cache_beyond_32_bits_is_decoded():
    q, k, v = (
        torch.randn(65, heads, n, 128, device="cuda", dtype=torch.bfloat16)
        for heads, n in ((32, 1), (8, 32800), (8, 32800))
    )
    assert k.numel() > 2**31
    y, last = attention(q, k, v, sink=0.0, impl="decode"), attention(q[-1:], k[-1:], v[-1:], sink=0.0, impl="decode")
    torch.testing.assert_close(y[-1:], last, rtol=1e-2, atol=1e-3)
