"""Engine ``flex``: FlexAttention, whose log-sum-exp is differentiable, followed by the epilogue under autograd.

Any logit of the family, any mask. On the CPU it has no backward and builds the dense matrix, so there it is only a
second opinion in tests.
"""

from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    create_block_mask,
    flex_attention,
)

from affine_attn.core.blocks import sums_in_blocks, sums_in_blocks_backward
from affine_attn.core.call import Call
from affine_attn.core.masks import Mask, entry
from affine_attn.core.stages import own_precision, row_dtype
from affine_attn.engines.needs import Facts, is_traced
from affine_attn.kernels.epilogue.eager import combine, rescale_by_sink

# Below 128 queries FlexAttention would take another kernel, which has no tile for more than 128 queries of a group.
_KERNEL_OPTIONS = FlexKernelOptions(FORCE_USE_FLEX_ATTENTION=True)

# By mask and shape: the versions of the mask's tensors, which count changes in place, and what was built from them.
_block_masks: WeakKeyDictionary[Mask, dict[tuple, tuple[tuple[int, ...], BlockMask]]] = WeakKeyDictionary()


def run(call: Call, facts: Facts) -> Tensor:
    q = call.q
    with own_precision(q):
        o, aux = _flex()(
            q,
            call.k,
            call.v,
            score_mod=_score_mod(call),
            block_mask=_block_mask(call),
            scale=call.scale,
            enable_gqa=call.heads != call.k.shape[1],
            return_aux=AuxRequest(lse=True),
            kernel_options=_KERNEL_OPTIONS,
        )
    o, _ = rescale_by_sink(o, aux.lse.to(row_dtype(q)), call)
    if call.alpha is None and call.beta is None and call.gate is None:
        return o
    u = None if call.beta is None else _VisibleValues.apply(call.v, call)
    return combine(o, u, call.alpha, call.beta, call.gate, row_dtype(q)).to(q.dtype)


def _flex():
    """Outside a compiled region FlexAttention would build the dense matrix on CUDA, so it is compiled here."""
    if torch.compiler.is_compiling() or not torch.cuda.is_available():
        return flex_attention
    global _compiled
    if _compiled is None:
        _compiled = torch.compile(flex_attention, dynamic=False)
    return _run_compiled


_compiled = None


def _run_compiled(*args, **kwargs):
    # Past the limit Dynamo would silently run the dense form; every new shape is one more specialisation.
    limits = torch._dynamo.config.patch(recompile_limit=4096, accumulated_recompile_limit=4096)
    with limits, _compiled_all_the_same():
        assert _compiled is not None  # _flex compiles before it hands out this function
        return _compiled(*args, **kwargs)


def _compiled_all_the_same() -> AbstractContextManager:
    """Return a context in which FlexAttention is compiled although ``observe`` runs the rest of a model eagerly."""
    is_eager = not torch.compiler.is_compiling() and torch._dynamo.eval_frame._stance.stance == "force_eager"
    return torch.compiler.set_stance("default") if is_eager else nullcontext()


def _score_mod(call: Call):
    curve, logit, bias = call.curve, call.logit, call.bias
    if curve is None and logit is None and bias is None:
        return None
    count = None if logit is None else call.count().expand(call.q.shape[0], -1, call.tq).contiguous()
    heads, tq, tk, dtype = call.heads, call.tq, call.tk, row_dtype(call.q)
    lengths = None if call.mask.lengths is None else call.mask.lengths.to(torch.int64)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score if curve is None else curve.curve(score)
        if logit is not None and count is not None:
            p = i + ((tk if lengths is None else lengths[b]) - tq)
            n = count[b, h if count.shape[1] > 1 else 0, i]
            factor, offset = logit.coefficients((p - j).to(dtype), n, h, heads)
            score = score if factor is None else score * factor
            score = score if offset is None else score + offset
        return score if bias is None else score + entry(bias, b, h, i, j)

    return score_mod


def _block_mask(call: Call) -> BlockMask:
    """Built once per mask and shape: the layers of a model share their mask object."""
    tensors = call.mask.tensors.values()
    # A compiled graph that looked into what is remembered would be compiled again for every new mask, a fake block mask
    # is for fake calls alone, and tensors made in inference mode do not tell whether they were changed since.
    if is_traced(call) or any(x.is_inference() for x in tensors):
        return _new_block_mask(call)
    masks = _block_masks.setdefault(call.mask, {})
    shape, versions = (*call.q.shape[:2], call.tq, call.tk, call.q.device), tuple(x._version for x in tensors)
    if shape not in masks or masks[shape][0] != versions:
        # Evaluated first, trained with later: a backward takes no tensor that was made in inference mode.
        with torch.inference_mode(False):
            masks[shape] = versions, _new_block_mask(call)
    return masks[shape][1]


def _new_block_mask(call: Call) -> BlockMask:
    batch = call.q.shape[0] if call.mask.tensors else None
    heads = call.heads if call.mask.is_by_head else None
    arguments = call.mask.predicate(call.tq, call.tk), batch, heads, call.tq, call.tk
    if call.q.device.type != "cuda":
        return create_block_mask(*arguments, device=call.q.device)
    # Compiled, or the mask itself would be built dense first.
    with _compiled_all_the_same():
        return torch.compile(create_block_mask)(*arguments, device=call.q.device)


class _VisibleValues(torch.autograd.Function):
    """u with a backward that rebuilds visibility block by block instead of saving it."""

    @staticmethod
    def forward(ctx, v: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return sums_in_blocks(v.to(row_dtype(v)), call)

    # torch declares *grad_outputs and documents naming them, as here.
    @staticmethod
    def backward(ctx, du: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return sums_in_blocks_backward(du, ctx.call).to(ctx.call.v.dtype), None
