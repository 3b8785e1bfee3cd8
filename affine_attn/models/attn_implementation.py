"""``attn_implementation="affine_attn"``: the attention and its mask, as transformers' models call them.

Both functions are registered under one name: without a mask function there is no mask.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import causal_mask_function

from affine_attn.api import attention
from affine_attn.core.call import checked_call, refuse_context_parallel
from affine_attn.core.masks import Mask
from affine_attn.core.reference import run_with_weights
from affine_attn.errors import UserError
from affine_attn.models.masks import PreparedMask, prepare

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
    *("num_items_in_batch", "shift_labels"),
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
    if use_vmap:
        raise UserError(f"attn_implementation={NAME!r} has causal, sliding, chunked and packed masks, no custom ones")
    device, documents = torch.device(device), None
    if mask_function is not causal_mask_function:
        documents = _probe(mask_function, batch_size, kv_length, kv_offset, device)
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
            if value is False:
                raise UserError(f"attn_implementation={NAME!r} is causal, got is_causal=False")
        elif value is not False:
            raise UserError(f"attn_implementation={NAME!r} has no {name}, with which this model calls its attention")


def _probe(sees: Callable, batch: int, slots: int, dropped: int | Tensor, device: torch.device) -> Tensor | None:
    """Documents of an opaque mask function: a new one starts where a key cannot see its left neighbour."""
    later = torch.arange(1, slots, device=device) + dropped
    rows, head = torch.arange(batch, device=device)[:, None], torch.zeros((), dtype=torch.int64, device=device)
    starts = ~sees(rows, head, later, later - 1).expand(batch, slots - 1)
    documents = F.pad(starts.cumsum(1), (1, 0))
    looks_ahead = sees(rows, head, later - 1, later).any()
    refusal = f"attn_implementation={NAME!r} is causal, this model's mask lets tokens see later ones"
    if torch.compiler.is_compiling():
        torch._assert_async(~looks_ahead, refusal)
        return documents
    packed, looks_ahead = torch.stack((starts.any(), looks_ahead)).tolist()
    if looks_ahead:
        raise UserError(refusal)
    return documents if packed else None


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PreparedMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    output_attentions: bool = False,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """[B, H, T, D] in, (y [B, T, H, D], weights) out. ``s_aux``: one sink logit per query head, as in gpt-oss."""
    refuse_context_parallel()
    if not isinstance(attention_mask, PreparedMask):
        raise UserError(
            f"attn_implementation={NAME!r} needs the mask its own function makes, got {type(attention_mask).__name__}"
        )
    if dropout or softcap is not None:
        raise UserError(f"attn_implementation={NAME!r} has no dropout and no softcap, got {dropout=}, {softcap=}")
    refuse_unknown(attention_mask.mask, named)
    if attention_mask.slots not in (None, key.shape[2]):
        raise UserError(
            f"attn_implementation={NAME!r} needs a mask of all keys: this model makes it for {attention_mask.slots} "
            f"and attends to {key.shape[2]}"
        )
    key, value = attention_mask.filled(key, value)
    arguments = (query, key, value, attention_mask.mask, scaling, None, s_aux)
    if output_attentions:
        y, weights = run_with_weights(checked_call(*arguments))
        return y.transpose(1, 2), weights
    return attention(*arguments).transpose(1, 2), None


AttentionInterface.register(NAME, transformers_attention)
AttentionMaskInterface.register(NAME, transformers_mask)
