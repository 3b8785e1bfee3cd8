"""The family against outside opinions: PyTorch, gpt-oss, printed numbers, finite differences and plain loops."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jacfwd, jacrev, jvp
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from affine_attn import Alibi, AttentionSpec, LogN, Mask, ScaleInvariant, SoftCap, attention
from affine_attn.bench import accuracy
from affine_attn.bench.accuracy import Shape, deviations, random_inputs, value_and_gradients
from affine_attn.core.spec import scores_of
from tests.support.cases import BIASES, CURVES, SPECS

ENGINES = ("reference", "sdpa", "blocked")


def _assert_all_close(a: dict[str, Tensor], b: dict[str, Tensor], **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


@pytest.mark.parametrize("impl", ENGINES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
def test_softmax_equals_pytorch(heads, causal, impl):
    inputs = random_inputs(AttentionSpec(), Shape(2, *heads, 9, 9, 16), torch.float64)
    dy = torch.randn_like(inputs["q"])
    ours = value_and_gradients(lambda **x: attention(**x, mask=Mask(causal=causal), impl=impl), inputs, dy)
    qkv = {name: inputs[name] for name in ("q", "k", "v")}
    theirs = value_and_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), qkv, dy
    )
    _assert_all_close(ours, theirs)


def _gpt_oss(window: int | None, scale: float):
    """The eager attention of gpt-oss in transformers, with the additive mask that its model would build."""

    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        hidden = (distance < 0) | (distance >= (window or k.shape[2]))
        additive = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, torch.finfo(q.dtype).min)
        module = SimpleNamespace(sinks=sink, num_key_value_groups=q.shape[1] // k.shape[1], training=False)
        return eager_attention_forward(module, q, k, v, additive, scaling=scale)[0].transpose(1, 2)

    return function


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("window", "impl"), [(None, impl) for impl in ENGINES] + [(4, impl) for impl in ("reference", "blocked")]
)
def test_a_learned_sink_equals_gpt_oss(window, impl, dtype):
    inputs = random_inputs(SPECS["sink"], Shape(2, 8, 2, 11, 11, 16), dtype)
    del inputs["logit"]
    dy = torch.randn_like(inputs["q"])
    ours = value_and_gradients(lambda **x: attention(**x, mask=Mask(window=window), impl=impl), inputs, dy)
    _assert_all_close(ours, value_and_gradients(_gpt_oss(window, 16**-0.5), inputs, dy))


GOLDEN = [  # t, a_t, m_t for tau = 10
    (0, 1, 0),
    (1, 1.091156, -0.190620),
    (9, 1.511194, -1.283708),
    (10, 1.544764, -1.386294),
    (100, 2.407445, -4.795791),
    (1000, 3.198475, -9.230241),
    (4095, 3.610367, -12.034752),
    (16383, 3.975431, -14.804049),
    (65535, 4.309967, -17.575814),
]


@pytest.mark.parametrize(("t", "a", "m"), GOLDEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scale_invariant_coefficients_have_the_printed_values(t, a, m, dtype):
    factor, offset = ScaleInvariant(tau=10.0).coefficients(torch.tensor(t, dtype=dtype), None, torch.tensor(0), 1)
    assert factor.item() == pytest.approx(a, abs=2e-6)
    assert offset.item() == pytest.approx(m, abs=2e-6)
    assert factor.item() ** 2 + offset.item() == pytest.approx(1, abs=3e-6)


def test_scale_invariant_coefficients_reach_the_scores():
    """One query over two keys, one of them 10 back: the weights are those of the printed a_10 and m_10."""
    k = torch.zeros(1, 1, 11, 1, dtype=torch.float64)
    k[0, 0, 0, 0], k[0, 0, 10, 0] = 2.0, 0.5
    padding = torch.zeros(1, 11, dtype=torch.bool)
    padding[0, [0, 10]] = True
    v = torch.arange(11, dtype=torch.float64).view(1, 1, 11, 1)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    y = attention(q, k, v, Mask(padding=padding), scale=1.0, logit=ScaleInvariant())
    own, far = math.exp(0.5), math.exp(1.544764 * 2.0 - 1.386294)
    assert y.item() == pytest.approx(10 * own / (own + far), rel=1e-5)


@pytest.mark.parametrize("impl", ENGINES)
def test_affine_weights_may_be_negative(impl):
    """N = 2, alpha = 0.8, alpha_ma = 0.4, P = (0.1, 0.9) gives the weights (-0.12, 0.52)."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([0.1, 0.9], dtype=torch.float64).log().view(1, 1, 2, 1)
    alpha = torch.full((1, 1, 1), 0.8, dtype=torch.float64)
    beta = (0.4 - alpha) / 2
    weights = []
    for one_hot in torch.eye(2, dtype=torch.float64):
        weights.append(attention(q, k, one_hot.view(1, 1, 2, 1), scale=1.0, alpha=alpha, beta=beta, impl=impl).item())
    assert weights == pytest.approx([-0.12, 0.52], abs=1e-12)


def _tiny(spec: AttentionSpec, per_token_sink: bool = False, shape: Shape = Shape(1, 2, 1, 3, 4, 2)) -> dict:
    """Inputs of every stage the spec has, with alpha of both signs (random_inputs keeps it in [0, 1])."""
    inputs = random_inputs(spec, shape, torch.float64, seed=5)
    rows = (shape.batch, shape.heads, shape.tq)
    if "alpha" in inputs:
        inputs["alpha"] = torch.randn(rows, dtype=torch.float64)
    if "beta" in inputs:
        inputs["beta"] = torch.randn(rows, dtype=torch.float64)
    if "sink" in inputs and isinstance(inputs["sink"], Tensor):
        inputs["sink"] = torch.randn(rows if per_token_sink else shape.heads, dtype=torch.float64)
    return inputs


GRADCHECK = {
    "every_stage": (SPECS["sink+affine+gate"], Mask(), False),
    "every_stage_sink_per_token": (SPECS["sink+affine+gate"], Mask(), True),
    "both_ways": (SPECS["sink+affine+gate"], Mask(causal=False), False),
    "logn": (AttentionSpec(logit=LogN(), sink="learned", affine=SPECS["affine"].affine), Mask(), True),
    "distance_headwise": (SPECS["scale_invariant+sink+affine+headwise"], Mask(), True),
    "alibi": (AttentionSpec(logit=Alibi(), sink="learned", gate="headwise"), Mask(), False),
    "window": (SPECS["sink+affine+gate"], Mask(window=2), True),
    "curve": (CURVES["softcap+every_stage"], Mask(), True),
    "curve_of_many_keys": (CURVES["softcap+logn+gated"], Mask(causal=False, window=2, window_after=1), True),
    "pairs": (
        CURVES["softcap+every_stage"],
        Mask(allowed=torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]) > 0),
        True,
    ),
}


@pytest.mark.parametrize(
    ("case", "impl"),
    [(case, impl) for case in GRADCHECK for impl in ("reference", "blocked")]
    + [(case, "sdpa") for case in ("every_stage", "every_stage_sink_per_token", "both_ways", "logn")],
)
def test_gradients_are_those_of_finite_differences(case, impl):
    spec, mask, per_token_sink = GRADCHECK[case]
    inputs = _tiny(spec, per_token_sink)
    if case in ("curve", "curve_of_many_keys", "pairs"):
        inputs = _tiny(spec, per_token_sink, Shape(1, 2, 1, 3, 4, 2, 3))
        inputs["sink"] = torch.randn(1, 2, 3, dtype=torch.float64)
        inputs["bias"] = torch.randn({"curve": (3, 4), "pairs": (2, 3, 1)}.get(case, (1, 2, 3, 4)), dtype=torch.float64)
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor)}
    assert leaves.keys() >= {"q", "k", "v", "sink"}

    def function(*tensors: Tensor) -> Tensor:
        return attention(**(inputs | dict(zip(leaves, tensors, strict=True))), mask=mask, impl=impl)

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))


def _by_hand(inputs: dict, sees, distance) -> list:
    """y[b][h][i][d] in plain Python floats, from the four formulas and nothing else of the package."""
    q, k, v = (inputs[name].tolist() for name in ("q", "k", "v"))
    optional = {n: inputs[n].tolist() if isinstance(inputs.get(n), Tensor) else inputs.get(n) for n in inputs}
    batch, heads, queries, dim = inputs["q"].shape
    kv_heads, keys = inputs["k"].shape[1:3]
    logits = inputs["logit"] if isinstance(inputs["logit"], tuple) else (inputs["logit"],)
    bias = inputs["bias"].expand(batch, heads, queries, keys).tolist() if "bias" in inputs else None
    y = []
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            for i in range(queries):
                visible = [j for j in range(keys) if sees(b, i, j)]
                exps = {}
                for j in visible:
                    s = sum(q[b][h][i][c] * k[b][kv][j][c] for c in range(dim)) / math.sqrt(dim)
                    t = distance(b, i, j)
                    for logit in sorted(logits, key=lambda logit: not isinstance(logit, SoftCap)):
                        if isinstance(logit, SoftCap):
                            s = logit.cap * math.tanh(s / logit.cap)
                        elif isinstance(logit, ScaleInvariant):
                            s = math.sqrt(1 + 2 * math.log(1 + t / logit.tau)) * s - 2 * math.log(1 + t / logit.tau)
                        elif isinstance(logit, LogN):
                            s = math.log(len(visible)) * s
                        elif isinstance(logit, Alibi):
                            s = s - 2 ** (-8 * (h + 1) / heads) * abs(t)
                        elif logit is not None:
                            raise NotImplementedError(f"write the formula of {type(logit).__name__} down here")
                    s = s if bias is None else s + bias[b][h][i][j]
                    exps[j] = math.exp(s)
                total = sum(exps.values())
                if (sink := optional.get("sink")) is not None:
                    total += math.exp(sink[h] if isinstance(sink, list) else sink)
                for d in range(inputs["v"].shape[3]):
                    out = 0.0
                    for j in visible:
                        w = exps[j] / total
                        if "alpha" in optional:
                            w *= optional["alpha"][b][h][i]
                        if "beta" in optional:
                            w += optional["beta"][b][h][i]
                        out += w * v[b][kv][j][d]
                    if "gate" in optional:
                        gate = optional["gate"][b][h][i]
                        out *= gate[d if len(gate) > 1 else 0]
                    y.append(out)
    return y


@pytest.mark.parametrize("masked", ["causal", "window", "documents_and_padding"])
@pytest.mark.parametrize("name", SPECS)
def test_every_variant_equals_plain_loops(name, masked):
    shape = Shape(2, 4, 2, 4, 6, 3)
    inputs = _tiny(SPECS[name], shape=shape)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [5, 5, -1, -1, -1, 5]])
    padding = torch.tensor([[True] * 6, [False, True, True, False, True, True]])
    older = shape.tk - shape.tq
    mask, sees = {
        "causal": (Mask(), lambda b, i, j: j <= i + older),
        "window": (Mask(window=3), lambda b, i, j: i + older - 3 < j <= i + older),
        "documents_and_padding": (
            Mask(documents=documents, padding=padding),
            lambda b, i, j: j <= i + older and documents[b, j] == documents[b, i + older] and bool(padding[b, j]),
        ),
    }[masked]
    expected = torch.tensor(_by_hand(inputs, sees, lambda b, i, j: i + older - j), dtype=torch.float64)
    for impl in ("reference", "auto"):
        y = attention(**inputs, mask=mask, impl=impl)
        torch.testing.assert_close(y, expected.view_as(y), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("masked", ["allowed", "two_sided"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("name", [*CURVES, "sink+affine+gate"])
def test_what_a_call_can_add_equals_plain_loops(name, bias, masked):
    """Curves, biases that hide keys, values of another width, masks of pairs and windows on both sides."""
    shape = Shape(2, 4, 2, 4, 6, 3, 2)
    inputs = _tiny((CURVES | SPECS)[name], shape=shape)
    inputs["bias"] = (x := torch.randn(BIASES[bias](shape), dtype=torch.float64)).masked_fill(x > 1.5, -math.inf)
    older, allowed = shape.tk - shape.tq, torch.rand(2, 1, 4, 6, generator=torch.Generator().manual_seed(1)) > 0.4
    allowed[:, :, :, 0] = True
    mask, sees = {
        "allowed": (Mask(allowed=allowed), lambda b, i, j: j <= i + older and bool(allowed[b, 0, i, j])),
        "two_sided": (
            Mask(causal=False, window=2, window_after=1),
            lambda b, i, j: i + older - 2 < j <= i + older + 1,
        ),
    }[masked]
    if any(part is not None and part.needs_causal for part in scores_of(inputs["logit"])) and not mask.causal:
        with pytest.raises(ValueError, match="needs a causal mask"):
            attention(**inputs, mask=mask)
        return
    y = attention(**inputs, mask=mask, impl="reference")
    expected = torch.tensor(_by_hand(inputs, sees, lambda b, i, j: i + older - j), dtype=torch.float64)
    torch.testing.assert_close(y, expected.view_as(y), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_bias_is_the_additive_mask_of_pytorch(impl):
    inputs = random_inputs(AttentionSpec(), Shape(2, 6, 2, 9, 12, 16), torch.float64, bias=(6, 9, 12))
    del inputs["logit"]
    dy = torch.randn_like(inputs["q"])
    ours = value_and_gradients(lambda **x: attention(**x, mask=Mask(causal=False), impl=impl), inputs, dy)
    theirs = value_and_gradients(
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True), inputs, dy
    )
    _assert_all_close(ours, theirs)


def _lse_gradient_dropped(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, logit: None) -> Tensor:
    """The well-known wrong way: rescale the output of an engine whose log-sum-exp carries no gradient."""
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~torch.ones(q.shape[2], k.shape[2]).tril().bool(), -math.inf)
    z = torch.logsumexp(s, -1).detach()
    return torch.sigmoid(z - sink[:, None])[..., None] * (s.softmax(-1) @ v)


def _deviations_by_name(function, sink: Tensor, dtype: torch.dtype) -> dict[str, bool]:
    inputs = random_inputs(SPECS["sink"], Shape(2, 4, 4, 33, 33, 16), dtype) | {"sink": sink}
    return {d.name: d.within for d in deviations("", inputs, function=function)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_tolerance_rule_catches_a_dropped_lse_gradient(dtype):
    sink = torch.linspace(2, 4, 4)  # around the log-sum-exp of 33 unit logits
    within = _deviations_by_name(_lse_gradient_dropped, sink, dtype)
    assert within["y"]
    assert within["dv"]
    assert not within["dq"]
    assert not within["dk"]


@pytest.mark.parametrize(("error", "within"), [(0.19, True), (0.21, False)])
def test_the_tolerance_rule_allows_twice_the_yardsticks_error(error, within):
    exact, other = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    assert accuracy._deviation("y", error * other, 0.1 * other, exact, rounding=0.0).within == within
    # Also where it is one entry that is wrong, or all of them a little.
    one = torch.zeros_like(exact).index_fill(0, torch.tensor([3]), 1.0)
    assert accuracy._deviation("y", error * one, 0.1 * other, exact, rounding=0.0).within == within
    assert not accuracy._deviation("y", 0.15 * other, 0.1 * one, exact, rounding=0.0).within


def test_the_tolerance_rule_accepts_the_same_maths_done_right():
    """So that the rejection above is due to the missing gradient."""

    def right(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, logit: None) -> Tensor:
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~torch.ones(q.shape[2], k.shape[2]).tril().bool(), -math.inf)
        return torch.sigmoid(torch.logsumexp(s, -1) - sink[:, None])[..., None] * (s.softmax(-1) @ v)

    assert all(_deviations_by_name(right, torch.linspace(2, 4, 4), torch.float32).values())


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_gradients_of_single_samples_by_torch_func(impl):
    q, k, v = torch.randn(3, 1, 4, 6, 8), torch.randn(3, 1, 2, 6, 8), torch.randn(3, 1, 2, 6, 8)

    def loss(q, k, v):
        return attention(q, k, v, Mask(window=3), sink=0.5, impl=impl).square().sum()

    together = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(sum(loss(*sample) for sample in zip(*leaves, strict=True)), leaves)
    torch.testing.assert_close(together, expected)


def test_forward_mode_derivatives_are_those_of_the_backward():
    q, k, v = (torch.randn(1, heads, 6, 8, dtype=torch.float64) for heads in (4, 2, 2))
    alpha, sink = torch.rand(1, 4, 6, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def y(q, k, v, alpha, sink):
        return attention(q, k, v, Mask(window=3), sink=sink, alpha=alpha, beta=alpha / 3)

    inputs = (q, k, v, alpha, sink)
    for ahead, back in zip(*(jacobian(y, (0, 1, 2, 3, 4))(*inputs) for jacobian in (jacfwd, jacrev)), strict=True):
        torch.testing.assert_close(ahead, back)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    _, expected = jvp(y, inputs, tangents)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(inputs, tangents, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(y(*duals)).tangent, expected)


def test_lengths_of_single_samples_by_torch_func():
    q, k, v = torch.randn(3, 1, 4, 2, 8), torch.randn(3, 1, 2, 6, 8), torch.randn(3, 1, 2, 6, 8)
    lengths = torch.tensor([[6], [1], [4]])
    together = torch.vmap(lambda q, k, v, n: attention(q, k, v, Mask(lengths=n)))(q, k, v, lengths)
    each = [attention(*sample, Mask(lengths=n)) for *sample, n in zip(q, k, v, lengths, strict=True)]
    torch.testing.assert_close(together, torch.stack(each))


@pytest.mark.parametrize("impl", ["sdpa", "blocked", "flex"])
def test_what_torch_func_cannot_go_through_says_so(impl):
    q = torch.randn(2, 1, 2, 6, 8)
    with pytest.raises(ValueError, match=rf"^impl='{impl}' cannot run this call: .*torch.func.* reference alone"):
        torch.vmap(lambda x: attention(x, x, x, impl=impl))(q)
