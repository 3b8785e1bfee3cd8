"""Engine ``decode``: few queries over a long cache, in one pass over its keys and values. Inference only.

Keys are split over programs, the query heads of a kv head share one tile, and the sum of the values is gathered while
they stream by (kernels/decode).
"""

import torch

from affine_attn.core.call import Call, Output
from affine_attn.core.spec import Alibi
from affine_attn.engines.compose import row_scaled
from affine_attn.engines.operator import register_inference
from affine_attn.kernels import availability, launch
from affine_attn.kernels.decode.launch import LOGITS, launches

DESCRIPTION = "one pass over the cache, split over keys; inference only"

MAX_QUERIES = 16


def why_not(call: Call) -> str | None:
    if (reason := availability.why_no_triton(call)) is not None:
        return reason
    if call.needs_grad:
        return "it has no backward"
    if not 0 < call.tq <= MAX_QUERIES:
        return f"it takes 1 to {MAX_QUERIES} queries, not {call.tq}"
    if 0 in (call.q.shape[0], call.tk) or (call.mask.lengths is None and call.tq > call.tk):
        return "it needs a key for every query"
    if type(call.logit) not in LOGITS:
        return f"its kernel does not know the {type(call.logit).__name__} logit"
    if isinstance(call.logit, Alibi) and not call.mask.causal:
        return "its distance logits are causal"
    return None


def forward(call: Call, splits: int | None = None) -> Output:
    call = row_scaled(call)
    y = torch.empty_like(call.q)
    launch.run(*launches(call, y, splits))
    return Output.alone(y)


def fake(call: Call) -> Output:
    return Output.alone(torch.empty_like(call.q))


run = register_inference("decode", forward, fake)
