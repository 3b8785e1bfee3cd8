"""Identities between members of the family, on small random calls and on every engine that takes them."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from affine_attn import Affine, Alibi, AlphaGate, LogN, Mask, ScaleInvariant, attention, attention_stats
from affine_attn.core.call import checked_call
from affine_attn.engines.plan import why_not

MANY = settings(max_examples=30, deadline=None)


class Small(NamedTuple):
    """A random call: q, k, v in float64, a mask, and row inputs to choose from."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask

    def rows(self, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.q.shape[:3], generator=generator, dtype=torch.float64)

    def everywhere(self, **stages) -> list[Tensor]:
        """The output of each engine that takes the call."""
        names = ("scale", "logit", "sink", "alpha", "beta", "gate")
        call = checked_call(self.q, self.k, self.v, self.mask, **(dict.fromkeys(names) | stages))
        engines = [name for name in ("sdpa", "blocked", "reference") if why_not(name, call) is None]
        assert len(engines) >= 2
        return [attention(self.q, self.k, self.v, self.mask, **stages, impl=name) for name in engines]

    def stats(self, **stages):
        return attention_stats(self.q, self.k, self.mask, **stages)


@st.composite
def small(draw, causal: bool | None = None, plain: bool = False) -> Small:
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    tk, dim = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    tq = draw(st.integers(1, tk))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def randn(*shape: int) -> Tensor:
        return 2 * torch.randn(shape, generator=generator, dtype=torch.float64)

    causal = draw(st.booleans()) if causal is None else causal
    options = {}
    if not plain and draw(st.booleans()):
        options["padding"] = torch.rand(batch, tk, generator=generator) < 0.7
    if not plain and causal and draw(st.booleans()):
        options["window"] = draw(st.integers(1, tk))
    q = randn(batch, kv_heads * group, tq, dim)
    return Small(q, randn(batch, kv_heads, tk, dim), randn(batch, kv_heads, tk, dim), Mask(causal=causal, **options))


def _assert_all(outputs: list[Tensor], expected: Tensor, **tolerance):
    for y in outputs:
        torch.testing.assert_close(y, expected, **({"atol": 1e-11, "rtol": 1e-9} | tolerance))


def _softmax(x: Small, **stages) -> Tensor:
    return attention(*x, **stages, impl="reference")


@MANY
@given(small())
def test_a_sink_of_minus_infinity_is_softmax(x):
    _assert_all(x.everywhere(sink=-math.inf), _softmax(x))


@MANY
@given(small())
def test_a_sink_of_plus_infinity_takes_everything(x):
    _assert_all(x.everywhere(sink=math.inf), torch.zeros_like(x.q), atol=0)


@MANY
@given(small(causal=False, plain=True))
def test_off_by_one_is_an_extra_key_of_zero_with_a_value_of_zero(x):
    """A zero key has the logit 0, whatever the query."""
    zero = torch.zeros_like(x.k[:, :, :1])
    with_key = attention(x.q, torch.cat((zero, x.k), 2), torch.cat((zero, x.v), 2), x.mask, impl="reference")
    _assert_all(x.everywhere(sink=0.0), with_key)


@MANY
@given(small(causal=False, plain=True), st.floats(-9, 9))
def test_a_sink_is_the_same_for_all_ways_to_say_it(x, s):
    expected = _softmax(x, sink=s)
    heads = torch.full((x.q.shape[1],), s, dtype=torch.float64)
    _assert_all(x.everywhere(sink=heads), expected)
    _assert_all(x.everywhere(sink=torch.full_like(x.rows(), s)), expected)


@MANY
@given(small())
def test_alpha_one_and_beta_zero_is_softmax(x):
    ones = torch.ones_like(x.rows())
    _assert_all(x.everywhere(alpha=ones, beta=torch.zeros_like(ones)), _softmax(x))


@MANY
@given(small())
def test_alpha_zero_and_beta_zero_is_zero(x):
    zeros = torch.zeros_like(x.rows())
    _assert_all(x.everywhere(alpha=zeros, beta=zeros), torch.zeros_like(x.q), atol=0)


@MANY
@given(small(), st.booleans())
def test_a_gate_of_ones_is_no_gate(x, headwise):
    gate = torch.ones_like(x.q[..., :1] if headwise else x.q)
    affine = {"alpha": x.rows(1), "beta": x.rows(2)}
    _assert_all(x.everywhere(**affine, gate=gate), _softmax(x, **affine))


@MANY
@given(small())
def test_a_gate_multiplies_the_output(x):
    gate = torch.randn_like(x.q)
    affine = {"alpha": x.rows(1), "beta": x.rows(2), "sink": 0.5}
    _assert_all(x.everywhere(**affine, gate=gate), gate * _softmax(x, **affine))


@MANY
@given(small(causal=True))
def test_scale_invariant_with_a_huge_tau_is_softmax(x):
    _assert_all(x.everywhere(logit=ScaleInvariant(tau=1e12)), _softmax(x), atol=1e-8, rtol=1e-8)


def test_scale_invariant_with_a_usual_tau_is_not_softmax():
    """Nor may the identity above hold because the logit is ignored: a row with two keys feels its distance. Not for any
    call: where one key has all the weight, nothing is felt."""
    x = Small(*torch.randn(3, 1, 2, 6, 4, dtype=torch.float64), Mask())
    difference = (_softmax(x, logit=ScaleInvariant()) - _softmax(x)).abs().amax(-1)
    assert float(difference[:, :, 0].max()) < 1e-12
    assert float(difference[:, :, 1:].min()) > 1e-4


@MANY
@given(small(plain=True))
def test_logn_is_softmax_with_queries_scaled_by_log_n(x):
    count = x.mask.count(x.q.shape[2], x.k.shape[2], torch.device("cpu"))
    scaled = x._replace(q=x.q * count.double().log()[..., None])
    _assert_all(x.everywhere(logit=LogN()), _softmax(scaled))


@pytest.mark.parametrize("spread", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logn_in_16_bits_loses_one_rounding_of_q_and_no_more(dtype, spread):
    """The bound that docs/equations.md states, for the output and every gradient."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(1, 4, 300, 64, generator=generator).to(dtype) for _ in range(4))
    q, count = spread * q, torch.arange(1, 301).log()[:, None]
    rounded = (q.float() * count).to(dtype)

    def results(q: Tensor, k: Tensor, v: Tensor, impl: str, logit: LogN | None = None) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        y = attention(*leaves, logit=logit, impl=impl)
        return [x.double() for x in (y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype)))]

    logn = results(q, k, v, "sdpa", LogN())
    exact = results(q.double(), k.double(), v.double(), "reference", LogN())
    softmax = results(rounded, k, v, "sdpa")
    exact_softmax = results(rounded.double(), k.double(), v.double(), "reference")
    # The exact attention of the rounded q; its dq is that of the rounded q, scaled.
    one_rounding = [exact_softmax[0], exact_softmax[1] * count, *exact_softmax[2:]]
    for ours, plain, plain_exact, once, truth in zip(logn, softmax, exact_softmax, one_rounding, exact, strict=True):
        bound = (once - truth).norm() / truth.norm() + (plain - plain_exact).norm() / plain_exact.norm()
        assert (ours - truth).norm() / truth.norm() < bound


@MANY
@given(small(causal=True))
def test_causal_alibi_is_softmax_with_one_more_channel(x):
    """-slope (i - j) = slope j - slope i, and what is constant along a row cancels: a channel (1, slope j) remains."""
    heads, group, scale = x.q.shape[1], x.q.shape[1] // x.k.shape[1], x.q.shape[3] ** -0.5
    slope = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)], dtype=torch.float64)
    k, v = (t.repeat_interleave(group, 1) for t in (x.k, x.v))
    channel = (slope[:, None] * torch.arange(k.shape[2]) / scale)[..., None].expand(*k.shape[:3], 1)
    wider = Small(
        torch.cat((x.q, torch.ones_like(x.q[..., :1])), -1),
        torch.cat((k, channel), -1),
        torch.cat((v, torch.zeros_like(channel)), -1),
        x.mask,
    )
    _assert_all(x.everywhere(logit=Alibi()), _softmax(wider, scale=scale)[..., :-1])


@MANY
@given(small(), st.sampled_from([None, 0.0, 1.5]))
def test_the_row_sum_of_p_is_one_minus_the_sink_s_mass(x, sink):
    stats = x.stats(sink=sink)
    seen = x.mask.count(x.q.shape[2], x.k.shape[2], torch.device("cpu")) > 0
    torch.testing.assert_close(stats.row_sum, seen * (1 - stats.sink_mass))


def _alpha_and_beta(x: Small, length: int | str, average: float) -> tuple[Tensor, Tensor]:
    heads = x.q.shape[1]
    gate = AlphaGate(3, heads, Affine(length=length, start=average))
    alpha = x.rows().sigmoid().float()
    return alpha, gate.beta(alpha, x.mask, x.k.shape[2])


@MANY
@given(small(), st.floats(0, 1))
def test_with_visible_n_every_row_sums_to_the_average(x, average):
    alpha, beta = _alpha_and_beta(x, 0, average)
    seen = x.mask.count(x.q.shape[2], x.k.shape[2], torch.device("cpu")) > 0
    expected = torch.where(seen, average, 0.0).expand_as(alpha)
    torch.testing.assert_close(x.stats(alpha=alpha, beta=beta).row_sum, expected.float(), atol=1e-5, rtol=1e-5)


@MANY
@given(small(), st.floats(0, 1), st.sampled_from([4, 2048, "keys"]))
def test_with_other_n_the_row_sum_is_a_mixture(x, average, length):
    alpha, beta = _alpha_and_beta(x, length, average)
    n = x.mask.count(x.q.shape[2], x.k.shape[2], torch.device("cpu")).float()
    divisor = x.k.shape[2] if length == "keys" else n.clamp(min=length)
    expected = torch.where(n > 0, alpha + n * (average - alpha) / divisor, 0.0)
    torch.testing.assert_close(x.stats(alpha=alpha, beta=beta).row_sum, expected, atol=1e-5, rtol=1e-5)


STAGES: dict[str, Callable[[Small], dict]] = {
    "softmax": lambda x: {},
    "sink": lambda x: {"sink": torch.linspace(-2, 2, x.q.shape[1], dtype=torch.float64)},
    "affine": lambda x: {"alpha": x.rows(1), "beta": x.rows(2)},
    "sink_and_affine": lambda x: {"sink": 0.5, "alpha": x.rows(1), "beta": x.rows(2)},
    "distance": lambda x: {"logit": Alibi(), "alpha": x.rows(1), "beta": x.rows(2)},
}


@pytest.mark.parametrize("stage", STAGES)
@MANY
@given(x=small())
def test_shifting_all_values_shifts_the_output_by_the_row_sum(stage, x):
    stages = STAGES[stage](x)
    shift = torch.linspace(-1, 3, x.v.shape[3], dtype=torch.float64)
    row_sum = x.stats(**stages).row_sum.double()
    expected = attention(*x, **stages, impl="reference") + row_sum[..., None] * shift
    _assert_all(x._replace(v=x.v + shift).everywhere(**stages), expected, atol=1e-5, rtol=1e-5)  # statistics are fp32


@pytest.mark.parametrize("stage", ["softmax", "sink", "affine", "sink_and_affine"])
@MANY
@given(x=small(causal=False, plain=True), seed=st.integers(0, 99))
def test_the_order_of_keys_does_not_matter_without_causality(stage, x, seed):
    stages = STAGES[stage](x)
    order = torch.randperm(x.k.shape[2], generator=torch.Generator().manual_seed(seed))
    _assert_all(x._replace(k=x.k[:, :, order], v=x.v[:, :, order]).everywhere(**stages), _softmax(x, **stages))


@MANY
@given(small(), st.floats(0.1, 4))
def test_scale_multiplies_the_scores(x, factor):
    default = x.q.shape[3] ** -0.5
    _assert_all(x.everywhere(scale=factor), _softmax(x._replace(q=x.q * (factor / default))))


@MANY
@given(small(), st.floats(-3, 3))
def test_the_output_is_linear_in_the_values(x, factor):
    stages = STAGES["sink_and_affine"](x)
    _assert_all(x._replace(v=factor * x.v).everywhere(**stages), factor * _softmax(x, **stages))


@MANY
@given(small())
def test_query_heads_read_the_kv_head_of_their_group(x):
    """Grouped heads equal as many kv heads as query heads, each repeated next to itself."""
    group = x.q.shape[1] // x.k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (x.k, x.v))
    stages = STAGES["sink_and_affine"](x)
    _assert_all(x.everywhere(**stages), _softmax(x._replace(k=k, v=v), **stages))


@MANY
@given(small(causal=True, plain=True))
def test_a_window_of_all_keys_is_no_window(x):
    stages = STAGES["sink_and_affine"](x)
    windowed = x._replace(mask=replace(x.mask, window=x.k.shape[2]))
    _assert_all(windowed.everywhere(**stages), _softmax(x, **stages))


@MANY
@given(small(causal=True, plain=True))
def test_a_window_of_one_sees_the_token_itself(x):
    alpha, beta = x.rows(1), x.rows(2)
    windowed = x._replace(mask=Mask(window=1))
    own = x.v[:, :, -x.q.shape[2] :].repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    _assert_all(windowed.everywhere(alpha=alpha, beta=beta), (alpha + beta)[..., None] * own)
