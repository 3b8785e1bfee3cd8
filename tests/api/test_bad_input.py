"""Bad input gets one line that names the argument and what was given; ``explain`` names engines and reasons."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from affine_attn import (
    Affine,
    Alibi,
    AlphaGate,
    AttentionLayer,
    AttentionSpec,
    LogN,
    Mask,
    Rope,
    ScaleInvariant,
    SoftCap,
    attention,
    attention_stats,
    explain,
    variant,
)
from affine_attn.core.spec import ACTIVATIONS
from affine_attn.engines.plan import ENGINES

B, H, KV, T, D = 2, 4, 2, 5, 8
Q, K, V = torch.randn(B, H, T, D), torch.randn(B, KV, T, D), torch.randn(B, KV, T, D)
ROWS = torch.rand(B, H, T)
LAYER, X = AttentionLayer(16, 4), torch.randn(B, T, 16)


def call(**changes) -> Callable:
    return lambda: attention(**({"q": Q, "k": K, "v": V} | changes))


def masked(**options) -> Callable:
    return lambda: attention(Q, K, V, Mask(**options))


def on_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


BAD: dict[str, tuple[Callable, str]] = {
    # q, k, v
    "q_not_a_tensor": (call(q=[1.0]), r"^q must be a Tensor, got list"),
    "v_none": (call(v=None), r"^v must be a Tensor, got NoneType"),
    "v_none_explained": (lambda: explain(Q, K, None), r"^v must be a Tensor, got NoneType"),
    "q_3d": (call(q=Q[0]), r"^q must have 4 dimensions .*got \[4, 5, 8\]"),
    "k_5d": (call(k=K[None]), r"^k must have 4 dimensions .*got \[1, 2, 2, 5, 8\]"),
    "v_2d": (call(v=V[0, 0]), r"^v must have 4 dimensions .*got \[5, 8\]"),
    "nested": (
        call(q=torch.nested.nested_tensor([Q[0].transpose(0, 1)] * 2, layout=torch.jagged).transpose(1, 2)),
        r"^q must not be a nested tensor: .*Mask.packed\(lengths\)",
    ),
    "integers": (call(q=Q.long()), r"^q must be a floating point tensor, got torch.int64"),
    "eight_bits": (call(q=Q.to(torch.float8_e4m3fn)), r"^q must be a floating point tensor, got torch.float8.*16, 32"),
    "mixed_dtypes": (call(v=V.bfloat16()), r"dtype.*torch.float32 for q and torch.bfloat16 for v"),
    "mixed_devices": (call(k=on_meta(K)), r"^k is on meta, q is on cpu"),
    "batches": (call(q=Q[:1]), r"q \[1, 4, 5, 8\] and k \[2, 2, 5, 8\] must agree in batch"),
    "head_dims": (call(q=Q[..., :4]), r"q \[2, 4, 5, 4\] and k \[2, 2, 5, 8\] must agree in .*head_dim"),
    "key_and_value_lengths": (call(v=V[:, :, :4]), r"k and v .*same shape, .*got \[2, 2, 5, 8\] and \[2, 2, 4, 8\]"),
    "heads_do_not_divide": (call(q=Q[:, :3]), r"q has 3 heads, k has 2.*multiple"),
    "no_kv_heads": (call(k=K[:, :0], v=V[:, :0]), r"q has 4 heads, k has 0.*multiple"),
    "no_channels": (
        call(q=Q[..., :0], k=K[..., :0], v=V[..., :0]),
        r"at least one channel per head, got \[2, 4, 5, 0\]",
    ),
    "statistics_too": (lambda: attention_stats(Q, K[0]), r"^k must have 4 dimensions .*got \[2, 5, 8\]"),
    "explain_too": (lambda: explain(Q[0], K, V), r"^q must have 4 dimensions .*got \[4, 5, 8\]"),
    # stages
    "scale": (call(scale="large"), r"scale.*'large'"),
    "logit_name": (call(logit="alibi"), r"^logit must be None or one of ScaleInvariant, LogN, Alibi.*, got 'alibi'"),
    "logit_class": (call(logit=Alibi), r"^logit must be .*got <class"),
    "logit_not_causal": (
        call(logit=ScaleInvariant(), mask=Mask(causal=False)),
        r"^logit ScaleInvariant needs a causal mask, got Mask\(causal=False\)",
    ),
    "scale_true": (call(scale=True), r"^scale must be None or a finite number, got True"),
    "sink_true": (call(sink=True), r"^sink must be None, a number or a Tensor, got True"),
    "scale_endless": (call(scale=10**400), r"^scale must be None or a finite number, got 10000"),
    "sink_endless": (call(sink=10**400), r"^sink must be None, a number or a Tensor, got 10000"),
    "sink_name": (call(sink="learned"), r"sink.*'learned'"),
    "sink_list": (call(sink=[0.0, 1.0]), r"sink.*(list|\[0\.0, 1\.0\])"),
    "sink_per_kv_head": (call(sink=torch.zeros(KV)), r"^sink must have shape \[4\] or \[2, 4, 5\], got \[2\]"),
    "sink_dtype": (call(sink=torch.zeros(H).half()), r"^sink must be torch.float32.*got torch.float16"),
    "sink_device": (call(sink=on_meta(torch.zeros(H))), r"^sink is on meta, q is on cpu"),
    "alpha_number": (call(alpha=0.5), r"^alpha must be a Tensor, got float"),
    "alpha_shape": (call(alpha=ROWS[..., None]), r"^alpha must have shape \[2, 4, 5\], got \[2, 4, 5, 1\]"),
    "alpha_dtype": (call(alpha=ROWS.double()), r"^alpha must be torch.float32.*got torch.float64"),
    "alpha_device": (call(alpha=on_meta(ROWS)), r"^alpha is on meta, q is on cpu"),
    "beta_shape": (call(beta=ROWS[:, :KV]), r"^beta must have shape \[2, 4, 5\], got \[2, 2, 5\]"),
    "beta_dtype": (call(beta=ROWS.long()), r"^beta must be torch.float32.*got torch.int64"),
    "gate_shape": (
        call(gate=Q[..., :3]),
        r"^gate must have shape \[2, 4, 5, 8\] or \[2, 4, 5, 1\], got \[2, 4, 5, 3\]",
    ),
    "gate_of_narrow_values": (
        call(v=V[..., :3], gate=Q),
        r"^gate must have shape \[2, 4, 5, 3\] or \[2, 4, 5, 1\], got \[2, 4, 5, 8\]",
    ),
    "bias_number": (call(bias=0.5), r"^bias must be a Tensor, got float"),
    "bias_shape": (
        call(bias=torch.zeros(KV, T, T)),
        r"^bias must be broadcastable to \[2, 4, 5, 5\], got \[2, 5, 5\]",
    ),
    "bias_5d": (call(bias=torch.zeros(1, 1, 1, T, T)), r"^bias must be broadcastable to .*got \[1, 1, 1, 5, 5\]"),
    "bias_dtype": (call(bias=torch.zeros(T, T).long()), r"^bias must be torch.float32.*got torch.int64"),
    "bias_device": (call(bias=on_meta(torch.zeros(T, T))), r"^bias is on meta, q is on cpu"),
    "two_curves": (call(logit=(SoftCap(), SoftCap(2.0))), r"^logit may have one with a curve and one with coeff"),
    "two_coefficients": (call(logit=(LogN(), Alibi())), r"^logit may have one with a curve and one with coeff"),
    "logit_in_a_tuple": (
        call(logit=(SoftCap(), "alibi")),
        r"^logit must be None or one of .*, got \(SoftCap\(.*'alibi'",
    ),
    "curve_not_causal": (
        call(logit=(SoftCap(), ScaleInvariant()), mask=Mask(causal=False)),
        r"^logit ScaleInvariant needs a causal mask",
    ),
    "softcap": (lambda: SoftCap(0.0), r"SoftCap: cap must be a number > 0, got 0.0"),
    "gate_without_channels": (call(gate=ROWS), r"^gate must have shape .*got \[2, 4, 5\]"),
    "gate_dtype": (call(gate=Q.double()), r"^gate must be torch.float32.*got torch.float64"),
    # masks
    "mask_none": (call(mask=None), r"^mask must be a Mask, got NoneType"),
    "mask_tensor": (call(mask=torch.ones(T, T)), r"^mask must be a Mask, got Tensor"),
    "window_0": (masked(window=0), r"window must be an integer >= 1 .*got 0"),
    "window_minus_1": (masked(window=-1), r"window must be an integer >= 1 .*got -1"),
    "window_past_64_bits": (
        masked(window=2**63),
        r"window must be an integer >= 1 .*got 9223372036854775808; the largest",
    ),
    "window_past_32_bits": (masked(window=2**31), r"window must be an integer >= 1 .*got 2147483648; the largest is"),
    "window_endless": (masked(window=10**30), r"window must be an integer >= 1 .*got 1000000000000000000000000000000;"),
    "window_true": (masked(window=True), r"window must be an integer >= 1 .*got True"),
    "window_float": (masked(window=2.0), r"window must be an integer >= 1 .*got 2.0"),
    "window_not_causal": (masked(window=2, causal=False), r"window needs causal=True, got causal=False"),
    "documents_list": (masked(documents=[[0] * T] * B), r"documents must be a Tensor, got list"),
    "documents_float": (
        masked(documents=torch.zeros(B, T)),
        r"documents must be an? integer tensor, got torch.float32",
    ),
    "documents_shape": (
        masked(documents=torch.zeros(T, dtype=torch.long)),
        r"documents must have shape \[2, 5\], got \[5\]",
    ),
    "padding_integers": (masked(padding=torch.ones(B, T).long()), r"padding must be a bool tensor, got torch.int64"),
    "padding_shape": (masked(padding=torch.ones(B, 4).bool()), r"padding must have shape \[2, 5\], got \[2, 4\]"),
    "padding_device": (masked(padding=on_meta(torch.ones(B, T).bool())), r"padding is on meta, q is on cpu"),
    "lengths_bool": (masked(lengths=torch.ones(B).bool()), r"lengths must be an? integer tensor, got torch.bool"),
    "lengths_shape": (masked(lengths=torch.tensor([5])), r"lengths must have shape \[2\], got \[1\]"),
    "lengths_too_large": (
        masked(lengths=torch.tensor([T, T + 1])),
        r"lengths must be from 0 to the 5 key slots, got \[5, 6\]",
    ),
    "lengths_negative": (
        masked(lengths=torch.tensor([-1, T])),
        r"lengths must be from 0 to the 5 key slots, got \[-1, 5\]",
    ),
    "allowed_floats": (masked(allowed=torch.zeros(T, T)), r"allowed must be a bool tensor, got torch.float32"),
    "allowed_shape": (
        masked(allowed=torch.ones(T, 4).bool()),
        r"mask.allowed must be broadcastable to \[2, 4, 5, 5\], got \[5, 4\]",
    ),
    "allowed_device": (masked(allowed=on_meta(torch.ones(T, T).bool())), r"allowed is on meta, q is on cpu"),
    "window_after_causal": (masked(window_after=2), r"window_after needs causal=False"),
    "window_after_minus_1": (masked(causal=False, window_after=-1), r"window_after must be an integer >= 0, got -1"),
    "causal_tensor": (lambda: Mask(torch.ones(B, T).bool()), r"causal must be True or False, got Tensor"),
    "causal_none": (masked(causal=None), r"causal must be True or False, got NoneType"),
    # engines
    "impl_list": (call(impl=["sdpa"]), r"^impl must be one of .*, got \['sdpa'\]"),
    "unknown_impl": (call(impl="flash"), r"^impl must be one of \['auto', .*'reference'.*\], got 'flash'"),
    "unknown_impl_explained": (lambda: explain(Q, K, V, impl="flash"), r"^impl must be one of .*got 'flash'"),
    "sdpa_curve": (call(impl="sdpa", logit=SoftCap()), r"^impl='sdpa' cannot run this call: .*SoftCap curve"),
    "sdpa_empty_rows": (
        call(impl="sdpa", k=K[:, :, :3], v=V[:, :, :3]),
        r"^impl='sdpa' cannot .*more queries than keys",
    ),
    "flex_backward": (
        call(impl="flex", q=Q.clone().requires_grad_()),
        r"^impl='flex' cannot run this call: .*no backward on the CPU",
    ),
    "machine": (lambda: explain(Q, K, V, on="sm75"), r"^on must be None or one of \['cpu', 'sm80', .*got 'sm75'"),
    # specs
    "tau_0": (lambda: ScaleInvariant(tau=0.0), r"tau must be a number > 0, got 0"),
    "tau_negative": (lambda: ScaleInvariant(tau=-1.0), r"tau must be a number > 0, got -1"),
    "tau_nan": (lambda: ScaleInvariant(tau=float("nan")), r"tau must be a number > 0, got nan"),
    "tau_text": (lambda: ScaleInvariant(tau="3"), r"tau must be a number > 0, got '3'"),
    "tau_tensor": (lambda: ScaleInvariant(tau=torch.tensor(3.0)), r"tau must be a number > 0, got tensor"),
    "logn_length": (lambda: LogN(length=1), r"length must be an integer > 1, got 1"),
    "phi": (lambda: Affine(phi="relu"), r"phi must be one of \['linear_clipping', 'sigmoid'.*\], got 'relu'"),
    "logn_length_endless": (lambda: LogN(length=10**30), r"length must be an integer > 1, got 1000.*; the largest is"),
    "tau_endless": (lambda: ScaleInvariant(tau=10**400), r"tau must be a number > 0, got 10000"),
    "affine_length_endless": (lambda: Affine(length=10**30), r"length must be an integer >= 0 or 'keys', got 1000.*;"),
    "affine_length": (lambda: Affine(length=-1), r"length must be an integer >= 0 or 'keys', got -1"),
    "phi_of_all": (lambda: Affine(phi="softmax"), r"^Affine: phi must map each number to one, which 'softmax' does"),
    "phi_of_some": (lambda: Affine(phi="log"), r"^Affine: phi must map each number to one, which 'log' does not"),
    "logn_length_huge": (lambda: LogN(length=2**63), r"length must be an integer > 1, got 9223372036854775808"),
    "affine_start_huge": (lambda: Affine(start=10**400), r"start must be a finite number, got 1000"),
    "sink_huge": (lambda: AttentionSpec(sink=10**400), r"sink must be None, a number or 'learned', got 1000"),
    "variant_twice": (lambda: variant("sink+affine+sink"), r"'sink\+affine\+sink': 'sink' is given more than once"),
    "affine_length_true": (lambda: Affine(length=True), r"length must be an integer >= 0 or 'keys', got True"),
    "affine_length_name": (lambda: Affine(length="visible"), r"length must be .*'keys', got 'visible'"),
    "momentum": (lambda: Affine(momentum=1.0), r"momentum must be a number in \[0, 1\), got 1.0"),
    "momentum_text": (lambda: Affine(momentum="0.9"), r"momentum must be a number in \[0, 1\), got '0.9'"),
    "momentum_not_json": (
        lambda: Affine(momentum=np.float32(0.9)),
        r"momentum must be a number in \[0, 1\), got np.float32",
    ),
    "start_nan": (lambda: Affine(start=float("nan")), r"start must be a finite number, got nan"),
    "start_none": (lambda: Affine(start=None), r"start must be a finite number, got None"),
    "per_head_text": (lambda: Affine(per_head="no"), r"per_head must be True or False, got 'no'"),
    "beta_number": (lambda: Affine(beta=0.5), r"beta must be True or False, got 0.5"),
    "alpha_range_none": (lambda: Affine(alpha_range=None), r"alpha_range must be a number > 0, got None"),
    "alpha_range_inf": (lambda: Affine(alpha_range=float("inf")), r"alpha_range must be a number > 0, got inf"),
    "alpha_range": (lambda: Affine(alpha_range=0.0), r"alpha_range must be a number > 0, got 0"),
    "spec_logit": (lambda: AttentionSpec(logit="alibi"), r"logit must be None or one of .*Alibi.*, got 'alibi'"),
    "spec_sink_name": (lambda: AttentionSpec(sink="fixed"), r"sink must be None, a number or 'learned', got 'fixed'"),
    "spec_sink_endless": (lambda: AttentionSpec(sink=10**400), r"sink must be None, a number or 'learned', got 10000"),
    "spec_sink_list": (lambda: AttentionSpec(sink=[0.0]), r"sink must be None, a number or 'learned', got \[0.0\]"),
    "spec_affine": (lambda: AttentionSpec(affine=True), r"affine must be None or Affine\(...\), got True"),
    "spec_gate": (
        lambda: AttentionSpec(gate="sigmoid"),
        r"gate must be None, a number or one of \['learned', 'elementwise', 'headwise'.*\], got 'sigmoid'",
    ),
    "spec_gate_infinite": (lambda: AttentionSpec(gate=float("inf")), r"gate must be None, a number or .*, got inf"),
    "dict_entry": (lambda: AttentionSpec.from_dict({"sinks": 0.0}), r"unknown entries \['sinks'\].*sink"),
    "dict_affine_entry": (lambda: AttentionSpec.from_dict({"affine": {"lenght": 4}}), r"(?=.*lenght)(?=.*length)"),
    "dict_logit_kind": (lambda: AttentionSpec.from_dict({"logit": {"kind": "alibbi"}}), r"logit.*alibi.*'alibbi'"),
    "dict_logit_entry": (
        lambda: AttentionSpec.from_dict({"logit": {"kind": "scale_invariant", "tua": 3.0}}),
        r"(?=.*tua)(?=.*tau)",
    ),
    "dict_logit_kind_list": (lambda: AttentionSpec.from_dict({"logit": {"kind": []}}), r"logit.*alibi.*\[\]"),
    "dict_name": (lambda: AttentionSpec.from_dict("affine"), r"a dict with entries among .*'gate'.*, got 'affine'"),
    "dict_none": (lambda: AttentionSpec.from_dict(None), r"a dict with entries among .*, got None"),
    "dict_logit_name": (lambda: AttentionSpec.from_dict({"logit": "alibi"}), r"logit.*'alibi'"),
    "variant_nearly": (lambda: variant("afine"), r"'afine'.*did you mean 'affine'.*scale_invariant"),
    "variant_activation": (
        lambda: variant("linear_clipping"),
        r"an activation of alpha, .*Affine\(phi='linear_clipping'\)",
    ),
    "variant_part": (lambda: variant("sink+afine"), r"'afine'.*did you mean 'affine'"),
    "variant_parts": (lambda: variant("sink+off_by_one"), r"'sink\+off_by_one': 'off_by_one' has another sink"),
    "variant_unknown": (lambda: variant("xyz"), r"'xyz'.*affine.*scale_invariant"),
    "variant_spec": (lambda: variant(AttentionSpec()), r"name must be a str, got AttentionSpec"),
    # layers
    "layer_variant": (lambda: AttentionLayer(16, 4, attention="afine"), r"'afine'.*did you mean 'affine'"),
    "layer_attention_none": (lambda: AttentionLayer(16, 4, attention=None), r"attention.*None"),
    "layer_kv_heads": (lambda: AttentionLayer(16, 4, 3), r"heads \(4\) must be a multiple of kv_heads \(3\)"),
    "layer_no_heads": (lambda: AttentionLayer(16, 0), r"AttentionLayer: heads must be an integer >= 1, got 0"),
    "layer_no_kv_heads": (lambda: AttentionLayer(16, 4, 0), r"kv_heads must be an integer >= 1, got 0"),
    "layer_half_a_head": (lambda: AttentionLayer(16, 2.0), r"heads must be an integer >= 1, got 2.0"),
    "layer_no_dim": (lambda: AttentionLayer(0, 1), r"AttentionLayer: dim must be an integer >= 1, got 0"),
    "layer_head_dim": (lambda: AttentionLayer(16, 4, head_dim=-2), r"head_dim must be an integer >= 1, got -2"),
    "layer_idx": (lambda: AttentionLayer(16, 4, layer_idx=-1), r"layer_idx must be an integer >= 0, got -1"),
    "gate_no_heads": (lambda: AlphaGate(16, 0), r"AlphaGate: heads must be an integer >= 1, got 0"),
    "layer_dim": (lambda: AttentionLayer(16, 3), r"dim \(16\) must be a multiple of heads \(3\)"),
    "layer_odd_head_dim_with_rope": (lambda: AttentionLayer(12, 4), r"head_dim.*3"),
    "layer_cache_without_positions": (
        lambda: AttentionLayer(16, 4)(torch.randn(1, 2, 16), cache=object()),
        r"positions must be given together with a cache",
    ),
    "layer_rope": (lambda: AttentionLayer(16, 4, rope="p_rope"), r"rope must be a Rope or None, got 'p_rope'"),
    "layer_one_sequence": (lambda: LAYER(X[0]), r"x must be \[batch, tokens, dim\], got \[5, 16\]"),
    "layer_mask_none": (lambda: LAYER(X, None), r"mask must be a Mask, got NoneType"),
    "layer_mask_tensor": (lambda: LAYER(X, torch.ones(T, T)), r"mask must be a Mask, got Tensor"),
    "layer_padding": (lambda: LAYER(X, Mask(padding=torch.ones(B, 4).bool())), r"padding must have shape \[2, 5\]"),
    "layer_lengths_as_padding": (
        lambda: LAYER(X, Mask(lengths=torch.tensor([T, 3]))),
        r"mask.lengths counts filled slots of a cache; without one give mask.padding",
    ),
    "layer_one_position": (
        lambda: LAYER(X, positions=torch.zeros(B, 1).long()),
        r"positions must be \[B or 1, T\] of x, got \[2, 1\]",
    ),
    "layer_positions": (lambda: LAYER(X, positions=torch.arange(6)[None]), r"positions must be .*got \[1, 6\]"),
    "gate_x": (lambda: AlphaGate(16, 4)(X[0]), r"AlphaGate: x must be \[batch, tokens, 16\], got \[5, 16\]"),
    "gate_width": (lambda: AlphaGate(8, 4)(X), r"AlphaGate: x must be \[batch, tokens, 8\], got \[2, 5, 16\]"),
    "gate_valid": (
        lambda: AlphaGate(16, 4)(X, torch.ones(1, T).bool()),
        r"AlphaGate: valid must be \[B, T\] of x, \[2, 5\], got \[1, 5\]",
    ),
    "gate_affine": (lambda: AlphaGate(16, 4, variant("softmax").affine), r"affine must be Affine\(...\), got None"),
    "rope_theta_text": (lambda: Rope(theta="1e4"), r"theta must be a number > 0, got '1e4'"),
    "rope_kind": (lambda: Rope(kind="yarn"), r"kind must be 'rope', 'p_rope' or 'p_rope_top', got 'yarn'"),
    "rope_theta": (lambda: Rope(theta=0.0), r"theta must be a number > 0, got 0"),
    "rope_slowest_text": (lambda: Rope(kind="p_rope", slowest="64"), r"slowest must be at least 1 position .*, got 64"),
    "rope_slowest": (
        lambda: Rope(kind="p_rope", slowest=0.0),
        r"slowest must be at least 1 position per radian, got 0.0",
    ),
    "rope_p": (lambda: Rope(kind="p_rope_top", p=1.5), r"p must be a number in \(0, 1\], got 1.5"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_that_names_it(case, monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "softmax", lambda x: x.softmax(-1).sum())
    monkeypatch.setitem(ACTIVATIONS, "log", torch.log)
    function, pattern = BAD[case]
    with pytest.raises(ValueError, match=pattern) as error:
        function()
    assert "\n" not in str(error.value)


def test_explain_names_the_engine_that_runs_and_why_the_others_do_not():
    lines = dict(line.split(": ", 1) for line in explain(Q, K, V, logit=SoftCap()).splitlines())
    assert lines["blocked"].startswith("runs this call")
    assert lines["sdpa"] == "cannot, its kernels do not know the SoftCap curve"
    assert lines["reference"] == "could, but blocked is preferred"
    assert lines["triton"] == lines["decode"] == "cannot, Triton kernels need a CUDA device"
    assert list(lines)[: len(ENGINES)] == list(ENGINES)


def test_explain_follows_an_explicit_impl():
    lines = dict(line.split(": ", 1) for line in explain(Q, K, V, impl="reference").splitlines())
    assert lines["reference"].startswith("runs this call")
    assert lines["sdpa"] == "could, but reference was asked for"


def test_explain_agrees_with_what_runs():
    """The engine named by explain is the one attention takes: naming it gives the same bits."""
    for mask in (Mask(), Mask(window=3), Mask(causal=False)):
        chosen = next(line.split(":")[0] for line in explain(Q, K, V, mask).splitlines() if "runs this call" in line)
        assert torch.equal(attention(Q, K, V, mask), attention(Q, K, V, mask, impl=chosen))
