"""However a sequence is cut into calls, padded or packed, a token's output depends on what it sees and nothing else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from affine_attn import VARIANTS, Affine, AttentionLayer, AttentionSpec, LogN, Mask, ScaleInvariant, attention
from affine_attn.bench.accuracy import Shape, random_inputs
from affine_attn.core.call import checked_call
from affine_attn.engines.plan import why_not
from tests.support.cases import SPECS

DIM, T = 32, 13
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def _short(spec: AttentionSpec) -> AttentionSpec:
    """The spec with a length that the test sequences cross, so that N_i changes along them."""
    affine = spec.affine and replace(spec.affine, length=5)
    return replace(spec, affine=affine, logit=LogN(length=5) if isinstance(spec.logit, LogN) else spec.logit)


def _layer(spec: AttentionSpec, **options) -> AttentionLayer:
    layer = AttentionLayer(DIM, 4, 2, attention=spec, init_std=0.3, **options).eval()
    if layer.alpha is not None:
        layer.alpha.alpha_ma.uniform_(0.2, 0.8)
    return layer


def _cached(layer: AttentionLayer, x: Tensor, sizes: list[int]) -> Tensor:
    cache, start, outputs = DynamicCache(), 0, []
    for size in sizes:
        positions = torch.arange(start, start + size)[None]
        outputs.append(layer(x[:, start : start + size], positions=positions, cache=cache))
        start += size
    return torch.cat(outputs, 1)


CUTS = {"prefill": [T], "chunks": [5, 1, 7], "prefill_then_tokens": [10, 1, 1, 1], "token_by_token": [1] * T}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_however_a_sequence_is_cut_the_output_is_the_same(name, cut):
    layer, x = _layer(_short(SPECS[name])), torch.randn(2, T, DIM)
    torch.testing.assert_close(_cached(layer, x, CUTS[cut]), layer(x), **CLOSE)


@torch.no_grad()
def test_dividing_by_the_keys_of_the_call_depends_on_the_cut():
    """The documented price of length="keys"; the last token has N = n_i in every reading, so it alone agrees."""
    layer, x = _layer(AttentionSpec(affine=Affine(length="keys"))), torch.randn(2, T, DIM)
    whole, pieces = layer(x), _cached(layer, x, CUTS["token_by_token"])
    assert (whole - pieces)[:, :-1].abs().amax(-1).min() > 1e-3
    torch.testing.assert_close(whole[:, -1], pieces[:, -1], **CLOSE)


def _engines(inputs: dict, mask: Mask) -> list[str]:
    """The engines that take this call; blocked and the reference take every one."""
    arguments = dict.fromkeys(("scale", "sink", "alpha", "beta", "gate")) | inputs
    call = checked_call(mask=mask, **arguments)
    return [name for name in ("sdpa", "blocked", "reference") if why_not(name, call) is None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_the_last_token_does_not_change_a_bit_of_earlier_outputs(name, dtype):
    """Bitwise: a beta on future keys, or a sum over the whole sequence taken apart again, would show."""
    inputs = random_inputs(SPECS[name], Shape(2, 4, 2, 40, 40, 32), dtype)
    changed = {n: x.clone() if isinstance(x, Tensor) else x for n, x in inputs.items()}
    for argument in {"q", "k", "v", "alpha", "beta", "gate"} & inputs.keys():
        changed[argument][:, :, -1] += 3
    for impl in _engines(inputs, Mask()):
        before, after = (attention(**x, impl=impl) for x in (inputs, changed))
        assert torch.equal(before[:, :, :-1], after[:, :, :-1]), impl
        assert not torch.equal(before[:, :, -1], after[:, :, -1]), impl


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_the_layer_is_causal_to_the_bit(name):
    layer, x = _layer(_short(SPECS[name])), torch.randn(2, T, DIM)
    before = layer(x)
    x[:, -1] += 1
    assert torch.equal(before[:, :-1], layer(x)[:, :-1])


def _value_and_parameter_gradients(layer: AttentionLayer, run: Callable[[], Tensor], dy: Tensor) -> list[Tensor]:
    y = run()
    return [y, *torch.autograd.grad(y, list(layer.parameters()), dy)]


@pytest.mark.parametrize("rope_restarts", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_packed_documents_equal_separate_calls(name, rope_restarts):
    """RoPE sees differences only, so positions may restart in each document or run on."""
    layer, lengths = _layer(_short(SPECS[name])), [6, 1, 9]
    x, dy = torch.randn(1, sum(lengths), DIM), torch.randn(1, sum(lengths), DIM)
    documents = torch.repeat_interleave(torch.tensor([7, -2, 3]), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None] if rope_restarts else None
    mask = Mask(documents=documents)
    packed = _value_and_parameter_gradients(layer, lambda: layer(x, mask, positions), dy)
    apart = _value_and_parameter_gradients(layer, lambda: torch.cat([layer(s) for s in x.split(lengths, 1)], 1), dy)
    for a, b in zip(packed, apart, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_padding_changes_nothing_for_real_tokens(name, side):
    layer, real, pads = _layer(_short(SPECS[name])), torch.randn(1, 9, DIM), 4
    other = torch.randn(1, 9 + pads, DIM)  # a full row, so that rows of the batch differ
    junk = torch.randn(1, pads, DIM)
    row = torch.cat((junk, real) if side == "left" else (real, junk), 1)
    padding = torch.ones(2, 9 + pads, dtype=torch.bool)
    padding[0, :pads] = side == "right"
    padding[0, 9:] = side == "left"
    y = layer(torch.cat((row, other)), Mask(padding=padding))
    torch.testing.assert_close(y[:1][padding[:1]][None], layer(real), **CLOSE)
    torch.testing.assert_close(y[1:], layer(other), **CLOSE)


@pytest.mark.parametrize("impl", ["blocked", "reference"])
@pytest.mark.parametrize("name", SPECS)
def test_a_static_cache_with_nan_in_unfilled_slots_equals_the_dense_call(name, impl):
    spec, tq, slots = SPECS[name], 3, 12
    shape = Shape(3, 4, 2, tq, slots, 16)
    inputs = random_inputs(spec, shape)
    lengths = torch.tensor([12, 7, 3])
    for b, length in enumerate(lengths):
        for cached in ("k", "v"):
            inputs[cached][b, :, length:] = float("nan")
    y = attention(**inputs, mask=Mask(lengths=lengths), impl=impl)
    for b, length in enumerate(lengths.tolist()):
        row = {name: x[b : b + 1] if isinstance(x, Tensor) and x.ndim > 1 else x for name, x in inputs.items()}
        row |= {name: row[name][:, :, :length] for name in ("k", "v")}
        torch.testing.assert_close(y[b : b + 1], attention(**row, impl="reference"), **CLOSE)


BAD = 6  # the key or value that is not finite
# A mask, and which queries cannot see key BAD under it (of T = 10 queries and keys).
INVISIBLE: dict[str, tuple[Mask, list[int]]] = {
    "future": (Mask(), [0, 1, 2, 3, 4, 5]),
    "padded": (Mask(padding=torch.arange(10)[None] != BAD), list(range(10))),
    "padded_both_ways": (Mask(causal=False, padding=torch.arange(10)[None] != BAD), list(range(10))),
    "other_document": (Mask(documents=torch.arange(10)[None] // 5), [0, 1, 2, 3, 4, 5]),
    "older_document": (Mask(documents=torch.arange(10)[None] // 8), [0, 1, 2, 3, 4, 5, 8, 9]),
    "outside_window": (Mask(window=2), [0, 1, 2, 3, 4, 5, 8, 9]),
    "unfilled_slot": (Mask(lengths=torch.tensor([6])), list(range(10))),
}
EVERY_STAGE = AttentionSpec(sink="learned", affine=Affine(), gate="elementwise")
DISTANCE = replace(EVERY_STAGE, logit=ScaleInvariant())
NOT_FINITE = [float("inf"), -float("inf"), float("nan")]


def test_the_stock_engine_is_among_those_tested_for_leaks():
    inputs = random_inputs(EVERY_STAGE, Shape(1, 4, 2, 10, 10, 8))
    assert "sdpa" in _engines(inputs, INVISIBLE["future"][0])


def _on_rows(inputs: dict, mask: Mask, rows: list[int], impl: str) -> list[Tensor]:
    """y of these rows, and every gradient of a loss over these rows only."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor)}
    y = attention(**(inputs | leaves), mask=mask, impl=impl)[:, :, rows]
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), list(leaves.values()))]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(
    ("where", "spec"),
    [(where, EVERY_STAGE) for where in INVISIBLE]
    + [(where, DISTANCE) for where, (mask, _) in INVISIBLE.items() if mask.causal],
    ids=lambda x: x if isinstance(x, str) else "distance" if x is DISTANCE else "plain",
)
def test_an_invisible_inf_or_nan_changes_neither_y_nor_gradients(where, spec, value):
    mask, rows = INVISIBLE[where]
    inputs = random_inputs(spec, Shape(1, 4, 2, 10, 10, 8))
    for impl in _engines(inputs, mask):
        clean = _on_rows(inputs, mask, rows, impl)
        for name, channel in (("k", slice(None)), ("v", slice(None)), ("k", slice(0, 1)), ("v", slice(0, 1))):
            spoilt = inputs | {name: inputs[name].clone()}
            spoilt[name][:, :, BAD, channel] = value
            for a, b in zip(clean, _on_rows(spoilt, mask, rows, impl), strict=True):
                torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-5, msg=lambda m, i=impl: f"{i}: {m}")


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("argument", ["k", "v"])
@pytest.mark.parametrize("impl", ["sdpa", "blocked", "reference"])
def test_a_visible_inf_or_nan_is_not_hidden(impl, argument, value):
    inputs = random_inputs(EVERY_STAGE, Shape(1, 4, 2, 10, 10, 8))
    inputs[argument][:, 1, BAD] = value
    y = attention(**inputs, impl=impl)
    assert y[:, 2:, BAD:].isnan().all()  # kv head 1 serves query heads 2 and 3
    assert y[:, :2].isfinite().all()
    assert y[:, :, :BAD].isfinite().all()


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", [4, 10, 40])
@pytest.mark.parametrize("impl", ["sdpa", "blocked", "reference"])
def test_an_inf_or_nan_of_a_query_is_not_hidden(impl, keys, dtype, value):
    inputs = random_inputs(EVERY_STAGE, Shape(1, 4, 2, 4, keys, 8), dtype)
    inputs["q"][:, 1, 2] = value
    inputs["q"].requires_grad_()
    y = attention(**inputs, impl=impl)
    assert y[:, 1, 2].isnan().all()
    assert y.isnan().sum() == 8
    y.sum().backward()
    assert inputs["q"].grad[:, 1, 2].isnan().all()


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("impl", ["blocked", "reference"])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5]], ids=["sees nothing", "is not read"])
def test_an_inf_or_nan_of_a_query_changes_nothing(rows, impl, value):
    """Where it sees no key, or no loss reads its row."""
    inputs = random_inputs(EVERY_STAGE, Shape(1, 4, 2, 6, 6, 8))
    mask = Mask(padding=torch.arange(6)[None] >= 3)
    clean = _on_rows(inputs, mask, rows, impl)
    assert not clean[0][:, :, :3].any()
    inputs["q"][:, 1, 2 if 4 in rows else 4] = value
    torch.testing.assert_close(_on_rows(inputs, mask, rows, impl), clean, rtol=0, atol=0)


@pytest.mark.parametrize("argument", ["k", "v"])
@pytest.mark.parametrize("impl", ["sdpa", "blocked", "reference"])
def test_a_loss_over_a_row_that_sees_nan_has_nan_gradients(impl, argument):
    """Gradient scalers and clippers look for NaN in gradients, not in the loss, to skip a step."""
    inputs = random_inputs(EVERY_STAGE, Shape(1, 4, 2, 10, 10, 8))
    inputs[argument][:, :, BAD] = float("nan")
    inputs["q"].requires_grad_()
    attention(**inputs, impl=impl).sum().backward()
    assert inputs["q"].grad[:, :, BAD:].isnan().all()


# A mask, queries, keys, and the rows that see nothing.
EMPTY_ROWS: dict[str, tuple[Mask, int, int, list[int]]] = {
    "more_queries_than_keys": (Mask(), 9, 4, list(range(5))),
    "many_more_queries_than_keys": (Mask(), 40, 3, list(range(37))),
    "left_padding": (Mask(padding=torch.arange(6)[None] >= 3), 6, 6, [0, 1, 2]),
    "all_padded": (Mask(padding=torch.zeros(1, 6, dtype=torch.bool)), 6, 6, list(range(6))),
    "all_padded_both_ways": (Mask(causal=False, padding=torch.zeros(1, 6, dtype=torch.bool)), 6, 6, list(range(6))),
    "nothing_filled": (Mask(lengths=torch.tensor([0])), 2, 6, [0, 1]),
    "no_keys": (Mask(), 3, 0, [0, 1, 2]),
    "no_queries": (Mask(), 0, 3, []),
    "padded_window": (Mask(window=1, padding=torch.arange(6)[None] != 4), 6, 6, [4]),
}


@pytest.mark.parametrize("sink", [None, -float("inf"), "learned"], ids=str)
@pytest.mark.parametrize("where", EMPTY_ROWS)
def test_a_row_that_sees_nothing_is_zero_with_finite_gradients(where, sink):
    mask, tq, tk, rows = EMPTY_ROWS[where]
    others = [i for i in range(tq) if i not in rows]
    inputs = random_inputs(replace(EVERY_STAGE, sink=sink), Shape(1, 4, 2, tq, tk, 8))
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor)}
    for impl in ["auto", *_engines(inputs, mask)]:
        y = attention(**inputs, mask=mask, impl=impl)
        assert torch.equal(y[:, :, rows], torch.zeros_like(y[:, :, rows])), impl
        assert (y[:, :, others] != 0).all(), impl
        for name, gradient in zip(leaves, torch.autograd.grad(y.sum(), list(leaves.values())), strict=True):
            assert gradient.isfinite().all(), (impl, name)
            # A row that sees nothing passes nothing back.
            if name in ("q", "alpha", "beta", "gate"):
                assert not gradient[:, :, rows].any(), (impl, name)


def test_looking_for_non_finite_keys_copies_none():
    # On the CPU every call looks; a copy of the cache for every token is what decoding would mostly do.
    k = torch.randn(2, 2, 300, 16)
    with torch.profiler.profile(record_shapes=True) as profile:
        attention(torch.randn(2, 4, 1, 16), k, torch.randn_like(k), alpha=torch.rand(2, 4, 1), impl="sdpa")
    copies = [
        event for event in profile.events() if event.name == "aten::copy_" and list(k.shape) in event.input_shapes
    ]
    assert profile.events()
    assert not copies
