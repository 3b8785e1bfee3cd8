"""The backward for Hopper: simulated on the CPU, where the kernels of Triton run in its interpreter, and on a GPU."""

from dataclasses import replace

import pytest
import torch

from affine_attn import Mask, attention, explain
from affine_attn.bench.accuracy import Shape, deviations, random_inputs
from affine_attn.core.call import Call, Gradients, Output, checked_call
from affine_attn.engines import needs
from affine_attn.engines.plan import why_not
from affine_attn.kernels.sm90 import backward as sm90_backward
from affine_attn.kernels.sm90 import forward as sm90_forward
from tests.conftest import interpreted, rerun_in_interpreter
from tests.support.cases import SPECS
from tests.support.simulated_hopper import on_hopper, simulate  # noqa: F401, a fixture

ALL_SPECS = {
    **{name: SPECS[name] for name in ("softmax", "sink", "affine", "gated", "gated_headwise", "affine_gated")},
    "sink+affine+headwise": replace(SPECS["affine"], sink="learned", gate="headwise"),
    "alpha alone": replace(SPECS["affine"], affine=replace(SPECS["affine"].affine, beta=False)),
    "logn+affine": replace(SPECS["affine"], logit=SPECS["logn"].logit),
}
SHAPES = [
    Shape(1, 2, 1, 300, 300, 64),  # a group of heads; keys and queries that end within a block
    Shape(2, 3, 1, 140, 140, 128),  # dq in step, not a block late; a tile must leave before the next one comes
    Shape(3, 3, 3, 130, 130, 64),  # more kv heads than are taken at a time
    Shape(1, 1, 1, 1, 1, 64),
]


MEASURED = sm90_backward.LENGTHS


@pytest.fixture(autouse=True)
def _any_length(monkeypatch):
    monkeypatch.setattr(needs, "SM90_LENGTHS", range(1, 1 << 20))


def test_the_kernel_on_the_cpu():
    rerun_in_interpreter(__file__)


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ALL_SPECS)
def test_gradients(name, shape, simulate):  # noqa: F811
    simulate(seed=0)
    # Not in bfloat16, for which Triton's interpreter has no negative numbers.
    inputs = random_inputs(ALL_SPECS[name], shape, torch.float16)
    inputs |= {x: inputs[x] - 0.5 for x in ("alpha", "gate") if x in inputs}
    assert why_not("sm90 backward", checked_call(**inputs)) is None
    assert not [d for d in deviations("sdpa", inputs) if not d.within]


@interpreted
def test_explain_names_it(simulate):  # noqa: F811
    simulate(seed=0)
    inputs = random_inputs(SPECS["affine"], Shape(1, 2, 2, 40, 40, 64), torch.float16)
    inputs["q"].requires_grad_()
    both_ways = Mask(causal=False)
    assert "\nforward: sm90" in explain(**inputs, impl="sdpa")
    assert "\nbackward: sm90" in explain(**inputs, impl="sdpa")
    assert "\nepilogue: fused kernels\n" in explain(**inputs, mask=both_ways, impl="sdpa")
    assert "\nsm90 forward: not taken, kernels for Hopper are causal" in explain(**inputs, mask=both_ways)


def with_negative_rows(shape: Shape) -> tuple[Call, Output]:
    call = checked_call(**random_inputs(SPECS["affine"], shape, torch.float16))
    call = replace(call, alpha=call.alpha - 0.5)
    return call, sm90_forward.forward(call)


@interpreted
def test_any_gradient_of_y(simulate):  # noqa: F811
    """One that lies otherwise in memory, or not at a multiple of 16 bytes, and one number for all. It is left as it
    was."""
    simulate(seed=0)
    call, output = with_negative_rows(Shape(2, 2, 1, 140, 140, 64))
    dy = torch.randn_like(call.q)
    shifted = torch.empty(dy.numel() + 1, dtype=dy.dtype)[1:].view(dy.shape).copy_(dy)
    tokens_first = dy.transpose(1, 2).contiguous().transpose(1, 2)
    expected = sm90_backward.backward(call, dy.clone(), output)
    for given in (shifted, tokens_first):
        assert same(sm90_backward.backward(call, given, output), expected)
        assert torch.equal(given, dy)
    one, all_ones = torch.ones(1, dtype=dy.dtype).expand(dy.shape), torch.ones_like(dy)
    assert same(sm90_backward.backward(call, one, output), sm90_backward.backward(call, all_ones, output))


@interpreted
@pytest.mark.parametrize("name", ["q", "v"])
def test_a_gradient_of_y_that_is_an_input(name, simulate):  # noqa: F811
    """An input's rows may not be negated."""
    simulate(seed=0)
    call, output = with_negative_rows(Shape(1, 2, 2, 140, 140, 64))
    dy = getattr(call, name)
    expected = sm90_backward.backward(call, dy.clone(), output)
    assert same(sm90_backward.backward(call, dy, output), expected)


@interpreted
def test_a_failed_launch_leaves_the_gradient_of_y_as_it_was(simulate, monkeypatch):  # noqa: F811
    simulate(seed=0)
    call, output = with_negative_rows(Shape(1, 2, 2, 40, 40, 64))
    dy = torch.randn_like(call.q)
    before = dy.clone()

    def fails(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sm90_backward, "launch", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        sm90_backward.backward(call, dy, output)
    assert torch.equal(dy, before)


@interpreted
def test_types_and_strides_of_stages(simulate):  # noqa: F811
    """A gate in fp32, alpha and beta in the type of q, a sink for every token, and one kv head."""
    simulate(seed=0)
    spec = replace(ALL_SPECS["sink+affine+headwise"], gate="elementwise")
    inputs = random_inputs(spec, Shape(2, 2, 1, 70, 70, 64), torch.float16)
    inputs |= {x: inputs[x].half() for x in ("alpha", "beta")} | {"gate": inputs["gate"].float()}
    inputs["sink"] = torch.randn(2, 2, 70, 3)[..., 1]
    assert not [d for d in deviations("sdpa", inputs) if not d.within]
    headwise = inputs | {"gate": torch.rand(2, 70, 2, dtype=torch.float16).transpose(1, 2)[..., None] - 0.5}
    assert not [d for d in deviations("sdpa", headwise) if not d.within]


@interpreted
@pytest.mark.parametrize("gate", [None, "headwise", "elementwise"])
def test_beta_without_alpha(gate, simulate):  # noqa: F811
    """Signs then come from a gate per head, or there are none."""
    simulate(seed=0)
    inputs = random_inputs(replace(SPECS["affine"], gate=gate), Shape(1, 2, 1, 100, 100, 128), torch.float16)
    inputs = {name: x - 0.5 if name == "gate" else x for name, x in inputs.items() if name != "alpha"}
    assert why_not("sm90 backward", checked_call(**inputs)) is None
    assert not [d for d in deviations("sdpa", inputs) if not d.within]


def test_programs_have_as_many_items_as_others_or_one_less():
    for items, most in ((4096, 264), (4096, 132), (9, 4), (1, 264), (264, 264), (265, 264)):
        programs = sm90_backward._even(items, most)
        counts = [len(range(program, items, programs)) for program in range(programs)]
        assert programs <= most
        assert max(counts) - min(counts) <= 1
        assert max(counts) == -(-items // most)


@interpreted
def test_what_is_timed_beside_cudnn_runs_and_is_checked(simulate, monkeypatch):  # noqa: F811
    from benchmarks import sm90_backward as of_backward
    from benchmarks import sm90_forward as of_forward

    simulate(seed=0)
    call = checked_call(**random_inputs(SPECS["affine"], Shape(1, 2, 1, 70, 70, 64), torch.float16))
    for timed in (of_forward.functions(call), of_backward.functions(call)):
        for function in timed.values():
            function()
    monkeypatch.setattr(sm90_backward, "rounded", lambda call, sums: torch.zeros_like(call.q))
    with pytest.raises(ValueError, match="dq differs by 1"):
        of_backward.functions(call)


def given(shape: Shape, dtype: torch.dtype) -> tuple[Call, torch.Tensor, Output]:
    call = checked_call(**random_inputs(SPECS["affine"], shape, dtype))
    # Of either sign, and none so near 0 that log-sum-exp is infinite.
    alpha = call.alpha - 0.5
    call = replace(call, alpha=alpha.where(alpha.abs() > 0.01, 0.01))
    return call, torch.randn_like(call.q), sm90_forward.forward(call)


def same(found: Gradients, right: Gradients, tolerance: float = 2e-3) -> bool:
    """Compare dk, dv and row statistics to the bit. Additions to dq have no order, and after that it is rounded."""
    dq, expected = found[0].double(), right[0].double()
    off, rest = dq - expected, zip(found[1:], right[1:], strict=True)
    is_near = float(off.norm()) < tolerance * float(expected.norm())
    is_near_everywhere = float(off.abs().max()) < 8 * tolerance * float(expected.abs().max())
    return is_near and is_near_everywhere and all(y is None if x is None else torch.equal(x, y) for x, y in rest)


@interpreted
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_no_order_of_events_changes_a_bit_of_what_has_one(shape, simulate):  # noqa: F811
    simulate(seed=0)
    call, dy, output = given(shape, torch.float16)
    first = sm90_backward.backward(call, dy, output)
    for seed in range(1, 8):
        simulate(seed)
        assert same(sm90_backward.backward(call, dy, output), first, tolerance=2e-4)


# Mistakes, by what they replace and with what, and the shape that meets them.
LATE, IN_STEP = SHAPES[:2]
MISTAKES = {
    "keys are not waited for": ("wait_full(kv_full, n, tile, TILES)", "pass", LATE),
    "keys are overwritten": ("wait_free(kv_free, n, stage, TILES)", "pass", IN_STEP),
    "one group frees a tile": ("init(kv_free.index(tile), count=2)", "init(kv_free.index(tile), count=1)", IN_STEP),
    "dk has not left yet": ("        tma.store_wait(0)\n        mbarrier", "        mbarrier", IN_STEP),
    "queries are not waited for": ("wait_full(full, i, stage, STAGES)", "pass", LATE),
    "one group frees a stage": ("init(free.index(stage), count=2)", "init(free.index(stage), count=1)", LATE),
    "row statistics are not waited for": (
        "init(full.index(stage), count=2)", "init(full.index(stage), count=1)", LATE
    ),
    "half of the gradients of scores": (
        "init(ds_full.index(buffer), count=2)", "init(ds_full.index(buffer), count=1)", LATE
    ),
    "gradients of scores are overwritten": (
        "mbarrier.wait(ds_free.index(j & 1), (((j + 1) >> 1) & 1) ^ 1)", "pass", LATE
    ),
    "the wrong phase of them": ("(((j + 1) >> 1) & 1) ^ 1", "((j >> 1) & 1) ^ 1", LATE),
    "none before a tile's first": ("mbarrier.arrive(ds_full.index((j + 1) & 1), count=1)", "pass", LATE),
    "dq of the tile before once more": ("if not is_first:", "if i > 0:", LATE),
    "dq is overwritten": ("mbarrier.wait(dq_free.index(0), (i & 1) ^ 1)", "pass", LATE),
    "half of dq is added": ("init(dq_full.index(0), count=2)", "init(dq_full.index(0), count=1)", LATE),
    "dk overwrites keys": ("mbarrier.wait(ds_free.index(j & 1), ((j + 1) >> 1) & 1)", "pass", LATE),
    "dk overwrites keys, in step": ("        else:\n            mbarrier.wait(ds_free.index(0), (i & 1) ^ 1)",
                                    "        else:\n            pass", IN_STEP),
    "no fence": (
        "fence_async_shared()\n        mbarrier.arrive(ds_full.index(j", "mbarrier.arrive(ds_full.index(j", LATE
    ),
    "the diagonal is not masked": ("b_p = gl.where(m_seen, b_p, 0.0)", "pass", LATE),
    "signs of delta are forgotten": ("b_delta = gl.where(is_negative, -b_delta, b_delta)", "pass", IN_STEP),
    "signs of beta are forgotten": ("b_beta = gl.where(is_negative, -b_beta, b_beta)", "pass", LATE),
    "beta of later blocks is forgotten": ("mask=(o_d < D) & (after < T)", "mask=o_d < 0", LATE),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", MISTAKES)
def test_the_simulation_finds(name, simulate):  # noqa: F811
    from tests.support.gluon_on_cpu import mistake, shows_in_some_order

    old, new, shape = MISTAKES[name]
    simulate(seed=0)
    call, dy, output = given(shape, torch.float16)
    right = sm90_backward.backward(call, dy, output)

    def is_wrong(seed: int) -> bool:
        simulate(seed, backward=mistake(old, new))
        return not same(sm90_backward.backward(call, dy, output), right)

    assert shows_in_some_order(is_wrong)


# The same for the preprocess kernel: specs and query heads of two kv heads. Only a head alone may fall behind
# by two tiles of values.
PLAIN, GATED, ALONE = ("affine", 4), ("affine_gated", 4), ("affine", 2)
ROW_MISTAKES = {
    "tiles are not waited for": ("wait_full(full, i, stage, STAGES)", "pass", PLAIN),
    "tiles are overwritten": ("wait_free(free, i, stage, STAGES)", "pass", PLAIN),
    "tiles are freed before they are read": (
        "            b_do = s_dy.load(LAYOUT)\n",
        "            mbarrier.arrive(free.index(stage), count=1)\n            b_do = s_dy.load(LAYOUT)\n", PLAIN,
    ),
    "small copies are not waited for": (
        "            async_copy.mbarrier_arrive(my_full, increment_count=False)\n"
        "            mbarrier.expect(my_full, TENSORS * BYTES)",
        "            mbarrier.expect(my_full, TENSORS * BYTES)\n            mbarrier.arrive(my_full, count=32)",
        PLAIN,
    ),
    "values are not waited for": ("wait_full(v_full, n, stage, STAGES)", "pass", PLAIN),
    "values are overwritten": ("wait_free(v_free, n, stage, STAGES)", "pass", ALONE),
    "values are freed before the sums": (
        "            b_u = warpgroup_mma_wait(",
        "            mbarrier.arrive(v_free.index(stage), count=1)\n            b_u = warpgroup_mma_wait(",
        PLAIN,
    ),
    "dgate has not left yet": ("                tma.store_wait(2)\n", "", GATED),
    "no fence for the triangle": ("    fence_async_shared()\n    memory", "    memory", PLAIN),
    "no fence": ("                fence_async_shared()\n", "", GATED),
    "statistics past the last row": ("    return gl.where(m_t, ", "    return gl.where(m_t | True, ", PLAIN),
    "only the last head's total": ("b_weighted += (b_gate", "b_weighted = (b_gate", PLAIN),
    "rows are not negated": ("b_least = gl.minimum(b_least, b_factor)", "pass", PLAIN),
    "values of the other half": (" & (o_j[None, :] % PARTS == o_i[:, None] % PARTS)", "", PLAIN),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", ROW_MISTAKES)
def test_the_simulation_finds_in_the_preprocess(name, simulate):  # noqa: F811
    from tests.support.gluon_on_cpu import mistake, shows_in_some_order

    old, new, (spec, heads) = ROW_MISTAKES[name]
    simulate(seed=0)
    call = checked_call(**random_inputs(SPECS[spec], Shape(3, heads, 2, 100, 100, 128), torch.float16))
    call = replace(call, alpha=call.alpha - 0.5)
    dy, output = torch.randn_like(call.q), sm90_forward.forward(call)

    def rows(seed: int, edit=lambda source: source) -> list[torch.Tensor]:
        simulate(seed, rows=edit)
        found = sm90_backward.Preprocess(call, dy.clone(), output)
        found.launch()
        return [
            found.delta,
            found.dalpha,
            found.dbeta,
            found.after,
            found.do,
            *([found.dgate] if found.is_elementwise else []),
        ]

    right = rows(0)
    assert all(torch.equal(a, b) for seed in (1, 2, 3) for a, b in zip(rows(seed), right, strict=True))

    def is_wrong(seed: int) -> bool:
        return not all(torch.equal(a, b) for a, b in zip(rows(seed, mistake(old, new)), right, strict=True))

    assert shows_in_some_order(is_wrong)


@interpreted
def test_sizes_are_those_of_the_kernel():
    from affine_attn.kernels.sm90 import backward_kernel as kernels
    from affine_attn.kernels.sm90 import preprocess_kernel

    assert (kernels.M.value, kernels.HALF.value, kernels.N.value) == (64, 64, sm90_forward.ROWS)
    assert (sm90_backward.QUERIES, sm90_backward.HALF) == (64, 64)
    tile = preprocess_kernel.ROWS.value, preprocess_kernel.COLUMNS.value
    assert tile == (sm90_backward.TILE_ROWS, sm90_backward.TILE_COLUMNS)


def test_deterministic_algorithms_leave_it_alone(monkeypatch):
    call = checked_call(**random_inputs(SPECS["affine"], Shape(1, 2, 1, 64, 64, 64), torch.bfloat16))
    assert why_not("sm90 backward", call, on="sm90") is None  # tests only warn
    monkeypatch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: False)
    assert "in no fixed order" in str(why_not("sm90 backward", call, on="sm90"))


def test_other_lengths_are_left_to_the_stock_kernel(monkeypatch):
    monkeypatch.setattr(needs, "SM90_LENGTHS", MEASURED)
    taken = []
    for length in (1, 511, 512, 8192, 8193):
        q = torch.empty(1, 1, length, 64, dtype=torch.bfloat16, device="meta")
        taken += [length] if why_not("sm90 backward", checked_call(q, q, q), on="sm90") is None else []
    assert taken == [512, 8192]


@pytest.mark.gpu
@on_hopper
def test_deterministic_algorithms_on_a_gpu():
    inputs = random_inputs(SPECS["affine"], Shape(4, 12, 4, 1000, 1000, 64), torch.bfloat16, "cuda")
    leaves = {name: inputs[name].requires_grad_() for name in ("q", "k", "v", "alpha", "beta")}
    dy = torch.randn_like(inputs["q"])
    torch.use_deterministic_algorithms(True)
    runs = [torch.autograd.grad(attention(**inputs | leaves), list(leaves.values()), dy) for _ in range(4)]
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


ON_GPU = [
    *(Shape(2, 6, 2, n, n, head_dim) for n in (1, 63, 65, 128, 129, 300) for head_dim in (64, 128)),
    *(Shape(1, 4, 4, 1100, 1100, head_dim) for head_dim in (64, 128)),
    *(Shape(3, 40, 8, 777, 777, head_dim) for head_dim in (64, 128)),
    Shape(1, 4, 1, 1000, 1000, 64),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ON_GPU, ids=str)
@pytest.mark.parametrize("name", ALL_SPECS)
def test_gradients_on_a_gpu(name, shape, dtype):
    for largest_logit in (None, 300.0):
        inputs = random_inputs(ALL_SPECS[name], shape, dtype, "cuda", largest_logit=largest_logit)
        inputs |= {x: inputs[x] - 0.5 for x in ("alpha", "gate") if x in inputs}
        assert why_not("sm90 backward", checked_call(**inputs)) is None
        assert not [d for d in deviations("sdpa", inputs) if not d.within]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_runs_and_graphs_on_a_gpu(head_dim):
    """The same bits wherever additions have an order, in every run and in a CUDA graph."""
    call = checked_call(**random_inputs(SPECS["affine"], Shape(4, 12, 4, 1000, 1000, head_dim), torch.bfloat16, "cuda"))
    output, dy = sm90_forward.forward(call), torch.randn_like(call.q)
    first = sm90_backward.backward(call, dy, output)
    for _ in range(20):
        assert same(sm90_backward.backward(call, dy, output), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sm90_backward.backward(call, dy, output)
    for x in captured:
        if x is not None:
            x.fill_(float("nan"))
    graph.replay()
    assert same(captured, first)
