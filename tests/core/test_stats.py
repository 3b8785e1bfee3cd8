"""Statistics against an explicit weight matrix in float64, and the promise that no such matrix is ever made."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from affine_attn import (
    Alibi,
    AttentionSpec,
    AttentionStats,
    Mask,
    ScaleInvariant,
    SoftCap,
    attention,
    attention_stats,
)
from affine_attn.bench.accuracy import Shape, random_inputs
from affine_attn.core.spec import scores_of
from tests.support.cases import BIASES, MASKS, PAIR_MASKS, SPECS

B, H, KV, TQ, TK, D = 3, 4, 2, 11, 14, 8
CPU = torch.device("cpu")


def _dense(q: Tensor, k: Tensor, mask: Mask, logit, sink, alpha, beta, bias=None) -> AttentionStats:
    """Every statistic from its definition on the whole matrix; only visibility is taken from the package."""
    tq, tk = q.shape[2], k.shape[2]
    visible = mask.visible(tq, tk, CPU, slice(0, tq), slice(0, tk))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q @ k.mT / math.sqrt(q.shape[3])
    curve, logit = scores_of(logit)
    s = s if curve is None else curve.cap * torch.tanh(s / curve.cap)
    lengths = torch.full((q.shape[0],), tk) if mask.lengths is None else mask.lengths
    distance = (torch.arange(tq)[:, None] - torch.arange(tk) + (lengths - tq)[:, None, None, None]).double()
    name = type(logit).__name__
    if name == "ScaleInvariant":
        u = torch.log1p(distance.clamp(min=0) / logit.tau)
        s = torch.sqrt(1 + 2 * u) * s - 2 * u
    elif name == "LogN":
        s = s * visible.sum(-1, keepdim=True).clamp(min=1).double().log()
    elif name == "Alibi":
        s = s - 2 ** (-8 * (torch.arange(q.shape[1])[:, None, None] + 1) / q.shape[1]) * distance.abs()
    s = s if bias is None else s + bias
    e = torch.where(visible, s.exp(), 0.0)
    e_sink = torch.zeros(1) if sink is None else torch.as_tensor(sink, dtype=torch.float64).exp().reshape(-1, 1, 1)
    total = e.sum(-1, keepdim=True) + e_sink
    p = torch.where(total > 0, e / total, 0.0)
    w = p if alpha is None else alpha[..., None] * p
    w = w if beta is None else w + torch.where(visible, beta[..., None], 0.0)
    first = visible & (visible.long().cumsum(-1) == 1)
    seen = visible.expand(s.shape)
    return AttentionStats(
        entropy=-torch.where(p > 0, p * p.log(), 0.0).sum(-1),
        first_token=torch.where(first, w, 0.0).sum(-1),
        row_sum=w.sum(-1),
        sink_mass=torch.where(total > 0, e_sink / total, 0.0)[..., 0],
        mean_logit=torch.where(seen, s, 0.0).sum((2, 3)) / seen.sum((2, 3)).clamp(min=1),
        max_logit=torch.where(seen, s, -math.inf).amax((2, 3)),
    )


def _assert_same(stats: AttentionStats, expected: AttentionStats):
    for name, value, truth in zip(AttentionStats._fields, stats, expected, strict=True):
        assert value.dtype == torch.float32, name
        message = partial("{0}: {1}".format, name)
        torch.testing.assert_close(value.double(), truth.double(), atol=2e-6, rtol=2e-5, msg=message)


LOGITS = {name: SPECS[name].logit for name in ("softmax", "scale_invariant", "logn", "alibi")}
SINKS = {"no_sink": None, "off_by_one": 0.0, "learned": torch.linspace(-3, 5, H, dtype=torch.float64)}


@pytest.mark.parametrize("affine", ["p", "affine"])
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("logit", LOGITS)
@pytest.mark.parametrize("mask", MASKS)
def test_statistics_are_those_of_the_explicit_weights(mask, logit, sink, affine):
    shape = Shape(B, H, KV, TQ, TK, D)
    made = MASKS[mask](shape, CPU)
    if logit == "scale_invariant" and not made.causal:
        made = Mask(lengths=made.lengths, padding=made.padding, documents=made.documents)
    inputs = random_inputs(SPECS["affine"], shape, torch.float64)
    alpha, beta = (inputs["alpha"], inputs["beta"]) if affine == "affine" else (None, None)
    arguments = (inputs["q"], inputs["k"], made)
    options = {"logit": LOGITS[logit], "sink": SINKS[sink], "alpha": alpha, "beta": beta}
    _assert_same(attention_stats(*arguments, **options), _dense(*arguments, **options))


@pytest.mark.parametrize("bias", [None, *BIASES])
@pytest.mark.parametrize("mask", [*PAIR_MASKS, "causal", "documents"])
def test_statistics_of_curves_biases_and_masks_of_pairs(mask, bias):
    """Of rows, too, in which a bias of -inf leaves nothing but the beta of a visible key."""
    shape = Shape(B, H, KV, TQ, TK, D)
    inputs = random_inputs(SPECS["sink+affine+gate"], shape, torch.float64, bias=bias and BIASES[bias](shape))
    made = (PAIR_MASKS | MASKS)[mask](shape, CPU)
    names = ["alpha", "beta", *(["bias"] if bias else [])]
    for sink, logit in ((None, SoftCap(0.7)), (inputs["sink"], (SoftCap(0.7), Alibi())), (0.5, None)):
        options = {"logit": logit, "sink": sink} | {name: inputs[name] for name in names}
        arguments = (inputs["q"], inputs["k"], made)
        _assert_same(attention_stats(*arguments, **options), _dense(*arguments, **options))


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_low_precision_inputs_give_float32_statistics(dtype, rows):
    inputs = random_inputs(SPECS["affine"], Shape(B, H, KV, TQ, TK, D), dtype)
    q, k, alpha, beta = (*(inputs[name] for name in "qk"), *(inputs[name].to(rows) for name in ("alpha", "beta")))
    options = {"logit": None, "sink": 0.0}
    stats = attention_stats(q, k, Mask(), alpha=alpha, beta=beta, **options)
    exact = _dense(q.double(), k.double(), Mask(), alpha=alpha.double(), beta=beta.double(), **options)
    _assert_same(stats, exact)


@pytest.mark.parametrize(
    ("mask", "tq", "tk"),
    [
        (Mask(padding=torch.zeros(1, 6, dtype=torch.bool)), 6, 6),
        (Mask(lengths=torch.tensor([0])), 3, 6),
        (Mask(), 520, 3),
        (Mask(), 3, 0),
    ],
    ids=["all_padded", "nothing_filled", "more_queries_than_keys", "no_keys"],
)
@pytest.mark.parametrize("sink", [None, 0.0])
def test_rows_that_see_nothing(mask, tq, tk, sink):
    """Nothing weighs nothing, and what no key takes is the sink's: its mass is 1 - f, whatever empties the row."""
    empty = slice(0, tq - tk if mask.tensors == {} else tq)
    q, k = torch.randn(1, 2, tq, 4), torch.randn(1, 2, tk, 4)
    ones = torch.ones(1, 2, tq)
    stats = attention_stats(q, k, mask, sink=sink, alpha=ones, beta=ones)
    for name in ("entropy", "first_token", "row_sum"):
        assert not getattr(stats, name)[:, :, empty].any(), name
    assert (stats.sink_mass[:, :, empty] == (0.0 if sink is None else 1.0)).all()
    if empty.stop == tq:
        assert (stats.max_logit == -math.inf).all()
        assert (stats.mean_logit == 0).all()


@pytest.mark.parametrize("sink", [math.inf, 1e4, torch.tensor([math.inf, 1e4])], ids=str)
def test_a_sink_that_takes_everything_leaves_no_entropy(sink):
    """0 log 0 is 0."""
    q, k = torch.randn(2, 2, 5, 4), torch.randn(2, 1, 5, 4)
    stats = attention_stats(q, k, sink=sink)
    assert (stats.sink_mass == 1).all()
    for name in ("entropy", "first_token", "row_sum"):
        assert (getattr(stats, name) == 0).all(), name


def test_the_mean_of_many_logits_that_cancel():
    """The sums of a long sequence's rows have more digits than fp32: all of them positive, then all negative."""
    q = torch.randint(1 << 22, 1 << 23, (1, 1, 1 << 17, 1)).float()
    q = torch.cat((q + 1, 1 - q), 2)
    stats = attention_stats(q, torch.ones(1, 1, 1, 1), Mask(causal=False), scale=1.0)
    assert stats.mean_logit.item() == 1


def test_uniform_weights_have_the_entropy_of_their_number():
    q, k = torch.zeros(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    stats = attention_stats(q, k)
    torch.testing.assert_close(stats.entropy[0, 0], torch.arange(1, 6).log())
    torch.testing.assert_close(stats.first_token[0, 0], 1 / torch.arange(1, 6))


def test_statistics_carry_no_gradient():
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    assert not any(value.requires_grad for value in attention_stats(q, q))


T, HEADS = 4096, 2
MATRIX = T * T * 4 * HEADS  # bytes of one fp32 score matrix: 128 MiB


def _largest_and_peak_bytes(function) -> tuple[int, int]:
    """The largest single allocation and the most memory held at once, from the profiler's allocation records.

    A TorchDispatchMode would see the outer operators only, not the tensors inside them.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        function()
    largest = held = peak = 0
    for event in sorted(records.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            largest, peak = max(largest, event.nbytes()), max(peak, held)
    return largest, peak


def _train(spec: AttentionSpec, impl: str, tokens: int) -> None:
    inputs = random_inputs(spec, Shape(1, HEADS, 1, tokens, tokens, 16))
    for x in inputs.values():
        if isinstance(x, Tensor):
            x.requires_grad_()
    attention(**inputs, impl=impl).sum().backward()


def _statistics(tokens: int) -> None:
    attention_stats(torch.randn(1, HEADS, tokens, 16), torch.randn(1, 1, tokens, 16), logit=ScaleInvariant())


WITHOUT_A_MATRIX = {
    "blocked": partial(_train, SPECS["scale_invariant+sink+affine+headwise"], "blocked"),
    "sdpa": partial(_train, SPECS["sink+affine+gate"], "sdpa"),
    "statistics": _statistics,
}


@pytest.mark.parametrize("name", WITHOUT_A_MATRIX)
def test_no_score_matrix_is_made_and_memory_is_linear_in_the_length(name):
    function = WITHOUT_A_MATRIX[name]
    largest, peak = _largest_and_peak_bytes(lambda: function(T))
    assert largest <= MATRIX / 4
    assert peak < MATRIX
    assert peak < 2.5 * _largest_and_peak_bytes(lambda: function(T // 2))[1]


def test_the_memory_probe_sees_a_score_matrix():
    """The dense reference fails each of the bounds above, so they can fail."""
    dense = partial(_train, AttentionSpec(), "reference")
    largest, peak = _largest_and_peak_bytes(lambda: dense(T))
    assert largest >= MATRIX
    assert peak > 2.5 * _largest_and_peak_bytes(lambda: dense(T // 2))[1]


def test_statistics_of_single_samples_by_torch_func():
    q, k = torch.randn(3, 1, H, TQ, D), torch.randn(3, 1, KV, TK, D)
    together = torch.vmap(lambda q, k: tuple(attention_stats(q, k, Mask(window=3), sink=0.5)))(q, k)
    each = [attention_stats(*sample, Mask(window=3), sink=0.5) for sample in zip(q, k, strict=True)]
    torch.testing.assert_close(together, tuple(torch.stack(x) for x in zip(*each, strict=True)))
