"""Every kernel compiles ahead of time without a GPU and fits its limits; ``make test-aot`` has all GPUs and dtypes.

Launchers get made-up calls on the meta device, and what they would launch is compiled.
"""

import ast
import re
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

from affine_attn import Mask, ScaleInvariant, SoftCap  # noqa: E402
from affine_attn.core.call import Call, checked_call  # noqa: E402
from affine_attn.kernels import launch as launch_module  # noqa: E402
from affine_attn.kernels.decode import launch as decode  # noqa: E402
from affine_attn.kernels.epilogue import launch as epilogue  # noqa: E402
from affine_attn.kernels.flash import launch as flash  # noqa: E402
from affine_attn.kernels.launch import Launch, function, run  # noqa: E402
from affine_attn.kernels.sm90 import backward, forward  # noqa: E402
from affine_attn.kernels.visible_sums import launch as visible_sums  # noqa: E402

# How PTX reads and writes memory that kernels share.
MEMORY = ("ld.global", "st.global", "cp.async.c", "cp.async.bulk")
# Bytes of shared memory that one CTA may have, by compute capability.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TYPES = DTYPES | {torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"}
# Kernels whose loops over tiles Triton must pipeline.
TILED = {"flash_forward_kernel", "flash_dkdv_kernel", "flash_dq_kernel", "flash_statistics_kernel"}
# Bytes of stack per thread on Hopper in 16 bits with every stage switched on: a few spilled registers, mostly outside
# the loops. Elsewhere a kernel must compile and fit; how fast it is has not been measured.
SPILLS = 96
STACK_LIMIT = {
    # Timed on an H200 with these spills, which Triton 3.7 does not have (docs/log/flash-attention-4.md).
    **{("epilogue_backward_kernel, restarts", head_dim): 112 for head_dim in (64, 128, 256)},
    # With alpha and beta alone, as affine attention has, it is 16 bytes or none.
    **{("epilogue_backward_kernel, slides", head_dim): 128 for head_dim in (64, 128, 256)},
    ("flash_dkdv_kernel", 128): 256, ("flash_dkdv_kernel", 256): 256, ("decode_split_kernel", 64): 256,
}  # fmt: skip


class Target(NamedTuple):
    capability: int
    dtype: torch.dtype
    head_dim: int

    def __str__(self) -> str:
        return f"sm{self.capability}-{DTYPES[self.dtype]}-D{self.head_dim}"


class Build(NamedTuple):
    """A kernel to compile: its constants, the types of its other arguments, and options of the launch."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str]
    options: dict[str, Any]


class _Recorder(NamedTuple):
    """Stands for a kernel, and notes its launches instead of running them."""

    kernel: str
    launches: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: self.launches.append(Launch(self.kernel, grid, arguments))


@pytest.fixture
def launches(monkeypatch) -> list[Launch]:
    """Give the list of all that the test launches; nothing runs."""
    noted: list[Launch] = []
    monkeypatch.setattr(launch_module, "function", lambda kernel: _Recorder(kernel, noted))
    return noted


def _builds(launches: list[Launch], capability: int) -> list[Build]:
    """Return what Triton would compile for these launches, each build once."""
    # Launchers ask the device for these, and no GPU is there to answer.
    on_gpu = {"FAST_LOG": True, "EARLY": capability >= 90}
    builds: list[Build] = []
    for name, _, arguments in launches:
        kernel = function(name)
        passed = {x: on_gpu.get(x, arguments[x]) for x in kernel.arg_names}
        constexprs = {x.name for x in kernel.params if x.is_constexpr}
        constants = {x: value for x, value in passed.items() if x in constexprs or value is None}
        types = {x: _type(value) for x, value in passed.items() if x not in constants}
        options = {x: value for x, value in arguments.items() if x not in passed}
        build = Build(name.rpartition(".")[2], kernel, constants, types, options)
        builds += [] if build in builds else [build]
    return builds


def _type(x: Any) -> str:
    """Return Triton's name for the type of an argument that is no constant."""
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<{TYPES[x.base.dtype]}{x.block_shape},{x.layout!r}>"
    return f"*{TYPES[x.dtype]}" if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else "i32"


def _compile(build: Build, capability: int, is_aligned: bool = True) -> Any:
    """Compile for tensors whose memory and rows are aligned, as torch's are: wide loads take other registers."""
    names = build.kernel.arg_names
    signature = {x: build.types.get(x, "constexpr") for x in names}
    pointers = [i for i, x in enumerate(names) if x.startswith(("p_", "stride_")) and x in build.types]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers} if is_aligned else None
    source_type = GluonASTSource if isinstance(build.kernel, GluonJITFunction) else ASTSource
    source = source_type(build.kernel, signature, build.constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=build.options)


def _check(build: Build, target: Target, folder: Path) -> Any:
    """Return the compiled kernel, if it is within its limits."""
    compiled = _compile(build, target.capability)
    shared, limit = compiled.metadata.shared, SHARED_LIMIT[target.capability]
    assert shared <= limit, f"{build.name} has {shared} bytes of shared memory"
    if target.capability == 90 and target.dtype != torch.float32:
        kinds = (kind for kind in ("RESTARTS", "SLIDES") if build.constants.get(kind))
        name = ", ".join((build.name, *(kind.lower() for kind in kinds)))
        stack, limit = _stack(compiled, folder), STACK_LIMIT.get((name, target.head_dim), SPILLS)
        assert stack <= limit, f"{build.name} has {stack} bytes of stack"
    return compiled


def _stack(compiled, folder: Path) -> int:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return int(re.search(r"STACK:(\d+)", _tool("--dump-resource-usage", cubin)).group(1))


def _tool(option: str, cubin: Path) -> str:
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([cuobjdump, option, cubin], capture_output=True, text=True, check=True).stdout


def _targets() -> list:
    """Hopper in bf16 always, all others under the marker of ``make test-aot``."""
    every = [Target(*target) for target in product((90, 80), DTYPES, (64, 128, 256))]
    always = [target for target in every if target[:2] == (90, torch.bfloat16)]
    return [pytest.param(t, id=str(t), marks=() if t in always else pytest.mark.aot_full) for t in every]


def _call(
    target: Target,
    heads: int,
    kv_heads: int,
    queries: int = 4096,
    keys: int | None = None,
    stages: str = "",
    gate: str = "",
    value_dim: int | None = None,
    **arguments: Any,
) -> Call:
    """Return a call without numbers; ``stages`` are its learned sink, alpha and beta, in fp32."""
    q, k = (
        _meta(2, n, tokens, target.head_dim, dtype=target.dtype)
        for n, tokens in ((heads, queries), (kv_heads, keys or queries))
    )
    v = _meta(*k.shape[:3], value_dim or target.head_dim, dtype=target.dtype)
    rows = {stage: _meta(2, heads, queries) for stage in stages.split()}
    gates = {"": None, "headwise": _meta(2, heads, queries, 1), "elementwise": q}
    return checked_call(q, k, v, gate=gates[gate], **rows, **arguments)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _packed_call(target: Target) -> Call:
    mask = Mask(documents=_meta(2, 8192, dtype=torch.int64), contiguous=True)
    return _call(target, 8, 2, 4096, 8192, stages="sink alpha beta", gate="elementwise", mask=mask)


def _windowed_call(target: Target) -> Call:
    return _call(target, 8, 2, 4096, 8192, stages="sink alpha beta", gate="elementwise", mask=Mask(window=1000))


def _launch_epilogue(call: Call) -> None:
    scaled = epilogue.scale_rows(call.q, _meta(2, 1, call.tq), torch.empty_like(call.q))
    output = epilogue.apply_epilogue(call, scaled, _meta(*call.q.shape[:3]), epilogue.begin(call))
    rows = epilogue.RowGradients(call, torch.empty_like(call.q), output)
    with rows.incoming():
        pass
    rows.finish(*(torch.empty_like(x) for x in (call.q, call.k, call.v)))


def _launch_flash(call: Call) -> None:
    out, lse = flash.forward(call)
    flash.backward(call, torch.empty_like(out), out, lse)
    flash.score_statistics(call, _meta(1, 1, call.tq, dtype=torch.int64))


def _launch_decode(target: Target, queries: int, stages: str = "sink alpha beta", **sink: float) -> None:
    mask = Mask(lengths=_meta(2, dtype=torch.int64))
    made: dict[str, Any] = {"stages": stages, "gate": "elementwise", "mask": mask, "logit": ScaleInvariant(), **sink}
    call = _call(target, 6, 2, queries, 8192, **made)
    run(*decode.launches(call, torch.empty_like(call.q)))


def _launch_visible_sums(target: Target, transposed: bool, restricted: bool) -> None:
    documents, padding = (_meta(2, 8192, dtype=dtype) if restricted else None for dtype in (torch.int64, torch.bool))
    call = _call(target, 2, 2, 4096, 8192, mask=Mask(window=1024, documents=documents, padding=padding))
    source, result = (_meta(*call.q.shape), call.v) if transposed else (call.v, _meta(*call.q.shape))
    run(*visible_sums.launches(call, source, result, transposed))


def _launch_sm90(call: Call) -> None:
    backward.backward(call, torch.empty_like(call.q), forward.forward(call))


# What is launched for a target, by name. Epilogues: a copy of dy for the attention, rows of dy negated in place, what
# affine attention has, no sums.
CALLS: dict[str, Callable[[Target], None]] = {
    "epilogue_elementwise": lambda t: _launch_epilogue(_call(t, 8, 2, stages="sink alpha beta", gate="elementwise")),
    "epilogue_headwise": lambda t: _launch_epilogue(_call(t, 6, 2, stages="sink alpha beta", gate="headwise")),
    "epilogue_affine": lambda t: _launch_epilogue(_call(t, 8, 2, stages="alpha beta")),
    "epilogue_restarting": lambda t: _launch_epilogue(_packed_call(t)),
    "epilogue_sliding": lambda t: _launch_epilogue(_windowed_call(t)),
    "epilogue_no_sums": lambda t: _launch_epilogue(_call(t, 8, 2, stages="sink alpha", gate="elementwise")),
    "flash": lambda t: _launch_flash(_call(t, 4, 2, 256, logit=ScaleInvariant())),
    "flash_capped": lambda t: _launch_flash(_call(t, 4, 2, 256, logit=SoftCap())),
    "flash_other_width": lambda t: _launch_flash(_call(t, 4, 2, 256, value_dim={64: 256}.get(t.head_dim, 64))),
    "decode": lambda t: _launch_decode(t, 1),
    "decode_constant_sink": lambda t: _launch_decode(t, 1, "alpha beta", sink=0.0),
    "decode_chunk": lambda t: _launch_decode(t, 16),
    "visible_sums": lambda t: _launch_visible_sums(t, False, False),
    "visible_sums_restricted": lambda t: _launch_visible_sums(t, False, True),
    "visible_sums_transposed": lambda t: _launch_visible_sums(t, True, False),
    "visible_sums_transposed_restricted": lambda t: _launch_visible_sums(t, True, True),
}


@pytest.mark.parametrize("target", _targets())
@pytest.mark.parametrize("name", CALLS)
def test_kernels_compile_within_limits(name, target, launches, tmp_path):
    CALLS[name](target)
    for build in _builds(launches, target.capability):
        compiled = _check(build, target, tmp_path)
        if build.constants.get("EARLY"):
            # Nothing may be touched before the kernel that it follows has ended.
            code = compiled.asm["ptx"]
            assert code.index("griddepcontrol.wait") < min(code.index(x) for x in MEMORY if x in code)
        if build.name in TILED and target.capability == 90 and target.dtype != torch.float32:
            # A loop that Triton could not pipeline copies its tiles, then waits for them; one that prefetches waits
            # first.
            loops = [loop for loop in compiled.asm["ttgir"].split("scf.for")[1:] if "warp_group_dot " in loop]
            assert loops, build.name
            for loop in loops:
                assert loop.index("async_wait") < loop.index("async_copy_global_to_local"), build.name


def test_no_kernel_is_left_out(launches):
    """A kernel that none of these calls launches would not be compiled here, and may be dead."""
    for launch_for in CALLS.values():
        launch_for(Target(90, torch.bfloat16, 64))
    _launch_sm90(_call(Target(90, torch.bfloat16, 64), 4, 2, stages="alpha beta"))
    folder = Path(launch_module.__file__).parent
    kernels = {
        f"{'.'.join(path.relative_to(folder).with_suffix('').parts)}.{node.name}"
        for path in folder.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name.endswith("_kernel")
    }
    assert {kernel for kernel, *_ in launches} == kernels


def _sm90_build(kernel: str, launches: list[Launch]) -> Build:
    (build,) = (build for build in _builds(launches, 90) if build.name == kernel)
    return build


@pytest.mark.parametrize("head_dim", forward.STAGES)
@pytest.mark.parametrize(
    ("stages", "gate", "dtype"),
    [
        ("", "", torch.bfloat16),
        ("sink", "headwise", torch.bfloat16),
        ("", "elementwise", torch.float16),
        ("alpha beta", "", torch.float16),
        ("sink alpha beta", "headwise", torch.bfloat16),
        ("sink alpha beta", "elementwise", torch.bfloat16),
    ],
    ids=["constant_sink", "headwise", "elementwise", "affine", "affine_headwise", "affine_elementwise"],
)
def test_the_sm90_forward_overlaps_mmas_and_exponentials(stages, gate, dtype, head_dim, launches, tmp_path):
    """The source has them in an order that overlaps; what counts is the order that the compiler makes of it."""
    sink = {} if stages or gate else {"sink": 0.0}
    forward.forward(_call(Target(90, dtype, head_dim), 2, 2, stages=stages, gate=gate, **sink))
    # For memory that begins anywhere: row statistics may, and the limit below was set so.
    compiled = _compile(_sm90_build("sm90_forward_kernel", launches), 90, is_aligned=False)
    assert compiled.metadata.shared <= SHARED_LIMIT[90]
    assert _stack(compiled, tmp_path) <= 32
    code = _tool("--dump-sass", tmp_path / "kernel.cubin")
    # A step has one batch of MMAs for scores and one for sums: ptxas puts a wait behind every MMA that it serialises.
    events = re.findall(r"HGMMA|WARPGROUP.DEPBAR.LE gsb0, 0x\d|MUFU.EX2|STL|LDL", code)
    waits = [i for i, event in enumerate(events) if "DEPBAR" in event]
    assert len(waits) < events.count("HGMMA") / 2
    # Between the wait for the scores and that for the sums, which leaves none on its way: exponentials, no spills.
    scores = [i for i in waits if events[i].endswith("1")]
    besides = [events[i + 1 : waits[waits.index(i) + 1]] for i in scores]
    # Both warpgroups have such a loop; the two MMAs at a tile's end have nothing to run beside them.
    assert [len(beside) for beside in besides if "MUFU.EX2" in beside] == [forward.ROWS // 2 + 1] * 2
    assert all(set(beside) <= {"MUFU.EX2"} for beside in besides if "MUFU.EX2" in beside)
    assert not _overwritten_operands(code)


def test_an_operand_overwritten_while_it_is_read_is_found():
    mma, wait = "/*0000*/ HGMMA.64x64 R24, R56, gdesc[UR4], R24, gsb0;", "/*0010*/ WARPGROUP.DEPBAR.LE gsb0, 0x0;"
    constant = "/*0020*/ MOV R58, 0x3f80;"
    assert _overwritten_operands(mma + constant + wait) == ["MOV R58, 0x3f80"]
    assert not _overwritten_operands(mma + wait + constant)


def _overwritten_operands(code: str) -> list[str]:
    """Return instructions that write a register from which an MMA in flight still reads its left operand. The compiler
    puts some there where such a register is constant."""
    under_way, operands, found = [], set(), []
    for instruction in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ +)?(.*?);", code):
        if mma := re.match(r"HGMMA\S* R\d+, R(\d+),", instruction):
            operands |= set(range(int(mma[1]), int(mma[1]) + 4))
        if instruction.startswith("HGMMA"):
            if "gsb0" in instruction:
                under_way, operands = [*under_way, operands], set()
        elif wait := re.match(r"WARPGROUP.DEPBAR.LE gsb0, 0x(\d)", instruction):
            under_way = under_way[len(under_way) - int(wait[1]) :] if int(wait[1]) < len(under_way) else under_way
        elif result := re.match(r"(\S+) (?:P\S+, )?R(\d+)\b", instruction):
            width = 4 if re.search(r"LDSM.*\.4|\.128", result[1]) else 2 if re.search(r"\.64|WIDE", result[1]) else 1
            written = set(range(int(result[2]), int(result[2]) + width))
            if written & set().union(operands, *under_way):
                found.append(instruction)
    return found


@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (128, 3)])
@pytest.mark.parametrize("stages", ["", "beta", "alpha beta"], ids=["plain", "beta", "beta_and_signs"])
def test_the_sm90_backward_keeps_its_mmas_apart(stages, head_dim, group, launches, tmp_path):
    """Every wait is one of the source's: ptxas puts in more where it serialises MMAs."""
    target = Target(90, torch.bfloat16, head_dim)
    _launch_sm90(_call(target, 2 * group, 2, stages=stages))
    for build in _builds(launches, 90):
        if not build.name.startswith("sm90_"):  # what is launched between them
            _check(build, target, tmp_path)
    compiled, late = _compile(_sm90_build("sm90_backward_kernel", launches), 90), backward.LATE[head_dim]
    assert compiled.metadata.shared <= SHARED_LIMIT[90]
    assert _stack(compiled, tmp_path) <= 32
    code = _tool("--dump-sass", tmp_path / "kernel.cubin")
    # Waits of both warpgroups, where the diagonal cuts blocks and where it does not; a late dq has one more. And ptxas
    # puts in one: the second warpgroup waits for scores before its other MMA, where the diagonal cuts.
    assert len(re.findall("WARPGROUP.DEPBAR", code)) == 2 * (2 * 5 + late) + 1
    assert not _overwritten_operands(code)


@pytest.mark.parametrize("head_dim", forward.STAGES)
@pytest.mark.parametrize(
    ("stages", "gate"),
    [
        *(("", ""), ("sink", ""), ("alpha beta", ""), ("sink alpha beta", "headwise")),
        *(("", "elementwise"), ("alpha beta", "elementwise"), ("sink alpha beta", "elementwise")),
    ],
)
def test_the_sm90_preprocess_fits_and_hardly_spills(stages, gate, head_dim, launches, tmp_path):
    _launch_sm90(_call(Target(90, torch.bfloat16, head_dim), 6, 2, stages=stages, gate=gate))
    build = _sm90_build("sm90_preprocess_kernel", launches)
    compiled, ctas = _compile(build, 90), backward.CTAS_PER_SM[gate == "elementwise"]
    assert build.options["maxnreg"] == backward.ROW_REGISTERS
    # A CTA takes one KiB besides.
    assert ctas * (compiled.metadata.shared + 1024) <= SHARED_LIMIT[90] + 1024
    assert _stack(compiled, tmp_path) <= 16
    code = _tool("--dump-sass", tmp_path / "kernel.cubin")
    assert not _overwritten_operands(code)
    # Eight warps; those of the producer give registers to those that compute.
    assert ctas * 8 * 32 * backward.ROW_REGISTERS <= 65536
    assert "USETMAXREG.TRY_ALLOC" in code
