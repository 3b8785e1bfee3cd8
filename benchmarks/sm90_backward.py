"""What the sm90 backward saves: python3 benchmarks/sm90_backward.py

Beside each other: cuDNN's plain backward, the same with the gradients of the stages, and the sm90 backward, also
by its parts. A result that differs from the second's by more than 16 bits explain is not timed.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.engines import aten
from affine_attn.engines.needs import facts_of
from affine_attn.engines.plan import stock, why_not
from affine_attn.kernels.epilogue import launch as epilogue
from affine_attn.kernels.sm90 import backward as sm90_backward
from benchmarks.sm90_forward import command, plain, with_epilogue


def plain_backward(call: Call, do: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return aten.backward(
        stock(facts_of(call)), do, call.q, call.k, call.v, o, lse, call.scale, causal=True, window=None
    )


def in_stages(call: Call, dy: Tensor, output: Output) -> Gradients:
    rows = epilogue.RowGradients(call, dy, output)
    with rows.incoming() as do:
        gradients = plain_backward(call, do, rows.out, output.saved_lse)
    return rows.finish(*gradients)


def wrong(call: Call, dy: Tensor, output: Output) -> str | None:
    """What differs by more than 16 bits explain, or None."""
    before = dy.clone()
    found, right = sm90_backward.backward(call, dy, output), in_stages(call, dy, output)
    for name, a, b in zip(Gradients._fields, found, right, strict=True):
        if b is not None and not (error := float((a.float() - b.float()).norm() / b.float().norm())) < 5e-3:
            return f"d{name} differs by {error:.3g}"
    return None if torch.equal(dy, before) else "dy is changed"


def parts(call: Call, dy: Tensor, output: Output) -> dict[str, Callable[[], object]]:
    """Return what the sm90 backward launches, one by one."""
    rows = sm90_backward.Preprocess(call, dy, output)
    rows.launch()
    sums, dk, dv = sm90_backward.new_sums(call, rows), torch.empty_like(call.k), torch.empty_like(call.v)
    return {
        "ours: rows": rows.launch,
        "ours: dq = 0, sums": functools.partial(sm90_backward.new_sums, call, rows),
        "ours: attention": functools.partial(sm90_backward.launch, call, output.saved_lse, rows, sums, dk, dv),
        "ours: dq rounded": functools.partial(sm90_backward.rounded, call, sums),
    }


def at_a_time(kv_heads: int, call: Call, dy: Tensor, output: Output) -> Callable[[], object]:
    """Fewer leave less to keep in the cache, which long sequences run out of (docs/log)."""
    fewer = mock.patch.object(sm90_backward, "_KV_HEADS", kv_heads)
    return fewer(functools.partial(sm90_backward.backward, call, dy, output))


def functions(call: Call) -> dict[str, Callable[[], object]]:
    output, (o, lse), dy = with_epilogue(call), plain(call), torch.randn_like(call.q)
    if (reason := why_not("sm90 forward", call) or wrong(call, dy, output)) is not None:
        raise ValueError(reason)
    return {
        "cuDNN, plain": functools.partial(plain_backward, call, dy, o, lse),
        "cuDNN, stages": functools.partial(in_stages, call, dy, output),
        "ours": functools.partial(sm90_backward.backward, call, dy, output),
        **{f"ours, {n} kv heads at a time": at_a_time(n, call, dy, output) for n in (1, 2, 4)},
        **parts(call, dy, output),
    }


if __name__ == "__main__":
    command(functions, __doc__, ["softmax", "affine"])
