"""``attn_implementation="affine_attn"``: the attention and its mask, as transformers' models call them.

transformers prepares one mask per forward (or one per kind of layer) and hands it to every attention layer. Here that
is a :class:`PreparedMask` instead of a dense tensor, so padding, packing, windows and half-filled static caches reach
the attention as a ``Mask``. Both functions are registered under one name: without a mask function there is no mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function

from affine_attn.api import attention
from affine_attn.core.call import checked_call, refuse_context_parallel
from affine_attn.core.masks import Mask
from affine_attn.core.reference import run_with_weights
from affine_attn.errors import UserError

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


@dataclass(frozen=True, eq=False)
class PreparedMask:
    """The mask of one forward, where transformers carries a prepared 4-D tensor."""

    mask: Mask
    # Read only so many key slots: those of a static cache that are filled, where their number is known as an integer.
    keys: int | None = None
    # Key slots that a model of transformers has said there will be.
    slots: int | None = None
    # transformers looks at these on the way to transformers_mask and prepares only what is 2-D; the sizes mean nothing.
    ndim: ClassVar[int] = 4
    shape: ClassVar[tuple[int, ...]] = (0, 0, 0, 0)

    def contiguous(self) -> "PreparedMask":
        """Return this mask: transformers asks it of every mask that ``generate`` prepares."""
        return self

    def to(self, device: torch.device, **_) -> "PreparedMask":
        """Move to another device: accelerate calls it when it spreads the layers over several."""
        return replace(self, mask=replace(self.mask, **{name: t.to(device) for name, t in self.mask.tensors.items()}))

    def windowed(self, window: int | None) -> Mask:
        m = self.mask
        return m if window is None else Mask(m.causal, window, m.documents, m.padding, m.lengths)

    def filled(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (k, v) if self.keys is None else (k[:, :, : self.keys], v[:, :, : self.keys])


def prepare(
    batch: int,
    queries: int,
    slots: int,
    device: torch.device,
    seen: int | Tensor = 0,
    dropped: int | Tensor = 0,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
) -> PreparedMask:
    """Prepare a mask from the terms of a transformers cache.

    queries: new tokens; slots: keys the layer will hand to the attention; seen: tokens before the new ones (a tensor
    in a static cache); dropped: how many of those the cache no longer has; padding: [B, tokens so far], True = real.
    """
    seen = _known(seen, queries)
    filled = seen - dropped + queries
    lengths = keys = None
    if isinstance(filled, Tensor):
        lengths = filled.to(device, torch.int64).expand(batch)
    elif filled < slots and queries > 1:
        keys = slots = filled
    elif filled < slots:
        # Decoding: an integer that grows would compile the forward anew for each token.
        lengths = torch.full((batch,), filled, device=device)
    if padding is not None:
        padding = _fit(padding, dropped, slots, exact=lengths is None)
    return PreparedMask(Mask(window=window, documents=documents, padding=padding, lengths=lengths), keys)


def _known(seen: int | Tensor, queries: int) -> int | Tensor:
    """Return ``seen`` as an integer where there is a prompt: one look at the device saves a call with lengths."""
    looks = isinstance(seen, Tensor) and queries > 1 and not torch.compiler.is_compiling()
    return int(seen) if looks else seen


def _fit(padding: Tensor, dropped: int | Tensor, slots: int, exact: bool) -> Tensor | None:
    """The part of a 2-D attention mask that belongs to the key slots, or None where all are real."""
    padding = padding.bool()
    if isinstance(dropped, Tensor) or dropped > 0:
        padding = padding[:, dropped:]
    if exact and padding.shape[1] < slots:
        raise UserError(f"attention_mask must cover all {slots} tokens, cached and new, got {padding.shape[1]}")
    # Slots of a static cache beyond the mask are not filled yet; lengths hides them.
    padding = F.pad(padding[:, :slots], (0, slots - min(padding.shape[1], slots)), value=True)
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    return padding


def decoder_mask(
    tokens: Tensor,
    attention_mask: "Tensor | PreparedMask | None",
    cache: Cache | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> PreparedMask:
    """The mask of an AffineAttn decoder for new tokens [B, T, ...]; windows are each layer's own.

    Packing is read from document_ids, or from position_ids of real tokens that do not go up by one (across padding:
    that do not go up); padding may have any position.
    """
    if isinstance(attention_mask, PreparedMask):
        return attention_mask
    batch, queries = tokens.shape[:2]
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[0] != batch):
        raise UserError(
            f"attention_mask must be 2-D [{batch}, tokens so far], got {list(attention_mask.shape)}; "
            "for packed sequences give position_ids that restart, or document_ids"
        )
    seen = 0 if cache is None else _known(cache.get_query_offset(0), queries)
    slots, dropped = (queries, 0) if cache is None else cache.get_mask_sizes(queries, 0)
    empty = not isinstance(seen, Tensor) and seen == 0
    if document_ids is not None:
        if not empty or list(document_ids.shape) != [batch, queries]:
            raise UserError(
                f"document_ids must name every key: [{batch}, {queries}] and no cached tokens, "
                f"got {list(document_ids.shape)} and {int(seen)} cached"
            )
    elif position_ids is not None and empty:
        document_ids = _documents(position_ids.expand(batch, -1), attention_mask)
    elif position_ids is not None and queries > 1 and not torch.compiler.is_compiling():
        real = None if attention_mask is None else attention_mask[:, seen:]
        if _documents(position_ids.expand(batch, -1), real) is not None:
            raise UserError(f"position_ids restart after {seen} cached tokens: packed sequences must come at once")
    return prepare(batch, queries, slots, tokens.device, seen, dropped, attention_mask, document_ids)


def _documents(position_ids: Tensor, padding: Tensor | None) -> Tensor | None:
    breaks = position_ids.diff(dim=1) != 1
    # One that is too short is refused later.
    if padding is not None and padding.shape[1] >= position_ids.shape[1]:
        real = padding[:, : position_ids.shape[1]].bool()
        slots = torch.arange(real.shape[1], device=real.device)
        # Slot of the last real token before each but the first; -1 where there is none.
        last = torch.where(real, slots, -1).cummax(1).values[:, :-1]
        steps = position_ids[:, 1:] - position_ids.gather(1, last.clamp(min=0))
        # Padding inside of a document is counted by some positions and skipped by others.
        breaks = torch.where(last == slots[:-1], steps != 1, steps <= 0) & real[:, 1:] & (last >= 0)
    if not torch.compiler.is_compiling() and not bool(breaks.any()):
        return None
    return F.pad(breaks.cumsum(1), (1, 0))


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
