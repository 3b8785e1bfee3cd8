"""Which keys a query sees, decided once for every engine.

Queries are the last Tq of the filled key slots: query i stands at slot p_i = length - Tq + i. A window counts visible
keys including the query's own. All restrictions combine; whatever an engine needs (dense blocks, a per-pair predicate,
counts) is derived here, so no engine converts a window or aligns a diagonal by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from affine_attn.checks import is_count
from affine_attn.core.spec import LARGEST_COUNT

_NO_KEY = torch.iinfo(torch.int64).max


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees; all restrictions combine. Queries are the last Tq of the Tk (or ``lengths``) slots."""

    causal: bool = True  # no key after the query's own
    window: int | None = None  # keys visible at most, the query's own included; needs causal
    documents: Tensor | None = None  # int [B, Tk], equal ids see each other
    padding: Tensor | None = None  # bool [B, Tk], True = real; hides keys only
    lengths: Tensor | None = None  # int [B], filled key slots per row; the rest is invisible

    def __post_init__(self):
        if not isinstance(self.causal, bool):
            raise ValueError(f"Mask: causal must be True or False, got {type(self.causal).__name__}")
        if self.window is not None:
            if not is_count(self.window, 1, LARGEST_COUNT):
                raise ValueError(
                    f"Mask: window must be an integer >= 1 (keys including self), got {self.window!r}; "
                    f"the largest is {LARGEST_COUNT}"
                )
            if not self.causal:
                raise ValueError("Mask: window needs causal=True, got causal=False")
        for name, kinds in (("documents", "an integer"), ("padding", "a bool"), ("lengths", "an integer")):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise ValueError(f"Mask: {name} must be a Tensor, got {type(tensor).__name__}")
            is_bool = tensor.dtype == torch.bool
            is_integer = not (is_bool or tensor.is_floating_point() or tensor.is_complex())
            if not (is_bool if kinds == "a bool" else is_integer):
                raise ValueError(f"Mask: {name} must be {kinds} tensor, got {tensor.dtype}")

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {f.name: t for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)}

    @property
    def restrictions(self) -> tuple[str, ...]:
        """What hides keys besides causality, by name: tensors first."""
        return (*self.tensors, *(() if self.window is None else ("window",)))

    def check(self, batch: int, keys: int, device: torch.device) -> None:
        """Raise if a tensor of the mask does not fit q [batch, ...] and k [..., keys, ...]."""
        for name, tensor in self.tensors.items():
            shape = (batch,) if name == "lengths" else (batch, keys)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"mask.{name} must have shape {list(shape)}, got {list(tensor.shape)}")
            if tensor.device != device:
                raise ValueError(f"mask.{name} is on {tensor.device}, q is on {device}; all must share a device")
        # On other devices a look would wait for all work before it, and what is traced or batched has no numbers.
        is_plain = type(self.lengths) is Tensor and not torch.compiler.is_compiling()
        if device.type == "cpu" and is_plain and not torch._C._are_functorch_transforms_active():
            lengths = self.lengths.tolist()
            if not all(0 <= length <= keys for length in lengths):
                raise ValueError(f"mask.lengths must be from 0 to the {keys} key slots, got {lengths}")

    def positions(self, tq: int, tk: int, device: torch.device) -> Tensor:
        """Key slot of each query, [B or 1, Tq]; negative where a row has fewer filled slots than queries."""
        length = tk if self.lengths is None else self.lengths.to(torch.int64)[:, None]
        return torch.arange(tq, device=device)[None] + (length - tq)

    def predicate(self, tq: int, tk: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """sees(b, h, i, j): broadcastable index tensors in, bool out; also FlexAttention's mask_mod."""
        causal, window, documents, padding, lengths = (getattr(self, f.name) for f in fields(self))
        if tk == 0:
            documents = None  # nothing to see, and no id to compare
        if lengths is not None:
            # Fewer slots than queries are a negative difference, which unsigned integers do not have.
            lengths = lengths.to(torch.int64)

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            length = tk if lengths is None else lengths[b]
            p = i + (length - tq)
            ok = j < length
            if causal:
                ok = ok & (j <= p)
            if window is not None:
                ok = ok & (p - j < window)
            if documents is not None:
                ok = ok & (documents[b, j] == documents[b, p.clamp(min=0)]) & (p >= 0)
            if padding is not None:
                ok = ok & padding[b, j]
            return ok

        return sees

    def visible(self, tq: int, tk: int, device: torch.device, rows: slice, keys: slice) -> Tensor:
        """Dense visibility of a block of queries and keys, bool [B or 1, 1, rows, keys]."""
        b = torch.arange(self._batch(), device=device)[:, None, None, None]
        i = torch.arange(tq, device=device)[rows, None]
        j = torch.arange(tk, device=device)[keys]
        shape = (b.numel(), 1, i.shape[0], j.shape[0])
        return self.predicate(tq, tk)(b, torch.zeros_like(b), i, j).expand(shape)

    def key_range(self, tq: int, tk: int, rows: slice) -> slice:
        """The keys that any of these rows could see, known without reading a tensor."""
        if self.lengths is not None or not self.causal:
            return slice(0, tk)
        first, last = rows.start + tk - tq, rows.stop - 1 + tk - tq
        start = 0 if self.window is None else max(0, first - self.window + 1)
        return slice(min(start, tk), max(min(last + 1, tk), min(start, tk)))

    def band(self, tq: int, tk: int) -> tuple[int, int]:
        """How many slots (back, ahead) of its own a query could see, known without reading a tensor."""
        everything = tq + tk
        back = everything if self.window is None else min(self.window - 1, everything)
        return back, 0 if self.causal else everything

    def count(self, tq: int, tk: int, device: torch.device) -> Tensor:
        """n_i, the number of visible keys, int64 [B or 1, 1, Tq]; no Tq x Tk tensor is made."""
        low, high = self._bounds(tq, tk, device)
        if self.documents is None and self.padding is None:
            return (high - low + 1).clamp(min=0)[:, None]
        if self.documents is None:
            assert self.padding is not None
            # Real keys before each slot; their slots are in order, so nothing needs sorting.
            before = F.pad(self.padding.cumsum(1), (1, 0))
            ends = (x.clamp(0, tk).expand(before.shape[0], tq) for x in (low, high + 1))
            start, stop = (before.gather(1, end) for end in ends)
            return (stop - start).clamp(min=0)[:, None]
        _, before, upto = self._ranks(tq, tk, device, low, high)
        return (upto - before).clamp(min=0)[:, None]

    def first(self, tq: int, tk: int, device: torch.device) -> Tensor:
        """Slot of the first visible key of each row, int64 [B or 1, 1, Tq]; -1 where there is none."""
        low, high = self._bounds(tq, tk, device)
        if self.documents is None and self.padding is None:
            return torch.where(high >= low, low, -1)[:, None]
        codes, before, upto = self._ranks(tq, tk, device, low, high)
        code = codes.gather(1, before.clamp(max=tk - 1)) if tk else before
        return torch.where(upto > before, code % max(tk, 1), -1)[:, None]

    def _batch(self) -> int:
        return next((tensor.shape[0] for tensor in self.tensors.values()), 1)

    def _bounds(self, tq: int, tk: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """First and last slot a query could see before documents and padding, each [B or 1, Tq]."""
        p = self.positions(tq, tk, device)
        last = tk - 1 if self.lengths is None else self.lengths.to(torch.int64)[:, None] - 1
        high = torch.minimum(p, last + torch.zeros_like(p)) if self.causal else last + torch.zeros_like(p)
        low = torch.zeros_like(p) if self.window is None else (p - self.window + 1).clamp(min=0)
        return low, high

    def _ranks(self, tq: int, tk: int, device: torch.device, low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        """Sort real keys by (document, slot); a row's visible keys are then one run, found by bisection.

        Works for ids in any order, in T log T time and linear memory.
        """
        batch = self._batch()
        slot = torch.arange(tk, device=device)
        real = torch.ones(batch, tk, dtype=torch.bool, device=device) if self.padding is None else self.padding
        if self.documents is None:
            key_id = torch.zeros(batch, tk, dtype=torch.int64, device=device)
        else:
            key_id = _dense(self.documents)
        codes = torch.where(real, key_id * tk + slot, _NO_KEY).sort(dim=1).values
        p = self.positions(tq, tk, device).expand(batch, tq)
        row_id = key_id.gather(1, p.clamp(min=0)) if tk else p
        low, high = low.expand(batch, tq), high.expand(batch, tq)
        before = torch.searchsorted(codes, (row_id * tk + low).contiguous())
        upto = torch.searchsorted(codes, (row_id * tk + high).contiguous(), right=True)
        nowhere = (p < 0) if self.documents is not None else torch.zeros_like(p, dtype=torch.bool)
        return codes, before, torch.where(nowhere | (high < low), before, upto)


def _dense(ids: Tensor) -> Tensor:
    """Ids of each row renumbered 0, 1, ... in order: any int64 id, a hash say, then multiplies without overflow."""
    ordered, index = ids.to(torch.int64).sort(dim=1)
    rank = (ordered.diff(dim=1) != 0).long().cumsum(1)
    return torch.zeros_like(index).scatter_(1, index[:, 1:], rank).scatter_(1, index[:, :1], 0)


def run_bounds(ids: Tensor) -> tuple[Tensor, Tensor]:
    """First and last slot of the run of equal ids around each slot, int32 [B, Tk] each."""
    batch, length = ids.shape
    place = torch.arange(length, dtype=torch.int32, device=ids.device).expand(batch, length)
    changes = ids[:, 1:] != ids[:, :-1]
    edge = changes.new_ones(batch, 1)
    first = torch.where(torch.cat([edge, changes], 1), place, 0).cummax(1).values
    last = torch.where(torch.cat([changes, edge], 1), place, length).flip(1).cummin(1).values.flip(1)
    return first, last


def document_bounds(documents: Tensor) -> tuple[Tensor, Tensor]:
    """First and last slot with the same id, int32 [B, Tk] each: they bound loops. Ids may come in any order."""
    # Kernels read the rows of the result as contiguous, and a sort keeps the layout of what it sorts.
    ids, order = documents.contiguous().sort(dim=1, stable=True)
    first, last = (torch.empty_like(order).scatter_(1, order, order.gather(1, x.long())) for x in run_bounds(ids))
    return first.int(), last.int()
