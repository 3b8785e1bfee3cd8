"""Every kernel compiles ahead of time for Hopper, without a GPU, and fits its limits."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from affine_attn import Mask, ScaleInvariant  # noqa: E402
from affine_attn.core import fused  # noqa: E402
from affine_attn.core.call import checked_call  # noqa: E402
from affine_attn.core.engines import decode  # noqa: E402
from affine_attn.core.engines import triton as engine  # noqa: E402
from affine_attn.core.kernels import decode as decode_kernels  # noqa: E402
from affine_attn.core.kernels import distance_backward, distance_forward, epilogue  # noqa: E402

SHARED_LIMIT = 227 * 1024
# Bytes of stack per thread with every stage switched on: a few spilled registers, mostly outside the loops.
SPILLS = 96
STACK_LIMIT = {("dkdv", 128): 256, ("dkdv", 256): 256, ("decode_split_kernel", 64): 256}
STAGES = {"SINK": 2, "HAS_ALPHA": True, "HAS_BETA": True, "CAUSAL": True, "STAGES": fused._STAGES}
KERNELS = {
    "value_prefix_kernel": {"SLICE": fused._PREFIX_SLICE, "STAGES": fused._PREFIX_STAGES},
    "epilogue_kernel": STAGES | {"GATE": 2, "KEEP_OUT": True},
    "gated_gradient_kernel": {"HAS_ALPHA": True},
    "negate_rows_kernel": {"HAS_ALPHA": True, "HAS_GATE": True, "ROWS": fused._ROWS},
    "row_gradients_kernel": STAGES | {"HAS_GATE": True},
    "gated_row_gradients_kernel": STAGES,
    "value_gradient_kernel": {"GATE": 2, "CHUNK": fused._CHUNK, "STAGES": fused._STAGES},
}
IN_INPUT_DTYPE = {
    *("p_o", "p_v", "p_gate", "p_y", "p_dy", "p_do", "p_dv", "p_dgate"),
    *("p_q", "p_k", "p_out", "p_grad", "p_dq", "p_dk"),
}


TYPES = {
    **dict.fromkeys(IN_INPUT_DTYPE, "*bf16"),
    **dict.fromkeys(("p_document", "p_doc_first", "p_doc_last", "p_first_key"), "*i32"),
    **dict.fromkeys(("p_far", "p_basis"), "*fp16"),
    **dict.fromkeys(("constant_sink", "qk_factor", "grad_factor", "inv_tau"), "fp32"),
    "p_padding": "*u8",
}
# kernel: (module, what its tiles' columns are, None for a kernel without far tiles)
DISTANCE_KERNELS = {
    "forward": (distance_forward.distance_forward_kernel, "keys"),
    "dkdv": (distance_backward.distance_backward_dkdv_kernel, "queries"),
    "dq": (distance_backward.distance_backward_dq_kernel, "keys"),
    "statistics": (distance_forward.qk_statistics_kernel, None),
}


def _compile(kernel, constants: dict, types: dict[str, str] = TYPES, **options):
    signature = {}
    for name in kernel.arg_names:
        default = "*fp32" if name.startswith("p_") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, default)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.startswith(("p_", "stride_")) and name not in constants
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _stack(compiled, folder: Path) -> int:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = subprocess.run([cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", report.stdout).group(1))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_hopper_within_limits(name, head_dim, tmp_path):
    tokens, warps = fused._TILES[head_dim]
    shared = {"HEAD_DIM": head_dim, "D": head_dim, "T": tokens}
    compiled = _compile(getattr(epilogue, name), KERNELS[name] | shared, num_warps=warps)
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert _stack(compiled, tmp_path) <= STACK_LIMIT.get((name, head_dim), SPILLS)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", DISTANCE_KERNELS)
def test_distance_kernels_compile_for_hopper_within_limits(name, head_dim, tmp_path):
    kernel, columns = DISTANCE_KERNELS[name]
    q = torch.empty(2, 4, 256, head_dim, dtype=torch.bfloat16, device="meta")
    call = checked_call(q, q[:, :2], q[:, :2], Mask(), None, ScaleInvariant(), None, None, None, None)
    config = engine._config(name, q)
    options = engine.Launch(call).options(config, columns) | {"FAST_LOG": True}
    launch = {option: options.pop(option) for option in ("num_warps", "num_stages", "maxnreg") if option in options}
    absent = {x: None for x in ("p_document", "p_doc_first", "p_doc_last", "p_padding") if x in kernel.arg_names}
    causal = {"CAUSAL": True} if "CAUSAL" in kernel.arg_names else {}
    compiled = _compile(kernel, options | absent | causal, **launch)
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert _stack(compiled, tmp_path) <= STACK_LIMIT.get((name, head_dim), SPILLS)
    # A loop that Triton could not pipeline copies its tiles and then waits for them; one that prefetches waits first.
    loops = [loop for loop in compiled.asm["ttgir"].split("scf.for")[1:] if "warp_group_dot " in loop]
    assert loops
    for loop in loops:
        assert loop.index("async_wait") < loop.index("async_copy_global_to_local")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [1, 16])
def test_decode_kernels_compile_for_hopper_within_limits(queries, head_dim, tmp_path):
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    q = meta(2, 6, queries, head_dim, dtype=torch.bfloat16)
    k = meta(2, 2, 8192, head_dim, dtype=torch.bfloat16)
    rows = meta(2, 6, queries)
    mask = Mask(lengths=meta(2, dtype=torch.int64))
    call = checked_call(q, k, k, mask, None, ScaleInvariant(), rows, rows, rows, q)
    for name, _, arguments in decode.launches(call, torch.empty_like(q)):
        warps = arguments.pop("num_warps")
        constants = {x: arguments[x] for x in arguments if x.isupper() or arguments[x] is None}
        pointers = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
        types = {x: pointers[value.dtype] for x, value in arguments.items() if isinstance(value, torch.Tensor)}
        types |= {x: "fp32" for x, value in arguments.items() if isinstance(value, float)}
        compiled = _compile(getattr(decode_kernels, name), constants, types, num_warps=warps)
        assert compiled.metadata.shared <= SHARED_LIMIT
        assert _stack(compiled, tmp_path) <= STACK_LIMIT.get((name, head_dim), SPILLS)
