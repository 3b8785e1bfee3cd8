"""Who runs a call: the decisions for machines that are not there, their reasons, and what deciding costs.

``python -m tests.engines.test_plan`` writes the table of decisions again.
"""

import ast
import functools
import itertools
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import affine_attn
from affine_attn import LogN, Mask, ScaleInvariant, SoftCap, attention, explain
from affine_attn.bench.accuracy import Shape, random_inputs
from affine_attn.core.call import Call, checked_call
from affine_attn.engines import needs, plan
from affine_attn.engines.needs import MACHINES, Facts
from tests.support.cases import CASES, MASKS, SPECS

PACKAGE = Path(affine_attn.__file__).parent
DECISIONS = Path(__file__).parent / "decisions.txt"
# (queries, whether gradients are wanted, whether algorithms must be deterministic)
SETTINGS = {
    "inference": (2048, False, False),
    "training": (2048, True, False),
    "training, deterministic": (2048, True, True),
    "training, 16384 tokens": (16384, True, False),
    "decoding": (1, False, False),
}


# What a call can add, by the width of its values and the options.
OPTIONS: dict[str, tuple[int, dict]] = {
    "softcap": (64, {"logit": SoftCap()}),
    "softcap+scale_invariant": (64, {"logit": (SoftCap(), ScaleInvariant())}),
    "softcap+logn": (64, {"logit": (SoftCap(), LogN())}),
    "bias": (64, {"bias": torch.empty(4, 1, 1)}),
    "allowed": (64, {"mask": Mask(allowed=torch.ones(1, 1, dtype=torch.bool))}),
    "two_sided": (64, {"mask": Mask(causal=False, window=64, window_after=64)}),
    "narrow_values": (32, {}),
    "wide_values": (128, {}),
    "narrow_values+window": (32, {"mask": Mask(window=64)}),
    "narrow_values+not_causal": (32, {"mask": Mask(causal=False)}),
    "narrow_values+softcap": (32, {"logit": SoftCap()}),
}


WITH_FA4 = "sm90 with flash-attn-4"


@functools.cache
def _tensors(queries: int, keys: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return those of all calls: each with its own would hold 9 GB."""
    q, k = torch.empty(1, 4, queries, 64, dtype=dtype), torch.empty(1, 2, keys, 64, dtype=dtype)
    return q, k, torch.empty(1, 4, queries)


@functools.cache
def _call(name: str, mask: str, queries: int, dtype: torch.dtype) -> Call | None:
    shape = Shape(1, 4, 2, queries, max(queries, 2048), 64)
    visible = MASKS[mask](shape, torch.device("cpu"))
    if SPECS[name].logit is not None and SPECS[name].logit.needs_causal and not visible.causal:
        return None
    q, k, row = _tensors(queries, shape.tk, dtype)
    stages = random_inputs(SPECS[name], Shape(1, 4, 2, 2, 2, 64), dtype)
    made = {"q": q, "k": k, "v": k, "alpha": row, "beta": row}
    if "gate" in stages:
        made["gate"] = q if stages["gate"].shape[-1] > 1 else q[..., :1]
    return checked_call(**{name: made.get(name, value) for name, value in stages.items()}, mask=visible)


def _decision(call: Call, machine: str, has_grad: bool, is_deterministic: bool) -> str:
    f = needs.facts_of(call, MACHINES[machine])
    f = f._replace(has_grad=has_grad, is_deterministic=is_deterministic, flash=None)
    name = plan.choose(f)
    found = plan.kernels(name, f, needs.sizes_of(call, f))
    return f"{name}: " + ", ".join(f"{what} {value}" for what, value in zip(found._fields, found, strict=True) if value)


def decisions() -> str:
    """Return for each machine, setting and mask the plans, and the specs that have them."""
    lines = []
    for name, (setting, (queries, grad, deterministic)) in itertools.product((*MACHINES, WITH_FA4), SETTINGS.items()):
        lines.append(f"## {name}, {setting}\n")
        machine, *package = name.split(" with ")
        installed = None if package else "flash-attn-4 is not installed"
        masks: dict[str, list[str]] = {}
        for mask in MASKS:
            found: dict[str, list[str]] = {}
            dtype = torch.float32 if machine == "cpu" else torch.bfloat16
            for name in SPECS:
                call = _call(name, mask, queries, dtype)
                if call is not None:
                    with mock.patch.object(needs, "flash_attn_4_package", lambda installed=installed: installed):
                        decision = _decision(call, machine, grad, deterministic)
                    found.setdefault(decision, []).append(name)
            plans = "".join(f"    {decision}\n        {' '.join(names)}\n" for decision, names in found.items())
            masks.setdefault(plans, []).append(mask)
        lines += [f"{' '.join(names)}\n{plans}" for plans, names in masks.items()]
        lines.append("\n")
    for machine, (setting, (queries, grad, deterministic)) in itertools.product(MACHINES, SETTINGS.items()):
        lines.append(f"## options, {machine}, {setting}\n")
        found = {}
        for name, (value_dim, options) in OPTIONS.items():
            dtype = torch.float32 if machine == "cpu" else torch.bfloat16
            q, k = torch.empty(1, 4, queries, 64, dtype=dtype), torch.empty(1, 2, max(queries, 2048), 64, dtype=dtype)
            rows = {"sink": 0.0, "alpha": q[..., 0], "beta": q[..., 0]}
            call = checked_call(q, k, k[..., :1].expand(-1, -1, -1, value_dim), **rows, **options)
            found.setdefault(_decision(call, machine, grad, deterministic), []).append(name)
        lines += [f"{decision}\n    {' '.join(names)}\n" for decision, names in found.items()]
        lines.append("\n")
    return "".join(lines)


def test_decisions_are_those_of_the_table():
    """A difference is a change of what runs: look at it, then write the table again."""
    assert decisions() == DECISIONS.read_text()


@pytest.mark.parametrize("machine", MACHINES)
def test_asked_one_by_one_facts_give_the_same_engine_as_remembered(machine):
    """A compiler asks each question when a reason needs it; eager calls answer all of them at once."""
    for case in CASES[::7]:
        inputs, mask = case.arguments()
        call = checked_call(**inputs, mask=mask)
        f = needs.facts_of(call, MACHINES[machine])
        assert plan.choose(f._replace(sizes=needs.Questions(*call.q.shape[:3], call.tk))) == plan.engine(f)
        hash(f)


def test_a_growing_cache_needs_no_new_decision():
    q = torch.randn(1, 4, 1, 16)
    facts = {needs.facts_of(checked_call(q, k, k)) for k in (torch.randn(1, 2, n, 16) for n in range(1, 40))}
    assert len(facts) == 1


def test_more_sequences_than_a_grid_has_places_are_not_decoded():
    q = torch.empty(1, 4, 1, 16)
    for batch, reason in ((needs.MOST_HEADS, None), (needs.MOST_HEADS + 1, "it takes at most 65535 sequences")):
        f = needs.facts_of(checked_call(q.expand(batch, -1, -1, -1), *[q[:, :2].expand(batch, -1, -1, -1)] * 2))
        assert needs.decode(f._replace(machine=MACHINES["sm90"])) == reason


def test_each_condition_of_the_sm90_kernels_has_its_own_sentence():
    q = torch.randn(1, 4, 2048, 64, dtype=torch.bfloat16)
    for k, mask, reason in (
        (q, Mask(causal=False), "are causal"),
        (q, Mask(documents=torch.zeros(1, 2048, dtype=torch.int64)), "have no mask.documents"),
        (q.repeat(1, 1, 2, 1), Mask(), "take as many keys as queries, and at least one"),
    ):
        said = explain(q, k, k, mask, sink=0.0, on="sm90")
        assert f"\nsm90 forward: not taken, kernels for Hopper {reason}\n" in said
    for arguments, reason in (
        ({"logit": ScaleInvariant()}, "plain scores, or those of LogN, not the ScaleInvariant logit"),
        ({"logit": SoftCap()}, "its kernels do not know the SoftCap curve"),
        ({"v": q[..., :32]}, "its kernels have values as wide as keys, not 32 channels for 64"),
    ):
        said = explain(**({"q": q, "k": q, "v": q} | arguments), sink=0.0, on="sm90")
        assert f"{reason}\n" in said[said.index("\nsm90 forward: not taken, ") :]


def test_what_the_flash_and_the_decode_kernel_still_refuse_of_curves_and_widths():
    q, k = torch.randn(1, 4, 8, 64), torch.randn(1, 2, 16, 64)
    for arguments, reason in (
        ({"v": k, "logit": (SoftCap(), LogN())}, "LogN scales q for it, which SoftCap comes before"),
        ({"v": k.repeat(1, 1, 1, 5)}, "Triton kernels take values of up to 256 channels, not 320"),
    ):
        said = explain(q, k, **arguments, on="sm90")
        assert f"\ntriton: cannot, {reason}\n" in said
        assert f"decode: cannot, {reason}\n" in said


def test_explain_says_what_other_widths_of_values_cost():
    q, k = torch.randn(1, 4, 20, 64), torch.randn(1, 2, 20, 64)
    said = explain(q, k, k[..., :32], on="cpu")
    assert "\nwidths: 64 channels of q and k, 32 of v, filled with zeros up to 64: 33 % more multiplications\n" in said
    assert "\nwidths: 64 channels of q and k, 32 of v, as they are\n" in explain(q, k, k[..., :32], impl="blocked")
    assert "widths" not in explain(q, k, k)
    on_cuda = [x.bfloat16() for x in (q, k, k[..., :32])]
    said = explain(*on_cuda, on="sm90", impl="sdpa")
    assert "forward: cudnn, PyTorch's cuDNN operator\nwidths: 64 channels of q and k, 32 of v, as they are\n" in said
    for mask, machine in ((Mask(window=4), "sm90"), (Mask(), "sm80")):
        said = explain(*on_cuda, mask, on=machine)
        assert "\nsdpa: only by name, since its operators have not been run on a GPU with values of another " in said
        assert "\nwidths: 64 channels of q and k, 32 of v, as they are\n" in said
        said = explain(*on_cuda, mask, on=machine, impl="sdpa")
        assert "\nwidths: 64 channels of q and k, 32 of v, filled with zeros up to 64: 33 % more multipl" in said


@pytest.mark.parametrize(
    ("widths", "changes", "kernel"),
    [
        ((64, 32), {}, "cudnn"),
        ((64, 128), {}, "cudnn"),
        ((192, 128), {}, "cudnn"),
        ((192, 128), {"restrictions": ("window",)}, "flash2"),
        ((192, 128), {"is_deterministic": True}, "flash2"),
        ((192, 192), {}, "flash2"),
        ((128, 192), {}, "flash2"),
        ((256, 128), {}, "flash2"),
        ((64, 60), {}, "flash2"),
    ],
    ids=str,
)
def test_widths_of_values_that_cudnn_reads_as_they_are(widths, changes, kernel):
    q, v = (torch.empty(1, 2, 64, width, dtype=torch.bfloat16) for width in widths)
    f = needs.facts_of(checked_call(q, q, v), MACHINES["sm90"])._replace(**{"is_deterministic": False} | changes)
    assert needs.sdpa(f) is None
    assert plan.kernels("sdpa", f, needs.NO_SIZES).forward == kernel


def test_the_widest_channels_are_those_that_the_operators_for_cuda_count():
    q = torch.empty(1, 2, 64, 60, dtype=torch.bfloat16)
    for value_dim, reason in ((60, "not 60"), (68, "not 68"), (264, "not 264"), (64, None)):
        found = plan.why_not("sdpa", checked_call(q, q, q[..., :1].expand(-1, -1, -1, value_dim)), on="sm90")
        assert found is None if reason is None else str(found).endswith(reason)


@pytest.mark.parametrize(
    ("widths", "taken"), [((16, 256), "flex"), ((64, 8), "blocked"), ((8, 64), "blocked"), ((64, 264), "blocked")]
)
def test_flex_has_neither_keys_nor_values_of_few_channels_on_cuda(widths, taken):
    q, v = (torch.empty(1, 2, 20, width, dtype=torch.bfloat16) for width in widths)
    call = checked_call(q, q, v, bias=torch.empty(20))
    assert plan.choose(needs.facts_of(call, MACHINES["sm90"])) == taken
    assert (plan.why_not("flex", call, on="sm90") is None) == (taken == "flex")


def test_a_bias_that_needs_a_gradient_is_not_handed_to_a_stock_operator():
    q, bias = torch.randn(1, 2, 9, 16), torch.randn(9)
    assert plan.why_not("sdpa", checked_call(q, q, q, bias=bias)) is None
    bias.requires_grad_()
    assert "gives no gradient of a bias" in str(plan.why_not("sdpa", checked_call(q, q, q, bias=bias)))
    with torch.no_grad():
        assert plan.why_not("sdpa", checked_call(q, q, q, bias=bias)) is None


def test_an_engine_without_a_plan_is_an_error():
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(KeyError, match="engine 'brand new' has no plan"):
        plan.kernels("brand new", needs.facts_of(checked_call(q, q, q)), needs.NO_SIZES)


# What torch.nn.attention.activate_flash_attention_impl puts in place of the flash operators.


def _on_sm90(monkeypatch, **changes) -> Facts:
    monkeypatch.setattr(needs, "current_flash_attention_impl", lambda: "FA4")
    q = torch.randn(1, 4, 300, 64, dtype=torch.bfloat16)
    call = checked_call(q, q[:, :2], q[:, :2], **changes)
    return needs.facts_of(call, MACHINES["sm90"])


def test_another_flash_implementation_is_not_taken_for_the_one_that_was_tested(monkeypatch):
    f = _on_sm90(monkeypatch, mask=Mask(window=64))
    assert needs.sdpa(f) == (
        "torch's flash operators are those of FA4 now (activate_flash_attention_impl), not tested here"
    )
    assert plan.engine(f) == "triton"
    # Neither the CPU's operator nor cuDNN's is replaced.
    assert plan.engine(_on_sm90(monkeypatch)) == "sdpa"
    assert plan.engine(f._replace(machine=MACHINES["cpu"], restrictions=())) == "sdpa"
    q = torch.randn(1, 4, 300, 64, dtype=torch.bfloat16)
    assert explain(q, q, q, on="sm90").endswith("flash operators: those of FA4 (activate_flash_attention_impl)")
    with pytest.raises(ValueError, match=r"impl='sdpa' cannot run this call: torch's flash operators are those of FA4"):
        explain(q, q, q, Mask(window=64), impl="sdpa", on="sm80")


def test_a_compiler_does_not_ask_for_the_gpu_and_leaves_replaced_operators_alone(monkeypatch):
    f = _on_sm90(monkeypatch)
    assert "those of FA4" in str(needs.sdpa(f._replace(machine=f.machine._replace(capability=None))))


def test_a_backward_whose_operators_were_replaced_since_its_forward_is_refused(monkeypatch):
    f = _on_sm90(monkeypatch, mask=Mask(window=64))._replace(flash=None)
    monkeypatch.setattr(needs, "current_flash_attention_impl", lambda: None)
    assert plan.facts_now("sdpa", f._replace(is_deterministic=needs.process().is_deterministic)) is not None
    monkeypatch.setattr(needs, "current_flash_attention_impl", lambda: "FA3")
    with pytest.raises(
        RuntimeError, match=r"the backward of engine 'sdpa' cannot run after its forward: .* of FA3 now"
    ):
        plan.facts_now("sdpa", f)


def test_so_is_that_of_a_compiled_call(monkeypatch):
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    y = torch.compile(lambda x: attention(x, x, x), backend="aot_eager", fullgraph=True)(q)
    monkeypatch.setitem(plan.ENGINES, "sdpa", plan.ENGINES["sdpa"]._replace(why_not=lambda _: "no more"))
    with pytest.raises(RuntimeError, match="the backward of engine 'sdpa' cannot run after its forward: no more"):
        y.sum().backward()


# What is told about a call, without asking why not.
TOLD = (
    "facts_of",
    "_known_of_documents",
    "sizes_of",
    "process",
    "is_traced",
    "machine_of",
    "__init__",
    *needs.Answers._fields,
)
TOLD = {f"needs.{name}" for name in TOLD}

# Rules of the house.


def test_a_reason_to_refuse_has_one_place():
    """Functions that say why not stand in needs.py, whatever they are called."""
    for path in (*PACKAGE.glob("kernels/**/*.py"), *PACKAGE.glob("engines/*.py")):
        if path.name in ("needs.py", "plan.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                returns = ast.unparse(node.returns) if node.returns else ""
                assert returns != "str | None", f"{path.name}: {node.name} gives a reason"
                assert not node.name.lstrip("_").startswith("why"), f"{path.name}: {node.name} gives a reason"


def test_no_engine_raises_for_a_call_that_it_cannot_run():
    """api.py alone does, and core for arguments."""
    for path in PACKAGE.glob("engines/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                assert not ast.unparse(node).startswith("raise ValueError"), path.name


def _entered(function) -> list[str]:
    """Functions of the package that are entered, in order."""
    names = []

    def enter(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")

    sys.setprofile(enter)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize(
    ("name", "mask", "most"),
    [("softmax", "causal", 30), ("affine", "causal", 40)],
)
@torch.no_grad()
def test_a_call_of_a_known_kind_enters_few_functions(name, mask, most):
    """What is paid in Python, counted: no timing. Fewer is better; more needs a reason."""
    shape = Shape(1, 4, 2, 16, 16, 64)
    inputs, visible = random_inputs(SPECS[name], shape), MASKS[mask](shape, torch.device("cpu"))
    attention(**inputs, mask=visible)
    entered = _entered(lambda: attention(**inputs, mask=visible))
    assert len(entered) <= most, entered


def test_what_a_forward_found_finite_its_backward_does_not_look_at():
    inputs = random_inputs(SPECS["affine"], Shape(1, 4, 2, 9, 9, 16))
    inputs = {name: x.requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    entered = _entered(lambda: attention(**inputs).sum().backward())
    assert entered.count("nonfinite.all_finite") == 1


def test_a_packed_training_call_of_a_known_kind_decides_nothing_again(monkeypatch):
    """Also with a new mask: no Mask is built, no logit encoded, no reason asked for, no id sorted twice."""
    inputs = random_inputs(SPECS["logn"], Shape(1, 4, 2, 9, 9, 16))
    inputs = {name: x.requires_grad_() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    masks = [Mask(documents=torch.tensor([ids])) for ids in ([0] * 4 + [1] * 5, [0] * 3 + [1] * 6)]
    attention(**inputs, mask=masks[0]).sum().backward()
    for mask, sorts in ((masks[0], 0), (masks[1], 1)):
        entered = _entered(lambda mask=mask: attention(**inputs, mask=mask).sum().backward())
        counts = {what: entered.count(what) for what in entered}
        again = "masks.__post_init__", "operator.encode_logit", "operator.decode_logit", "plan.choose", "plan.kernels"
        assert not set(again) & set(counts)
        assert not [what for what in counts if what.startswith("needs.") and what not in TOLD]
        assert counts.get("masks._in_order", 0) == sorts


if __name__ == "__main__":
    DECISIONS.write_text(decisions())
