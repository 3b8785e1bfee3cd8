"""Engine ``fa4`` on a made-up package in plain torch: values, gradients, layouts, and what it refuses.

Tests with the mark ``gpu`` ask the real package, where it is installed.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from affine_attn import Mask, attention, explain
from affine_attn.bench.accuracy import Shape, deviations, random_inputs, value_and_gradients
from affine_attn.core.call import checked_call
from affine_attn.engines import needs, plan, timings
from affine_attn.engines.plan import why_not
from benchmarks import fa4 as fa4_times
from benchmarks import record
from tests.support import flash_attn_4 as package
from tests.support.cases import CASES, MASKS, SPECS, Case
from tests.support.flash_attn_4 import flash_attn_4

__all__ = ["flash_attn_4"]

# It takes 16 bits alone.
TAKEN = list(dict.fromkeys(c._replace(dtype=torch.bfloat16) if c.dtype == torch.float32 else c for c in CASES))
# Documents beside each other in memory, and queries that are fewer than keys: some documents have none.
PACKED = [
    Case(name, SPECS[name], shape, MASKS[mask], torch.bfloat16)
    for name in ("softmax", "sink", "off_by_one", "logn", "alpha_only", "gated")
    for mask in ("packed", "packed_window")
    for shape in (Shape(2, 4, 2, 37, 37, 32), Shape(3, 4, 1, 9, 45, 64), Shape(1, 2, 2, 1, 50, 128))
]
# Values narrower than keys.
NARROW = [
    Case(name, SPECS[name], shape, MASKS[mask], torch.bfloat16)
    for name in ("softmax", "sink", "sink+affine+gate", "logn")
    for mask in ("none", "causal", "window7", "packed")
    for shape in (Shape(2, 4, 2, 37, 37, 32, 16), Shape(2, 4, 1, 9, 45, 192, 128))
]


def _arguments(case: Case, device: str = "cpu"):
    inputs = random_inputs(case.spec, case.shape, case.dtype, device, largest_logit=case.largest_logit)
    return inputs, case.mask(case.shape, torch.device(device))


def _call(case: Case):
    inputs, mask = _arguments(case)
    leaves = {name: x.requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    return checked_call(mask=mask, **leaves)


def _assert_within(case: Case, device: str = "cpu"):
    inputs, mask = _arguments(case, device)
    wrong = [d for d in deviations("fa4", inputs, mask) if not d.within]
    assert not wrong, f"fa4 is too far from the reference: {wrong}"


def test_every_case_that_it_accepts_is_right(flash_attn_4):
    taken = [case for case in TAKEN + PACKED + NARROW if why_not("fa4", _call(case)) is None]
    for case in taken:
        _assert_within(case)
    names = {name for case in taken for name, make in MASKS.items() if make is case.mask}
    assert names == {"none", "causal", "window1", "window7", "window_long", "packed", "packed_window"}
    assert {case.name for case in taken} >= {"softmax", "sink", "off_by_one", "affine_gated", "logn"}
    assert {case.mask for case in taken if case in NARROW} == {case.mask for case in NARROW}
    assert len(taken) > len(TAKEN) // 4


def test_documents_that_see_both_ways(flash_attn_4):
    shape = Shape(2, 4, 2, 20, 37, 32)
    documents = MASKS["packed"](shape, torch.device("cpu")).documents
    mask = Mask(causal=False, documents=documents, contiguous=True)
    assert not [d for d in deviations("fa4", random_inputs(SPECS["sink"], shape, torch.bfloat16), mask) if not d.within]


@pytest.mark.parametrize("name", ["sink", "affine_gated"])
def test_any_memory_layout_and_the_gradient_of_a_sum(flash_attn_4, name):
    inputs = random_inputs(SPECS[name], Shape(2, 4, 2, 30, 30, 32), torch.bfloat16)
    by_token = {
        x: t.transpose(1, 2).contiguous().transpose(1, 2) if isinstance(t, torch.Tensor) and t.ndim == 4 else t
        for x, t in inputs.items()
    }
    for strided in (inputs, by_token):
        assert not [d for d in deviations("fa4", strided) if not d.within]
        leaves = {x: t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for x, t in strided.items()}
        attention(**leaves, impl="fa4").sum().backward()
        assert leaves["q"].grad.stride() == leaves["q"].stride()


@pytest.mark.parametrize("kind", ["per_head", "per_head_in_16_bits", "per_token"])
def test_a_sink_is_in_its_kernels_where_it_is_the_only_stage(flash_attn_4, kind):
    inputs = random_inputs(SPECS["sink"], Shape(2, 4, 2, 30, 30, 32), torch.bfloat16)
    if kind == "per_head_in_16_bits":
        inputs["sink"] = inputs["sink"].bfloat16()
    elif kind == "per_token":
        inputs["sink"] = inputs["sink"][None, :, None].expand(2, 4, 30).clone()
    assert not [d for d in deviations("fa4", inputs) if not d.within]
    f = needs.facts_of(checked_call(**inputs))
    name = "fa4" if kind == "per_token" else "fa4_sink"
    assert plan.kernels("fa4", f, needs.NO_SIZES).forward == name
    assert plan.kernels("fa4", f._replace(has_alpha=True), needs.NO_SIZES).forward == "fa4"
    # On Blackwell head_dim 256 has no gradient of a sink.
    on_blackwell = f._replace(has_grad=True, head_dim=256, machine=f.machine._replace(capability=(10, 0)))
    assert plan.kernels("fa4", on_blackwell, needs.NO_SIZES).backward == "fa4"


def test_deterministic_where_torch_asks_for_it(flash_attn_4):
    inputs = random_inputs(SPECS["affine"], Shape(1, 2, 2, 9, 9, 16), torch.bfloat16)
    for is_asked in (True, False):
        torch.use_deterministic_algorithms(is_asked)
        value_and_gradients(lambda **x: attention(**x, impl="fa4"), inputs, torch.ones_like(inputs["q"]))
        assert flash_attn_4._flash_attn_bwd.deterministic is is_asked


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_and_recomputed_calls(flash_attn_4, packed):
    torch._dynamo.reset()
    inputs = random_inputs(SPECS["gated"], Shape(1, 4, 2, 9, 9, 16), torch.bfloat16)
    mask = Mask.packed([4, 5]) if packed else Mask(window=3)

    def call(q, k, v, gate):
        return attention(q, k, v, mask, gate=gate, impl="fa4")

    results = []
    for run in (
        call,
        torch.compile(call, fullgraph=True, backend="aot_eager"),
        lambda *x: checkpoint(call, *x, use_reentrant=False),
    ):
        leaves = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v", "gate")]
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_auto_takes_it_in_compiled_calls_and_not_in_exports(flash_attn_4):
    """A compiler asks for the GPU once; an exported program may run on another one."""
    torch._dynamo.reset()
    q = torch.randn(1, 2, 600, 64, dtype=torch.bfloat16, requires_grad=True)
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return module.forward

    class Attention(torch.nn.Module):
        def forward(self, q):
            return attention(q, q, q, Mask(window=64))

    for dynamic in (None, True):
        torch.compile(Attention(), backend=keep, fullgraph=True, dynamic=dynamic)(q).sum().backward()
    graphs.append(torch.export.export(Attention(), (q,)).graph)
    operators = [[str(node.target) for node in graph.nodes if "affine_attn" in str(node.target)] for graph in graphs]
    taken, taken_dynamic, exported = (any("fa4" in name for name in names) for names in operators)
    assert (taken, taken_dynamic, exported) == (True, True, False)


def test_explain_says_that_a_first_call_compiles(flash_attn_4):
    q = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16)
    said = explain(q, q, q, Mask.packed([20, 44]), sink=torch.zeros(2), impl="fa4").splitlines()
    assert "first call: of each configuration compiles for 2 to 10 seconds" in said
    assert "forward: fa4_sink, FlashAttention-4, with the sink in it" in said
    assert "epilogue: in the forward itself" in said
    assert "fa4: only by name, since its forward has not been timed by itself" in explain(q, q, q).splitlines()


def test_the_table_of_the_plan_is_that_of_the_measurements():
    measured = fa4_times.table(record.read(record.RESULTS / "fa4" / "nvidia-h200.csv"))
    assert timings.PATH.read_text() == timings.written(measured)
    assert measured == timings.TIMES


def test_shapes_that_a_plan_cannot_tell_apart_count_as_one():
    rows = [
        {"shape": shape, "what": "affine, fa4 + fa4", "ratio": ratio}
        for shape, ratio in (("1B", "1.0"), ("1B", "1.21"), ("0.5B", "1.5"), ("8k", "2.0"), ("512", ""))
    ]
    assert fa4_times.table(rows) == {
        timings.Point("causal", 64, 2048, "affine", "shared"): {("fa4", "fa4"): 1.1},
        timings.Point("causal", 64, 2048, "affine", "own"): {("fa4", "fa4"): 1.5},
        timings.Point("causal", 128, 8192, "affine", "shared"): {("fa4", "fa4"): 2.0},
    }


def _facts_of_timed(name: str, variant: str) -> needs.Facts:
    shape, window, mean = fa4_times.SHAPES[name]
    one = replace(shape, batch=1, heads=shape.heads // shape.kv_heads, kv_heads=1)
    mask = fa4_times.mask_of(one, window, mean, torch.device("cpu"))
    q = torch.empty(1, one.heads, one.tq, one.head_dim, dtype=torch.bfloat16)
    stages = {"sink": torch.zeros(one.heads), "alpha": q[..., 0], "beta": q[..., 0], "gate": q}
    call = checked_call(q, q[:, :1], q[:, :1], mask, **{x: stages[x] for x in fa4_times.STAGES[variant]})
    f = needs.facts_of(call)._replace(has_grad=True, is_deterministic=False)
    return f._replace(machine=f.machine._replace(triton=None))


@pytest.mark.parametrize("variant", fa4_times.STAGES)
def test_the_kernels_that_took_least_time_are_taken(flash_attn_4, variant):
    """For each shape that was timed, up to a hundredth of FlashAttention-4's plain attention."""
    s = needs.Sizes(is_square=True, has_rows=True)
    times: dict[str, dict[timings.Pair, float]] = {}
    for row in record.read(record.RESULTS / "fa4" / "nvidia-h200.csv"):
        what, _, pair = row["what"].partition(", ")
        if what == variant and " + " in pair:
            forward, backward = pair.split(" + ")
            times.setdefault(row["shape"], {})[forward, backward] = float(row["ratio"])
    assert set(times) == set(fa4_times.SHAPES)
    for name, found in times.items():
        f, length = _facts_of_timed(name, variant), fa4_times.SHAPES[name][0].tq
        pair = plan.kernels(plan.choose(f), f, s._replace(is_timed=length in needs.SM90_LENGTHS))[:2]
        assert found[pair] <= min(found.values()) + needs.FA4_MARGIN, (name, pair)


def test_times_are_those_of_the_nearest_point():
    def point(mask, head_dim, tokens, heads="shared"):
        return timings.of(timings.Point(mask, head_dim, tokens, "sink", heads))

    assert point("causal", 128, 8192) is timings.TIMES[timings.Point("causal", 128, 8192, "sink", "shared")]
    assert point("causal", 128, 9000) is point("causal", 128, 8192)
    # Fewer tokens than any of this head_dim, and a head_dim without a window of its own.
    assert point("causal", 96, 512) is timings.TIMES[timings.Point("causal", 96, 4096, "sink", "shared")]
    assert point("window", 96, 512) is not point("causal", 96, 512)
    # Heads with keys of their own were timed at 2048 tokens alone, which says nothing of 512.
    assert point("causal", 64, 2048, "own") is not point("causal", 64, 2048)
    assert point("causal", 64, 512, "own") is point("causal", 64, 512)


def test_the_sm90_forward_beside_it_where_the_two_took_least_time(flash_attn_4, monkeypatch):
    f = _facts_of_timed("1B, T = 1999", "affine")
    s = needs.Sizes(is_square=True, has_rows=True)
    times = {("sm90", "fa4"): 1.05, ("fa4", "fa4"): 1.1, ("sm90", "cudnn"): 1.3}
    for changed, pair in ((1.05, ("sm90", "fa4")), (1.2, ("fa4", "fa4"))):
        monkeypatch.setattr(timings, "of", lambda *_, t=changed: times | {("sm90", "fa4"): t})
        plan.kernels.cache_clear()
        found = plan.kernels("fa4", f, s)
        assert (found.forward, found.backward) == pair
    # Asked for by name where it has not been timed.
    monkeypatch.setattr(timings, "of", lambda *_: times)
    assert plan.kernels("fa4", f._replace(has_grad=False), s).forward == "sm90"
    assert plan.kernels("fa4", f._replace(is_deterministic=True), s).forward == "fa4"
    plan.kernels.cache_clear()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"has_grad": False}, "since its forward has not been timed by itself"),
        ({"is_deterministic": True}, "since no other has been timed beside it in deterministic mode"),
        ({"causal": False}, "since it has been timed under causal masks alone"),
        ({"head_dim": 80, "value_dim": 80}, "since it has not been timed with a head_dim of 80"),
        ({"value_dim": 32}, "since it has not been timed with values of another width than keys"),
        ({"documents": needs.CONTIGUOUS}, "since it would wait for the device to count the documents"),
        ({"length": 0}, "since it has not been timed with fewer than 512 queries"),
        ({"length": 2048, "restrictions": (), "has_gate": True}, "since others took less time"),
        ({"capability": (10, 0)}, "since it has been timed on compute capability 9.0 alone"),
        ({"capability": None}, "since it has been timed on compute capability 9.0 alone"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_auto_leaves_it_alone_where_it_was_not(flash_attn_4, changes, reason):
    q = torch.empty(1, 2, 600, 64, dtype=torch.bfloat16)
    f = needs.facts_of(checked_call(q, q, q, Mask(window=64)))._replace(has_grad=True, is_deterministic=False)
    assert plan.choose(f) == "fa4"
    changes = dict(changes)
    if "length" in changes:
        f = f._replace(sizes=f.sizes._replace(length=changes.pop("length")))
    if "capability" in changes:
        f = f._replace(machine=f.machine._replace(capability=changes.pop("capability")))
    f = f._replace(**changes)
    assert str(needs.fa4_unasked(f)).startswith(reason)
    assert plan.choose(f) != "fa4"


def _why(**changes) -> str | None:
    q = torch.empty(1, 4, 64, 64, dtype=torch.bfloat16)
    arguments = {"q": q, "k": q[:, :2], "v": q[:, :2]} | changes
    return why_not("fa4", checked_call(**arguments))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": torch.empty(1, 4, 65, 64, dtype=torch.bfloat16)}, "cannot have queries without any key"),
        ({"mask": Mask(padding=torch.ones(1, 64, dtype=torch.bool))}, "has no mask.padding"),
        ({"mask": Mask(lengths=torch.ones(1, dtype=torch.int64))}, "has no mask.lengths"),
        ({"mask": Mask(documents=torch.zeros(1, 64, dtype=torch.int64))}, "which Mask.packed or Mask"),
        ({"logit": SPECS["scale_invariant"].logit}, "not the ScaleInvariant logit"),
        ({name: torch.empty(1, 4, 64, 64) for name in "qkv"}, "takes bfloat16 or float16, not torch.float32"),
        ({name: torch.empty(1, 4, 64, 60).bfloat16() for name in "qkv"}, "divisible by 8 and at most 256, not 60"),
        ({name: torch.empty(1, 4, 64, 264).bfloat16() for name in "qkv"}, "divisible by 8 and at most 256, not 264"),
        ({"v": torch.empty(1, 2, 64, 72).bfloat16()}, "values no wider than keys, and divisible by 8, not 64 with val"),
        ({"v": torch.empty(1, 2, 64, 60).bfloat16()}, "values no wider than keys, and divisible by 8, not 64 with val"),
        ({name: torch.empty(1, 4, 0, 64).bfloat16() for name in "qkv"}, "at least one query and one key"),
    ],
    ids=lambda x: x.split(",")[0].replace(" ", "_") if isinstance(x, str) else "",
)
def test_what_it_cannot_run_is_refused(flash_attn_4, changes, reason):
    assert reason in str(_why(**changes))


@pytest.mark.parametrize(
    ("capability", "head_dim", "value_dim", "is_taken"),
    [((8, 0), 64, 64, False), ((9, 0), 192, 192, True), ((10, 0), 128, 128, True), ((10, 0), 192, 192, False),
     ((10, 3), 256, 256, True), ((12, 0), 64, 64, False), ((0, 0), 64, 64, False), ((9, 0), 256, 128, True),
     ((10, 0), 192, 128, True), ((10, 0), 256, 128, False), ((10, 0), 128, 64, True)],
)  # fmt: skip
def test_the_gpus_that_it_runs_on(flash_attn_4, monkeypatch, capability, head_dim, value_dim, is_taken):
    machine = needs.Machine("cuda", capability, None)
    monkeypatch.setattr(needs, "_known_machine", lambda *_: machine)
    q = torch.empty(1, 4, 64, head_dim, dtype=torch.bfloat16)
    assert (_why(q=q, k=q, v=q[..., :value_dim]) is None) == is_taken


def test_without_the_package_it_says_so():
    q = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16)
    needs._flash_attn_4_package.cache_clear()
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(needs, "version", _not_installed)
        assert "fa4: cannot, flash-attn-4 is not installed" in explain(q, q, q, on="sm90")
        with pytest.raises(ValueError, match="impl='fa4' cannot run this call: flash-attn-4 is not installed"):
            explain(q, q, q, on="sm90", impl="fa4")
    needs._flash_attn_4_package.cache_clear()


def _not_installed(package: str):
    raise needs.PackageNotFoundError(package)


def test_another_version_whose_functions_do_not_fit_is_refused(monkeypatch):
    def without_sinks(q, k, v, softmax_scale, causal, window_size_left, window_size_right, return_lse):
        raise AssertionError("never called")

    package.install(monkeypatch, _flash_attn_fwd=without_sinks)
    assert _why() == "flash-attn-4 4.0.0b36 does not fit: its _flash_attn_fwd has no argument cu_seqlens_k"
    module = package.install(monkeypatch)
    assert _why() is None
    needs._flash_attn_4_package.cache_clear()
    del module._flash_attn_bwd
    assert "flash-attn-4 4.0.0b36 cannot be called: module" in str(_why())
    monkeypatch.undo()
    needs._flash_attn_4_package.cache_clear()


def test_the_functions_are_called_by_the_names_that_are_checked(flash_attn_4, monkeypatch):
    from affine_attn.engines import flash_attn_4 as called

    assert _why() is None
    given = {name: set() for name in called.FUNCTIONS}

    def recorded(name):
        def function(q, k, v, **named):
            given[name] |= {"q", "k", "v", *named}
            return getattr(package, name)(q, k, v, **named)

        return function

    monkeypatch.setattr(called, "function", recorded)
    for mask in (Mask(window=4), Mask.packed([4, 5])):
        inputs = random_inputs(SPECS["sink"], Shape(1, 2, 2, 9, 9, 16), torch.bfloat16)
        value_and_gradients(lambda mask=mask, **x: attention(**x, mask=mask, impl="fa4"), inputs, inputs["q"])
    assert {name: set(arguments) for name, arguments in called.FUNCTIONS.items()} == given


# A few of each kind only: every configuration is compiled.
ON_GPU = [
    Case(name, SPECS[name], shape, MASKS[mask], dtype)
    for name, mask, shape, dtype in (
        ("softmax", "causal", Shape(2, 6, 2, 300, 300, 64), torch.bfloat16),
        ("sink", "causal", Shape(2, 6, 2, 300, 300, 64), torch.float16),
        ("affine_gated", "causal", Shape(1, 4, 2, 300, 555, 128), torch.bfloat16),
        ("sink+affine+gate", "none", Shape(2, 4, 4, 300, 300, 96), torch.bfloat16),
        ("affine", "causal", Shape(1, 4, 2, 300, 300, 256), torch.bfloat16),
        ("sink", "window7", Shape(2, 6, 2, 300, 300, 64), torch.bfloat16),
        ("affine_gated", "window7", Shape(1, 4, 2, 200, 555, 128), torch.bfloat16),
        ("sink", "packed", Shape(3, 6, 2, 300, 300, 64), torch.bfloat16),
        ("sink+affine+gate", "packed", Shape(2, 4, 2, 200, 555, 128), torch.bfloat16),
        ("affine", "packed_window", Shape(2, 4, 2, 300, 300, 64), torch.bfloat16),
        ("sink", "causal", Shape(2, 4, 2, 300, 300, 192, 128), torch.bfloat16),
        ("sink", "window7", Shape(2, 4, 2, 300, 300, 192, 128), torch.bfloat16),
        ("affine_gated", "causal", Shape(2, 4, 2, 200, 555, 128, 64), torch.bfloat16),
        ("softmax", "packed", Shape(2, 4, 2, 300, 300, 64, 32), torch.bfloat16),
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_the_real_package(case: Case):
    if (reason := needs.flash_attn_4_package()) is not None:
        pytest.skip(reason)
    _assert_within(case, "cuda")
