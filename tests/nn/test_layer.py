"""AttentionLayer and Rope: parameters, names, positions, and specs as values."""

import json
import math
import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from affine_attn import VARIANTS, Affine, AttentionLayer, AttentionSpec, LogN, Rope, ScaleInvariant, SoftCap, variant
from affine_attn.core import spec as spec_module
from affine_attn.core.call import checked_call
from affine_attn.core.spec import Coefficients, Logit
from affine_attn.engines.operator import decode_logit, encode_logit
from affine_attn.engines.plan import why_not
from affine_attn.kernels import launch
from affine_attn.nn.rope import rotate
from tests.support.cases import CURVES, SPECS

DIM, HEADS, KV = 24, 4, 2


def _layer(spec: AttentionSpec | str, **options) -> AttentionLayer:
    return AttentionLayer(DIM, HEADS, KV, head_dim=8, attention=spec, init_std=0.3, **options)


OPTIONS = {
    "default": {},
    "bias": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True},
    "no_rope": {"rope": None},
    "p_rope": {"rope": Rope("p_rope")},
    "everything": {"qkv_bias": True, "qk_norm": True, "rope": Rope("p_rope_top")},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_shapes_the_output(name, options):
    """A parameter without a gradient would be one that the forward forgot."""
    layer, x = _layer(SPECS[name], **OPTIONS[options]), torch.randn(2, 7, DIM)
    y = layer(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name


PROJECTIONS = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}


def _published(spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """What each stage adds to a checkpoint."""
    keys: dict[str, tuple[int, ...]] = {}
    if isinstance(spec.logit, LogN):
        keys |= {"logn_scale": (HEADS,)}
    if spec.sink == "learned":
        keys |= {"sinks": (HEADS,)}
    if spec.affine is not None:
        keys |= {"alpha.w_a": (HEADS, DIM), "alpha.alpha_ma": (HEADS,)}
    if spec.gate is not None:
        keys |= {"attn_gate.weight": (HEADS if spec.gate == "headwise" else HEADS * 8, DIM)}
    return keys


@pytest.mark.parametrize("name", SPECS)
def test_state_dict_keys_are_the_published_ones(name):
    state, added = _layer(SPECS[name]).state_dict(), _published(SPECS[name])
    assert set(state) == PROJECTIONS | set(added)
    assert {key: tuple(state[key].shape) for key in added} == added


def test_options_add_their_own_keys():
    state = _layer("softmax", qkv_bias=True, qk_norm=True).state_dict()
    biases = {"q_proj.bias", "k_proj.bias", "v_proj.bias"}
    assert set(state) == PROJECTIONS | biases | {"q_norm.weight", "k_norm.weight"}
    assert state["k_proj.weight"].shape == (KV * 8, DIM)
    assert state["q_norm.weight"].shape == (8,)


def test_initial_values():
    assert torch.equal(_layer("affine").alpha.alpha_ma, torch.zeros(HEADS))
    assert torch.equal(_layer(AttentionSpec(affine=Affine(start=1.0))).alpha.alpha_ma, torch.ones(HEADS))
    # log(n) / log(length) is 1 at the training length.
    scale = _layer(AttentionSpec(logit=LogN(length=512))).logn_scale
    torch.testing.assert_close(scale, torch.full((HEADS,), 1 / math.log(512)))


def test_a_layer_equals_its_formula_written_out():
    """Projections, rotation, stages and the output projection in the order of a Llama block."""
    layer, x = _layer(SPECS["sink+affine+gate"]).eval(), torch.randn(2, 5, DIM)
    layer.alpha.alpha_ma.fill_(0.4)

    def heads(y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, 8)).transpose(1, 2)

    q, k, v = (heads(x @ p.weight.T) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    cos, sin = Rope().table(torch.arange(5), 8)
    k, v = (t.repeat_interleave(2, 1) for t in (rotate(k, cos, sin), v))
    causal = torch.ones(5, 5).tril()
    e = (rotate(q, cos, sin) @ k.mT / math.sqrt(8)).exp() * causal
    p = e / (e.sum(-1, keepdim=True) + layer.sinks.exp()[:, None, None])
    alpha = (0.1 * x @ layer.alpha.w_a.T + 0.5).clamp(0, 1).transpose(1, 2)[..., None]
    w = alpha * p + (0.4 - alpha) / 2048 * causal
    out = (w @ v).transpose(1, 2).flatten(2) * torch.sigmoid(x @ layer.attn_gate.weight.T)
    torch.testing.assert_close(layer(x), out @ layer.o_proj.weight.T, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_a_bfloat16_layer_runs_and_keeps_its_dtype(name):
    layer = _layer(SPECS[name], qk_norm=True).to(torch.bfloat16)
    y = layer(torch.randn(2, 7, DIM, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("shape", [(2, 0, DIM), (0, 3, DIM)])
@pytest.mark.parametrize("name", ["softmax", "affine_gated", "gated_headwise"])
def test_no_tokens_are_an_empty_output(name, shape):
    layer = _layer(SPECS[name])
    y = layer(torch.randn(shape))
    assert y.shape == shape
    y.sum().backward()
    assert not any(p.grad.any() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_a_layer_runs_under_autocast(name, qk_norm, device):
    """Autocast sends norms and projections to different types (on CUDA, norms to float32)."""
    layer, x = _layer(SPECS[name], qk_norm=qk_norm).to(device), torch.randn(2, 7, DIM, device=device)
    exact = layer(x)
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert (y.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_names_join_to_the_stages_of_both():
    both = AttentionSpec(logit=ScaleInvariant(), affine=Affine())
    assert variant("scale_invariant+affine") == variant("affine+scale_invariant") == both
    assert variant("affine+gated") == variant("affine+affine_gated") == variant("affine_gated")
    assert variant("softmax+off_by_one") == variant("off_by_one")


def test_a_softmax_checkpoint_fits_every_variant():
    """What is missing from it is exactly the variant's own."""
    plain = _layer("softmax").state_dict()
    for spec in SPECS.values():
        missing, unexpected = _layer(spec).load_state_dict(plain, strict=False)
        assert (set(missing), unexpected) == (set(_published(spec)), [])


@pytest.mark.parametrize("kind", ["rope", "p_rope", "p_rope_top"])
def test_rotated_scores_depend_on_differences_of_positions(kind):
    q, k = torch.randn(1, 1, 6, 16, dtype=torch.float64), torch.randn(1, 1, 6, 16, dtype=torch.float64)
    scores = []
    for offset in (0, 37):
        table = Rope(kind).table(torch.arange(6) + offset, 16)
        scores.append(rotate(q, *table).double() @ rotate(k, *table).double().mT)
    torch.testing.assert_close(*scores, atol=2e-5, rtol=2e-5)
    unrotated = q @ k.mT
    assert (scores[0] - unrotated).abs().max() > 0.1


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_a_layer_does_not_feel_an_offset_of_all_positions(name):
    layer, x = _layer(name).eval(), torch.randn(1, 6, DIM)
    moved = layer(x, positions=torch.arange(6)[None] + 100)
    torch.testing.assert_close(moved, layer(x), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rope_equals_llama(theta):
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    positions = torch.stack((torch.arange(9), torch.arange(9) + 3000))
    expected = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions))
    cos, sin = Rope(theta=theta).table(positions, 16)
    # Angles near 3000 carry fp32 roundings of 2e-4.
    torch.testing.assert_close((rotate(q, cos, sin), rotate(k, cos, sin)), expected, atol=1e-3, rtol=1e-4)


def test_p_rope_frequencies():
    """Half-truncated: D/4 frequencies from 1 down to 1/1024, then as many zeros."""
    frequencies = Rope("p_rope").frequencies(16)
    torch.testing.assert_close(frequencies[:4], torch.tensor([1, 1024 ** (-1 / 3), 1024 ** (-2 / 3), 1 / 1024]))
    assert torch.equal(frequencies[4:], torch.zeros(4))
    assert Rope("p_rope", slowest=64).frequencies(16)[3] == pytest.approx(1 / 64)


def test_p_rope_top_frequencies():
    """The highest share p of ordinary frequencies; with p = 0.75 at D = 128 the lowest kept one is near 1/1024."""
    frequencies, ordinary = Rope("p_rope_top", p=0.75).frequencies(128), Rope().frequencies(128)
    assert torch.equal(frequencies[:48], ordinary[:48])
    assert torch.equal(frequencies[48:], torch.zeros(16))
    assert 1 / frequencies[47] == pytest.approx(1024, rel=0.2)
    torch.testing.assert_close(ordinary, 10000.0 ** (-torch.arange(0, 128, 2) / 128))


def test_an_unrotated_pair_of_channels_is_left_alone():
    x = torch.randn(1, 1, 5, 16)
    y = rotate(x, *Rope("p_rope").table(torch.arange(5), 16))
    still = [c for half in (0, 8) for c in range(half + 4, half + 8)]
    assert torch.equal(y[..., still], x[..., still])
    assert not torch.equal(y, x)


VALUES = (SPECS | CURVES) | {
    "infinite_sink": AttentionSpec(sink=-math.inf),
    "negative_sink": AttentionSpec(sink=-1.5),
    "keys": AttentionSpec(affine=Affine(length="keys", per_head=False, beta=True, start=1.0, alpha_range=2.0)),
    "tau": AttentionSpec(logit=ScaleInvariant(tau=0.1)),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_spec_is_plain_json_and_back(name):
    spec = VALUES[name]
    text = json.dumps(spec.to_dict(), allow_nan=False)
    assert AttentionSpec.from_dict(json.loads(text)) == spec


@pytest.mark.parametrize("name", VALUES)
def test_a_spec_survives_pickling_and_the_operator_s_string(name):
    spec = VALUES[name]
    assert pickle.loads(pickle.dumps(spec)) == spec
    for part in spec.scores:
        assert decode_logit(encode_logit(part)) == part


@pytest.fixture
def logits(monkeypatch):
    """The logits that are known, of which a test may define more."""
    monkeypatch.setattr(spec_module, "_LOGITS", dict(spec_module._LOGITS))


def test_a_logit_the_kernels_do_not_know_is_never_taken_for_another(logits, monkeypatch):
    class Other(Logit):
        kind = "other"

    # As if Triton ran here: what is asked is the engines' own knowledge.
    monkeypatch.setattr(launch, "INTERPRETED", True)
    q = torch.randn(1, 1, 4, 16)
    known = checked_call(q, q, q)
    for engine in ("decode", "triton"):
        assert why_not(engine, known) is None
        assert "the Other logit" in str(why_not(engine, replace(known, logit=Other())))


def test_a_logit_is_a_class_of_its_own_with_a_name_of_its_own(logits):
    with pytest.raises(TypeError, match="Steeper must derive from Logit itself"):

        class Steeper(LogN):
            kind = "steeper"

    with pytest.raises(TypeError, match="Slopes: the kind 'alibi' is that of Alibi"):

        class Slopes(Logit):
            kind = "alibi"

    # A notebook's cell that is run again.
    for default in (1.0, 2.0):

        @dataclass(frozen=True)
        class Again(Logit):
            strength: float = default
            kind = "again"

    for value in (2.0, 3, 0.5, -1e-9, float("inf")):
        assert decode_logit(encode_logit(Again(value))) == Again(value)
    with pytest.raises(TypeError, match="Nameless needs a kind"):

        class Nameless(Logit):
            pass

    with pytest.raises(ValueError, match="logit must be None or one of ScaleInvariant"):
        AttentionSpec(logit=Logit())


def test_a_logit_of_ones_own_with_a_curve_and_coefficients(logits):
    @dataclass(frozen=True)
    class Cubic(Logit):
        strength: float = 0.1
        kind = "cubic"
        needs_causal = False

        def curve(self, x):
            return x + self.strength * x**3

        def derivative(self, x):
            return 1 + 3 * self.strength * x**2

        def coefficients(self, distance, count, head, heads):
            return Coefficients(None, -distance.abs())

    x, spec = torch.randn(2, 9, DIM), AttentionSpec(logit=Cubic(), sink="learned")
    assert spec.scores == (Cubic(), Cubic())
    layer = _layer(spec)
    y, *others = (layer(x, impl=impl) for impl in ("reference", "auto", "blocked"))
    for other in others:
        torch.testing.assert_close(other, y)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)
    with pytest.raises(TypeError, match="Bent must have both, a curve and its derivative"):

        class Bent(Logit):
            kind = "bent"

            def curve(self, x):
                return x

    with pytest.raises(ValueError, match="one with a curve and one with coefficients"):
        AttentionSpec(logit=(Cubic(), SoftCap()))


def test_the_learned_scale_of_logn_is_there_under_a_curve():
    layer = _layer(AttentionSpec(logit=(SoftCap(5.0), LogN(64))))
    assert layer.logn_scale is not None
    torch.testing.assert_close(layer.logn_scale, torch.full((HEADS,), 1 / math.log(64)))


@pytest.mark.parametrize("value", [True, "3", None])
def test_parameters_of_a_logit_that_no_operator_could_be_told_are_refused(logits, value):
    @dataclass(frozen=True)
    class Other(Logit):
        strength: object = value
        kind = "other"

    with pytest.raises(ValueError, match=r"the parameters of a logit must be int or float, got .*Other"):
        encode_logit(Other())


def test_fields_of_a_logit_that_no_operator_could_be_told_are_refused(logits):
    @dataclass(frozen=True, kw_only=True)
    class Named(Logit):
        strength: float = 1.0
        kind = "named"

    with pytest.raises(ValueError, match="a compiled call needs a logit whose fields are positional, Named has others"):
        decode_logit(encode_logit(Named(strength=5.0)))


def test_a_number_of_numpy_that_is_a_float_is_a_parameter_of_a_logit():
    logit = ScaleInvariant(np.float64(3.0))
    assert decode_logit(encode_logit(logit)) == logit == ScaleInvariant(3.0)


def test_specs_are_hashable_values():
    assert len(set(VALUES.values())) == len(VALUES)
    assert {variant("affine"): 1}[AttentionSpec(affine=Affine())] == 1
    assert replace(variant("affine"), affine=Affine(length=512)) != variant("affine")


def test_specs_cannot_be_changed():
    with pytest.raises(AttributeError):
        variant("affine").sink = 0.0  # pyright: ignore


def test_a_spec_from_an_older_config_has_defaults_for_what_is_missing():
    assert AttentionSpec.from_dict({}) == AttentionSpec()
    assert AttentionSpec.from_dict({"affine": {"length": 512}}).affine == Affine(length=512)


@pytest.mark.parametrize("gate", [0.5, "learned", "headwise_identity", "elementwise_identity"])
def test_gates_that_start_as_one_number(gate):
    """Each scales the output of softmax, JSON keeps it, and what is learned gets a gradient."""
    spec = AttentionSpec(gate=gate)
    layer, plain, x = _layer(spec), _layer(AttentionSpec()), torch.randn(2, 7, DIM)
    plain.load_state_dict(layer.state_dict(), strict=False)
    y = layer(x)
    torch.testing.assert_close(y, plain(x) * (1.0 if str(gate).endswith("identity") else 0.5))
    assert AttentionSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    y.square().sum().backward()
    learned = {name: parameter for name, parameter in layer.named_parameters() if "gate" in name}
    assert set(learned) == {0.5: set(), "learned": {"gate_scale"}}.get(gate, {"attn_gate.weight"})
    assert all(parameter.grad.abs().max() > 0 for parameter in learned.values())
