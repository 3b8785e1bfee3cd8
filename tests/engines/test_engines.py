"""Every engine, every case: y and every gradient within the tolerance rule of the float64 reference."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from affine_attn import Mask, attention, attention_stats
from affine_attn.bench.accuracy import Shape, deviations, random_inputs
from affine_attn.core import call as call_module
from affine_attn.core import pieces
from affine_attn.core.blocks import sums_in_blocks, sums_in_blocks_backward
from affine_attn.core.call import checked_call
from affine_attn.engines import cpu_masks, cpu_scores, flex
from affine_attn.engines.operator import on_its_device
from affine_attn.engines.plan import why_not
from affine_attn.kernels import launch
from affine_attn.kernels.device import cached
from affine_attn.kernels.epilogue import eager
from tests.support.cases import CASES, CURVES, MASKS, PAIR_MASKS, SINKS, SPECS, Case
from tests.support.fp32_sums import assert_fp32_sums


def _arguments(case: Case, device: str = "cpu"):
    return case.arguments(device)


def _runs(engine: str, case: Case, device: str = "cpu") -> bool:
    inputs, mask = _arguments(case, device)
    leaves = {name: x.requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    return why_not(engine, checked_call(mask=mask, **leaves)) is None


def _assert_within(case: Case, engine: str, device: str = "cpu"):
    inputs, mask = _arguments(case, device)
    wrong = [d for d in deviations(engine, inputs, mask) if not d.within]
    assert not wrong, f"{engine} is too far from the reference: {wrong}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_engine_that_accepts_a_case_is_right(case: Case):
    engines = [name for name in ("sdpa", "blocked", "reference") if _runs(name, case)]
    assert engines
    for engine in engines:
        _assert_within(case, engine)


@pytest.mark.parametrize("case", [case for case in CASES if case.bias is not None], ids=str)
def test_a_bias_without_a_gradient_is_a_float_mask_on_the_cpu(case: Case):
    inputs, mask = _arguments(case)
    leaves = {name: x.requires_grad_() if name in ("q", "k", "v") else x for name, x in inputs.items()}
    if (reason := why_not("sdpa", checked_call(mask=mask, **leaves))) is not None:
        known = "curve", "mask.allowed leaves visible", "more queries than keys"
        assert any(what in reason for what in known), reason
        return
    inputs, mask = _arguments(case)
    wrong = [d for d in deviations("sdpa", inputs, mask, constants=("bias",)) if not d.within]
    assert not wrong, f"sdpa is too far from the reference: {wrong}"


@torch.no_grad()
@pytest.mark.parametrize("mask", ["causal", "none", "allowed", "two_sided", "documents_interleaved", "left_padding"])
def test_rows_of_which_a_bias_hides_all_keys_of_a_piece(mask):
    """Cached keys and new ones, in one piece or two; more rows than a block of the float mask has."""
    shape = Shape(2, 4, 2, 150, 260, 16)
    inputs = random_inputs(SPECS["sink"], shape)
    bias = torch.randn(4, 150, 260, generator=torch.Generator().manual_seed(2))
    bias[:, 3::7, :110], bias[:, 5::7, 110:], bias[:, 6::7] = -torch.inf, -torch.inf, -torch.inf
    visible = (MASKS | PAIR_MASKS)[mask](shape, torch.device("cpu"))
    for added in (bias, bias[:, :1], bias[:1, :, :1]):
        y, expected = (attention(**inputs, mask=visible, bias=added, impl=impl) for impl in ("sdpa", "reference"))
        torch.testing.assert_close(y, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("mask", ["causal", "none", "window7", "documents_interleaved", "lengths"])
def test_blocks_of_rows_add_up(mask, monkeypatch):
    """Calls as small as these are one block otherwise."""
    monkeypatch.setattr(call_module, "_SCORES_OF_A_BLOCK", 1)
    shape = Shape(3, 4, 2, 37, 45, 16)
    inputs, mask = random_inputs(SPECS["sink+affine+gate"], shape), MASKS[mask](shape, torch.device("cpu"))
    call = checked_call(**inputs, mask=mask)
    assert len(call.blocks()) == 3
    assert not [d for d in deviations("blocked", inputs, mask) if not d.within]
    visible = call.visible(slice(None), slice(None)).float()
    torch.testing.assert_close(sums_in_blocks(call.v, call), visible @ call.v)
    du = torch.randn(3, 2, 37, 16)
    torch.testing.assert_close(sums_in_blocks_backward(du, call), visible.mT @ du)


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == torch.float32][::7], ids=str)
def test_flex_forward_on_cpu_agrees(case: Case):
    inputs, mask = _arguments(case)
    y = attention(**inputs, mask=mask, impl="flex")
    expected = attention(**inputs, mask=mask, impl="reference")
    torch.testing.assert_close(y, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_mask_whose_tensors_are_changed_in_place(dtype, inference):
    """A static cache that counts its slots in one tensor; FlexAttention's block masks are remembered by mask."""
    inputs = random_inputs(SPECS["affine"], Shape(2, 4, 2, 3, 300, 16))
    with torch.inference_mode(inference):
        mask = Mask(lengths=torch.tensor([5, 6], dtype=dtype))
        for _ in range(3):
            mask.lengths.add_(97)
            expected = attention(**inputs, mask=mask, impl="reference")
            torch.testing.assert_close(attention(**inputs, mask=mask, impl="flex"), expected, atol=2e-5, rtol=2e-5)
            # The blocks themselves, which on the CPU nothing reads.
            built = flex._block_mask(checked_call(**inputs, mask=mask))
            assert built.kv_num_blocks[:, 0, 0].tolist() == [-(-n // 128) for n in mask.lengths.tolist()]


def test_a_mask_that_an_evaluation_saw_first_can_be_trained_with():
    """FlexAttention keeps the block mask for its backward, which takes no tensor of inference mode."""
    call = checked_call(**random_inputs(SPECS["affine"], Shape(1, 2, 2, 9, 9, 16)), mask=Mask(window=4))
    with torch.inference_mode():
        built = flex._block_mask(call)
    assert flex._block_mask(call) is built
    assert not built.kv_indices.is_inference()


@torch.no_grad()
def test_flex_makes_no_pass_over_what_has_no_stage(monkeypatch):
    returned = []
    attend = flex.flex_attention
    monkeypatch.setattr(
        flex, "flex_attention", lambda *x, **options: returned.append(attend(*x, **options)) or returned[0]
    )
    inputs = random_inputs(CURVES["softcap"], Shape(1, 2, 2, 9, 9, 16), torch.bfloat16)
    assert attention(**inputs, impl="flex") is returned[0][0]


def test_flex_is_compiled_although_its_model_is_observed():
    compilations = []
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, _: compilations.append(graph) or graph.forward)
    with torch.compiler.set_stance("force_eager"):
        compiled(torch.ones(2))
        assert not compilations
        with flex._compiled_all_the_same():
            compiled(torch.ones(2))
    assert len(compilations) == 1


@torch.no_grad()
def test_a_fake_call_leaves_nothing_to_real_ones():
    """Sizes are asked for with fake tensors; the mask may be the same, the default one say."""
    with FakeTensorMode():
        fake = torch.empty(1, 2, 9, 16)
        attention(fake, fake, fake, impl="flex")
    q = torch.randn(1, 2, 9, 16)
    torch.testing.assert_close(attention(q, q, q, impl="flex"), attention(q, q, q, impl="reference"))


@pytest.mark.parametrize("engine", ["sdpa", "blocked"])
def test_any_memory_layout_will_do(engine):
    """Token-major views, as a model makes them, and channels that are not neighbours in memory."""
    shape = Shape(2, 4, 2, 30, 30, 32)
    inputs = random_inputs(SPECS["sink+affine+gate"], shape)
    for layout in ((0, 2, 1, 3), (3, 2, 0, 1)):
        back = tuple(torch.tensor(layout).argsort().tolist())
        strided = {
            name: x.permute(layout).contiguous().permute(back) if name in ("q", "k", "v", "gate") else x
            for name, x in inputs.items()
        }
        assert not [d for d in deviations(engine, strided) if not d.within]


@pytest.mark.parametrize("engine", ["sdpa", "blocked", "reference", "flex"])
def test_autocast_rounds_nothing_inside(engine):
    """q, k and v have their dtype already; scores and weights stay in fp32, in the forward and in the backward."""
    inputs = random_inputs(SPECS["sink+affine+gate"], Shape(2, 4, 2, 20, 30, 32))
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = attention(**inputs, impl=engine)
            results.append([y, *attention_stats(**{x: t for x, t in inputs.items() if x not in ("v", "gate")})])
            if engine in ("sdpa", "blocked"):
                for x in leaves:
                    x.requires_grad_()
                results[-1] += torch.autograd.grad(attention(**inputs, impl=engine).sum(), leaves)
    assert all(torch.equal(plain, cast) for plain, cast in zip(*results, strict=True))


@pytest.mark.parametrize("engine", ["sdpa", "blocked", "reference"])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_is_not_positive(engine, scale):
    """A scale on the scores is the same as one on q, whatever its sign."""
    inputs = random_inputs(SPECS["sink+affine+gate"], Shape(2, 4, 2, 20, 30, 32))
    gradients = []
    for q, factor in ((inputs["q"], scale), (inputs["q"] * scale, 1.0)):
        changed = {name: x for name, x in (inputs | {"q": q}).items() if isinstance(x, torch.Tensor)}
        leaves = {name: x.detach().requires_grad_() for name, x in changed.items()}
        y = attention(**leaves, scale=factor, impl=engine)
        gradients.append([y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))])
    (y, dq, *others), (expected, dq_scaled, *expected_others) = gradients
    torch.testing.assert_close([y, dq, *others], [expected, scale * dq_scaled, *expected_others])


@pytest.mark.parametrize("engine", ["sdpa", "blocked"])
@pytest.mark.parametrize("token_sink", [False, True], ids=["per_head", "per_token"])
def test_sinks_of_both_shapes_and_infinite_ones(token_sink, engine):
    shape = Shape(2, 6, 2, 20, 30, 16)
    inputs = random_inputs(SPECS["sink+affine+gate"], shape)
    inputs["sink"] = SINKS[None, :, None].expand(2, 6, 20).clone() if token_sink else SINKS
    assert not [d for d in deviations(engine, inputs) if not d.within]


@torch.no_grad()
@pytest.mark.parametrize("mask", ["all_padded", "left_padding"])
def test_flex_on_rows_without_keys_and_infinite_sinks(mask):
    shape = Shape(2, 6, 2, 20, 20, 16)
    inputs, mask = random_inputs(SPECS["sink"], shape) | {"sink": SINKS}, MASKS[mask](shape, torch.device("cpu"))
    y, expected = (attention(**inputs, mask=mask, impl=impl) for impl in ("flex", "reference"))
    torch.testing.assert_close(y, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_the_torch_epilogue_are_fp32_sums_that_are_rounded_once(causal):
    assert_fp32_sums(eager, torch.bfloat16, causal)


@pytest.mark.parametrize("mask", ["causal", "all_padded", "left_padding", "documents"])
@pytest.mark.parametrize("least", [0.0, -0.5], ids=["not_negative", "negative"])
@pytest.mark.parametrize("sink", [None, SINKS], ids=["plain", "sinks"])
def test_rows_that_alpha_switches_off_or_turns(sink, least, mask, monkeypatch):
    """Where no row of alpha is negative it is in the log-sum-exp that the backward sees: no copy of a long dy."""
    monkeypatch.setattr(eager, "_TILE_ENTRIES", 2048)
    shape = Shape(2, 6, 2, 20, 20, 16)
    inputs = random_inputs(SPECS["affine"], shape) | ({} if sink is None else {"sink": sink})
    inputs["alpha"] = inputs["alpha"] + least
    inputs["alpha"][:, :, ::3] = 0.0
    visible = MASKS[mask](shape, torch.device("cpu"))
    assert not [d for d in deviations("sdpa", inputs, visible) if not d.within]
    call, dy = checked_call(**inputs, mask=visible), torch.randn(2, 6, 20, 16)
    z = torch.zeros(2, 6, 20)
    rows = eager.RowGradients(call, dy, eager.apply_epilogue(call, torch.zeros_like(dy), z))
    assert (rows.do is dy) == (least == 0)


@pytest.mark.parametrize("engine", ["sdpa", "blocked"])
def test_a_second_derivative_is_refused_not_taken_for_zero(engine):
    inputs = random_inputs(SPECS["affine"], Shape(1, 2, 2, 9, 9, 8))
    q = inputs["q"].requires_grad_()
    (dq,) = torch.autograd.grad(attention(**inputs, impl=engine).sum(), q, create_graph=True)
    (exact,) = torch.autograd.grad(attention(**inputs, impl="reference").sum(), q, create_graph=True)
    torch.testing.assert_close(dq, exact)
    exact.square().sum().backward()
    with pytest.raises(RuntimeError, match=r"no second derivative .*impl='reference'"):
        (dq.square().sum() + q.sum()).backward()


@pytest.mark.parametrize("engine", ["sdpa", "blocked"])
def test_batched_gradients_are_refused_with_what_takes_them(engine):
    inputs = random_inputs(SPECS["affine"], Shape(1, 2, 2, 9, 9, 8))
    q, dy = inputs["q"].requires_grad_(), torch.randn(3, *inputs["q"].shape)
    with pytest.raises(RuntimeError, match=r"no batched gradients .*impl='reference'"):
        torch.autograd.grad(attention(**inputs, impl=engine), q, dy, is_grads_batched=True)
    (dq,) = torch.autograd.grad(attention(**inputs, impl="reference"), q, dy, is_grads_batched=True)
    (first,) = torch.autograd.grad(attention(**inputs, impl=engine), q, dy[0])
    torch.testing.assert_close(dq[0], first)


def test_kernels_are_launched_where_the_tensors_are(monkeypatch):
    """Triton launches on the current device, which a model spread over several GPUs leaves at the first."""
    current, attended = [], []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for index in (0, 1):
        call = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda", index)))
        assert on_its_device(lambda _, x: x + 1)(call, 2) == 3
    assert current == [torch.device("cuda", 1)]
    assert on_its_device(attended.append)(checked_call(*torch.randn(3, 1, 1, 4, 8))) is None
    assert len(current) == len(attended) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sink+affine+gate", "logn", "alibi", "scale_invariant+sink+affine+headwise"])
@pytest.mark.parametrize("mask", [mask for mask in MASKS if MASKS[mask](Shape(1, 1, 1, 1, 1, 1), "cpu").causal])
def test_pieces_of_masks_add_up(mask, name, dtype, monkeypatch):
    """Masks as small as these are one piece or two otherwise."""
    monkeypatch.setattr(pieces, "_CALL", 0)
    monkeypatch.setattr(pieces, "_ROWS", (4, 16))
    monkeypatch.setattr(cpu_masks, "_ROWS", 16)
    monkeypatch.setattr(cpu_scores, "ROWS", 16)
    monkeypatch.setattr(cpu_scores, "_SCORES", 16 * 50 * 2)  # some blocks take several heads or sequences, some a head
    tables = pieces._pieces_of_numbers, cpu_masks._table
    for table in tables:
        table.cache_clear()
    shape = Shape(3, 4, 2, 60, 75, 16)
    _assert_within(Case(name, SPECS[name], shape, MASKS[mask], dtype), "sdpa")
    for table in tables:
        table.cache_clear()


@torch.no_grad()
@pytest.mark.parametrize(("queries", "calls"), [(1, [(2, 4)]), (3, [(2, 12), (8, 3)]), (17, [(8, 17), (8, 17)])])
def test_a_group_of_heads_reads_its_keys_once(queries, calls, monkeypatch):
    """On the CPU's operator the heads of a group are more queries of one head, where there are few."""
    operator, seen = torch._scaled_dot_product_flash_attention_for_cpu, []

    def watched(q, *rest, **options):
        seen.append(tuple(q.shape[1:3]))
        return operator(q, *rest, **options)

    inputs = random_inputs(SPECS["affine"], Shape(2, 8, 2, queries, 40, 16))
    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention_for_cpu", watched)
    y = attention(**inputs, impl="sdpa")
    assert seen == calls
    torch.testing.assert_close(y, attention(**inputs, impl="reference"))


def test_threads_share_one_table():
    """A kernel of one thread may still read what another would replace."""
    made = []

    @cached
    def table(size: int) -> object:
        made.append(size)
        time.sleep(0.05)
        return object()

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(table, [3] * 4))) == 1
    assert made == [3]


def test_the_fast_engine_takes_the_plain_cases():
    """The case table would pass with blocked alone; the stock kernels must really be in it."""
    taken = [c for c in CASES if _runs("sdpa", c)]
    assert len(taken) > len(CASES) // 4
    assert {c.name for c in taken} >= {
        "softmax",
        "sink",
        "affine_gated",
        "logn",
        "sink+affine+gate",
        "alibi",
        "scale_invariant",
    }
    masks = {name for name, make in MASKS.items() if any(c.mask is make for c in taken)}
    assert masks == set(MASKS)


def test_every_option_of_the_table_meets_every_stage():
    masks = {make: name for name, make in (MASKS | PAIR_MASKS).items()}

    def options(c: Case) -> set:
        found = {"soft cap": c.spec.scores.curve is not None, "bias": c.bias is not None}
        found["allowed"] = c.mask(c.shape, torch.device("cpu")).allowed is not None
        found["two-sided"] = masks[c.mask] in ("two_sided", "after", "all_both_ways")
        width = c.shape.value_dim
        return {name for name, has_it in found.items() if has_it} | ({(c.shape.head_dim, width)} if width else set())

    def met(c: Case) -> set:
        found = {"sink": c.spec.sink is not None, "affine": c.spec.affine is not None, "gate": c.spec.gate is not None}
        found |= {"groups": c.shape.heads > c.shape.kv_heads, "decoding": c.shape.tq == 1, "training": c.shape.tq > 1}
        found["documents"] = c.mask(c.shape, torch.device("cpu")).documents is not None
        return {name for name, has_it in found.items() if has_it}

    stages = {"sink", "affine", "gate", "groups", "decoding", "training", "documents"}
    every = {"soft cap", "bias", "allowed", "two-sided", (32, 16), (32, 64), (192, 128)}
    pairs = {pair for c in CASES for pair in itertools.product(options(c), met(c) | options(c))}
    missing = set(itertools.product(every, stages | every)) - pairs
    # A call has one width.
    assert not {(a, b) for a, b in missing if not (isinstance(a, tuple) and isinstance(b, tuple))}


# On CUDA the fast engines take 16-bit inputs, so the float32 cases run there in bfloat16.
CUDA_CASES = list(dict.fromkeys(c._replace(dtype=torch.bfloat16) if c.dtype == torch.float32 else c for c in CASES)) + [
    Case(name, spec, Shape(1, 4, 2, 77, 150, head_dim), MASKS["causal"], torch.bfloat16)
    for name, spec in SPECS.items()
    for head_dim in (16, 128, 256)
]
# Several tiles and segments, where the sums of the beta term travel.
CUDA_CASES += [
    Case(name, SPECS[name], shape, MASKS[mask], dtype)
    for name in ("affine", "sink+affine+gate", "scale_invariant+sink+affine+headwise")
    for mask in ("none", "causal", "window7", "documents", "documents_interleaved", "left_padding")
    if mask != "none" or SPECS[name].logit is None
    for shape in (Shape(2, 4, 2, 1100, 1100, 64), Shape(1, 6, 1, 300, 900, 128))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
def test_every_engine_on_cuda(case: Case):
    for engine in ("sdpa", "triton", "blocked"):
        if _runs(engine, case, "cuda"):
            _assert_within(case, engine, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [Shape(2, 6, 2, 300, 300, 64), Shape(1, 4, 4, 200, 333, 128), Shape(1, 4, 2, 1100, 1100, 64)],
    ids=str,
)
@pytest.mark.parametrize("mask", ["causal", "documents"])
@pytest.mark.parametrize("name", ["affine", "alpha_only", "gated_headwise", "scale_invariant+sink+affine+headwise"])
def test_row_factors_of_either_sign_on_cuda(name, mask, shape):
    """Their size is folded into the log-sum-exp, their sign into dy, which comes out as it went in."""
    inputs, visible = _arguments(Case(name, SPECS[name], shape, MASKS[mask], torch.bfloat16), "cuda")
    for signed in ("alpha", "gate"):
        if signed in inputs:
            inputs[signed] = inputs[signed] - 0.5
    assert not [d for d in deviations("auto", inputs, visible) if not d.within]
    leaves = {x: t.requires_grad_() if isinstance(t, torch.Tensor) else t for x, t in inputs.items()}
    dy = torch.randn_like(inputs["q"])
    before = dy.clone()
    attention(**leaves, mask=visible, impl="auto").backward(dy)
    assert torch.equal(dy, before)


def test_more_heads_than_an_axis_of_a_grid_has_programs(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", True)
    q = torch.empty(40_000, 2, 1, 64, dtype=torch.bfloat16, device="meta")
    call = checked_call(q, q, q, alpha=q[..., 0].float(), beta=q[..., 0].float())
    for name in ("sm90 forward", "triton"):
        assert "65535 heads" in str(why_not(name, call))
    assert why_not("decode", call) is None  # its grid has the sequences alone there


FEW_QUERIES = [Shape(3, 6, 2, 1, 300, 64), Shape(3, 6, 2, 5, 300, 80), Shape(3, 6, 2, 16, 300, 128)]
FEW_QUERIES += [Shape(3, 6, 2, 3, 300, 192, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "mask", ["causal", "window7", "lengths", "left_padding", "documents_interleaved", "everything"]
)
@pytest.mark.parametrize("name", [*SPECS, "softcap", "softcap+alibi+sink", "softcap+every_stage"])
def test_decode_on_cuda(name, mask, dtype):
    for shape in FEW_QUERIES:
        inputs, visible = _arguments(Case(name, (SPECS | CURVES)[name], shape, MASKS[mask], dtype), "cuda")
        wrong = [d for d in deviations("decode", inputs, visible, gradients=False) if not d.within]
        assert not wrong, f"{shape}: {wrong}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_CASES[::29], ids=str)
def test_flex_on_cuda(case: Case):
    """A few cases only: every one is a compilation."""
    if _runs("flex", case, "cuda"):
        _assert_within(case, "flex", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["softmax", "affine_gated", "sink", "scale_invariant", "logn", "softcap", "softcap+every_stage"]
)
def test_statistics_on_cuda(name):
    inputs = random_inputs((SPECS | CURVES)[name], Shape(2, 6, 2, 200, 300, 64), torch.bfloat16, "cuda")
    stages = {x: inputs[x] for x in ("q", "k", "logit", "sink", "alpha", "beta") if x in inputs}
    on_cpu = {x: t.cpu() if isinstance(t, torch.Tensor) else t for x, t in stages.items()}
    for measured, expected in zip(attention_stats(**stages), attention_stats(**on_cpu), strict=True):
        torch.testing.assert_close(measured.cpu(), expected, atol=2e-3, rtol=2e-3)
