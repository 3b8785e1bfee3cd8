"""Values of another width than keys on the engines for CUDA: on operators made up in torch, and on a GPU."""

import pytest
import torch

from affine_attn import Mask
from affine_attn.bench.accuracy import Shape, deviations
from affine_attn.core.call import checked_call
from affine_attn.engines import aten, needs, plan
from affine_attn.engines.plan import why_not
from tests.support.cases import MASKS, SPECS, Case
from tests.support.stock_operators import on_hopper

__all__ = ["on_hopper"]

# A window with beta takes kernels of this package besides.
CALLS = [("causal", "sink+affine+gate"), ("none", "sink+affine+gate"), ("causal", "logn"), ("none", "softmax")]
CALLS += [("window7", "sink"), ("window7", "gated")]
# Widths of keys and values, and whether cuDNN reads them as they are.
WIDTHS = [(64, 32, True), (32, 64, True), (192, 128, True), (192, 96, False), (128, 192, False), (32, 20, False)]


def _wrong(case: Case, device: str = "cpu") -> list:
    inputs, mask = case.arguments(device)
    return [d for d in deviations("sdpa", inputs, mask) if not d.within]


@pytest.mark.parametrize(("mask", "name"), CALLS)
@pytest.mark.parametrize("tokens", [(37, 37), (9, 45)], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_cudnn_reads_them_as_they_are_and_flash_filled_up(on_hopper, widths, mask, tokens, name):
    head_dim, value_dim, is_native = widths
    shape = Shape(2, 4, 2, *tokens, head_dim, value_dim)
    assert not _wrong(Case(name, SPECS[name], shape, MASKS[mask], torch.bfloat16))
    taken = {name for name, count in on_hopper.items() if count}
    assert taken == {"window" if mask == "window7" else "cudnn" if is_native else "flash2"}


@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize("widths", [(16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize(("heads", "shares"), [(4, 2), (1, 8)], ids=["sequences", "query_heads"])
def test_large_calls_are_cut_by_their_widest_tensor(on_hopper, heads, shares, widths, mask, monkeypatch):
    """Elements of o are counted too: no share has more than the operators can count."""
    shape, most = Shape(2, 4, 2, 12, 20, *widths), heads * 20 * 32
    monkeypatch.setattr(aten, "MOST_ELEMENTS", most)
    operator = aten._FORWARD["cudnn"]

    def watched(q, k, v, *rest):
        o, z = operator(q, k, v, *rest)
        assert max(x.numel() for x in (q, k, v, o)) <= most
        return o, z

    monkeypatch.setitem(aten._FORWARD, "cudnn", watched)
    assert not _wrong(Case("affine", SPECS["affine"], shape, MASKS[mask], torch.bfloat16))
    pieces = 2 if mask == "causal" else 1  # keys before the first query have a call of their own
    assert on_hopper["cudnn"] == 2 * pieces * shares


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiler_chooses_the_engine_of_eager_calls(on_hopper, dynamic, monkeypatch):
    """Also where it keeps the widths open."""
    torch._dynamo.reset()
    machine = needs.Machine("cuda", (9, 0), None)
    for name in ("_known_machine", "machine_of"):
        monkeypatch.setattr(needs, name, lambda *_, **__: machine)

    def chosen(q: torch.Tensor, v: torch.Tensor, mask: Mask) -> tuple[torch.Tensor, str]:
        return q + 1, plan.choose(needs.facts_of(checked_call(q, q, v, mask)))

    compiled = torch.compile(chosen, fullgraph=True, dynamic=dynamic, backend="eager")
    for widths in ((64, 32), (32, 64), (192, 128), (192, 96)):
        for mask in (Mask(), Mask(window=7)):
            q, v = (torch.randn(1, 2, 20, width).bfloat16() for width in widths)
            assert compiled(q, v, mask)[1] == chosen(q, v, mask)[1] == "triton"


ON_GPU = [
    Case(name, SPECS[name], Shape(1, 4, 2, *tokens, *widths[:2]), MASKS[mask], torch.bfloat16)
    for mask, name in (*CALLS, ("window7", "affine"))
    for tokens in ((300, 300), (77, 150))
    for widths in (*WIDTHS, (64, 128), (128, 64), (64, 24))
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_the_real_operators(case: Case):
    inputs, mask = case.arguments("cuda")
    assert why_not("sdpa", checked_call(**inputs, mask=mask)) is None
    assert not _wrong(case, "cuda")
