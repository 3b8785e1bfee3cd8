"""Distillation losses against their formulas on full logits in float64, every gradient, and what must never be made."""

import functools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from affine_attn.distill import KINDS, Logits, Loss, LossSpec, Teacher, TopK, chunked_loss, next_tokens
from affine_attn.distill import losses as module
from affine_attn.distill.losses import chunk_size
from benchmarks import losses as benchmark
from benchmarks import record
from benchmarks.steps import Step

N, V, D, TEACHER_D, K = 23, 41, 8, 6, 5
SPECS = [
    *(LossSpec(kind) for kind in KINDS),
    *(LossSpec(kind, temperature=2.5, hard=0.3, beta=0.2) for kind in KINDS),
    LossSpec(temperature=0.5, hard=1.0),
]


def _name(spec: LossSpec) -> str:
    return f"{spec.kind}-T{spec.temperature:g}-hard{spec.hard:g}"


def _inputs(tokens: int = N, vocabulary: int = V, scale: float = 0.5, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * math.sqrt(scale)

    hidden, weight = normal(tokens, D), normal(vocabulary, D)
    teacher = Teacher(normal(tokens, TEACHER_D), normal(vocabulary, TEACHER_D))
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden, weight, teacher, labels


def _top_k(teacher: Teacher, k: int = K) -> TopK:
    log_probs, ids = (teacher.hidden @ teacher.weight.T).log_softmax(-1).topk(k)
    return TopK(ids, log_probs)


def _target(kind: str, teacher: Teacher) -> Teacher | Logits | TopK:
    if kind == "logits":
        return Logits(teacher.hidden @ teacher.weight.T)
    return _top_k(teacher) if kind == "top_k" else teacher


def _formula(
    hidden: Tensor,
    weight: Tensor,
    target: Teacher | Logits | TopK | None,
    labels: Tensor | None,
    spec: LossSpec,
    valid: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss, kd, hard, entropy as means over the valid tokens, differentiated by autograd."""
    z, t = hidden @ weight.T, spec.temperature
    log_p = (z / t).log_softmax(-1)
    zero = z.new_zeros(z.shape[0])
    hard = zero if labels is None else F.cross_entropy(z, labels.clamp(min=0), reduction="none")
    kd = entropy = zero
    if target is not None:
        if isinstance(target, Teacher):
            q = (target.hidden.to(z) @ target.weight.to(z).T / t).softmax(-1)
        elif isinstance(target, Logits):
            q = (target.logits.to(z) / t).softmax(-1)
        else:
            q = torch.zeros_like(z).scatter_add(1, target.ids, (target.log_probs.to(z) / t).softmax(-1))
        p, m = log_p.exp(), spec.beta * q + (1 - spec.beta) * log_p.exp()
        entropy = -torch.xlogy(q, q).sum(-1)
        kd = {
            "soft_ce": lambda: -(q * log_p).sum(-1),
            "forward_kl": lambda: (torch.xlogy(q, q) - q * log_p).sum(-1),
            "reverse_kl": lambda: (p * (log_p - q.log())).sum(-1),
            "jsd": lambda: (
                spec.beta * (torch.xlogy(q, q) - q * m.log()).sum(-1)
                + (1 - spec.beta) * (p * (log_p - m.log())).sum(-1)
            ),
        }[spec.kind]()
    share = 1.0 if target is None else spec.hard
    parts = [x[valid].sum() / valid.sum() for x in (t**2 * kd, hard, t**2 * entropy)]
    return (1 - share) * parts[0] + share * parts[1], *parts


def _chunks_of(tokens: int, vocabulary: int = V, itemsize: int = 4) -> int:
    """chunk_bytes for that many tokens."""
    return tokens * vocabulary * itemsize


def _assert_same(dtype, hidden, weight, target, labels, spec, valid=None, rtol=2e-6, **options) -> Loss:
    """Values and both gradients in ``dtype`` against the formula in float64 on the same, rounded numbers."""

    def rounded(x):
        return x.to(dtype) if x.dtype.is_floating_point else x

    target = target if target is None else type(target)(*map(rounded, target))
    ours = [rounded(x).requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in ours]
    valid_rows = torch.ones(hidden.shape[0], dtype=torch.bool) if valid is None else valid
    expected = _formula(*exact, target, labels, spec, valid_rows)
    actual = chunked_loss(*ours, target, labels, spec=spec, mask=valid, **options)
    for name, value, truth in zip(("loss", "kd", "hard", "entropy"), actual, expected, strict=False):
        assert value.dtype == torch.promote_types(dtype, torch.float32), name
        torch.testing.assert_close(value.double(), truth, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")
    assert actual.loss.requires_grad
    assert not any(part.requires_grad for part in actual[1:])
    gradients = torch.autograd.grad(actual.loss * 3, ours)
    truths = torch.autograd.grad(expected[0] * 3, exact)
    for name, gradient, truth in zip(("hidden", "weight"), gradients, truths, strict=True):
        assert gradient.dtype == dtype
        error = (gradient.double() - truth).abs().max() / truth.abs().max()
        assert error <= rtol, f"gradient of {name}: {error:.1e}"
    return actual


@pytest.mark.parametrize("spec", SPECS, ids=_name)
@pytest.mark.parametrize("chunk", [1, 5, N, 1000])
def test_every_loss_in_fp32(spec, chunk):
    _assert_same(torch.float32, *_inputs(), spec, chunk_bytes=_chunks_of(chunk))


@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_every_loss_in_float64(spec):
    _assert_same(torch.float64, *_inputs(), spec, rtol=1e-12, chunk_bytes=_chunks_of(5, itemsize=8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_every_loss_in_half_precision(spec, dtype):
    """Logits of this dtype are what costs: at a few units they are off by a unit in the last place."""
    rtol = 8 * torch.finfo(dtype).eps
    _assert_same(dtype, *_inputs(), spec, rtol=rtol, chunk_bytes=_chunks_of(5, itemsize=2))


@pytest.mark.parametrize("spec", [s for s in SPECS if s.kind != "reverse_kl"], ids=_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_top_k_target_is_exact_for_the_truncated_teacher(spec, dtype):
    hidden, weight, teacher, labels = _inputs()
    rtol = 2e-6 if dtype == torch.float32 else 1e-12
    target = _top_k(teacher)
    # A label among the ids and one that is not: both gradients at the ids and elsewhere have the hard part.
    labels[0] = target.ids[0, 1]
    assert labels[1] not in target.ids[1]
    _assert_same(dtype, hidden, weight, target, labels, spec, rtol=rtol, chunk_bytes=_chunks_of(5))


@pytest.mark.parametrize("kind", ["soft_ce", "jsd"])
def test_top_k_of_everything_is_the_teacher_and_minus_infinity_is_no_entry(kind):
    hidden, weight, teacher, _ = _inputs()
    full = chunked_loss(hidden, weight, teacher, spec=LossSpec(kind, 2.0))
    everything = chunked_loss(hidden, weight, _top_k(teacher, V), spec=LossSpec(kind, 2.0))
    torch.testing.assert_close(everything, full)
    ids, log_probs = _top_k(teacher, 7)
    log_probs[:, K:] = -math.inf
    cut = chunked_loss(hidden, weight, TopK(ids, log_probs), spec=LossSpec(kind))
    torch.testing.assert_close(
        cut, chunked_loss(hidden, weight, TopK(ids[:, :K], log_probs[:, :K]), spec=LossSpec(kind))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", [s for s in SPECS if s.kind != "reverse_kl"], ids=_name)
def test_entries_that_are_not_used_may_repeat_one_that_is(spec, dtype):
    """Rows of different lengths are filled up with one id, which some of them also use."""
    hidden, weight, teacher, labels = _inputs()
    ids, log_probs = _top_k(teacher, 2 * K)
    log_probs[:, K:] = -math.inf
    ids[:, K:] = ids[:, :1]
    rtol = 2e-6 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    _assert_same(dtype, hidden, weight, TopK(ids, log_probs), labels, spec, rtol=rtol)


@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_logits_as_targets(spec):
    hidden, weight, teacher, labels = _inputs()
    target = _target("logits", teacher)
    _assert_same(torch.float32, hidden, weight, target, labels, spec, chunk_bytes=_chunks_of(5))


def test_logits_are_the_teacher_they_come_from():
    """Also of a shared vocabulary, and in any shape."""
    hidden, weight, teacher, labels = _inputs()
    shared = 29
    logits = Logits((teacher.hidden @ teacher.weight[:37].T).view(1, N, 37))
    theirs = chunked_loss(hidden, weight, teacher, labels % shared, shared=shared)
    ours = chunked_loss(hidden[None], weight, logits, labels[None] % shared, shared=shared)
    for value, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, truth)


def test_without_teacher_it_is_cross_entropy():
    hidden, weight, _, labels = _inputs()
    actual = _assert_same(
        torch.float32, hidden, weight, None, labels, LossSpec(temperature=3.0), chunk_bytes=_chunks_of(4)
    )
    torch.testing.assert_close(actual.loss.double(), F.cross_entropy(hidden @ weight.T, labels), rtol=2e-6, atol=0)
    assert actual.kd == actual.entropy == 0


def test_soft_cross_entropy_and_forward_kl_differ_by_the_entropy_alone():
    hidden, weight, teacher, _ = _inputs()
    hidden.requires_grad_()
    kl, ce = (chunked_loss(hidden, weight, teacher, spec=LossSpec(kind, 2.0)) for kind in ("forward_kl", "soft_ce"))
    torch.testing.assert_close(ce.kd - ce.entropy, kl.kd)
    torch.testing.assert_close(*(torch.autograd.grad(x.loss, hidden)[0] for x in (kl, ce)), rtol=0, atol=0)


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(2, 30),
    chunk=st.integers(1, 45),
    spec=st.sampled_from(SPECS),
    cached=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(tokens, vocabulary, chunk, spec, cached, seed):
    hidden, weight, target, labels = _inputs(tokens, vocabulary, seed=seed)
    valid = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
    valid[seed % tokens] = True
    if cached and spec.kind != "reverse_kl":
        target = _top_k(target, min(K, vocabulary))
    chunk_bytes = _chunks_of(chunk, vocabulary, 8)
    _assert_same(torch.float64, hidden, weight, target, labels, spec, valid, rtol=1e-10, chunk_bytes=chunk_bytes)


@settings(deadline=None)
@given(tokens=st.integers(1, 10**5), vocabulary=st.integers(1, 10**6), most=st.integers(1, 10**9))
def test_chunks_are_few_equal_and_within_the_budget(tokens, vocabulary, most):
    size = chunk_size(tokens, vocabulary, 2, most)
    assert 1 <= size <= tokens
    assert size == 1 or size * vocabulary * 2 <= most
    assert size == tokens or most < 256 * vocabulary or size % 128 == 0


@pytest.mark.parametrize("spec", [LossSpec(), LossSpec("reverse_kl", 2.0, hard=0.5), LossSpec("jsd")], ids=_name)
@pytest.mark.parametrize("kind", ["teacher", "logits", "top_k"])
def test_masked_tokens_have_no_influence_whatever_they_hold(spec, kind):
    if kind == "top_k" and spec.kind == "reverse_kl":
        pytest.skip("infinite for a top-k target")
    hidden, weight, teacher, labels = _inputs()
    target = _target(kind, teacher)
    mask = torch.arange(N) % 3 != 0
    labels[5] = -100
    counts = mask & (labels != -100)
    alone = [x[counts] if len(x) == N else x for x in (hidden, weight, *target, labels)]
    h, w = alone[0].requires_grad_(), weight.requires_grad_()
    expected = chunked_loss(h, w, type(target)(*alone[2:-1]), alone[-1], spec=spec)
    dh, dw = torch.autograd.grad(expected.loss, (h, w))

    hidden[~counts], labels[~mask] = math.nan, 10**6
    dirty = [x.clone() for x in target]
    dirty[0][~counts] = -7 if kind == "top_k" else math.nan
    actual = chunked_loss(
        hidden.requires_grad_(), w, type(target)(*dirty), labels, spec=spec, mask=mask, chunk_bytes=_chunks_of(5, V, 8)
    )
    torch.testing.assert_close(actual, expected)
    assert actual.tokens == counts.sum()
    dhidden, dweight = torch.autograd.grad(actual.loss, (hidden, w))
    torch.testing.assert_close(dhidden[counts], dh)
    torch.testing.assert_close(dweight, dw)
    assert (dhidden[~counts] == 0).all()


def test_no_token_counts():
    hidden, weight, teacher, labels = _inputs()
    actual = chunked_loss(hidden.requires_grad_(), weight, teacher, torch.full_like(labels, -100))
    assert actual.loss == actual.tokens == 0
    assert (torch.autograd.grad(actual.loss, hidden)[0] == 0).all()


def test_leading_dimensions_and_next_tokens():
    hidden, weight, teacher, ids = _inputs(24)
    ids = ids.view(2, 12)
    assert next_tokens(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]
    batched = Teacher(teacher.hidden.view(2, 12, TEACHER_D), teacher.weight)
    leaf = hidden.view(2, 12, D).clone().requires_grad_()
    actual = chunked_loss(leaf, weight, batched, next_tokens(ids), spec=LossSpec(hard=0.5))
    expected = chunked_loss(hidden, weight, teacher, next_tokens(ids).flatten(), spec=LossSpec(hard=0.5))
    torch.testing.assert_close(actual, expected)
    assert actual.tokens == 22
    assert torch.autograd.grad(actual.loss, leaf)[0].shape == leaf.shape


@pytest.mark.parametrize("total", [17, torch.tensor(17)], ids=["int", "tensor"])
def test_micro_batches_add_up_with_the_denominator_of_all(total):
    hidden, weight, teacher, labels = _inputs()
    labels[17:] = -100
    weight.requires_grad_()
    whole = chunked_loss(hidden, weight, teacher, labels)
    (expected,) = torch.autograd.grad(whole.loss, weight)
    parts = []
    for rows in (slice(0, 7), slice(7, N)):
        micro = Teacher(teacher.hidden[rows], teacher.weight)
        parts.append(chunked_loss(hidden[rows], weight, micro, labels[rows], tokens=total))
        parts[-1].loss.backward()
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    torch.testing.assert_close(parts[0].kd + parts[1].kd, whole.kd)
    torch.testing.assert_close(weight.grad, expected)


def test_a_restricted_vocabulary_is_as_if_the_rest_did_not_exist():
    hidden, weight, teacher, labels = _inputs()
    shared, labels = 30, labels % 30
    target = Teacher(teacher.hidden, teacher.weight[:37])
    weight.requires_grad_()
    actual = chunked_loss(hidden, weight, target, labels, spec=LossSpec(hard=0.4), shared=shared)
    cut = Teacher(teacher.hidden, teacher.weight[:shared])
    expected = chunked_loss(hidden, weight[:shared], cut, labels, spec=LossSpec(hard=0.4))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.loss, weight)[0] for x in (actual, expected)))


def test_gradients_that_nobody_asks_for_are_not_computed(monkeypatch):
    hidden, weight, teacher, _ = _inputs()
    leaf = hidden.clone().requires_grad_()
    expected = torch.autograd.grad(chunked_loss(leaf, weight.clone().requires_grad_(), teacher).loss, leaf)
    monkeypatch.setattr(module, "_add_product", lambda *_, **__: pytest.fail("the head needs no gradient"))
    torch.testing.assert_close(torch.autograd.grad(chunked_loss(leaf, weight, teacher).loss, leaf), expected)
    fail = lambda *_: pytest.fail("no gradient is needed")  # noqa: E731
    monkeypatch.setattr(module, "_PASSES", (*module._PASSES[:2], fail, fail))
    with torch.no_grad():
        assert not chunked_loss(leaf, weight.requires_grad_(), teacher).loss.requires_grad
    chunked_loss(hidden, weight.detach(), teacher)


def test_a_retained_graph_gives_the_same_gradient_twice():
    hidden, weight, teacher, _ = _inputs()
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    loss = chunked_loss(*leaves, teacher).loss
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), first, rtol=0, atol=0)


def test_under_autocast_a_fp32_head_multiplies_in_bf16_and_keeps_fp32_gradients():
    hidden, weight, teacher, labels = (
        x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in _inputs()
    )
    teacher = Teacher(teacher.hidden.float(), teacher.weight.bfloat16())
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        actual = chunked_loss(*leaves, teacher, labels, spec=LossSpec(hard=0.5), chunk_bytes=_chunks_of(5, itemsize=2))
    low = [x.detach().bfloat16().requires_grad_() for x in leaves]
    expected = chunked_loss(*low, Teacher(teacher.hidden.bfloat16(), teacher.weight), labels, spec=LossSpec(hard=0.5))
    torch.testing.assert_close(actual, expected)
    gradients = torch.autograd.grad(actual.loss, leaves)
    assert all(x.dtype == torch.float32 for x in gradients)
    for gradient, rounded in zip(gradients, torch.autograd.grad(expected.loss, low), strict=True):
        torch.testing.assert_close(gradient, rounded.float(), rtol=1e-2, atol=1e-3)


def test_the_head_s_gradient_adds_up_in_fp32():
    """Over chunks of a token, each of which 16 bits would round into the sum; products of 16-bit numbers are exact."""
    hidden, weight, teacher, labels = _inputs(tokens=400)
    hidden, weight, teacher = hidden.bfloat16(), weight.bfloat16(), Teacher(*(x.bfloat16() for x in teacher))
    weight.requires_grad_()
    whole, by_token = (
        torch.autograd.grad(chunked_loss(hidden, weight, teacher, labels, chunk_bytes=bytes).loss, weight)[0].double()
        for bytes in (1 << 20, 2 * V)
    )
    # Both are rounded once, at the end.
    assert ((by_token - whole).abs() <= torch.finfo(torch.bfloat16).eps * whole.abs() + 1e-6 * whole.abs().max()).all()


def test_small_gradients_survive_fp16():
    """A denominator of a million and a loss scale, as a trainer in fp16 has it: only the last product may be small."""
    hidden, weight, teacher, _ = _inputs()
    hidden, weight, teacher = hidden.half(), weight.half(), Teacher(*(x.half() for x in teacher))
    hidden.requires_grad_()
    plain = torch.autograd.grad(chunked_loss(hidden, weight, teacher, tokens=1).loss, hidden)
    scaled = torch.autograd.grad(chunked_loss(hidden, weight, teacher, tokens=2**20).loss * 2**20, hidden)
    torch.testing.assert_close(scaled, plain, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits_stay_finite(kind):
    hidden, weight, teacher, labels = _inputs()
    leaf = (hidden.float() * 200).requires_grad_()
    far = Teacher(-200 * teacher.hidden.float(), teacher.weight.float())
    loss = chunked_loss(leaf, weight.float(), far, labels, spec=LossSpec(kind, hard=0.5)).loss
    assert loss.isfinite()
    assert torch.autograd.grad(loss, leaf)[0].isfinite().all()


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives, and the number of products."""

    def __init__(self):
        super().__init__()
        self.numel, self.products = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.products += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("spec", SPECS, ids=_name)
@pytest.mark.parametrize("cached", [False, True], ids=["teacher", "top_k"])
def test_full_logits_never_exist_and_a_chunk_takes_four_products(spec, cached):
    if cached and spec.kind == "reverse_kl":
        pytest.skip("infinite for a top-k target")
    tokens, vocabulary, chunk = 200, 64, 8
    hidden, weight, target, labels = _inputs(tokens, vocabulary)
    target = _top_k(target) if cached else target
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    with _Largest() as seen:
        loss = chunked_loss(*leaves, target, labels, spec=spec, chunk_bytes=_chunks_of(chunk, vocabulary, 8)).loss
        torch.autograd.grad(loss, leaves)
    # Hidden states and weights are the largest there may be; full logits would have four times that.
    assert seen.numel == max(hidden.numel(), chunk * vocabulary)
    assert seen.products == (3 if cached else 4) * tokens // chunk
    with _Largest() as eager:
        _formula(*leaves, target, labels, spec, torch.ones(tokens, dtype=torch.bool))
    assert eager.numel == tokens * vocabulary, "the check would see full logits"


def test_compiled_passes_give_the_same():
    hidden, weight, teacher, labels = _inputs()
    spec, mask = LossSpec("jsd", 2.0, hard=0.5), torch.arange(N) != 4
    options = {"chunk_bytes": _chunks_of(5), "compiled": True}
    _assert_same(torch.float32, hidden, weight, teacher, labels, spec, mask, **options)


@pytest.mark.parametrize("kind", ["teacher", "logits", "top_k"])
def test_one_graph_per_pass_serves_all_chunks(kind, monkeypatch):
    """Traced, which is where breaks and graphs are counted, and not translated, which takes long."""
    from torch._dynamo.utils import counters

    passes = tuple(torch.compile(function, fullgraph=True, backend="eager") for function in module._PASSES)
    monkeypatch.setattr(module, "_compiled_passes", lambda: passes)
    torch._dynamo.reset()
    counters.clear()
    hidden, weight, teacher, labels = _inputs()
    target = _target(kind, teacher)
    counted = []
    # Two chunks, then five and six, whose last ones overlap.
    for chunk in (12, 5, 4):
        options = {"chunk_bytes": _chunks_of(chunk), "compiled": True}
        _assert_same(torch.float32, hidden, weight, target, labels, LossSpec(hard=0.5), torch.arange(N) != 4, **options)
        counted.append(counters["stats"]["unique_graphs"])
    # Normalise and finish, or with cached targets three passes: once for the first length, once for any other. A chunk
    # of given logits is not copied, and where it starts is one more thing that may differ.
    assert counted == {"teacher": [2, 4, 4], "logits": [2, 6, 6], "top_k": [3, 6, 6]}[kind]
    assert not counters["graph_break"]


@pytest.fixture
def traced(monkeypatch) -> list[bool]:
    """Record whether each call was to be compiled, and compile none."""
    calls: list[bool] = []
    actual = module._run

    def run(hidden, weight, job, plan):
        calls.append(plan.compiled)
        return actual(hidden, weight, job, plan._replace(compiled=False))

    monkeypatch.setattr(module, "_run", run)
    return calls


def test_on_a_cpu_compiling_is_decided_for_a_run_and_not_by_what_ran_before(traced, monkeypatch):
    monkeypatch.setattr(module, "_can_compile", lambda: True)
    assert not module.compiling_pays(49, 2**40)
    assert not module.compiling_pays(1000, 2**28 - 1)
    assert module.compiling_pays(50, 2**28)
    monkeypatch.setattr(module, "_FEWEST_LOGITS", 1)
    hidden, weight, teacher, labels = _inputs(20)
    for _ in range(10):
        chunked_loss(hidden, weight, teacher, labels, chunk_bytes=_chunks_of(2, itemsize=8))
    assert traced == 10 * [False]
    chunked_loss(hidden, weight, teacher, labels, compiled=True)
    assert traced[-1]


def test_without_a_compiler_it_is_said_once(monkeypatch, caplog):
    def broken(*_, **__):
        raise RuntimeError("no C++ compiler\nhere")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(module, "_can_compile", functools.cache(module._can_compile.__wrapped__))
    monkeypatch.setattr(module, "_FEWEST_LOGITS", 1)
    assert [module.compiling_pays(50, 1) for _ in range(4)] == 4 * [False]
    assert [record.message for record in caplog.records] == [
        "the loss runs uncompiled, which is slower: no C++ compiler"
    ]


def test_on_a_cpu_chunks_are_of_the_size_that_malloc_keeps(monkeypatch):
    assert module.CPU_CHUNK_BYTES == 32 * 2**20
    monkeypatch.setattr(module, "CPU_CHUNK_BYTES", _chunks_of(8, 64, 8))
    hidden, weight, teacher, _ = _inputs(200, 64)
    with _Largest() as seen:
        chunked_loss(hidden, weight, teacher)
    assert seen.numel <= hidden.numel()
    assert seen.products == 2 * 200 // 8


BAD: dict[str, tuple[dict, str]] = {
    "vocabulary": (
        {"target": Teacher(torch.zeros(4, 3), torch.zeros(9, 3))},
        "student has 7 and the teacher has 9 .*shared",
    ),
    "too many shared": ({"shared": 8}, "shared is 8, but the student has 7 and the teacher has 7"),
    "none shared": ({"shared": 0}, "shared is 0"),
    "label": ({"labels": torch.full((4,), 7)}, r"labels must lie in \[0, 7\)"),
    "label not shared": ({"labels": torch.full((4,), 6), "shared": 5}, r"labels must lie in \[0, 5\)"),
    "id": ({"target": TopK(torch.full((4, 1), 7), torch.zeros(4, 1))}, r"target.ids must lie in \[0, 7\)"),
    "top-k shapes": ({"target": TopK(torch.zeros(4, 2).long(), torch.zeros(4, 1))}, "one shape"),
    "reverse": (
        {"target": TopK(torch.zeros(4, 1).long(), torch.zeros(4, 1)), "spec": LossSpec("reverse_kl")},
        "reverse_kl is infinite",
    ),
    "nothing": ({"target": None}, "nothing to learn from"),
    "no labels": ({"spec": LossSpec(hard=0.5)}, "no labels"),
    "labels' shape": ({"labels": torch.zeros(5).long()}, r"labels is for tokens \(5,\), hidden for \(4,\)"),
    "teacher's tokens": ({"target": Teacher(torch.zeros(5, 3), torch.zeros(7, 3))}, "target.hidden is for tokens"),
    "logits' tokens": ({"target": Logits(torch.zeros(5, 7))}, "target.logits is for tokens"),
    "logits' vocabulary": ({"target": Logits(torch.zeros(4, 9))}, "the teacher has 9"),
    "teacher's size": ({"target": Teacher(torch.zeros(4, 2), torch.zeros(7, 3))}, "teacher's hidden size is 2"),
    "mask": ({"mask": torch.ones(4)}, "mask must be bool"),
    "dtype": ({"weight": torch.zeros(7, 3, dtype=torch.bfloat16)}, "student's hidden states are .*float32"),
    "no tokens": ({"hidden": torch.zeros(0, 3)}, "no tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_sentence(name):
    changed, message = BAD[name]
    arguments = {
        "hidden": torch.zeros(4, 3),
        "weight": torch.zeros(7, 3),
        "target": Teacher(torch.zeros(4, 3), torch.zeros(7, 3)),
    }
    with pytest.raises(ValueError, match=message) as error:
        chunked_loss(**(arguments | changed))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"), [("kind", "mse"), ("temperature", 0.0), ("beta", 0.0), ("beta", 1.0), ("hard", 1.5)]
)
def test_bad_spec(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        LossSpec(**{field: value})


FSDP = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from affine_attn.distill import Teacher, chunked_loss

class Student(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 11, bias=False)
    def forward(self, x, target):
        return chunked_loss(self.body(x), self.head.weight, target, chunk_bytes=200).loss

torch.manual_seed(0)
student, x = Student(), torch.randn(9, 4)
target = Teacher(torch.randn(9, 3), torch.randn(11, 3))
loss = student(x, target)
expected = torch.autograd.grad(loss, student.parameters())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fully_shard(student, mesh=init_device_mesh("cpu", (1,)))
sharded = student(x, target)
sharded.backward()
torch.testing.assert_close(sharded, loss)
for parameter, gradient in zip(student.parameters(), expected):
    torch.testing.assert_close(parameter.grad.full_tensor(), gradient)
student.reshard()
try:
    chunked_loss(torch.randn(9, 8), student.head.weight, target)
except ValueError as error:
    assert "DTensor" in str(error)
else:
    sys.exit("a sharded head went through")
dist.destroy_process_group()
"""


def test_inside_the_forward_of_a_sharded_module():
    result = subprocess.run([sys.executable, "-c", FSDP], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]


SIZES = {"tokens": 24, "vocabulary": 50, "hidden": 8, "chunk-mib": 1, "rounds": 1, "round-ms": 0.1}
TINY = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
PRODUCT = {"matmul": Step(lambda: torch.ones(8, 8) @ torch.ones(8, 8), flops=1e3)}


def test_the_benchmark_times_ours_and_eager_against_the_floor(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "ceilings", lambda _: PRODUCT)
    benchmark.main([*TINY, "--output", str(tmp_path / "losses.csv")])
    rows = record.read(tmp_path / "losses.csv")
    assert [row["what"] for row in rows[:3]] == [benchmark.FLOOR, "eager torch, full logits", "chunked_loss, 1 MiB"]
    assert len(rows) >= 6
    assert all(float(row["ratio"]) > 0 and not row["note"] for row in rows)


def test_the_benchmark_refuses_wrong_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "ceilings", lambda _: PRODUCT)
    monkeypatch.setattr(benchmark, "ours_of", lambda kind, inputs, _: benchmark.eager(kind, inputs) * 1.01)
    with pytest.raises(SystemExit, match="wrong: gradients differ"):
        benchmark.main([*TINY, "--output", str(tmp_path / "losses.csv")])


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=_name)
@pytest.mark.parametrize("cached", [False, True], ids=["teacher", "top_k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_cuda_as_on_the_cpu(spec, cached, dtype):
    """Compiled, with fp32 sums of half-precision products, which have a path of their own there."""
    if cached and spec.kind == "reverse_kl":
        pytest.skip("infinite for a top-k target")
    hidden, weight, target, labels = _inputs(300, 1000)
    target = _top_k(target) if cached else target
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device, dtype).requires_grad_() for x in (hidden, weight)]
        there = type(target)(*(x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in target))
        loss = chunked_loss(*leaves, there, labels.to(device), spec=spec, chunk_bytes=_chunks_of(130, 1000, 2))
        results.append([x.cpu().double() for x in (*loss[:4], *torch.autograd.grad(loss.loss, leaves))])
    for ours, truth in zip(results[1], results[0], strict=True):
        assert (ours - truth).abs().max() <= 8 * torch.finfo(dtype).eps * truth.abs().max().clamp(min=1e-3)
