"""Every kernel compiles ahead of time without a GPU and fits its limits; ``make test-aot`` runs the full product."""

import re
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from affine_attn import Mask, ScaleInvariant  # noqa: E402
from affine_attn.core.call import checked_call  # noqa: E402
from affine_attn.kernels import launch  # noqa: E402
from affine_attn.kernels.decode import launch as decode  # noqa: E402
from affine_attn.kernels.epilogue import kernels as epilogue_kernels  # noqa: E402
from affine_attn.kernels.epilogue import launch as epilogue  # noqa: E402
from affine_attn.kernels.epilogue import tiles  # noqa: E402
from affine_attn.kernels.flash import backward_kernels as flash_backward  # noqa: E402
from affine_attn.kernels.flash import forward_kernels as flash_forward  # noqa: E402
from affine_attn.kernels.flash import launch as flash  # noqa: E402
from affine_attn.kernels.sm90 import (  # noqa: E402
    backward,
    backward_kernel,
    forward,
    forward_kernel,
    preprocess_kernel,
)
from affine_attn.kernels.visible_sums import launch as visible_sums  # noqa: E402

# How PTX reads and writes memory that kernels share.
MEMORY = ("ld.global", "st.global", "cp.async.c", "cp.async.bulk")
# Bytes of shared memory that one program may have, by compute capability.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Bytes of stack per thread on Hopper in 16 bits with every stage switched on: a few spilled registers, mostly outside
# the loops. Elsewhere a kernel must compile and fit; how fast it is has not been measured.
SPILLS = 96
STACK_LIMIT = {("dkdv", 128): 256, ("dkdv", 256): 256, ("decode_split_kernel", 64): 256}

# Epilogue kernels and their constants with every stage switched on, for groups of four; sizes come with the head dim.
# A name may go on after a colon: the same kernel with other constants.
STAGES = {"SINK": 2, "HAS_ALPHA": True, "SUMS": 1, "GATE": 2, "CHUNKS": 1, "CHUNK": 4}
WITHOUT_SUMS = STAGES | {"SUMS": 0, "CHUNK": 1}
NEGATED = {"HAS_ALPHA": True, "HAS_GATE": True}
# As affine attention launches them: what it has not is None, of which a kernel may not compute anything.
NO_GATE = {"HAS_GATE": False, "p_gate": None}
AFFINE = STAGES | {"SINK": 0, "GATE": 0, "p_sink": None, "p_gate": None}
ABSENT = dict.fromkeys(("p_lse", "p_dsink", "p_dgate", "p_do"))
EPILOGUE_KERNELS = {
    "value_sums_kernel": {"SLICE": epilogue.VALUE_COLUMNS},
    "epilogue_kernel": STAGES | {"KEEP_OUT": True, "BLOCKS": 32},
    "scale_rows_kernel": {"T": 16, "num_warps": 4, "HAS_ROWS": True},
    "negate_rows_kernel": NEGATED | {"ROWS": epilogue.ROWS, "T": 16, "num_warps": 4},
    "epilogue_backward_kernel": STAGES,
    "epilogue_kernel:affine": AFFINE | {"KEEP_OUT": True, "BLOCKS": 32},
    "negate_rows_kernel:affine": NEGATED | NO_GATE | {"ROWS": epilogue.ROWS, "T": 16, "num_warps": 4},
    "epilogue_backward_kernel:affine": AFFINE | ABSENT | {"SLICE": "backward_columns", "CHUNKS": 2, "CHUNK": 2},
    "epilogue_kernel:no sums": WITHOUT_SUMS | {"KEEP_OUT": True, "BLOCKS": 1},
    "epilogue_backward_kernel:no sums": WITHOUT_SUMS,
    "totals_from_kernel": {"SLICE": epilogue.VALUE_COLUMNS, "ROWS": 128, "GROUP": 4, "num_warps": 4},
    "add_seen_by_kernel": NEGATED | {"GROUP": 3, "T": 16, "num_warps": 4},
    "add_seen_by_kernel:affine": NEGATED | NO_GATE | {"GROUP": 3, "T": 16, "num_warps": 4},
}
# kernel: (function, what its tiles' columns are, None for a kernel without far tiles)
DISTANCE_KERNELS = {
    "forward": (flash_forward.flash_forward_kernel, "keys"),
    "dkdv": (flash_backward.flash_dkdv_kernel, "queries"),
    "dq": (flash_backward.flash_dq_kernel, "keys"),
    "statistics": (flash_forward.flash_statistics_kernel, None),
}
# Arguments of epilogue and distance kernels that are neither fp32 pointers nor 32-bit integers.
IN_INPUT_DTYPE = {
    *("p_o", "p_v", "p_gate", "p_y", "p_dy", "p_do", "p_dv", "p_dgate", "p_weighted"),
    *("p_q", "p_k", "p_out", "p_grad", "p_dq", "p_dk"),
}
TYPES = {
    **dict.fromkeys(("p_document", "p_doc_first", "p_doc_last", "p_first_key"), "*i32"),
    **dict.fromkeys(("p_far", "p_basis"), "*fp16"),
    **dict.fromkeys(("constant_sink", "qk_factor", "grad_factor", "inv_tau", "scale"), "fp32"),
    "p_padding": "*u8",
}


class Target(NamedTuple):
    capability: int
    dtype: torch.dtype
    head_dim: int

    def __str__(self) -> str:
        return f"sm{self.capability}-{DTYPES[self.dtype]}-D{self.head_dim}"


class Build(NamedTuple):
    """A kernel to compile: ``types`` of the arguments that are no constants, as in TYPES; ``options`` of the launch."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str]
    options: dict[str, int]


def _epilogue_build(name: str, target: Target) -> Build:
    kernel = getattr(epilogue_kernels, name.split(":")[0])
    tile = (tiles.TILES_WITHOUT_SUMS if "no sums" in name else tiles.TILES)[target.head_dim]
    sizes = {"HEAD_DIM": target.head_dim, "D": target.head_dim, "T": tile.tokens, "SLICE": tile.columns}
    sizes |= {"LENGTH": tile.segment, "num_warps": tile.warps} | EPILOGUE_KERNELS[name]
    sizes = {x: getattr(tile, size) if isinstance(size, str) else size for x, size in sizes.items()}
    options = {"num_warps": sizes.pop("num_warps")}
    return Build(name, kernel, {x: sizes[x] for x in sizes if x in kernel.arg_names}, _types(target), options)


def _distance_build(name: str, target: Target) -> Build:
    kernel, columns = DISTANCE_KERNELS[name]
    q = _meta(2, 4, 256, target.head_dim, dtype=target.dtype)
    call = checked_call(q, q[:, :2], q[:, :2], logit=ScaleInvariant())
    constants = flash.Shared(call).options(flash._config(name, q), columns) | {"FAST_LOG": True}
    options = {x: constants.pop(x) for x in ("num_warps", "num_stages", "maxnreg") if x in constants}
    absent = dict.fromkeys({"p_document", "p_doc_first", "p_doc_last", "p_padding"} & set(kernel.arg_names))
    causal = {"CAUSAL": True} if "CAUSAL" in kernel.arg_names else {}
    return Build(name, kernel, constants | absent | causal, _types(target), options)


def _decode_builds(queries: int, target: Target) -> Iterator[Build]:
    q = _meta(2, 6, queries, target.head_dim, dtype=target.dtype)
    k = _meta(2, 2, 8192, target.head_dim, dtype=target.dtype)
    rows = _meta(2, 6, queries)
    mask = Mask(lengths=_meta(2, dtype=torch.int64))
    for sink in (rows, 0.0) if queries == 1 else (rows,):
        call = checked_call(q, k, k, mask, None, ScaleInvariant(), sink, rows, rows, q)
        for build in _planned(decode.launches(call, torch.empty_like(q))):
            yield build._replace(constants=build.constants | {"EARLY": target.capability >= 90})


def _visible_sums_builds(transposed: bool, restricted: bool, target: Target) -> Iterator[Build]:
    q, v = (_meta(2, 2, tokens, target.head_dim, dtype=target.dtype) for tokens in (4096, 8192))
    documents, padding = (_meta(2, 8192, dtype=dtype) if restricted else None for dtype in (torch.int64, torch.bool))
    call = checked_call(q, v, v, Mask(window=1024, documents=documents, padding=padding))
    source, result = (_meta(*q.shape), v) if transposed else (v, _meta(*q.shape))
    return _planned(visible_sums.launches(call, source, result, transposed))


def _planned(launches: list[launch.Launch]) -> Iterator[Build]:
    """Build what the launches of a call would run."""
    pointers = {torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8"}
    pointers |= {dtype: f"*{name}" for dtype, name in DTYPES.items()}
    for kernel, _, arguments in launches:
        name = kernel.rpartition(".")[2]
        options = {x: arguments.pop(x) for x in ("num_warps", "num_stages") if x in arguments}
        constants = {x: value for x, value in arguments.items() if x.isupper() or value is None}
        types = {x: pointers[value.dtype] for x, value in arguments.items() if isinstance(value, torch.Tensor)}
        types |= {x: "fp32" for x, value in arguments.items() if isinstance(value, float)}
        yield Build(name, launch.function(kernel), constants, types, options)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _types(target: Target) -> dict[str, str]:
    return TYPES | dict.fromkeys(IN_INPUT_DTYPE, f"*{DTYPES[target.dtype]}")


def _compile(build: Build, target: Target):
    names = build.kernel.arg_names
    defaults = {name: "*fp32" if name.startswith("p_") else "i32" for name in names}
    signature = {x: "constexpr" if x in build.constants else build.types.get(x, defaults[x]) for x in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.startswith(("p_", "stride_")) and name not in build.constants
    }
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=build.constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=build.options)


def _check(build: Build, target: Target, folder: Path):
    """The compiled kernel, if it is within its limits."""
    compiled = _compile(build, target)
    shared, limit = compiled.metadata.shared, SHARED_LIMIT[target.capability]
    assert shared <= limit, f"{build.name} has {shared} bytes of shared memory"
    if target.capability == 90 and target.dtype != torch.float32:
        assert _stack(compiled, folder) <= STACK_LIMIT.get((build.name, target.head_dim), SPILLS)
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


@pytest.mark.parametrize("target", _targets())
@pytest.mark.parametrize("name", EPILOGUE_KERNELS)
def test_epilogue_kernels_compile_within_limits(name, target, tmp_path):
    _check(_epilogue_build(name, target), target, tmp_path)


@pytest.mark.parametrize("target", _targets())
@pytest.mark.parametrize("name", DISTANCE_KERNELS)
def test_distance_kernels_compile_within_limits(name, target, tmp_path):
    compiled = _check(_distance_build(name, target), target, tmp_path)
    if target.capability == 90 and target.dtype != torch.float32:
        # A loop that Triton could not pipeline copies its tiles, then waits for them; one that prefetches waits first.
        loops = [loop for loop in compiled.asm["ttgir"].split("scf.for")[1:] if "warp_group_dot " in loop]
        assert loops
        for loop in loops:
            assert loop.index("async_wait") < loop.index("async_copy_global_to_local")


@pytest.mark.parametrize("target", _targets())
@pytest.mark.parametrize("queries", [1, 16])
def test_decode_kernels_compile_within_limits(queries, target, tmp_path):
    for build in _decode_builds(queries, target):
        code = _check(build, target, tmp_path).asm["ptx"]
        if build.constants["EARLY"]:
            # Nothing may be touched before the kernel that it follows has ended.
            assert code.index("griddepcontrol.wait") < min(code.index(x) for x in MEMORY if x in code)


@pytest.mark.parametrize("target", _targets())
@pytest.mark.parametrize("restricted", [False, True], ids=["window", "window_documents_padding"])
@pytest.mark.parametrize("transposed", [False, True], ids=["values", "gradients"])
def test_visible_sums_compile_within_limits(transposed, restricted, target, tmp_path):
    for build in _visible_sums_builds(transposed, restricted, target):
        _check(build, target, tmp_path)


@pytest.mark.parametrize("head_dim", forward.STAGES)
@pytest.mark.parametrize(
    ("sink", "is_affine", "gate", "dtype"),
    [(1, 0, 0, "bf16"), (2, 0, 1, "bf16"), (0, 0, 2, "fp16"), (0, 1, 0, "fp16"), (2, 1, 1, "bf16"), (2, 1, 2, "bf16")],
)
def test_the_forward_in_one_kernel_overlaps_products_and_exponentials(sink, is_affine, gate, dtype, head_dim, tmp_path):
    """In the order of the source they do; what counts is the order that the compiler makes of it."""
    compiled = _compile_forward(head_dim, sink, bool(is_affine), gate, dtype)
    assert compiled.metadata.shared <= SHARED_LIMIT[90]
    assert _stack(compiled, tmp_path) <= 32
    code = _tool("--dump-sass", tmp_path / "kernel.cubin")
    # Products of a step are one batch each, scores and sums: ptxas puts a wait behind every one that it serialises.
    events = re.findall(r"HGMMA|WARPGROUP.DEPBAR.LE gsb0, 0x\d|MUFU.EX2|STL|LDL", code)
    waits = [i for i, event in enumerate(events) if "DEPBAR" in event]
    assert len(waits) < events.count("HGMMA") / 2
    # Between the wait for the scores and that for the sums, which leaves none on its way: exponentials, no spills.
    scores = [i for i in waits if events[i].endswith("1")]
    besides = [events[i + 1 : waits[waits.index(i) + 1]] for i in scores]
    # Both groups have such a loop; the two products at a tile's end have nothing to run beside them.
    assert [len(beside) for beside in besides if "MUFU.EX2" in beside] == [forward.ROWS // 2 + 1] * 2
    assert all(set(beside) <= {"MUFU.EX2"} for beside in besides if "MUFU.EX2" in beside)
    assert not _overwritten_operands(code)


def test_an_operand_overwritten_while_it_is_read_is_found():
    product, wait = "/*0000*/ HGMMA.64x64 R24, R56, gdesc[UR4], R24, gsb0;", "/*0010*/ WARPGROUP.DEPBAR.LE gsb0, 0x0;"
    constant = "/*0020*/ MOV R58, 0x3f80;"
    assert _overwritten_operands(product + constant + wait) == ["MOV R58, 0x3f80"]
    assert not _overwritten_operands(product + wait + constant)


def _overwritten_operands(code: str) -> list[str]:
    """Instructions that write a register from which a product on its way still reads its left operand. The compiler
    puts some there where such a register is constant."""
    under_way, operands, found = [], set(), []
    for instruction in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ +)?(.*?);", code):
        if product := re.match(r"HGMMA\S* R\d+, R(\d+),", instruction):
            operands |= set(range(int(product[1]), int(product[1]) + 4))
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
@pytest.mark.parametrize(("has_beta", "has_signs"), [(False, False), (True, False), (True, True)])
def test_the_backward_of_our_own_keeps_its_products_apart(head_dim, group, has_beta, has_signs, tmp_path):
    """Every wait is one of the source's: ptxas puts in more where it serialises products."""
    kernel, late = backward_kernel.sm90_backward_kernel, backward.LATE[head_dim]
    constants = {"GROUP": group, "D": head_dim, "LATE": late, "HAS_BETA": has_beta}
    constants["SEGMENT"] = backward.TILE_ROWS * backward.TILE_COLUMNS // head_dim
    constants |= {"HAS_SIGNS": has_signs} | ({} if has_signs else {"p_signs": None})
    constants |= {"STAGES": backward.STAGES[head_dim], "TILES": backward.TILES[head_dim]}
    constants |= {} if has_beta else {"p_beta": None, "p_after": None}
    types = dict.fromkeys(("d_q", "d_dy"), _descriptor("bf16", backward.QUERIES, head_dim))
    types |= dict.fromkeys(("d_k", "d_v"), _descriptor("bf16", forward.ROWS, head_dim))
    types |= dict.fromkeys(("d_dk", "d_dv"), _descriptor("bf16", backward.HALF, head_dim))
    types |= dict.fromkeys(("p_order", "p_tiles"), "*i32") | dict.fromkeys(("factor", "scale", "per_scale"), "fp32")
    compiled = _compile_gluon(kernel, types, constants, aligned=True)
    assert compiled.metadata.shared <= SHARED_LIMIT[90]
    assert _stack(compiled, tmp_path) <= 32
    code = _tool("--dump-sass", tmp_path / "kernel.cubin")
    # Of both groups, where the diagonal cuts blocks and where it does not; a late dq has one more. And ptxas puts in
    # one: the second group waits for scores before its other product, where the diagonal cuts.
    assert len(re.findall("WARPGROUP.DEPBAR", code)) == 2 * (2 * 5 + late) + 1
    assert not _overwritten_operands(code)


@pytest.mark.parametrize("head_dim", forward.STAGES)
@pytest.mark.parametrize(
    ("sink", "has_alpha", "has_beta", "gate"),
    [(0, 0, 0, 0), (2, 0, 0, 0), (0, 1, 1, 0), (2, 1, 1, 1), (0, 0, 0, 2), (0, 1, 1, 2), (2, 1, 1, 2)],
)
def test_row_gradients_fit_and_hardly_spill(sink, has_alpha, has_beta, gate, head_dim, tmp_path):
    kernel, parts = preprocess_kernel.sm90_preprocess_kernel, head_dim // backward.TILE_COLUMNS
    constants = {"SINK": sink, "HAS_ALPHA": bool(has_alpha), "HAS_BETA": bool(has_beta), "GATE": gate}
    constants |= {"GROUP": 3, "D": head_dim, "SAVED": 8}
    constants |= {"STAGES": backward.SLOTS[gate == 2]}
    is_absent = dict.fromkeys(("p_sink", "p_dsink"), sink != 2) | dict.fromkeys(("p_alpha", "p_dalpha"), not has_alpha)
    is_absent |= dict.fromkeys(("d_v", "p_before", "p_beta", "p_dbeta", "p_totals"), not has_beta)
    is_absent |= dict.fromkeys(("p_gate", "p_dgate"), gate != 1)
    is_absent |= dict.fromkeys(("d_gate", "d_do", "d_dgate"), gate != 2)
    is_absent |= {"p_delta": has_alpha and has_beta and gate != 1, "p_shift": not has_beta or gate != 1}
    constants |= dict.fromkeys(name for name, absent in is_absent.items() if absent)
    tile = _descriptor("bf16", backward.TILE_ROWS // parts, parts, backward.TILE_COLUMNS)
    types = {name: tile for name in kernel.arg_names if name.startswith("d_") and name not in constants}
    types["p_do"] = "*bf16"
    options = {"num_warps": 4, "maxnreg": backward.ROW_REGISTERS}
    compiled = _compile_gluon(kernel, types, constants, options, aligned=True)
    programs = backward.PROGRAMS[gate == 2]
    # A program takes one KiB besides.
    assert programs * (compiled.metadata.shared + 1024) <= SHARED_LIMIT[90] + 1024
    assert _stack(compiled, tmp_path) <= 16
    code = _tool("--dump-sass", tmp_path / "kernel.cubin")
    assert not _overwritten_operands(code)
    # Eight warps, of which registers of threads that only ask go to those that compute.
    assert programs * 8 * 32 * backward.ROW_REGISTERS <= 65536
    assert "USETMAXREG.TRY_ALLOC" in code


def _compile_forward(head_dim: int, sink: int, is_affine: bool, gate: int, dtype: str):
    constants = {"N": forward.ROWS, "D": head_dim, "STAGES": forward.STAGES[head_dim], "SINK": sink}
    constants |= {"AFFINE": is_affine, "GATE": gate, "SEGMENT": 64, "SAVED": 16}
    types = dict.fromkeys(("d_q", "d_gate", "d_o", "d_y"), _descriptor(dtype, forward.ROWS // 2, head_dim))
    types |= dict.fromkeys(("d_k", "d_v"), _descriptor(dtype, forward.ROWS, head_dim))
    types |= dict.fromkeys(("p_order", "p_tiles"), "*i32") | dict.fromkeys(("factor", "constant_sink"), "fp32")
    is_absent = {"p_sink": sink != 2, "p_gate": gate != 1, "d_gate": gate != 2}
    is_absent |= dict.fromkeys(("p_alpha", "p_beta", "p_sums"), not is_affine)
    constants |= dict.fromkeys(name for name, absent in is_absent.items() if absent)
    return _compile_gluon(forward_kernel.sm90_forward_kernel, types, constants)


def _descriptor(dtype: str, *tile: int) -> str:
    block, kind = [1, 1, *tile], {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]
    return f"tensordesc<{dtype}{block},{gl.NVMMASharedLayout.get_default_for(block, kind)!r}>"


def _compile_gluon(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int] | None = None,
    aligned: bool = False,
):
    """Aligned as torch's tensors and their rows are: wide loads take other registers."""
    rest = {name: "*fp32" if name.startswith("p_") else "i32" for name in kernel.arg_names}
    names = [name for name in kernel.arg_names if name.startswith(("p_", "stride_")) and name not in constants]
    pointers = [kernel.arg_names.index(name) for name in names]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers} if aligned else None
    source = GluonASTSource(kernel, rest | types | dict.fromkeys(constants, "constexpr"), constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | (options or {}))
