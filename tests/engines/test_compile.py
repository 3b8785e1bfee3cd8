"""Compiled in one graph, traced as operators, or recomputed: the numbers are those of eager."""

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from affine_attn import VARIANTS, Affine, AttentionLayer, AttentionSpec, Mask, ScaleInvariant, SoftCap, attention
from affine_attn.bench.accuracy import Shape, random_inputs, value_and_gradients
from affine_attn.core.call import checked_call
from affine_attn.engines.operator import flatten, unflatten
from affine_attn.kernels import launch
from tests.support.cases import CURVES, SPECS

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
# Each engine that is an operator, on a call that has every stage.
CALLS = {
    "sdpa": (SPECS["sink+affine+gate"], Mask()),
    "sdpa_plain": (SPECS["softmax"], Mask()),
    "sdpa_logn": (SPECS["logn"], Mask(causal=False)),
    "blocked": (SPECS["scale_invariant+sink+affine+headwise"], Mask(documents=DOCUMENTS)),
    "blocked_window": (SPECS["affine_gated"], Mask(window=3)),
    "blocked_options": (CURVES["softcap+every_stage"], Mask(allowed=torch.arange(9) % 4 != 2)),
    "blocked_two_sided": (CURVES["softcap+logn+gated"], Mask(causal=False, window=4, window_after=2)),
    "sdpa_options": (SPECS["sink+affine+gate"], Mask(documents=DOCUMENTS)),
}
# What has a bias and narrow values. The stock operator has no gradient of a bias.
WITH_OPTIONS = ("blocked_options", "blocked_two_sided", "sdpa_options")
CONSTANTS = {"sdpa_options": ("bias",)}


def _inputs(case: str, tq: int = 9, dtype: torch.dtype = torch.float32) -> dict:
    has_options = case in WITH_OPTIONS
    shape = Shape(1, 4, 2, tq, 9, 8, 4 if has_options else None)
    return random_inputs(CALLS[case][0], shape, dtype, bias=(4, tq, 9) if has_options else None)


def _leaves(case: str, inputs: dict) -> dict:
    constants = CONSTANTS.get(case, ())
    return {n: x.requires_grad_() if isinstance(x, Tensor) and n not in constants else x for n, x in inputs.items()}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def _assert_same(compiled: dict[str, Tensor], eager: dict[str, Tensor], **tolerance):
    for name in eager:
        torch.testing.assert_close(compiled[name], eager[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("tq", [9, 4])
@pytest.mark.parametrize("case", CALLS)
def test_one_graph_with_the_same_values_and_gradients(case, tq, dynamic):
    """fullgraph=True raises on any graph break, in the forward or while the backward is traced.

    With dynamic=True all sizes and numbers are variables, those of the spec too.
    """
    impl, (_, mask) = case.split("_")[0], CALLS[case]
    inputs = _inputs(case, tq)
    dy = torch.randn(*inputs["q"].shape[:3], inputs["v"].shape[3])
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = [
        value_and_gradients(lambda f=function, **x: f(**x, mask=mask, impl=impl), inputs, dy, CONSTANTS.get(case, ()))
        for function in (compiled, attention)
    ]
    _assert_same(*results)


def test_a_batch_of_any_size_is_exported_up_to_what_a_grid_holds(monkeypatch):
    """The choice of an engine has a limit on CUDA: torch must be able to name it."""
    monkeypatch.setattr(launch, "INTERPRETED", True)

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, alpha: Tensor) -> Tensor:
            return attention(q, q, q, alpha=alpha, beta=alpha)

    q = torch.randn(3, 4, 32, 16)
    sizes = {0: torch.export.Dim("batch")}
    with pytest.raises(torch._dynamo.exc.UserError, match=r"Dim\('batch', max=16383\)"):
        torch.export.export(Attention(), (q, q[..., 0]), dynamic_shapes=(sizes, sizes))


@pytest.mark.parametrize("logit", [None, SoftCap(5.0)])
def test_biases_masks_of_pairs_and_narrow_values_are_exported_for_any_length(logit):
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, allowed: Tensor) -> Tensor:
            return attention(q, k, v, Mask(allowed=allowed), logit=logit, sink=0.5, bias=bias)

    def arguments(tokens: int) -> tuple[Tensor, ...]:
        q, k, v = (torch.randn(2, heads, tokens, width) for heads, width in ((4, 8), (2, 8), (2, 4)))
        return q, k, v, torch.randn(4, tokens, tokens), torch.arange(tokens) % 4 != 2

    tokens = torch.export.Dim("tokens", min=2, max=64)
    sizes = (*({2: tokens},) * 3, {1: tokens, 2: tokens}, {0: tokens})
    program = torch.export.export(Attention(), arguments(9), dynamic_shapes=sizes).module()
    for other in (5, 9, 23):
        given = arguments(other)
        torch.testing.assert_close(program(*given), Attention()(*given))


@torch.no_grad()
def test_flex_is_one_graph_for_all_masks_of_a_kind():
    """Packed batches have a new mask each, made outside of the compiled step or in it."""
    inputs, graphs = random_inputs(SPECS["affine"], Shape(1, 4, 2, 9, 9, 16)), []

    def backend(graph: torch.fx.GraphModule, _) -> Callable:
        graphs.append(graph)
        return graph.forward

    def function(mask: Mask, documents: Tensor) -> Tensor:
        inner = attention(**inputs, mask=Mask(causal=False, documents=documents), impl="flex")
        return inner + attention(**inputs, mask=mask, impl="flex")

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for cut in range(1, 4):
        documents = (torch.arange(9) >= cut).long()[None]
        mask = Mask(documents=documents)
        torch.testing.assert_close(compiled(mask, documents), function(mask, documents))
    assert len(graphs) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_trusts_the_layouts_that_the_operator_promises():
    """The one slow case: generated code around the operator reads its outputs and gradients by their fake strides."""

    def function(q: Tensor, gate: Tensor, **rest) -> Tensor:
        return attention(2 * q.transpose(1, 2), gate=torch.sigmoid(gate), **rest) + 1

    inputs = _inputs("sdpa")
    inputs["q"] = inputs["q"].transpose(1, 2).contiguous()
    dy = torch.randn(inputs["gate"].shape)
    compiled = torch.compile(function, fullgraph=True)
    _assert_same(value_and_gradients(compiled, inputs, dy), value_and_gradients(function, inputs, dy))


@pytest.mark.parametrize("name", ["affine_gated", "scale_invariant", "logn", "sink"])
def test_a_compiled_layer_trains_like_an_eager_one(name):
    layer = AttentionLayer(16, 4, 2, attention=VARIANTS[name].spec, init_std=0.3).train()
    x = torch.randn(2, 9, 16)
    results = []
    for run in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
        y = run(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    for compiled, eager in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_a_default_device_does_not_cut_the_graph():
    """torch.set_default_device replaces every torch function while it is on, which not all of them survive traced."""
    layer = AttentionLayer(16, 4, 2, attention="affine_gated", init_std=0.3).train()
    x = torch.randn(2, 9, 16)
    with torch.device("cpu"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x).sum().backward()


@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_layer_adds_to_the_same_alpha_sums(padded):
    layer = AttentionLayer(16, 4, 2, attention="affine", init_std=0.3).train()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, :4] = False
    mask = Mask(padding=padding) if padded else Mask()
    batches = torch.randn(3, 2, 9, 16)
    sums = []
    for run in (compiled, layer):
        layer.alpha._sum.zero_()
        layer.alpha._count.zero_()
        for x in batches:
            run(x, mask).sum().backward()
        sums.append((layer.alpha._sum.clone(), layer.alpha._count.clone()))
    assert sums[1][1].tolist() == [3 * (14 if padded else 18)] * 4
    torch.testing.assert_close(sums[0], sums[1])


@pytest.mark.parametrize(
    ("engine", "case"),
    [(engine, case) for engine in ("sdpa", "blocked") for case in (engine, "sdpa_plain")]
    + [(case.split("_")[0], case) for case in WITH_OPTIONS],
)
def test_operators_keep_the_rules_of_torch_library(engine, case):
    """Schema, fake implementation, autograd registration and tracing with symbolic shapes."""
    mask = CALLS[case][1]
    arguments = dict.fromkeys(("scale", "sink", "alpha", "beta", "gate")) | _inputs(case)
    call = checked_call(mask=mask, **_leaves(case, arguments))
    torch.library.opcheck(getattr(torch.ops.affine_attn, engine).default, flatten(call))


def test_an_operator_gets_all_of_a_call():
    """Also that documents lie in order, so that nothing is sorted."""
    inputs = random_inputs(SPECS["scale_invariant+sink+affine+headwise"], Shape(1, 2, 1, 9, 9, 16))
    real = torch.ones(1, 9, dtype=torch.bool)
    mask = replace(Mask.packed([3, 6], window=4), padding=real, lengths=torch.tensor([9]), allowed=real)
    for call in (
        checked_call(**inputs, mask=mask, scale=0.3, bias=torch.randn(9)),
        checked_call(**inputs | {"sink": 2.0, "logit": (SoftCap(), inputs["logit"])}),
        checked_call(**inputs | {"logit": None}, mask=Mask(causal=False, window=1, window_after=0)),
    ):
        arguments = flatten(call)
        again = unflatten(arguments)
        assert again.options == call.options
        assert all(a is b for a, b in zip(again.tensors, call.tensors, strict=True))
        assert vars(again.mask) == vars(call.mask)
        assert len(arguments) == len(torch.ops.affine_attn.blocked.default._schema.arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("engine", ["sdpa", "blocked"])
def test_fake_outputs_have_the_real_strides(engine, transposed, dtype):
    """A compiled graph trusts the fake layout; projections hand over transposed q, k, v."""
    inputs = _inputs(engine, dtype=dtype)
    if transposed:
        for name in ("q", "k", "v"):
            inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    arguments = dict.fromkeys(("scale", "sink", "alpha", "beta", "gate")) | inputs
    leaves = {n: x.requires_grad_() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    flat = flatten(checked_call(mask=CALLS[engine][1], **leaves))
    torch.library.opcheck(
        getattr(torch.ops.affine_attn, engine).default, flat, test_utils=("test_faketensor", "test_aot_dispatch_static")
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["affine_gated", "sink", "scale_invariant"])
def test_activation_checkpointing_gives_identical_gradients(name, use_reentrant):
    layer = AttentionLayer(16, 4, 2, attention=VARIANTS[name].spec, init_std=0.3).train()
    x = torch.randn(2, 9, 16)
    results = []
    for run in (lambda x: checkpoint(layer, x, use_reentrant=use_reentrant), layer):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        results.append([leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_new_length_recompiles_and_stays_right():
    layer = AttentionLayer(16, 4, attention=AttentionSpec(logit=ScaleInvariant(), affine=Affine()), init_std=0.3).eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9, 12):
        x = torch.randn(1, tokens, 16)
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("name", ["scale", "sink"])
def test_a_number_that_changes_from_call_to_call(name):
    """The compiler takes it for a variable from the second value on."""
    inputs = _inputs("sdpa_plain")
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for value in (0.5, 2.0, -1.5, 0.0):
        numbers = inputs | {name: value}
        torch.testing.assert_close(compiled(**numbers), attention(**numbers))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_logit_s_number_that_changes_from_call_to_call(dynamic):
    """Layers of one model may differ in it, and share the code that is compiled."""
    inputs = _inputs("sdpa_plain")
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tau in (10.0, 3.0, 0.1):
        numbers = inputs | {"logit": ScaleInvariant(tau)}
        torch.testing.assert_close(compiled(**numbers), attention(**numbers))
