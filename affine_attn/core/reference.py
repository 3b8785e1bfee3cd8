"""The definition of correctness: the attention family as it is written on paper.

    s_ij = logit(scale * q_i.k_j) + bias_ij           stage 1  logit
    p_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(sink))  stage 2  sink
    w_ij = alpha_i * p_ij + beta_i                    stage 3  affine, on visible keys only
    y_i  = gate_i * sum_j w_ij v_j                    stage 4  gate

Dense, any dtype, any device, differentiable by autograd. Every engine is tested against it in float64.
"""

import torch
from torch import Tensor

from affine_attn.core.call import Call
from affine_attn.core.nonfinite import isolate, poison
from affine_attn.core.stages import grouped_matmul, probabilities, scores, sink_rows, sums_of_visible, weights


def run(call: Call, matmul: torch.dtype | None = None) -> Tensor:
    """Return y [B, H, Tq, Dv]; ``matmul`` lowers the precision of the two matmuls (for the tolerance rule)."""
    return run_with_weights(call, matmul)[0]


def run_with_weights(call: Call, matmul: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return y and the weights w [B, H, Tq, Tk], which are zero on invisible keys, in the dtype of row statistics."""
    rows, keys = slice(0, call.tq), slice(0, call.tk)
    visible = call.visible(rows, keys)
    call, poisoned = isolate(call, visible.any(-1), lambda bad: sums_of_visible(visible, bad))
    s = scores(call, call.k, visible, rows, keys, matmul)
    p, _ = probabilities(s, sink_rows(call, rows))
    w = weights(p, visible, call.alpha, call.beta)
    y = grouped_matmul(w, call.v.to(w.dtype), matmul)
    if call.gate is not None:
        y = call.gate.to(y.dtype) * y
    return poison(y, poisoned).to(call.q.dtype), w
