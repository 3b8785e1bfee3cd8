"""The experiment of benchmarks/hopper_backward.py: its kernel, simulated on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from affine_attn import attention
from affine_attn.core.accuracy import Shape, random_inputs
from affine_attn.core.call import Call, checked_call
from benchmarks import hopper_backward
from tests.cases import SPECS

pytest.importorskip("triton")
from benchmarks import hopper_backward_kernel as kernel_module
from tests.gluon_on_cpu import Simulated, mistake, shows_in_some_order

SHAPES = [
    Shape(1, 2, 1, 300, 300, 64),  # a group of heads; keys and queries that end within a block
    Shape(1, 3, 1, 200, 200, 128),  # dq at once, not a block late
    Shape(2, 2, 2, 65, 65, 64),
    Shape(3, 3, 3, 130, 130, 64),  # more kv heads than are taken at a time
    Shape(1, 1, 1, 1, 1, 64),
]


class Given(SimpleNamespace):
    """A call, its dy, and by float64 what a forward leaves and what the gradients are."""

    call: Call

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, name: str) -> "Given":
        inputs = random_inputs(SPECS[name], shape, dtype)
        call = checked_call(**inputs)
        exact = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        q, k, v = (exact[name].requires_grad_() for name in "qkv")
        y = attention(**exact)
        dy = torch.randn_like(call.q)
        gradients = torch.autograd.grad(y, (q, k, v), dy.double())
        group, alpha = call.heads // call.k.shape[1], exact.get("alpha", torch.ones(()).double())
        scores = (q @ k.repeat_interleave(group, 1).mT * call.scale).detach()
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        o = scores.softmax(-1) @ v.detach().repeat_interleave(group, 1)
        lse = (scores.logsumexp(-1) - alpha.log()).float()
        return cls(call=call, dy=dy, lse=lse, delta=(dy.double() * o).sum(-1).float(), exact=gradients)


def differentiate(monkeypatch, given: Given, seed: int, edit=lambda source: source) -> list[torch.Tensor]:
    """dq, dk, dv."""
    kernel = Simulated(kernel_module, "hopper_backward_kernel", seed, edit)
    module = SimpleNamespace(hopper_backward_kernel=kernel, N=kernel_module.N, HALF=kernel_module.HALF)
    monkeypatch.setattr(hopper_backward, "_module", lambda: module)
    call, acc = given.call, hopper_backward.new_dq(given.call)
    dk, dv = torch.empty_like(call.k), torch.empty_like(call.v)
    hopper_backward.launch(call, given.dy, given.lse, given.delta, call.beta, acc, dk, dv)
    return [acc[:, :, : call.tq] * call.scale, dk, dv]


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).norm() / (1e-3 + right.norm()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["softmax", "affine"])
def test_values(name, shape, monkeypatch):
    given = Given.of(shape, torch.float16, name)
    for found, right in zip(differentiate(monkeypatch, given, seed=0), given.exact, strict=True):
        assert error(found, right) < 1e-3


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_no_order_of_events_changes_more_than_the_order_of_additions_to_dq(shape, monkeypatch):
    given = Given.of(shape, torch.bfloat16, "affine")
    first, *others = [differentiate(monkeypatch, given, seed) for seed in range(8)]
    for dq, dk, dv in others:
        assert error(dq, first[0].double()) < 1e-6
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])


# Mistakes, by what they replace and with what.
MISTAKES = {
    "keys are not waited for": ("mbarrier.wait(kv_full.index(0), 0)", "pass"),
    "queries are not waited for": ("mbarrier.wait(full.index(slot), (i // STAGES) & 1)", "pass"),
    "one group frees a slot": ("init(free.index(stage), count=2)", "init(free.index(stage), count=1)"),
    "numbers of rows are not waited for": ("init(full.index(stage), count=2)", "init(full.index(stage), count=1)"),
    "half of the gradients of scores": ("init(ds_full.index(buffer), count=2)", "init(ds_full.index(buffer), count=1)"),
    "gradients of scores are overwritten": ("mbarrier.wait(ds_free.index(i & 1), (((i + 1) >> 1) & 1) ^ 1)", "pass"),
    "the wrong phase of them": ("(((i + 1) >> 1) & 1) ^ 1", "((i >> 1) & 1) ^ 1"),
    "dq is overwritten": ("mbarrier.wait(dq_free.index(0), (n & 1) ^ 1)", "pass"),
    "half of dq is added": ("init(dq_full.index(0), count=2)", "init(dq_full.index(0), count=1)"),
    "dk overwrites keys": ("mbarrier.wait(ds_free.index((i - 1) & 1), (i >> 1) & 1)", "pass"),
    "no fence": ("fence_async_shared()\n        mbarrier.arrive(ds_full.index(i", "mbarrier.arrive(ds_full.index(i"),
    "the first block is not masked": ("b_e = gl.where(m_seen, b_e, 0.0)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_the_simulation_finds(name, monkeypatch):
    given = Given.of(SHAPES[0], torch.bfloat16, "affine")
    right = differentiate(monkeypatch, given, seed=0)

    def is_wrong(seed: int) -> bool:
        found = differentiate(monkeypatch, given, seed, mistake(*MISTAKES[name]))
        return not all(error(x, y.double()) < 1e-6 for x, y in zip(found, right, strict=True))

    assert shows_in_some_order(is_wrong)
