"""Which keys a query sees, decided once for every engine.

Queries are the last Tq of the filled key slots: query i stands at slot p_i = length - Tq + i. A window counts visible
keys including the query's own. All restrictions combine; whatever an engine needs (dense blocks, a per-pair predicate,
counts) is derived here, so no engine converts a window or aligns a diagonal by itself.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from affine_attn.checks import is_count
from affine_attn.core.spec import LARGEST_COUNT

_Table = TypeVar("_Table")


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees; all restrictions combine. Queries are the last Tq of the Tk (or ``lengths``) slots.

    causal: no key after the query's own.
    window: keys visible at most, the query's own included; needs causal or window_after.
    documents: int [B, Tk], equal ids see each other.
    padding: bool [B, Tk], True = real; hides keys only.
    lengths: int [B], filled key slots per row; the rest is invisible.
    contiguous: promises that equal ids of documents are neighbours: then nothing is sorted.
    most_documents: promises that all rows together have no more of them: then none is counted.
    allowed: bool, broadcastable to [B, H, Tq, Tk], True = may be seen.
    window_after: keys visible at most after the query's own; needs causal=False.
    """

    causal: bool = True
    window: int | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None
    lengths: Tensor | None = None
    contiguous: bool = False
    most_documents: int | None = None
    allowed: Tensor | None = None
    window_after: int | None = None

    @classmethod
    def packed(
        cls,
        lengths: "list[int] | Tensor | None" = None,
        *,
        cu_seqlens: Tensor | None = None,
        tokens: int | None = None,
        causal: bool = True,
        window: int | None = None,
        device: torch.device | str | None = None,
    ) -> "Mask":
        """Return the mask of one row of documents that lie one after another, [1, tokens].

        lengths: of each document, a list or int [n]; or cu_seqlens, int [n + 1]: where each starts, and the end.
        tokens: of the row, needed where the lengths lie on a GPU, whose numbers would have to be waited for; those
            after the last document are one more.
        """
        if (lengths is None) == (cu_seqlens is None):
            raise ValueError("Mask.packed: give either lengths or cu_seqlens")
        if cu_seqlens is not None:
            _check_lengths("cu_seqlens", cu_seqlens)
            ends = cu_seqlens[1:]
        else:
            given = torch.tensor(lengths, dtype=torch.int64) if isinstance(lengths, list | tuple) else lengths
            _check_lengths("lengths", given)
            ends = given.cumsum(0)  # pyright: ignore[reportOptionalMemberAccess]
        if ends.device.type == "cpu":
            total = int(ends[-1]) if ends.numel() else 0
            tokens = total if tokens is None else tokens
            if cu_seqlens is not None and (not cu_seqlens.numel() or int(cu_seqlens[0]) != 0):
                raise ValueError(f"Mask.packed: cu_seqlens must begin with 0, got {cu_seqlens.tolist()}")
            if total > tokens or bool((ends.diff(prepend=ends.new_zeros(1)) < 0).any()):
                raise ValueError(
                    f"Mask.packed: documents must end in order, within the {tokens} tokens, got ends {ends.tolist()}"
                )
        elif tokens is None:
            raise ValueError(f"Mask.packed: tokens must be given, as the lengths are on {ends.device}")
        ends = ends.to(device or ends.device, torch.int64)
        documents = torch.searchsorted(ends, torch.arange(tokens, device=ends.device), right=True)
        return cls(causal, window, documents[None], contiguous=True, most_documents=ends.numel() + 1)

    def __post_init__(self):
        if not isinstance(self.causal, bool):
            raise ValueError(f"Mask: causal must be True or False, got {type(self.causal).__name__}")
        if self.window is not None:
            if not is_count(self.window, 1, LARGEST_COUNT):
                raise ValueError(
                    f"Mask: window must be an integer >= 1 (keys including self), got {self.window!r}; "
                    f"the largest is {LARGEST_COUNT}"
                )
            if not self.causal and self.window_after is None:
                raise ValueError("Mask: window needs causal=True, got causal=False; or give window_after too")
        if self.window_after is not None:
            if not is_count(self.window_after, 0, LARGEST_COUNT):
                raise ValueError(
                    f"Mask: window_after must be an integer >= 0, got {self.window_after!r}; "
                    f"the largest is {LARGEST_COUNT}"
                )
            if self.causal:
                raise ValueError("Mask: window_after needs causal=False, since a causal query sees nothing after it")
        for name in _TENSORS:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise ValueError(f"Mask: {name} must be a Tensor, got {type(tensor).__name__}")
            is_bool = tensor.dtype == torch.bool
            is_integer = not (is_bool or tensor.is_floating_point() or tensor.is_complex())
            is_of_bools = name in ("padding", "allowed")
            if not (is_bool if is_of_bools else is_integer):
                kind = "a bool" if is_of_bools else "an integer"
                raise ValueError(f"Mask: {name} must be {kind} tensor, got {tensor.dtype}")
        if not isinstance(self.contiguous, bool):
            raise ValueError(f"Mask: contiguous must be True or False, got {type(self.contiguous).__name__}")
        if self.contiguous and self.documents is None:
            raise ValueError("Mask: contiguous is a promise about documents, and there are none")
        if self.most_documents is not None:
            if not is_count(self.most_documents, 1, LARGEST_COUNT):
                raise ValueError(f"Mask: most_documents must be an integer >= 1, got {self.most_documents!r}")
            if not self.contiguous:
                raise ValueError("Mask: most_documents counts contiguous documents, got contiguous=False")

    @property
    def tensors(self) -> dict[str, Tensor]:
        if self.documents is None and self.padding is None and self.lengths is None and self.allowed is None:
            return {}
        named = ((name, getattr(self, name)) for name in _TENSORS)
        return {name: tensor for name, tensor in named if tensor is not None}

    @property
    def restrictions(self) -> tuple[str, ...]:
        """What hides keys besides causality, by name: tensors first."""
        tensors = self.tensors
        if not tensors and self.window is None and self.window_after is None:
            return ()
        windows = () if self.window is None else ("window",)
        return (*tensors, *windows, *(() if self.window_after is None else ("window_after",)))

    def check(self, scores: tuple[int, ...], device: torch.device) -> None:
        """Raise if a tensor of the mask does not fit scores [B, H, Tq, Tk]."""
        if self.documents is None and self.padding is None and self.lengths is None and self.allowed is None:
            return
        batch, keys = scores[0], scores[3]
        for name, tensor in self.tensors.items():
            shape = (batch,) if name == "lengths" else (batch, keys)
            if name == "allowed":
                check_broadcastable("mask.allowed", tensor, scores)
            elif tuple(tensor.shape) != shape:
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
        if self.lengths is None:
            return torch.arange(tk - tq, tk, device=device)[None]
        return torch.arange(tq, device=device)[None] + (self.lengths.to(torch.int64)[:, None] - tq)

    def predicate(self, tq: int, tk: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """sees(b, h, i, j): broadcastable index tensors in, bool out; also FlexAttention's mask_mod."""
        sees, allowed = self._of_places(tq, tk), self.allowed
        if allowed is None:
            return sees
        allowed = with_4_dims(allowed)
        return lambda b, h, i, j: sees(b, h, i, j) & entry(allowed, b, h, i, j)

    def _of_places(self, tq: int, tk: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The same without ``allowed``."""
        causal, window, after, documents = self.causal, self.window, self.window_after, self.documents
        padding, lengths = self.padding, self.lengths
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
            if after is not None:
                ok = ok & (j - p <= after)
            if documents is not None:
                ok = ok & (documents[b, j] == documents[b, p.clamp(min=0)]) & (p >= 0)
            if padding is not None:
                ok = ok & padding[b, j]
            return ok

        return sees

    def visible(self, tq: int, tk: int, device: torch.device, rows: slice, keys: slice) -> Tensor:
        """Dense visibility of a block of queries and keys, bool [B or 1, 1, rows, keys]; of ``allowed`` by head [B or
        1, H, rows, keys]."""
        b = torch.arange(self._batch(), device=device)[:, None, None, None]
        i = torch.arange(tq, device=device)[rows, None]
        j = torch.arange(tk, device=device)[keys]
        shape = (b.numel(), 1, i.shape[0], j.shape[0])
        seen = self._of_places(tq, tk)(b, torch.zeros_like(b), i, j).expand(shape)
        return seen if self.allowed is None else seen & block_of(with_4_dims(self.allowed), rows, keys)

    def key_range(self, tq: int, tk: int, rows: slice) -> slice:
        """The keys that any of these rows could see, known without reading a tensor."""
        after = 0 if self.causal else self.window_after
        if self.lengths is not None or after is None:
            return slice(0, tk)
        first, last = rows.start + tk - tq, rows.stop - 1 + tk - tq + after
        start = 0 if self.window is None else max(0, first - self.window + 1)
        return slice(min(start, tk), max(min(last + 1, tk), min(start, tk)))

    def band(self, tq: int, tk: int) -> tuple[int, int]:
        """How many slots (back, ahead) of its own a query could see, known without reading a tensor."""
        everything = tq + tk
        back = everything if self.window is None else min(self.window - 1, everything)
        after = everything if self.window_after is None else min(self.window_after, everything)
        return back, 0 if self.causal else after

    def count(self, tq: int, tk: int, device: torch.device) -> Tensor:
        """n_i, the number of visible keys, int64 [B or 1, 1, Tq]; no Tq x Tk tensor is made. Not to be changed.

        With ``allowed`` by head it is [B or 1, H, Tq], as is ``first``.
        """
        return self.derived("count", (tq, tk), lambda: self._count(tq, tk, device))

    def _count(self, tq: int, tk: int, device: torch.device) -> Tensor:
        if self.allowed is not None:
            return self._by_rows(tq, tk, device, lambda visible: visible.sum(-1))
        low, high = self._bounds(tq, tk, device)
        if self.documents is None and self.padding is None:
            return (high - low + 1).clamp(min=0)[:, None]
        real, before, upto = self._runs(tq, tk, device, low, high)
        if real is None:
            return (upto - before).clamp(min=0)[:, None]
        # Real keys before each place.
        until = F.pad(real.cumsum(1), (1, 0))
        return (until.gather(1, upto) - until.gather(1, before)).clamp(min=0)[:, None]

    def first(self, tq: int, tk: int, device: torch.device) -> Tensor:
        """Slot of the first visible key of each row, int64 [B or 1, 1, Tq]; -1 where there is none."""
        if self.allowed is not None and tk:
            return self._by_rows(
                tq, tk, device, lambda visible: torch.where(visible.any(-1), visible.int().argmax(-1), -1)
            )
        low, high = self._bounds(tq, tk, device)
        if (self.documents is None and self.padding is None) or not tk:
            return torch.where(high >= low, low, -1)[:, None]
        real, before, upto = self._runs(tq, tk, device, low, high)
        if real is not None:
            before = _first_real(real, before)
        slot = before.clamp(max=tk - 1)
        if self.documents is not None:
            slot = self.documents_in_order().order.gather(1, slot)
        return torch.where(upto > before, slot, -1)[:, None]

    def _by_rows(
        self, tq: int, tk: int, device: torch.device, reduce: Callable[[Tensor], Tensor], step: int = 256
    ) -> Tensor:
        """Reduce the keys of dense visibility, a block of rows at a time."""
        keys = slice(0, tk)
        blocks = [slice(start, min(start + step, tq)) for start in range(0, max(tq, 1), step)]
        return torch.cat([reduce(self.visible(tq, tk, device, rows, keys)) for rows in blocks], 2)

    def ranges(self, tq: int, tk: int, device: torch.device) -> "Ranges":
        """Return orders of rows and keys in which what a row sees are neighbours, and where they are.

        Where documents are contiguous, and padding is at the ends of them, nothing has to be moved.
        """
        low, high = self._bounds(tq, tk, device)
        if (self.documents is None and self.padding is None) or not tk:
            low, high = (x.clamp(0, tk) for x in (low, high + 1))
            return Ranges(low, torch.maximum(low, high), None, None)
        found = None if self.documents is None else self._documents_where_they_are()
        real, low, high = self._runs(tq, tk, device, low, high, found)
        rows = keys = None
        if found is None and self.documents is not None:
            found = self.documents_in_order()
            keys = found.order
            p = self.positions(tq, tk, device).expand(low.shape)
            rows = found.start.gather(1, p.clamp(min=0)).sort(dim=1, stable=True).indices
        if real is not None:
            until = F.pad(real.cumsum(1), (1, 0))
            count = (until.gather(1, high) - until.gather(1, low)).clamp(min=0)
            first = torch.where(count > 0, _first_real(real, low), 0)
            if bool((until.gather(1, first + count) - until.gather(1, first) == count).all()):
                low, high = first, first + count
            else:
                # Real keys first, then they are neighbours.
                order = (~real).byte().sort(dim=1, stable=True).indices
                keys = order if keys is None else keys.gather(1, order)
                low = until.gather(1, low)
                high = low + count
        if rows is not None:
            low, high = low.gather(1, rows), high.gather(1, rows)
        return Ranges(low, torch.maximum(low, high), *(None if x is None else Order.of(x) for x in (rows, keys)))

    def _documents_where_they_are(self) -> "Documents | None":
        """Return the documents in the order of their slots if equal ids are neighbours, however they are numbered."""
        found = self.documents_in_order()
        if self.contiguous:
            return found
        first, last = self.document_runs()
        return _of_runs(first, last) if torch.equal(found.first, first) and torch.equal(found.last, last) else None

    def documents_in_order(self) -> "Documents":
        """Return where each document has its slots. Nothing else here sorts."""
        documents = self.documents
        assert documents is not None
        keys = (self.contiguous,)
        return once_for((documents,), ("documents", *keys), lambda: _in_order(documents, self.contiguous))

    def document_runs(self) -> tuple[Tensor, Tensor]:
        """First and last slot of the run of equal ids around each slot, int32 [B, Tk] each."""
        documents = self.documents
        assert documents is not None
        return once_for((documents,), ("runs",), lambda: run_bounds(documents))

    def cu_seqlens(self, tq: int, tk: int) -> tuple[Tensor, Tensor]:
        """Return where each contiguous document has its first query and its first key, and the ends, int32 [n + 1]
        each, in the tokens of all rows one after another. To know n, the device is waited for unless it was promised.
        """
        return self.derived("cu_seqlens", (tq, tk), lambda: self._cu_seqlens(tq, tk))

    def _cu_seqlens(self, tq: int, tk: int) -> tuple[Tensor, Tensor]:
        documents = self.documents
        assert documents is not None
        changes = documents[:, 1:] != documents[:, :-1]
        starts = torch.cat([changes.new_ones(documents.shape[0], 1), changes], 1)
        if self.most_documents is None and _is_captured(documents.device):
            raise RuntimeError(
                "the number of documents cannot be read while a CUDA graph is captured: Mask.packed knows it from the "
                "lengths, and Mask(most_documents=...) promises it"
            )
        number = starts.flatten().cumsum(0)  # of each token's document, from 1 on
        count = int(number[-1]) if self.most_documents is None else self.most_documents
        # Documents that are promised and not there begin and end at the end.
        numbers = torch.arange(1, count + 2, device=number.device)
        keys = torch.searchsorted(number, numbers)
        # Queries are the last slots of each row.
        queries = keys // tk * tq + (keys % tk - (tk - tq)).clamp(min=0)
        return queries.int(), keys.int()

    def derived(self, what: str, sizes: tuple[int, ...], make: Callable[[], _Table]) -> _Table:
        """Return what ``make`` gives, made once for all masks of the same tensors and numbers."""
        tensors = self.tensors
        promises = self.contiguous, self.most_documents
        key = (what, *tensors, self.causal, self.window, self.window_after, *promises, *sizes)
        return once_for(tuple(tensors.values()), key, make)

    @property
    def is_by_head(self) -> bool:
        """Return True if heads may see different keys."""
        return self.allowed is not None and self.allowed.ndim > 2 and self.allowed.shape[-3] > 1

    def _batch(self) -> int:
        return next((tensor.shape[0] for name, tensor in self.tensors.items() if name != "allowed"), 1)

    def _bounds(self, tq: int, tk: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """First and last slot a query could see before documents and padding, each [B or 1, Tq]."""
        high = p = self.positions(tq, tk, device)
        if not self.causal:
            last = tk - 1 if self.lengths is None else self.lengths.to(torch.int64)[:, None] - 1
            high = last + torch.zeros_like(p)
            high = high if self.window_after is None else torch.minimum(p + self.window_after, high)
        low = torch.zeros_like(p) if self.window is None else (p - self.window + 1).clamp(min=0)
        return low, high

    def _runs(
        self,
        tq: int,
        tk: int,
        device: torch.device,
        low: Tensor,
        high: Tensor,
        found: "Documents | None" = None,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return which slots are real (None: all), and in the order of the documents the run of places, from
        ``before`` to ``upto``, where a row sees all real ones; found by bisection."""
        batch = self._batch()
        p = self.positions(tq, tk, device).expand(batch, tq)
        low, high = low.expand(batch, tq), high.expand(batch, tq)
        real = self.padding
        if self.documents is None or not tk:
            before, upto = (x.clamp(0, tk) for x in (low, high + 1))
            nowhere = high < low
        else:
            found = self.documents_in_order() if found is None else found
            real = None if real is None else real.gather(1, found.order)
            # The place where a document begins names it.
            own = found.start.gather(1, p.clamp(min=0))
            codes = found.start.gather(1, found.order) * tk + found.order
            before = torch.searchsorted(codes, (own * tk + low).contiguous())
            upto = torch.searchsorted(codes, (own * tk + high).contiguous(), right=True)
            nowhere = (p < 0) | (high < low)
        return real, before, torch.where(nowhere, before, upto)


# Those of a mask, in the order in which they are named.
_TENSORS = ("documents", "padding", "lengths", "allowed")


def with_4_dims(x: Tensor) -> Tensor:
    """Return what is broadcastable to [B, H, Tq, Tk] with all four dimensions."""
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x


def block_of(x: Tensor, rows: slice, keys: slice) -> Tensor:
    """Return the block of rows and keys of x [B or 1, H or 1, Tq or 1, Tk or 1]."""
    x = x if x.shape[2] == 1 else x[:, :, rows]
    return x if x.shape[3] == 1 else x[..., keys]


def entry(x: Tensor, *indices: Tensor) -> Tensor:
    """Return the entries of x [B or 1, H or 1, Tq or 1, Tk or 1] at index tensors b, h, i, j."""
    return x[tuple(index * 0 if size == 1 else index for index, size in zip(indices, x.shape, strict=True))]


def check_broadcastable(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise if a tensor does not broadcast to the shape as it is."""
    sizes = tuple(tensor.shape)
    if len(sizes) > len(shape) or any(a not in (1, b) for a, b in zip(sizes[::-1], shape[::-1], strict=False)):
        raise ValueError(f"{name} must be broadcastable to {list(shape)}, got {list(sizes)}")


class Order(NamedTuple):
    """An order of rows or keys."""

    slot: Tensor  # int64 [B, T]: what stands at each place
    place: Tensor  # int64 [B, T]: where each stands

    @classmethod
    def of(cls, slot: Tensor) -> "Order":
        return cls(slot, slot.argsort(1))


class Ranges(NamedTuple):
    """The places of the keys that each row sees, [B or 1, Tq]: from ``low`` to before ``high``."""

    low: Tensor
    high: Tensor
    rows: Order | None  # None: as they are
    keys: Order | None


class Documents(NamedTuple):
    """Slots in the order of their documents."""

    order: Tensor  # int64 [B, Tk]: the slot at each place of the order
    start: Tensor  # int64 [B, Tk]: place where each slot's document begins
    first: Tensor  # int32 [B, Tk]: first slot of each slot's document
    last: Tensor  # int32 [B, Tk]


def _in_order(ids: Tensor, contiguous: bool) -> Documents:
    if contiguous:
        return _of_runs(*run_bounds(ids))
    # Kernels read the rows of the result as contiguous, and a sort keeps the layout of what it sorts.
    ids, order = ids.contiguous().sort(dim=1, stable=True)
    start, end = (x.long() for x in run_bounds(ids))
    of_places = start, order.gather(1, start), order.gather(1, end)
    start, first, last = (torch.empty_like(order).scatter_(1, order, x) for x in of_places)
    return Documents(order, start, first.int(), last.int())


def _of_runs(first: Tensor, last: Tensor) -> Documents:
    order = torch.arange(first.shape[1], device=first.device).expand(first.shape)
    return Documents(order, first.long(), first, last)


def _first_real(real: Tensor, before: Tensor) -> Tensor:
    """Return the first real place from each of these on; past the end where there is none."""
    tk = real.shape[1]
    place = torch.arange(tk, device=real.device).expand(real.shape)
    following = F.pad(torch.where(real, place, tk).flip(1).cummin(1).values.flip(1), (0, 1), value=tk)
    return following.gather(1, before)


def run_bounds(ids: Tensor) -> tuple[Tensor, Tensor]:
    """First and last slot of the run of equal ids around each slot, int32 [B, Tk] each."""
    batch, length = ids.shape
    place = torch.arange(length, dtype=torch.int32, device=ids.device).expand(batch, length)
    changes = ids[:, 1:] != ids[:, :-1]
    edge = changes.new_ones(batch, 1)
    first = torch.where(torch.cat([edge, changes], 1), place, 0).cummax(1).values
    last = torch.where(torch.cat([changes, edge], 1), place, length).flip(1).cummin(1).values.flip(1)
    return first, last


def _check_lengths(name: str, given: Any) -> None:
    if not isinstance(given, Tensor) or given.ndim != 1 or given.is_floating_point() or given.dtype == torch.bool:
        said = f"{list(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"Mask.packed: {name} must be a list of integers or an int Tensor [n], got {said}")


class _Remembered(NamedTuple):
    others: tuple[weakref.ref, ...]
    versions: tuple[int, ...]
    table: Any


# Tables that are kept of a tensor: as many as layers differ in their windows, and lengths in their sizes.
_MOST_TABLES = 16
# By the first tensor of those a table was made from, and lives as long.
_tables: Any = WeakTensorKeyDictionary()


def once_for(tensors: tuple[Tensor, ...], key: tuple, make: Callable[[], _Table]) -> _Table:
    """Return what ``make`` gives, made once for these tensors as they are now: all layers and both directions use it.

    Not the mask is the key but what it consists of: FSDP makes a new mask for every layer. Other streams have tables of
    their own.
    """
    if not tensors or not _is_plain(tensors):
        return make()
    key = (*key, _stream(tensors[0].device))
    tables = _tables.setdefault(tensors[0], {})
    versions = tuple(x._version for x in tensors)
    known = tables.get(key)
    is_same = known is not None and known.versions == versions
    if is_same and all(other() is x for other, x in zip(known.others, tensors[1:], strict=True)):
        return known.table
    # Evaluated first, trained with later: a backward takes no tensor that was made in inference mode.
    with torch.inference_mode(False):
        table = make()
    tables.pop(key, None)
    if len(tables) >= _MOST_TABLES:
        tables.pop(next(iter(tables)))
    tables[key] = _Remembered(tuple(weakref.ref(x) for x in tensors[1:]), versions, table)
    return table


def _is_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Return True where tables may be read and remembered: tensors have numbers, and what is launched runs now."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        # Modes make other tensors of what is computed, or count on each operation, as recomputation does.
        and not torch._C._len_torch_dispatch_stack()
        # Tensors of inference mode do not tell whether they were changed since.
        and all(type(x) is Tensor and not x.is_inference() for x in tensors)
        and not _is_captured(tensors[0].device)
    )


def _is_captured(device: torch.device) -> bool:
    """Return True while a CUDA graph is made: a replay must compute tables of the documents that it finds, and what
    is allocated belongs to the graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
