"""The experiment of benchmarks/streaming_backward.py: its kernel, simulated on the CPU."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from affine_attn.core import fused
from affine_attn.core.accuracy import Shape, random_inputs
from affine_attn.core.call import Call, checked_call
from affine_attn.core.ops import Output
from benchmarks import streaming_backward
from benchmarks.other_gradients import instead
from tests.cases import SPECS

pytest.importorskip("triton")
from benchmarks import streaming_backward_kernel as kernel_module
from tests.gluon_on_cpu import Simulated, mistake, shows_in_some_order

# With the programs that share them: neighbours have the tokens that one waits for.
CASES = {
    "two panels": (Shape(1, 3, 1, 300, 300, 128), 3),
    "blocks of items": (Shape(1, 1, 1, 1100, 1100, 64), 4),
    "fewer items than programs": (Shape(2, 2, 2, 65, 65, 64), 9),
    "one token": (Shape(1, 2, 1, 1, 1, 64), 2),
}


def affine(shape: Shape, dtype: torch.dtype) -> tuple[Call, torch.Tensor, Output]:
    """A call with an alpha of either sign, a gradient of y, and what a forward leaves; o need not be the right one."""
    torch.manual_seed(0)
    inputs = random_inputs(SPECS["affine"], shape, dtype)
    call = checked_call(**inputs | {"alpha": inputs["alpha"] - 0.3})
    o, plan = torch.randn_like(call.q), fused.plan_of(call)
    sums = torch.cat([torch.zeros_like(call.v[:, :, :1]).float(), call.v.float().cumsum(2)], 2)
    before = sums[:, :, : shape.tk : plan.tile.tokens].flatten(0, 1).contiguous()
    return call, torch.randn_like(call.q), Output(o, o, torch.zeros(o.shape[:3]), before)


def differentiate(monkeypatch, call, dy, output, programs, seed, edit=lambda source: source):
    """dalpha, dbeta, and dv from a dv of zeros; dy comes with negated rows and must leave without."""
    kernel = Simulated(kernel_module, "streaming_backward_kernel", seed, edit)
    names = {name: getattr(kernel_module, name) for name in ("L", "C", "BLOCK", "ABSENT")}
    module = SimpleNamespace(streaming_backward_kernel=kernel, **names)
    monkeypatch.setattr(streaming_backward, "_module", lambda: module)
    monkeypatch.setattr(streaming_backward, "multiprocessors", lambda _: programs)
    monkeypatch.setattr(streaming_backward, "PROGRAMS", dict.fromkeys(streaming_backward.PROGRAMS, 1))
    given, dv = torch.where(call.alpha[..., None] < 0, -dy, dy), torch.zeros_like(call.v)
    results = (*streaming_backward.add_gradients(call, given, output, dv), dv)
    assert torch.equal(given, dy)
    return results


def test_what_is_in_use_is_timed_beside_it():
    """Of functions that are patched already, as those of benchmarks/steps.py."""
    in_use = mock.patch.object(fused, "_LONG", 1)(lambda: fused.gradients)
    one_pass = instead(streaming_backward.gradients, in_use)
    assert one_pass() is streaming_backward.gradients
    assert in_use() is fused.gradients


@pytest.mark.parametrize("name", CASES)
def test_values(name, monkeypatch):
    shape, programs = CASES[name]
    call, dy, output = affine(shape, torch.float16)
    dalpha, dbeta, dv = differentiate(monkeypatch, call, dy, output, programs, seed=0)
    group, dy = call.heads // call.k.shape[1], dy.double()
    u = call.v.double().cumsum(2).repeat_interleave(group, 1)
    weighted = (call.beta.double()[..., None] * dy).unflatten(1, (-1, group)).sum(2)
    torch.testing.assert_close(dalpha.double(), (dy * output.saved_out.double()).sum(-1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dbeta.double(), (dy * u).sum(-1), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(dv.double(), weighted.flip(2).cumsum(2).flip(2), rtol=2e-3, atol=1e-5)


def test_no_order_of_events_changes_a_bit(monkeypatch):
    shape, programs = CASES["two panels"]
    given = affine(shape, torch.bfloat16)
    first, *others = [differentiate(monkeypatch, *given, programs, seed) for seed in range(5)]
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


# Mistakes, by what they replace and with what.
MISTAKES = {
    "totals are not waited for": ("while gl.max(gl.max((b_bits == ABSENT).to(gl.int32), 1), 0) > 0:", "while False:"),
    "totals are not published": ("mask=(o_t == 0)[:, None]", "mask=(o_t < 0)[:, None]"),
    "values are overwritten": ("mbarrier.wait(v_free.index(n & 1), ((n // 2) & 1) ^ 1)", "pass"),
    "numbers of rows are overwritten": ("mbarrier.wait(rows_free.index(n & 1), ((n // 2) & 1) ^ 1)", "pass"),
    "sums of rows are overwritten": ("mbarrier.wait(part_free.index(n & 1), ((n // 2) & 1) ^ 1)", "pass"),
    "dv is overwritten": ("mbarrier.wait(dv_free.index(m & 1), ((m // 2) & 1) ^ 1)", "pass"),
    "one group frees a slot": ("init(free.index(stage), count=PANELS)", "init(free.index(stage), count=1)"),
    "dv has not left yet": ("tma.store_wait(1)\n", "pass\n"),
    "weighted rows have no fence": ("        fence_async_shared()\n        ones", "        ones"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_the_simulation_finds(name, monkeypatch):
    # Two programs with five items each, of one head: so loads may be several items ahead.
    given = affine(Shape(2, 1, 1, 300, 300, 128), torch.bfloat16)
    right = differentiate(monkeypatch, *given, 2, seed=0)

    def is_wrong(seed: int) -> bool:
        found = differentiate(monkeypatch, *given, 2, seed, mistake(*MISTAKES[name]))
        return not all(torch.equal(x, y) for x, y in zip(found, right, strict=True))

    assert shows_in_some_order(is_wrong)


def test_groups_that_would_wait_for_ever_are_refused():
    call, dy, output = affine(Shape(1, 5, 1, 64, 64, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="groups of 5 heads leave no room for 2 programs"):
        streaming_backward.add_gradients(call, dy, output, torch.zeros_like(call.v))
