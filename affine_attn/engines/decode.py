"""Engine ``decode``: few queries over a long cache, in one pass over its keys and values. Inference only.

Keys are split over programs, the query heads of a kv head share one tile, and the sum of the values is gathered while
they stream by (kernels/decode).
"""

from affine_attn.core.call import Call, Output
from affine_attn.engines.compose import row_scaled
from affine_attn.engines.needs import Facts
from affine_attn.engines.operator import register_inference
from affine_attn.engines.plan import Plan
from affine_attn.kernels import launch
from affine_attn.kernels.decode.launch import launches


def forward(call: Call, plan: Plan, splits: int | None = None) -> Output:
    call = row_scaled(call, is_fused=True)
    y = call.new_output()
    launch.run(*launches(call, y, splits))
    return Output(y)


def fake(call: Call, facts: Facts) -> Output:
    return Output(call.new_output())


run = register_inference("decode", forward, fake)
