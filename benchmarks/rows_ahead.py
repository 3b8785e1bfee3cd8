"""Numbers per row with loads a step ahead, an experiment: python3 benchmarks/rows_ahead.py --lengths 2048

Beside a copy of as many bytes: the kernel in use, and one whose programs load the next steps while they compute one. A
result that differs from the first's is not timed.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn.core import fused, hopper_backward
from affine_attn.core.call import Call
from affine_attn.core.gpu import cdiv, multiprocessors
from benchmarks.hopper_forward import command, with_epilogue

# Slots of a program by head_dim, and programs on a multiprocessor: as many as its shared memory holds.
STAGES, PROGRAMS = {64: 2, 128: 2}, {64: 15, 128: 8}


class RowsAhead(hopper_backward.RowGradients):
    """The same numbers, of alpha and beta alone; totals are those of single steps."""

    def __init__(self, call: Call, dy: Tensor, output: Any):
        super().__init__(call, dy, output)
        batch, heads, queries, head_dim = call.q.shape
        self.steps = cdiv(queries, hopper_backward.STEP)
        self.totals = torch.empty(batch * heads, self.steps, head_dim, device=dy.device)

    def launch(self) -> None:
        call, (batch, heads, queries, head_dim) = self.call, self.call.q.shape
        o = self.output.saved_out
        kernel()[(multiprocessors(self.dy.device) * PROGRAMS[head_dim],)](
            self.dy, o, call.v, self.output.saved_sums, call.alpha, call.beta,
            self.dalpha, self.dbeta, self.delta, self.shift, self.totals,
            *fused.strides(self.dy), *fused.strides(o), *fused.strides(call.v),
            heads, queries, self.steps, batch * heads * self.steps,
            GROUP=heads // call.k.shape[1], D=head_dim, SAVED=fused.plan_of(call).tile.tokens,
            STAGES=STAGES[head_dim], num_warps=1,
        )  # fmt: skip


def kernel() -> Any:
    from benchmarks.rows_ahead_kernel import rows_ahead_kernel

    return rows_ahead_kernel


def functions(call: Call) -> dict[str, Callable[[], object]]:
    if call.alpha is None or call.beta is None or call.sink is not None or call.gate is not None:
        raise ValueError("it has alpha and beta alone")
    output, dy = with_epilogue(call), torch.randn_like(call.q)
    in_use, ahead = hopper_backward.RowGradients(call, dy, output), RowsAhead(call, dy, output)
    in_use.after = None  # the sums over tiles that follow are left out
    for rows in (in_use, ahead):
        rows.launch()
    by_tile = ahead.totals.view(*in_use.totals.shape[:2], -1, call.q.shape[-1]).sum(2)
    found = (ahead.dalpha, ahead.dbeta, ahead.delta, ahead.shift, by_tile)
    right = (in_use.dalpha, in_use.dbeta, in_use.delta, in_use.shift, in_use.totals)
    for name, a, b in zip(("dalpha", "dbeta", "delta", "shift", "totals"), found, right, strict=True):
        if not (error := float((a - b).norm() / b.norm())) < 1e-4:
            raise ValueError(f"{name} differs by {error:.3g}")
    bytes_read = sum(2 * x.numel() for x in (call.q, call.q, call.v))
    source = torch.empty(bytes_read // 2, dtype=torch.uint8, device=dy.device)
    return {
        "a copy": functools.partial(torch.empty_like(source).copy_, source),
        "in use": in_use.launch,
        "ahead": ahead.launch,
    }


if __name__ == "__main__":
    command(functions, __doc__, ["affine"])
