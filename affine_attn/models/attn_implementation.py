"""``attn_implementation="affine_attn"``: the attention and its mask, as transformers' models call them.

Both functions are registered under one name: without a mask function there is no mask.
"""

# The annotations of transformers are narrower than what it hands on.
# pyright: reportArgumentType=false

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.output_capturing import _active_collector

from affine_attn.api import attention
from affine_attn.core.call import checked_call, refuse_context_parallel
from affine_attn.core.masks import Mask
from affine_attn.core.reference import run_with_weights
from affine_attn.core.spec import SoftCap
from affine_attn.errors import UserError
from affine_attn.models.masks import Packed, PreparedMask, fit, packed, prepare

NAME = "affine_attn"
# What models hand over and changes no value here. All else is refused: a bias of the logits, say, chosen keys, or sinks
# under a new name.
_HARMLESS = {
    # q and k are rotated by them, and the mask has the documents that they tell.
    *("position_ids", "cache_position"),
    # The mask has the window.
    "sliding_window",
    # How a flash kernel is launched and sums, and the packing of layers with a state.
    *("max_length_q", "max_length_k", "deterministic", "seq_idx"),
    # Settings of the whole forward and its loss, which pass all layers on their way.
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("num_items_in_batch", "shift_labels", "logits_to_keep"),
}
# Ends of packed sequences, for kernels that take no mask.
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k")


def transformers_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: "Tensor | PreparedMask | None" = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype | None = None,
    config: PreTrainedConfig | None = None,
) -> PreparedMask:
    """What transformers calls for any model; the arguments are its own. The last four are of dense masks alone."""
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        # Prepared, here or by another copy of this code: two folders with code register it under one name.
        return attention_mask
    device, documents = torch.device(device), None
    if local_size is not None and local_size < 1:
        return PreparedMask(Mask(), problem=f"attn_implementation={NAME!r}: a window of {local_size} keys is none")
    if mask_function is bidirectional_mask_function and not use_vmap:
        padding = None if attention_mask is None else fit(attention_mask, kv_offset, kv_length, exact=True)
        return PreparedMask(Mask(causal=False, padding=padding), slots=kv_length)
    if mask_function is not causal_mask_function:
        looks_ahead = False
        if not use_vmap:
            looks_ahead, documents = _probe(mask_function, batch_size, kv_length, kv_offset, device)
        if use_vmap or looks_ahead:
            allowed = sdpa_mask(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size,
                allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
            )  # fmt: skip
            return PreparedMask(Mask(causal=False, allowed=allowed), slots=kv_length)
    made = prepare(batch_size, q_length, kv_length, device, q_offset, kv_offset, attention_mask, documents, local_size)
    return replace(made, slots=kv_length)


def refuse_unknown(mask: Mask, named: dict[str, Any]) -> None:
    """Raise for a keyword argument of an attention layer that is not known to leave its values as they are."""
    for name, value in named.items():
        if name in _HARMLESS or value is None:
            continue
        if name in _PACKING:
            if mask.documents is None and value.shape[-1] > 2:
                raise UserError(
                    f"attn_implementation={NAME!r} packs by position_ids that restart, got {name} without them"
                )
        elif name == "is_causal":
            if value is False and mask.causal:
                raise UserError(f"attn_implementation={NAME!r} was given a causal mask and is_causal=False")
        elif value is not False:
            raise UserError(f"attn_implementation={NAME!r} has no {name}, with which this model calls its attention")


def _probe(
    sees: Callable, batch: int, slots: int, dropped: int | Tensor, device: torch.device
) -> tuple[bool, Packed | None]:
    """Return whether an opaque mask function lets tokens see later ones, and its documents.

    A new one starts where a key cannot see its left neighbour.
    """
    later = torch.arange(1, slots, device=device) + dropped
    rows, head = torch.arange(batch, device=device)[:, None], torch.zeros((), dtype=torch.int64, device=device)
    starts = ~sees(rows, head, later, later - 1).expand(batch, slots - 1)
    looks_ahead = sees(rows, head, later - 1, later).any()
    if torch.compiler.is_compiling():
        refusal = f"attn_implementation={NAME!r} compiles causal masks, this model's lets tokens see later ones"
        torch._assert_async(~looks_ahead, refusal)
        return False, packed(starts, None)
    count, looks_ahead = torch.stack((starts.sum(), looks_ahead)).tolist()
    return bool(looks_ahead), packed(starts, count)


def _given(module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool | None) -> PreparedMask:
    """The mask of a model that makes its own: a dense one, or none."""
    if mask is not None and mask.dtype == torch.bool:
        return PreparedMask(Mask(causal=False, allowed=mask[..., : k.shape[2]]))
    if mask is not None:
        return PreparedMask(Mask(causal=False), bias=mask)
    if q.shape[2] > 1 and (getattr(module, "is_causal", None) if is_causal is None else is_causal) is not False:
        # Stock kernels would take it for a causal one, eager attention for none at all.
        raise UserError(f"attn_implementation={NAME!r} needs a mask, and this model gives its attention none")
    return PreparedMask(Mask(causal=False))


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PreparedMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    output_attentions: bool = False,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """[B, H, T, D] in, (y [B, T, H, D], weights) out. ``s_aux``: one sink logit per query head, as in gpt-oss."""
    refuse_context_parallel()
    if attention_mask is None or isinstance(attention_mask, Tensor):
        attention_mask = _given(module, query, key, attention_mask, named.pop("is_causal", None))
    if attention_mask.problem:
        raise UserError(attention_mask.problem)
    if dropout:
        raise UserError(f"attn_implementation={NAME!r} has no dropout, got {dropout}; set the config's to 0")
    refuse_unknown(attention_mask.mask, named)
    if attention_mask.slots not in (None, key.shape[2]):
        raise UserError(
            f"attn_implementation={NAME!r} needs a mask of all keys: this model makes it for {attention_mask.slots} "
            f"and attends to {key.shape[2]}"
        )
    key, value = attention_mask.filled(key, value)
    logit = None if softcap is None else SoftCap(softcap)
    arguments = {"scale": scaling, "logit": logit, "sink": s_aux, "bias": attention_mask.bias}
    if output_attentions or _are_recorded():
        y, weights = run_with_weights(checked_call(query, key, value, attention_mask.mask, **arguments))
    else:
        y, weights = attention(query, key, value, attention_mask.mask, **arguments), None
    return y.transpose(1, 2).contiguous(), weights


def _are_recorded() -> bool:
    """Return True if the model's forward was asked for attention weights, which most do not tell their layers."""
    return any("attentions" in kind for kind in _active_collector.get() or ())


AttentionInterface.register(NAME, transformers_attention)
AttentionMaskInterface.register(NAME, transformers_mask)
