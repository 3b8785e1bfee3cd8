"""An engine from any attention that returns (o, z): row scale into q, the attention, then stages 2 to 4.

The backward hands the attention's own backward the sink-adjusted (o', z'), so dq and dk are exact although it knows
nothing of sinks, gates or alpha.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from affine_attn.core.call import Call, Gradients, Output
from affine_attn.core.nonfinite import all_finite, careful, careful_gradients, is_clean
from affine_attn.core.spec import LogN
from affine_attn.core.stages import row_dtype
from affine_attn.engines import needs
from affine_attn.engines.needs import Facts
from affine_attn.engines.operator import Run, register
from affine_attn.engines.plan import Plan
from affine_attn.kernels.epilogue import eager, launch

# (call, kernel) -> o, z
Attention = Callable[[Call, str | None], tuple[Tensor, Tensor]]
# (call, kernel, do, out, lse) -> dq, dk, dv
AttentionBackward = Callable[[Call, str | None, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def compose(
    name: str,
    attend: Attention,
    attend_backward: AttentionBackward,
    guarded: tuple[str, ...],
    whole_forwards: Mapping[str | None, Callable[[Call], Output]] = {},
    whole_backwards: Mapping[str | None, Callable[[Call, Tensor, Output], Gradients]] = {},
) -> Run:
    """Return the engine's ``run``; ``guarded`` are the kernels beside which non-finite inputs are looked for.

    The whole ones do all stages, for plans that have their name. What a forward saves suits any backward.
    """

    def forward(call: Call, plan: Plan) -> Output:
        scaled = row_scaled(call, plan.epilogue == "kernels")
        if plan.forward in whole_forwards:
            return whole_forwards[plan.forward](scaled)
        epilogue = _epilogue(plan)
        begun = epilogue.begin(call)
        o, z = attend(scaled, plan.forward)
        # Bad values make o bad. Bad scores may be hidden, since the CPU's operator takes rows of NaN for empty ones.
        is_guarded = plan.forward in guarded
        if is_guarded and not (all_finite(call.q, call.k, o) or is_clean(call)):
            return careful(call, lambda clean: forward(clean, plan))
        # Kernels read contiguous row statistics; torch takes them as they come.
        if plan.epilogue == "kernels" or plan.backward in whole_backwards:
            z = z.contiguous()
        output = epilogue.apply_epilogue(call, o, z, begun)
        # Where a mask hides values, o says nothing of them.
        return Output(*output[:4], is_clean=is_guarded and not call.mask.restrictions)

    def backward(call: Call, plan: Plan, dy: Tensor, output: Output) -> Gradients:
        gradients = run_backward(call, plan, dy, output)
        # Matmuls with bad keys and values make dq bad, those with bad queries dk.
        if output.is_clean or plan.backward not in guarded or all_finite(gradients.q, gradients.k) or is_clean(call):
            return gradients
        return careful_gradients(
            call, dy, lambda clean: forward(clean, plan), lambda clean, output: run_backward(clean, plan, dy, output)
        )

    def run_backward(call: Call, plan: Plan, dy: Tensor, output: Output) -> Gradients:
        scaled = row_scaled(call, plan.epilogue == "kernels")
        if plan.backward in whole_backwards:
            gradients = whole_backwards[plan.backward](scaled, dy, output)
        elif plan.epilogue is None:
            do = eager.dense(dy, call, output.y)
            gradients = Gradients(*attend_backward(scaled, plan.backward, do, output.y, output.lse))
        else:
            rows = _epilogue(plan).RowGradients(call, dy, output)
            with rows.incoming() as do:
                attended = attend_backward(scaled, plan.backward, do, rows.out, rows.lse)
            gradients = rows.finish(*attended)
        if isinstance(call.logit, LogN):
            _times_row_scale(call, gradients.q, gradients.q, plan.epilogue == "kernels")
        return gradients

    def fake(call: Call, facts: Facts) -> Output:
        y = call.new_output()
        z = torch.empty(call.q.shape[:3], dtype=row_dtype(call.q), device=call.q.device)
        is_plain = call.alpha is None and call.beta is None and call.gate is None
        epilogue = eager if needs.epilogue(facts) else launch
        return Output(y, None if is_plain else torch.empty_like(y), z, epilogue.new_saved_sums(call))

    return register(name, forward, backward, fake, without=("bias",))


def _epilogue(plan: Plan) -> ModuleType:
    """Return where stages 2 to 4 run: fused kernels, or torch."""
    return launch if plan.epilogue == "kernels" else eager


def row_scaled(call: Call, is_fused: bool) -> Call:
    """LogN is a factor per row, so it moves into q."""
    if not isinstance(call.logit, LogN):
        return call
    return replace(call, q=_times_row_scale(call, call.q, torch.empty_like(call.q), is_fused), logit=None)


def _times_row_scale(call: Call, x: Tensor, out: Tensor, is_fused: bool) -> Tensor:
    scale = LogN.row_scale(call.count(), row_dtype(x))
    if is_fused:
        return launch.scale_rows(x, scale, out)
    # Written in x's type directly: a result of its own would be fp32, three times the bytes to move.
    return torch.mul(x, scale[..., None], out=out)
