"""An engine from any attention that returns (o, z): row scale into q, the attention, then stages 2 to 4.

The backward hands the attention's own backward the sink-adjusted (o', z'), so dq and dk are exact although it knows
nothing of sinks, gates or alpha.
"""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.core.nonfinite import guarded, guarded_backward
from affine_attn.core.spec import LogN
from affine_attn.core.stages import row_dtype
from affine_attn.engines.operator import register
from affine_attn.kernels import availability
from affine_attn.kernels.epilogue import eager, launch
from affine_attn.kernels.visible_sums import launch as visible_sums

Attention = Callable[[Call], tuple[Tensor, Tensor]]
# (call, do, out, lse) -> dq, dk, dv
EngineBackward = Callable[[Call, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def compose(
    name: str,
    attend: Attention,
    attend_backward: EngineBackward,
    guarded_on: tuple[str, ...],
    fused_forward: ModuleType | None = None,
    fused_backward: ModuleType | None = None,
):
    """Return the engine's ``run``; ``guarded_on`` are the devices where non-finite keys and values are looked for.

    ``fused_forward`` has a forward that does all stages, for the calls that its ``why_not`` lets through, and
    ``fused_backward`` a backward likewise. What a forward saves suits either backward.
    """

    def forward(call: Call) -> Output:
        if fused_forward is not None and fused_forward.why_not(call) is None:
            return fused_forward.forward(row_scaled(call))
        epilogue = _epilogue(call)
        begun = epilogue.begin(call)
        o, z = attend(row_scaled(call))
        output = epilogue.apply_epilogue(call, _like_q(o, call), z.contiguous(), begun)
        return output._replace(y=_like_q(output.y, call))

    def backward(call: Call, dy: Tensor, output: Output) -> Gradients:
        scaled = row_scaled(call)
        if fused_backward is not None and fused_backward.why_not(call) is None:
            dq, *rest = fused_backward.backward(scaled, dy, output)
        else:
            rows = _epilogue(call).RowGradients(call, dy, output)
            with rows.incoming() as do:
                gradients = attend_backward(scaled, do, rows.out, output.saved_lse)
            dq, *rest = rows.finish(*gradients)
        if isinstance(call.logit, LogN):
            _times_row_scale(call, dq, dq)
        return dq, *rest

    def fake(call: Call) -> Output:
        y = torch.empty_like(call.q)
        z = torch.empty(call.q.shape[:3], dtype=row_dtype(call.q), device=call.q.device)
        is_plain = call.alpha is None and call.beta is None and call.gate is None
        return Output(y, y.new_empty(0) if is_plain else torch.empty_like(y), z, _epilogue(call).new_saved_sums(call))

    return register(name, guarded(forward, guarded_on), guarded_backward(forward, backward, guarded_on), fake)


def why_not_beta(call: Call) -> str | None:
    """Why the epilogue cannot sum the visible values, or None: in torch it sums prefixes only."""
    if call.beta is None:
        return None
    if availability.why_no_fused_epilogue(call) is None:
        return visible_sums.why_not(call)
    for name in call.mask.restrictions:
        return f"the epilogue cannot sum the values that mask.{name} leaves visible"
    return None


def _epilogue(call: Call) -> ModuleType:
    """Return where stages 2 to 4 run: fused kernels, or torch."""
    return eager if availability.why_no_fused_epilogue(call) else launch


def row_scaled(call: Call) -> Call:
    """LogN is a factor per row, so it moves into q."""
    if not isinstance(call.logit, LogN):
        return call
    return replace(call, q=_times_row_scale(call, call.q, torch.empty_like(call.q)), logit=None)


def _times_row_scale(call: Call, x: Tensor, out: Tensor) -> Tensor:
    scale = LogN.row_scale(call.count(), row_dtype(x))
    if availability.why_no_fused_epilogue(call) is None:
        return launch.scale_rows(x, scale, out)
    # Written in x's type directly: a result of its own would be fp32, three times the bytes to move.
    return torch.mul(x, scale[..., None], out=out)


def _like_q(x: Tensor, call: Call) -> Tensor:
    """x in q's dense layout, as the fake promises; a no-op for what the kernels return in that layout."""
    if x.stride() == call.q.stride():
        return x
    y = torch.empty_like(call.q)
    return x if x.stride() == y.stride() else y.copy_(x)
