"""Every kernel compiles ahead of time for Hopper, without a GPU, and fits its limits."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from affine_attn.core import fused  # noqa: E402
from affine_attn.core.kernels import epilogue  # noqa: E402

SHARED_LIMIT = 227 * 1024
# Bytes of stack per thread: a few spills outside the loops cost nothing, more would show in the time.
STACK_LIMIT = {}
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
IN_INPUT_DTYPE = {"p_o", "p_v", "p_gate", "p_y", "p_dy", "p_do", "p_dv", "p_dgate"}


def _compile(kernel, constants: dict, warps: int):
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.startswith("p_"):
            signature[name] = "*bf16" if name in IN_INPUT_DTYPE else "*fp32"
        else:
            signature[name] = "fp32" if name == "constant_sink" else "i32"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.startswith(("p_", "stride_")) and name not in constants
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


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
    compiled = _compile(getattr(epilogue, name), KERNELS[name] | shared, warps)
    assert compiled.metadata.shared <= SHARED_LIMIT
    assert _stack(compiled, tmp_path) <= STACK_LIMIT.get(name, 0)
