"""The forward in one kernel: simulated on the CPU, where the kernels of Triton run in its interpreter, and on a GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from affine_attn import attention
from affine_attn.bench.accuracy import Shape, deviations, random_inputs
from affine_attn.core.call import Output, checked_call
from affine_attn.engines.plan import why_not
from affine_attn.kernels.sm90 import forward as sm90_forward
from affine_attn.kernels.sm90.scheduler import can_be_copied
from tests.conftest import interpreted, rerun_in_interpreter
from tests.support.cases import SPECS
from tests.support.simulated_hopper import on_hopper, simulate  # noqa: F401, a fixture

ALL_SPECS = {
    **{name: SPECS[name] for name in ("off_by_one", "sink", "affine", "gated", "gated_headwise", "affine_gated")},
    "sink+affine": replace(SPECS["affine"], sink="learned"),
    "logn+affine": replace(SPECS["affine"], logit=SPECS["logn"].logit),
    "sink+affine+elementwise": replace(SPECS["affine"], sink="learned", gate="elementwise"),
    "sink+affine+headwise": replace(SPECS["affine"], sink="learned", gate="headwise"),
}
SIMULATED = [
    Shape(2, 2, 1, 300, 300, 64),  # several tiles to a program, whole and cut short; a group of heads
    Shape(1, 3, 1, 129, 129, 128),  # a ring of two stages, which goes round in every tile
    Shape(1, 2, 2, 1, 1, 64),  # one token
]


def test_the_kernel_on_the_cpu():
    rerun_in_interpreter(__file__)


@interpreted
@pytest.mark.parametrize("shape", SIMULATED, ids=str)
@pytest.mark.parametrize("name", ALL_SPECS)
def test_values_and_gradients(name, shape, simulate):  # noqa: F811
    simulate(seed=0)
    # Not in bfloat16, for which Triton's interpreter has no negative numbers: the backward's kernels run there.
    inputs = random_inputs(ALL_SPECS[name], shape, torch.float16)
    inputs |= {x: inputs[x] - 0.5 for x in ("alpha", "gate") if x in inputs}
    assert why_not("sm90 forward", checked_call(**inputs)) is None
    assert not [d for d in deviations("sdpa", inputs) if not d.within]


@interpreted
def test_views_and_sinks_of_tokens(simulate):  # noqa: F811
    """Slices of one projection, as a model makes them, and a sink for every token, some beyond measure."""
    simulate(seed=0)
    inputs = random_inputs(SPECS["sink+affine+gate"], Shape(2, 2, 2, 140, 140, 64), torch.float16)
    projected = torch.cat([inputs[x].transpose(1, 2) for x in ("q", "k", "v", "gate")], 2)
    q, k, v, gate = (x.transpose(1, 2) for x in projected.split(2, 2))
    sink = torch.randn(2, 2, 140, 8)[..., 3]
    sink[..., ::7], sink[..., 1::7], sink[..., 2::7] = float("inf"), float("-inf"), 200.0
    changed = inputs | {"q": q, "k": k, "v": v, "gate": gate, "sink": sink}
    assert why_not("sm90 forward", checked_call(**changed)) is None
    output = sm90_forward.forward(checked_call(**changed))
    expected = attention(**{name: x.double() if isinstance(x, torch.Tensor) else x for name, x in changed.items()})
    torch.testing.assert_close(output.y.double(), expected, atol=2e-3, rtol=2e-3)


def _same(a: Output, b: Output) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@interpreted
@pytest.mark.parametrize("shape", SIMULATED[:2], ids=str)
@pytest.mark.parametrize("name", ["sink", "sink+affine", "sink+affine+elementwise", "sink+affine+headwise"])
def test_no_order_of_events_changes_a_bit(name, shape, simulate):  # noqa: F811
    call = checked_call(**random_inputs(ALL_SPECS[name], shape, torch.bfloat16))
    outputs: list[Output] = []
    for seed in range(8):
        simulate(seed)
        outputs.append(sm90_forward.forward(call))
        assert _same(outputs[-1], outputs[0])


# Mistakes, by what they replace and with what, and a spec that meets them.
MISTAKES = {
    "q is not waited for": ("mbarrier.wait(q_full.index(group), n & 1)", "pass"),
    "q is overwritten": ("mbarrier.wait(q_free.index(group), (n & 1) ^ 1)", "pass"),
    "a stage is overwritten": ("wait_free(free, i, stage, STAGES)", "pass"),
    "a stage is not waited for": (
        "            wait_full(full, i, i & (STAGES - 1), STAGES)\n            b_acc", "            b_acc"
    ),
    "one group frees a stage": ("init(free.index(stage), count=2)", "init(free.index(stage), count=1)"),
    "a stage is free before its MMA": (
        "            b_acc = warpgroup_mma_wait(0, deps=(t_acc,))\n"
        "            mbarrier.arrive(free.index(stage), count=1)\n",
        "            mbarrier.arrive(free.index(stage), count=1)\n"
        "            b_acc = warpgroup_mma_wait(0, deps=(t_acc,))\n",
    ),
    "a stage is never free": ("        mbarrier.arrive(free.index(stage), count=1)\n        i += 1", "        i += 1"),
    "a phase is the wrong one": ("wait(q_free.index(group), (n & 1) ^ 1)", "wait(q_free.index(group), n & 1)"),
    "scores are not waited for": ("warpgroup_mma_wait(1, deps=(t_qk,))", "warpgroup_mma_wait(2, deps=(t_qk,))"),
    "sums are not waited for": ("wait_full(before_full, n, n & 1, 2)", "pass"),
    "sums are overwritten": ("wait_free(before_free, n, n & 1, 2)", "pass"),
    "a gate is not waited for": ("mbarrier.wait(gate_full.index(group), n & 1)", "pass"),
    "a gate comes too early": ("mbarrier.wait(gate_free.index(group), n & 1)", "pass"),
    "a gate overwrites y": ("tma.store_wait(0)\n            mbarrier.arrive(gate", "mbarrier.arrive(gate"),
    "o is overwritten": ("tma.store_wait(0)  # of the last tile", "pass"),
    "the last o is not waited for": ("    tma.store_wait(0)\n\n\n@gluon", "\n\n@gluon"),
    "no fence": ("fence_async_shared()\n        tma", "tma"),
    "rows beyond the end": ("b_lse, mask=row0 + o_row < T)", "b_lse)"),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", MISTAKES)
def test_the_simulation_finds(name, simulate):  # noqa: F811
    from tests.support.gluon_on_cpu import mistake, shows_in_some_order

    # Where there is a gate, its wait for y is one for o as well; stages are used again at once where there are two.
    spec = ALL_SPECS["sink+affine" if name == "o is overwritten" else "sink+affine+elementwise"]
    calls = [checked_call(**random_inputs(spec, replace(SIMULATED[0], head_dim=d), torch.bfloat16)) for d in (64, 128)]
    simulate(seed=0)
    right = [sm90_forward.forward(call) for call in calls]

    def is_wrong(seed: int) -> bool:
        simulate(seed, forward=mistake(*MISTAKES[name]))
        found = (sm90_forward.forward(call) for call in calls)
        return not all(_same(a, b) for a, b in zip(found, right, strict=True))

    assert shows_in_some_order(is_wrong)


def test_rows_that_tma_cannot_load_are_told():
    """They begin at multiples of 16 bytes, and follow each other in memory in no odd way."""
    whole = torch.empty(2, 2, 10, 72, dtype=torch.float16)
    assert can_be_copied(whole[..., :64])
    assert can_be_copied(whole[..., 8:])
    for x in (
        whole[..., 4:68],
        whole[..., ::2],
        torch.empty(2, 2, 10, 68)[..., :64],
        whole[:, :1].expand(2, 2, 10, 72),
    ):
        assert not can_be_copied(x)


def test_programs_share_the_tiles_evenly():
    for batch, heads, blocks in product((1, 3), (2, 40), (1, 16)):
        with torch.device("meta"):  # the default one must not matter
            costs = tuple(n + 1.5 for n in range(blocks))
            tiles, counts = sm90_forward.order(batch, heads, heads // 2, costs, 32, 7, torch.device("cpu"))
        lists = [row[:n] for row, n in zip(tiles.tolist(), counts.tolist(), strict=True)]
        firsts = range(0, blocks * sm90_forward.ROWS, sm90_forward.ROWS)
        every = [[b, h, h // 2, first] for b in range(batch) for h in range(heads) for first in firsts]
        assert sorted(tile for row in lists for tile in row) == every
        assert tiles.shape[1] > counts.max()  # each looks one further
        if heads == 40:
            work = [sum(first // sm90_forward.ROWS + 1 for *_, first in row) for row in lists]
            assert max(work) <= 1.1 * sum(work) / len(work)


# Tiles of 128 rows in two halves: cut short, whole, several to a program.
ON_GPU = [
    *(Shape(2, 6, 2, n, n, 64) for n in (1, 2, 63, 65, 128, 129, 300)),
    *(Shape(2, 6, 2, n, n, 128) for n in (1, 65, 300)),
    *(Shape(1, 4, 4, 1100, 1100, head_dim) for head_dim in (64, 128)),
    *(Shape(3, 40, 8, 777, 777, head_dim) for head_dim in (64, 128)),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ON_GPU, ids=str)
@pytest.mark.parametrize("name", ALL_SPECS)
def test_values_and_gradients_on_a_gpu(name, shape, dtype):
    inputs = random_inputs(ALL_SPECS[name], shape, dtype, "cuda")
    inputs |= {x: inputs[x] - 0.5 for x in ("alpha", "gate") if x in inputs}
    in_models = {
        x: inputs[x].transpose(1, 2).contiguous().transpose(1, 2) for x in ("q", "k", "v", "gate") if x in inputs
    }
    large = {"sink": inputs["sink"] + 200} if isinstance(inputs.get("sink"), torch.Tensor) else {}
    for changed in (inputs, inputs | in_models, inputs | large):
        assert why_not("sm90 forward", checked_call(**changed)) is None
        assert not [d for d in deviations("sdpa", changed) if not d.within]
        assert torch.equal(attention(**changed, impl="sdpa"), attention(**changed, impl="sdpa"))


@pytest.mark.gpu
@on_hopper
def test_views_on_a_gpu():
    """Slices of one projection, as a model makes them, and a sink for every token."""
    inputs = random_inputs(SPECS["sink"], Shape(2, 4, 4, 300, 300, 64), torch.bfloat16, "cuda")
    qkv = torch.cat([inputs[x].transpose(1, 2) for x in ("q", "k", "v")], 2)
    q, k, v = (x.transpose(1, 2) for x in qkv.split(4, 2))
    sink = torch.randn(2, 4, 300, 8, device="cuda")[..., 3]
    changed = inputs | {"q": q, "k": k, "v": v, "sink": sink}
    assert why_not("sm90 forward", checked_call(**changed)) is None
    assert not [d for d in deviations("sdpa", changed) if not d.within]


@pytest.mark.gpu
@on_hopper
def test_many_steps_on_a_gpu():
    """A factor that should be 1 is multiplied in 127 times; the backward makes its weights of this number."""
    q, k, v = torch.randn(3, 1, 1, 16384, 64, device="cuda")
    q *= 300 / (q[:, :, -256:] @ k.mT).abs().max() * 8
    call = checked_call(*(x.bfloat16() for x in (q, k, v)), sink=-1e4)
    last = call.q[:, :, -256:].double() @ call.k.mT.double() / 8
    visible = torch.arange(16384, device="cuda") <= torch.arange(16384 - 256, 16384, device="cuda")[:, None]
    exact = last.masked_fill(~visible, float("-inf")).logsumexp(-1)
    assert float((sm90_forward.forward(call).saved_lse[:, :, -256:] - exact).abs().max()) < 5e-4


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("sink", [3e10, float("inf"), float("-inf")])
def test_sinks_beyond_measure_on_a_gpu(sink):
    inputs = random_inputs(SPECS["sink"], Shape(1, 2, 2, 200, 200, 64), torch.bfloat16, "cuda")
    sinks = torch.full_like(inputs["sink"], sink).requires_grad_()
    y = attention(**inputs | {"sink": sinks}, impl="sdpa")
    (gradient,) = torch.autograd.grad(y.float().square().sum(), sinks)
    expected = torch.zeros_like(y) if sink > 0 else attention(**inputs | {"sink": None})
    torch.testing.assert_close(y, expected, atol=0.02, rtol=0.02)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.gpu
@on_hopper
def test_cuda_graphs():
    """A graph goes on reading the table of tiles, whatever ran since; and one may be made by the compiler."""
    inputs = random_inputs(SPECS["affine"], Shape(2, 4, 2, 640, 640, 64), torch.bfloat16, "cuda")
    expected = attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attention(**inputs)
    for length in range(128, 1280, 128):
        attention(**random_inputs(SPECS["affine"], Shape(1, 2, 2, length, length, 64), torch.bfloat16, "cuda"))
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
    # Of a shape whose table is not made yet.
    inputs = random_inputs(SPECS["affine"], Shape(3, 4, 2, 640, 640, 64), torch.bfloat16, "cuda")
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    compiled = torch.compile(lambda **x: attention(**x) + 0, mode="reduce-overhead")
    results = [compiled(**tensors).clone() for _ in range(3)]
    for result in results:
        torch.testing.assert_close(result, attention(**inputs))
