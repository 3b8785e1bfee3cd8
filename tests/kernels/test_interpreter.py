"""The Triton kernels (epilogue, distance logits, statistics) in the CPU interpreter, against the float64 reference."""

import pytest
import torch

from affine_attn import Alibi, LogN, Mask, ScaleInvariant, SoftCap, attention, attention_stats
from affine_attn.bench.accuracy import Shape, deviations, random_inputs
from affine_attn.core.call import checked_call
from affine_attn.engines import decode, needs
from affine_attn.engines.plan import Plan, kernels, why_not
from affine_attn.kernels import launch
from affine_attn.kernels.epilogue import launch as epilogue
from tests.conftest import interpreted, rerun_in_interpreter
from tests.support.cases import CASES, CURVES, MASKS, SINKS, SPECS
from tests.support.flash_attn_4 import flash_attn_4
from tests.support.fp32_sums import assert_fp32_sums

__all__ = ["flash_attn_4"]

SHAPES = [
    Shape(2, 4, 2, 100, 100, 32),  # two tiles, the second one part filled
    Shape(1, 3, 1, 70, 133, 80),  # chunked prefill, head dim off the power of two, group of 3
    Shape(1, 2, 2, 140, 140, 64),  # three tiles: sums of later tiles travel
]
# What the epilogue sees: the specs whose logit a stock kernel can compute.
EPILOGUES = {name: spec for name, spec in SPECS.items() if spec.logit is None or isinstance(spec.logit, LogN)}


def test_the_kernels_in_the_interpreter():
    rerun_in_interpreter(__file__)


@interpreted
def test_the_kernels_are_really_used():
    assert launch.INTERPRETED
    q = torch.randn(1, 1, 4, 16)
    assert needs.epilogue(needs.facts_of(checked_call(q, q, q, sink=0.0))) is None


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
@pytest.mark.parametrize("kv_heads", [1, 2], ids="K{}".format)
@pytest.mark.parametrize("name", ["sink+affine+gate", "affine"])
def test_slices_of_columns_of_several_sequences(name, kv_heads):
    """Each slice writes its part of the gradients of row statistics."""
    inputs = random_inputs(SPECS[name], Shape(2, 2, kv_heads, 20, 20, 80))
    assert not [d for d in deviations("sdpa", inputs) if not d.within]


@interpreted
def test_no_two_gradients_share_memory():
    """An operator, which is what a compiled model calls, may not return two views of one tensor."""
    inputs = random_inputs(SPECS["affine"], Shape(1, 2, 2, 70, 70, 64))
    call = checked_call(**inputs)
    attended = torch.randn_like(call.q), torch.randn(call.q.shape[:3])
    output = epilogue.apply_epilogue(call, *attended, epilogue.begin(call))
    rows = epilogue.RowGradients(call, torch.randn_like(call.q), output)
    with rows.incoming():
        pass
    gradients = rows.finish(call.q, call.k, call.v)
    given = [x for x in gradients if x is not None]
    assert len(given) == 5
    assert len({x.untyped_storage().data_ptr() for x in given}) == 5


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
def test_a_failed_backward_leaves_the_incoming_gradient_as_it_was():
    inputs = random_inputs(SPECS["affine"], SHAPES[0])
    inputs["alpha"] -= 0.5
    call = checked_call(**inputs)
    attended = torch.randn_like(call.q), torch.randn(call.q.shape[:3])
    output = epilogue.apply_epilogue(call, *attended, epilogue.begin(call))
    dy = torch.randn_like(call.q)
    before = dy.clone()
    rows = epilogue.RowGradients(call, dy, output)

    def fails() -> None:
        with rows.incoming() as do:
            assert not torch.equal(do, before)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fails()
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
    inputs = random_inputs(SPECS["sink+affine+gate"], Shape(2, 6, 2, 100, 100, 32))
    inputs["sink"] = SINKS[None, :, None].expand(2, 6, 100).clone() if token_sink else SINKS
    assert not [d for d in deviations("sdpa", inputs) if not d.within]


@interpreted
def test_rows_without_keys_and_infinite_sinks():
    shape = Shape(2, 6, 2, 20, 20, 16)
    inputs, mask = (
        random_inputs(SPECS["sink"], shape) | {"sink": SINKS},
        MASKS["left_padding"](shape, torch.device("cpu")),
    )
    assert not [d for d in deviations("triton", inputs, mask) if not d.within]


@interpreted
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_the_fused_epilogue_are_fp32_sums(causal):
    """What a segment's own queries add to dv under a causal mask is kept in 16 bits on the way."""
    assert_fp32_sums(epilogue, torch.float16, causal, is_dv_rounded_once=not causal)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16], ids=["float16"])
def test_half_precision(dtype):
    inputs = random_inputs(SPECS["affine"], SHAPES[0], dtype)
    assert not [d for d in deviations("sdpa", inputs) if not d.within]


@interpreted
@pytest.mark.parametrize("engine", ["sdpa", "triton"])
def test_any_memory_layout_will_do(engine):
    inputs = random_inputs(SPECS["sink+affine+gate"], SHAPES[0])
    for layout in ((0, 2, 1, 3), (3, 2, 0, 1)):
        back = tuple(torch.tensor(layout).argsort().tolist())
        for name in ("q", "k", "v", "gate"):
            inputs[name] = inputs[name].permute(layout).contiguous().permute(back)
        inputs["sink"] = torch.stack((inputs["sink"], -inputs["sink"]), 1)[:, 0]
        assert not [d for d in deviations(engine, inputs) if not d.within]


@interpreted
@pytest.mark.parametrize("engine", ["sdpa", "triton"])
def test_a_gradient_of_y_in_any_memory_layout(engine):
    inputs = random_inputs(SPECS["softmax"], SHAPES[0])
    leaves = [inputs[x].requires_grad_() for x in "qkv"]
    y, dy = attention(**inputs, impl=engine), torch.randn(inputs["q"].shape)
    expected = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    channels_first = dy.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, channels_first), expected)


@interpreted
@pytest.mark.parametrize(
    "mask",
    [
        Mask(window=39),  # hides one pair
        Mask(documents=torch.arange(40).expand(2, 40) // 13 * 2**32),  # ids that 32 bits cannot tell apart
        Mask(padding=(torch.arange(40)[:, None] >= torch.tensor([3, 20])).T),  # tokens first in memory
    ],
    ids=["window", "documents", "padding"],
)
def test_masks_of_any_size_type_and_layout(mask):
    inputs = random_inputs(SPECS["logn"], Shape(2, 2, 1, 40, 40, 16))
    assert not [d for d in deviations("triton", inputs, mask) if not d.within]


# Every logit, mask and combination of stages that the triton engine takes, thinned out: the interpreter is slow.
DISTANCE_CASES = [case for case in CASES if case.dtype == torch.float32 and case.shape.tk < 60][::5]


@interpreted
@pytest.mark.parametrize("case", DISTANCE_CASES, ids=str)
def test_the_triton_engine(case):
    inputs, mask = case.arguments()
    reason = why_not("triton", checked_call(**inputs, mask=mask))
    if reason is not None:
        pytest.skip(reason)
    assert not [d for d in deviations("triton", inputs, mask) if not d.within]


@interpreted
@pytest.mark.parametrize(
    "logit", [ScaleInvariant(), ScaleInvariant(tau=0.5), (SoftCap(2.0), ScaleInvariant(tau=0.5))], ids=str
)
def test_far_tiles_are_as_exact_as_near_ones(logit):
    """Long enough that most tiles take the tensor-core polynomial."""
    inputs = random_inputs(SPECS["softmax"], Shape(1, 2, 1, 400, 400, 32)) | {"logit": logit}
    assert not [d for d in deviations("triton", inputs) if not d.within]


# Fewer queries than keys, and keys of more than one tile.
_CHUNK = Shape(2, 4, 2, 20, 45, 32)


@interpreted
@pytest.mark.parametrize(
    ("logit", "name", "mask", "shape"),
    [
        (SoftCap(2.0), "sink+affine+gate", "window7", _CHUNK),
        ((SoftCap(2.0), ScaleInvariant(3.0)), "sink+affine+gate", "causal", _CHUNK),
        ((SoftCap(2.0), ScaleInvariant(3.0)), "softmax", "documents", _CHUNK),
        ((SoftCap(2.0), Alibi()), "affine", "left_padding", Shape(1, 3, 1, 35, 35, 48)),
        (SoftCap(50.0), "softmax", "causal", _CHUNK),  # most scores are far below it
    ],
    ids=str,
)
def test_scores_with_a_soft_cap(logit, name, mask, shape):
    inputs = random_inputs(SPECS[name], shape) | {"logit": logit}
    visible = MASKS[mask](shape, torch.device("cpu"))
    assert not [d for d in deviations("triton", inputs, visible) if not d.within]


@interpreted
@pytest.mark.parametrize(("cap", "largest"), [(30.0, 1e3), (2.0, 1e6)])
def test_scores_far_above_their_soft_cap(cap, largest):
    inputs = random_inputs(SPECS["softmax"], _CHUNK, largest_logit=largest) | {"logit": SoftCap(cap)}
    assert not [d for d in deviations("triton", inputs) if not d.within]


@interpreted
def test_tanh_of_every_size():
    """Units in the last place are those of the result; 1 itself is never passed."""
    from tests.support.tanh_kernel import tanh_kernel

    size = torch.cat([torch.logspace(-30, 3, 2**14), torch.linspace(0, 12, 2**14 - 2), torch.tensor([0.0, torch.inf])])
    x = torch.stack([size, -size])
    y = torch.empty_like(x)
    tanh_kernel[(1,)](x, y, x.numel())
    exact = x.double().tanh()
    assert torch.all((y - exact).abs() <= 3 * torch.finfo(torch.float32).eps * exact.abs())
    assert torch.all(y.abs() <= 1)
    tanh_kernel[(1,)](torch.full_like(x, torch.nan), y, x.numel())
    assert torch.all(y.isnan())


@interpreted
@pytest.mark.parametrize(
    ("name", "mask", "shape"),
    [
        ("sink+affine+gate", "causal", Shape(1, 3, 1, 35, 35, 32, 64)),
        ("sink+affine+gate", "documents", Shape(2, 4, 2, 20, 45, 48, 16)),
        ("affine", "causal", Shape(2, 4, 2, 20, 70, 16, 80)),  # two slices of columns
        ("scale_invariant", "window7", Shape(2, 4, 2, 37, 37, 64, 24)),
        ("gated_headwise", "left_padding", Shape(2, 4, 2, 37, 37, 32, 5)),
        ("logn", "causal", Shape(2, 4, 2, 20, 45, 32, 40)),
    ],
    ids=str,
)
def test_values_of_another_width_than_keys(name, mask, shape):
    inputs, visible = random_inputs(SPECS[name], shape), MASKS[mask](shape, torch.device("cpu"))
    assert not [d for d in deviations("triton", inputs, visible) if not d.within]


@interpreted
@pytest.mark.parametrize(
    "name", ["softmax", "sink+affine+gate", "scale_invariant", "alibi", "logn", "softcap", "softcap+every_stage"]
)
@pytest.mark.parametrize("mask", ["causal", "none", "window7", "documents_interleaved", "left_padding"])
def test_statistics(name, mask):
    _check_statistics(name, mask, _CHUNK)


@interpreted
@pytest.mark.parametrize("mask", ["causal", "documents_both_ways"])
def test_statistics_of_queries_before_the_first_key(mask):
    _check_statistics("softmax", mask, Shape(2, 4, 2, 12, 7, 32))


def _check_statistics(name, mask, shape):
    spec = (SPECS | CURVES)[name]
    mask = MASKS[mask](shape, torch.device("cpu"))
    inputs = random_inputs(spec, shape)
    if spec.scores.logit is not None and not mask.causal:
        pytest.skip("the kernel's distance logits are causal")
    stages = {x: inputs[x] for x in ("q", "k", "logit", "sink", "alpha", "beta") if x in inputs}
    # float64 takes the path without a kernel.
    exact = {x: t.double() if isinstance(t, torch.Tensor) else t for x, t in stages.items()}
    for measured, expected in zip(
        attention_stats(**stages, mask=mask), attention_stats(**exact, mask=mask), strict=True
    ):
        torch.testing.assert_close(measured, expected, atol=2e-5, rtol=2e-5)


# Decoding: (lengths of a static cache, window); None is a full cache.
CACHES = {"full": (None, None), "lengths": ([50, 37, 2], None), "lengths_window": ([50, 37, 0], 9)}


@interpreted
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "name", ["softmax", "off_by_one", "sink+affine+gate", "affine", "scale_invariant", "alibi", "logn"]
)
@pytest.mark.parametrize("splits", [1, 3])
def test_decoding_over_a_cache(name, cache, queries, splits):
    _check_decoding(SPECS[name], cache, Shape(3, 6, 2, queries, 50, 64), splits)


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("softcap", Shape(3, 6, 2, 1, 50, 64)),
        ("softcap+every_stage", Shape(3, 6, 2, 5, 50, 32, 80)),
        ("softcap+alibi+sink", Shape(3, 6, 2, 2, 50, 48, 16)),
        ("sink+affine+gate", Shape(3, 6, 2, 5, 50, 48, 32)),
        ("affine", Shape(3, 6, 2, 1, 50, 32, 5)),
    ],
    ids=str,
)
def test_decoding_with_a_soft_cap_and_values_of_another_width(name, shape, splits):
    _check_decoding((SPECS | CURVES)[name], "lengths", shape, splits)


def _check_decoding(spec, cache, shape, splits):
    lengths, window = CACHES[cache]
    inputs = random_inputs(spec, shape)
    mask = Mask(window=window, lengths=None if lengths is None else torch.tensor(lengths))
    if lengths is not None:
        for row, length in enumerate(lengths):
            inputs["k"][row, :, length:] = torch.nan  # what lies in unfilled slots changes nothing
            inputs["v"][row, :, length:] = torch.nan
    call = checked_call(**inputs, mask=mask)
    assert why_not("decode", call) is None
    y = decode.forward(call, Plan("decode", None, None, None), splits).y
    torch.testing.assert_close(y, attention(**inputs, mask=mask, impl="reference"), atol=1e-5, rtol=1e-5)


@interpreted
def test_decoding_with_padding_and_documents_by_name():
    shape = Shape(2, 4, 2, 3, 45, 32)
    inputs = random_inputs(SPECS["sink+affine+gate"], shape)
    for mask in ("left_padding", "documents_interleaved", "none"):
        mask = MASKS[mask](shape, torch.device("cpu"))
        y = attention(**inputs, mask=mask, impl="decode")
        torch.testing.assert_close(y, attention(**inputs, mask=mask, impl="reference"), atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("mask", ["window7", "packed", "packed_window", "none"])
def test_fa4_with_the_fused_epilogue(flash_attn_4, mask):
    """Its attention is made up in torch; windows and documents have sums of visible values here alone."""
    shape = Shape(2, 4, 2, 70, 100, 32)
    inputs = random_inputs(SPECS["sink+affine+gate"], shape, torch.float16)
    visible = MASKS[mask](shape, torch.device("cpu"))
    assert not [d for d in deviations("fa4", inputs, visible) if not d.within]


# (document lengths of each row, queries, spec): documents shorter than a tile and longer than a segment of 64 tokens or
# a block of 256, and queries that begin within one.
RESTARTING = {
    "several_segments": ([[70, 3, 1, 86], [1, 1, 8, 150]], 160, "sink+affine+gate"),
    "fewer_queries": ([[100, 3, 57]], 91, "sink+affine+gate"),
    "several_blocks": ([[300, 20, 250]], 570, "affine"),
}


@interpreted
@pytest.mark.parametrize("case", RESTARTING)
def test_sums_of_values_restart_with_each_document(flash_attn_4, case):
    lengths, queries, name = RESTARTING[case]
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    mask = Mask(documents=documents, contiguous=True)
    inputs = random_inputs(SPECS[name], Shape(len(lengths), 2, 1, queries, documents.shape[1], 32), torch.float16)
    facts = needs.facts_of(checked_call(**inputs, mask=mask))
    assert kernels("fa4", facts, needs.NO_SIZES).sums == "restarting"
    assert not [d for d in deviations("fa4", inputs, mask) if not d.within]


# (shape, window, spec): windows that are a multiple of segments, of tiles, of nothing, and longer than all keys; heads
# that share values, and tiles of 16 and 32 tokens.
SLIDING = {
    "two_segments": (Shape(2, 4, 2, 300, 300, 32), 128, "sink+affine+gate"),
    "of_tiles": (Shape(1, 2, 1, 330, 330, 32), 208, "affine"),
    "odd": (Shape(1, 2, 2, 291, 291, 16), 150, "affine"),
    "fewer_queries": (Shape(1, 2, 1, 91, 400, 32), 200, "sink+affine+gate"),
    "longer_than_all": (Shape(1, 2, 1, 70, 100, 32), 640, "affine"),
}


@interpreted
@pytest.mark.parametrize("case", SLIDING)
def test_sums_of_values_slide_along_with_a_window(flash_attn_4, case):
    shape, window, name = SLIDING[case]
    inputs, mask = random_inputs(SPECS[name], shape, torch.float16), Mask(window=window)
    facts = needs.facts_of(checked_call(**inputs, mask=mask))
    assert kernels("fa4", facts, needs.NO_SIZES).sums == "sliding"
    assert not [d for d in deviations("fa4", inputs, mask) if not d.within]


@interpreted
def test_an_infinite_value_is_in_the_sums_of_the_rows_that_see_it_and_in_no_other():
    """Nothing is subtracted, forward or backward."""
    inputs = random_inputs(SPECS["affine"], Shape(1, 2, 1, 400, 400, 32), torch.float16)
    v, dy = inputs["v"], torch.ones_like(inputs["q"])
    v[:, :, 100], dy[:, :, 300] = torch.inf, torch.inf
    call = checked_call(**inputs, mask=Mask(window=130))
    output = epilogue.apply_epilogue(call, torch.zeros_like(dy), torch.zeros(1, 2, 400), epilogue.begin(call))
    assert output.y.isfinite().all((0, 1, 3)).tolist() == [not 100 <= i < 230 for i in range(400)]
    rows = epilogue.RowGradients(call, dy, output)
    with rows.incoming():
        pass
    dv = rows.finish(*(torch.zeros_like(x) for x in (call.q, call.k, call.v))).v
    assert dv.isfinite().all((0, 1, 3)).tolist() == [not 170 < j <= 300 for j in range(400)]
