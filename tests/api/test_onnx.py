"""The cases of ONNX's operator Attention, of which the package onnx makes inputs and outputs.

Since release 1.22 (its pull request 7867) the soft-cap comes before the mask, as here; 1.23.2 has 93 cases.

Y, present_key and present_value are compared. The scores that the operator can also return are none of ours.
"""

import functools
import importlib
import math
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.backend.test.case import node as onnx_cases
from torch import Tensor

from affine_attn import Mask, SoftCap, attention

# Their arithmetic is that of the inputs' type; here scores and weights have 32 bits.
TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1e-2, 2e-2)}


@functools.cache
def _cases() -> dict[str, Any]:
    """Return the cases by name, without those that are written in other operators."""
    onnx_cases._TargetOpType = "Attention"
    importlib.import_module("onnx.backend.test.case.node.attention")
    return {case.name: case for case in onnx_cases._NodeTestCases if not case.name.endswith("_expanded")}


def _tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.float32)).bfloat16() if x.dtype.name == "bfloat16" else torch.from_numpy(x)


def _in_heads(x: Tensor, heads: int | None) -> Tensor:
    """[B, T, H D] -> [B, H, T, D]."""
    return x if x.ndim == 4 else x.unflatten(2, (heads, -1)).transpose(1, 2)


def _said(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: int = 0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    softcap: float = 0.0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    softmax_precision: int | None = None,  # 32 bits at least
    qk_matmul_output_mode: int = 0,  # of an output that is left out
) -> dict[str, Any]:
    """Return the arguments of ``attention`` for those of the operator."""
    q, k, v = _in_heads(Q, q_num_heads), _in_heads(K, kv_num_heads), _in_heads(V, kv_num_heads)
    if past_key is not None and past_value is not None:
        k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
    batch, tq, tk = q.shape[0], q.shape[2], k.shape[2]
    options: dict[str, Any] = {"causal": bool(is_causal)}
    if left_window_size >= 0:
        options["window"] = left_window_size + 1
    if right_window_size >= 0:
        options["window_after"] = right_window_size
    if nonpad_kv_seqlen is not None:
        options["lengths"] = nonpad_kv_seqlen
    elif is_causal or left_window_size >= 0 or right_window_size >= 0:
        # Without a cache the first query stands at the first key, with one behind the last that is cached.
        first = 0 if past_key is None else past_key.shape[2]
        if first + tq <= tk:
            options["lengths"] = torch.full((batch,), first + tq)
        else:
            # Queries behind all keys: keys are added that nobody sees.
            more = first + tq - tk
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (k, v))
            options["padding"] = (torch.arange(tk + more) < tk).expand(batch, -1)
    bias = None
    if attn_mask is not None:
        fill = False if attn_mask.dtype == torch.bool else -math.inf
        attn_mask = torch.nn.functional.pad(attn_mask, (0, k.shape[2] - attn_mask.shape[-1]), value=fill)
        if attn_mask.dtype == torch.bool:
            options["allowed"] = attn_mask
        else:
            bias = attn_mask
    logit = SoftCap(softcap) if softcap else None
    return {"q": q, "k": k, "v": v, "mask": Mask(**options), "scale": scale, "logit": logit, "bias": bias}


# All of them: none is refused.
NAMES = sorted(_cases())


def test_no_case_is_left_out():
    assert len(NAMES) >= 93


@pytest.mark.parametrize("name", NAMES)
def test_the_call_that_says_it_has_the_outputs_of_onnx(name):
    case = _cases()[name]
    (node,), ((inputs, outputs),) = case.model.graph.node, case.data_sets
    tensors = dict(zip([name for name in node.input if name], map(_tensor, inputs), strict=True))
    expected = dict(zip([name for name in node.output if name], map(_tensor, outputs), strict=True))
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    call = _said(**tensors, **attributes)
    atol, rtol = TOLERANCE[expected["Y"].dtype]
    for impl in ("reference", "auto", "blocked"):
        y = attention(**call, impl=impl)
        y = y if tensors["Q"].ndim == 4 else y.transpose(1, 2).flatten(2)
        torch.testing.assert_close(y, expected["Y"], atol=atol, rtol=rtol, msg=lambda m, impl=impl: f"{impl}: {m}")
    for present, past in (("present_key", "k"), ("present_value", "v")):
        if present in expected:
            keys = expected[present].shape[2]
            assert torch.equal(call[past][:, :, :keys], expected[present])
