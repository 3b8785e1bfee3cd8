"""StreamingLLM (arXiv 2309.17453): the first tokens and the latest ones, at positions inside the cache.

Keys are cached before rotation and turned to their place in the cache at every step, so a stream of any length stays
within the positions the model was trained on, in constant memory. Distances (scale-invariant, ALiBi) and counts
(affine, LogN) are those of the kept tokens as well.
"""

from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from affine_attn.checks import is_count
from affine_attn.core.spec import LARGEST_COUNT
from affine_attn.errors import UserError


class StreamingLayer(DynamicLayer):
    is_croppable = False

    def __init__(self, sinks: int, recent: int):
        super().__init__()
        self.sinks, self.recent = sinks, recent
        self.cumulative_length = 0  # tokens seen, kept or not

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        """Make room, then add: what the new tokens see. Only ``sinks + recent`` of it stay for the next call."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        if self.keys is not None and self.values is not None and self.cumulative_length:
            key_states = torch.cat((self._last(self.keys, self.recent - new), key_states), -2)
            value_states = torch.cat((self._last(self.values, self.recent - new), value_states), -2)
        self.cumulative_length += new
        self.keys, self.values = self._last(key_states, self.recent), self._last(value_states, self.recent)
        return key_states, value_states

    def _last(self, states: Tensor, room: int) -> Tensor:
        """The sinks and the last ``room`` of the others."""
        if states.shape[-2] <= self.sinks + max(room, 0):
            return states
        latest = states[..., states.shape[-2] - max(room, 0) :, :]
        return torch.cat((states[..., : self.sinks, :], latest), -2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = 0 if not self.cumulative_length else self.keys.shape[-2]
        kept = min(held, self.sinks + max(self.recent - query_length, 0))
        return kept + query_length, self.cumulative_length - kept

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return self.sinks + self.recent

    def crop(self, *_, **__) -> None:
        raise UserError("StreamingCache: tokens cannot be taken back, since older ones were dropped for them")

    def reset(self) -> None:
        self.keys, self.values, self.is_initialized, self.cumulative_length = None, None, False, 0


class StreamingCache(Cache):
    """``model.generate(..., past_key_values=StreamingCache(sinks=4, recent=1020))``, without padding."""

    def __init__(self, sinks: int = 4, recent: int = 512):
        if not (is_count(sinks, 0, LARGEST_COUNT) and is_count(recent, 1, LARGEST_COUNT)):
            raise UserError(
                f"StreamingCache: sinks must be >= 0 and recent >= 1, got {sinks!r} and {recent!r}; "
                f"both must be integers, the largest is {LARGEST_COUNT}"
            )
        # transformers makes the layers as they come, by calling this.
        super().__init__(layer_class_to_replicate=partial(StreamingLayer, sinks, recent))  # pyright: ignore[reportArgumentType]

    def update(self, *_, **__):
        raise UserError(
            "StreamingCache: keys must come before their rotation, as only AffineAttn models hand them over"
        )

    def extend(self, unrotated: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the new tokens see, theirs last; the keys are still to be rotated."""
        return super().update(unrotated, values, layer_idx)

    def key_positions(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Positions in the cache of all keys that the new tokens [B, T, ...] see, theirs last: [1, keys]."""
        queries = tokens.shape[1]
        if attention_mask is not None and not bool(attention_mask[:, -queries:].all()):
            raise UserError("StreamingCache: padded batches have no common positions, give prompts of one length")
        keys, _ = self.get_mask_sizes(queries, 0)
        return torch.arange(keys, device=tokens.device)[None]
