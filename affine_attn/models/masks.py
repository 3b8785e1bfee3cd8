"""The mask of a decoder's forward, prepared once for all its layers.

transformers prepares one mask per forward (or one per kind of layer) and hands it to every attention layer. Here that
is a :class:`PreparedMask` instead of a dense tensor, so padding, packing, windows and half-filled static caches reach
the attention as a ``Mask``.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from affine_attn.core.masks import Mask
from affine_attn.errors import UserError

_NO_TENSOR = (
    "attn_implementation='affine_attn' describes its mask, and this model computes with a tensor of numbers: use "
    "attn_implementation='eager'"
)


class _NoTensor(UserError, AttributeError):
    """An AttributeError for whoever only asks whether the mask has something."""


@dataclass(frozen=True, eq=False)
class PreparedMask:
    """The mask of one forward, where transformers carries a prepared 4-D tensor."""

    mask: Mask
    # Read only so many key slots: those of a static cache that are filled, where their number is known as an integer.
    keys: int | None = None
    # Key slots that a model of transformers has said there will be.
    slots: int | None = None
    # Why there is none. transformers prepares masks that no layer uses, so a layer that does has to say it.
    problem: str | None = None
    # Added to the scores, of a model that brings its own dense mask.
    bias: Tensor | None = None
    # One mask for all layers of a window.
    by_window: dict[int, Mask] = field(default_factory=dict, repr=False)
    # transformers looks at these on the way to transformers_mask and prepares only what is 2-D; the sizes mean nothing.
    ndim: ClassVar[int] = 4
    shape: ClassVar[tuple[int, ...]] = (0, 0, 0, 0)

    def contiguous(self) -> "PreparedMask":
        """Return this mask: transformers asks it of every mask that ``generate`` prepares."""
        return self

    def to(self, device: torch.device, **_) -> "PreparedMask":
        """Move to another device: accelerate calls it when it spreads the layers over several."""
        moved = replace(self.mask, **{name: t.to(device) for name, t in self.mask.tensors.items()})
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, mask=moved, bias=bias, by_window={})

    def windowed(self, window: int | None) -> Mask:
        m = self.mask
        if window is None:
            return m
        # What is traced has no memory: it would be compiled again for a layer that finds another's mask.
        known = {} if torch.compiler.is_compiling() else self.by_window
        if window not in known:
            known[window] = replace(m, window=window)
        return known[window]

    def __getattr__(self, name: str) -> Any:
        # Python's own questions have to be answered as usual.
        raise (AttributeError(name) if name.startswith("__") else _NoTensor(_NO_TENSOR))

    def _is_no_tensor(self, *_: Any) -> Any:
        raise _NoTensor(_NO_TENSOR)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise _NoTensor(_NO_TENSOR)

    def __getitem__(self, index: Any) -> "PreparedMask":
        """``mask[:, :, -n:, :]``, all keys of the last queries: gemma4 keeps no others behind its last own cache."""
        match index:
            case (slice() as batch, slice() as heads, slice(stop=None, step=None) as rows, slice() as keys):
                if batch == heads == keys == slice(None):
                    return self._of_last_queries(rows)
        raise _NoTensor(_NO_TENSOR)

    def _of_last_queries(self, rows: slice) -> "PreparedMask":
        """What has no queries of its own stays as it is: those of a call are its last tokens."""
        allowed, bias = (None if t is None else t[:, :, rows] for t in (self.mask.allowed, self.bias))
        return replace(self, mask=replace(self.mask, allowed=allowed), bias=bias, by_window={})

    # What a model would do with a tensor.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _is_no_tensor
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = __neg__ = __lt__ = __gt__ = _is_no_tensor

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
    documents: "Packed | None" = None,
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
        padding = fit(padding, dropped, slots, exact=lengths is None)
    of_documents = {} if documents is None else documents._asdict()
    return PreparedMask(Mask(window=window, padding=padding, lengths=lengths, **of_documents), keys)


class Packed(NamedTuple):
    """Documents of a mask, and what is promised of them."""

    documents: Tensor
    contiguous: bool = False
    most_documents: int | None = None


def packed(starts: Tensor, count: int | None) -> Packed | None:
    """Return the documents that start at these tokens and at the first one of a row, bool [B, T - 1].

    count: of these tokens, None while a compiler traces; without any there are no documents.
    """
    if count == 0:
        return None
    documents = F.pad(starts.cumsum(1), (1, 0))
    # Few different numbers: layers that are compiled one by one would be compiled again for each.
    most = None if count is None else 1 << (count + starts.shape[0] - 1).bit_length()
    return Packed(documents, contiguous=True, most_documents=most)


def _known(seen: int | Tensor, queries: int) -> int | Tensor:
    """Return ``seen`` as an integer where there is a prompt: one look at the device saves a call with lengths."""
    looks = isinstance(seen, Tensor) and queries > 1 and not torch.compiler.is_compiling()
    return int(seen) if looks else seen


def fit(padding: Tensor, dropped: int | Tensor, slots: int, exact: bool) -> Tensor | None:
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
    documents = None if document_ids is None else Packed(document_ids)
    if document_ids is not None:
        if not empty or list(document_ids.shape) != [batch, queries]:
            raise UserError(
                f"document_ids must name every key: [{batch}, {queries}] and no cached tokens, "
                f"got {list(document_ids.shape)} and {int(seen)} cached"
            )
    elif position_ids is not None and empty:
        documents = _documents(position_ids.expand(batch, -1), attention_mask)
    elif position_ids is not None and queries > 1 and not torch.compiler.is_compiling():
        real = None if attention_mask is None else attention_mask[:, seen:]
        if _documents(position_ids.expand(batch, -1), real) is not None:
            raise UserError(f"position_ids restart after {seen} cached tokens: packed sequences must come at once")
    if documents is None and empty and _ends_in_padding(attention_mask, queries):
        # Said of tokens: the hidden states of padding are read by nobody, so its queries need not be computed.
        documents = Packed(attention_mask.bool().byte())
    return prepare(batch, queries, slots, tokens.device, seen, dropped, attention_mask, documents)


def _ends_in_padding(padding: Tensor | None, queries: int) -> bool:
    """Return True on a CPU if some row has its padding on the right, where queries see the keys before them.

    Elsewhere to ask would wait for the device, and under a compiler it would cut the graph.
    """
    if padding is None or padding.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return padding.shape[1] == queries > 1 and not bool(padding[:, -1].all())


def _documents(position_ids: Tensor, padding: Tensor | None) -> Packed | None:
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
    return packed(breaks, None if torch.compiler.is_compiling() else int(breaks.sum()))
