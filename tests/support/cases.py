"""The one case table: every variant and engine meets every shape, mask and dtype that is different in kind."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from affine_attn import VARIANTS, Affine, AttentionSpec, Mask, ScaleInvariant
from affine_attn.bench.accuracy import Shape

# Learned sinks of six heads, of all kinds.
SINKS = torch.tensor([-torch.inf, -8.0, 8.0, 40.0, torch.inf, 0.0])


class Case(NamedTuple):
    name: str
    spec: AttentionSpec
    shape: Shape
    mask: Callable[[Shape, torch.device], Mask]
    dtype: torch.dtype
    largest_logit: float | None = None

    def __str__(self) -> str:
        hot = "" if self.largest_logit is None else f"-logit{self.largest_logit:g}"
        mask = next(name for name, make in MASKS.items() if make is self.mask)
        return f"{self.name}-{self.shape}-{mask}-{str(self.dtype).removeprefix('torch.')}{hot}"


def _documents(s: Shape, device, count: int = 3) -> torch.Tensor:
    cuts = torch.linspace(0, count, s.tk, device=device).floor().clamp(max=count - 1).long()
    return torch.stack([(cuts + row) % count for row in range(s.batch)])


def _left_padding(s: Shape, device) -> torch.Tensor:
    first = torch.arange(s.batch, device=device)[:, None] * (s.tk // 3) + 2
    return torch.arange(s.tk, device=device)[None] >= first


def _right_padding(s: Shape, device) -> torch.Tensor:
    return _left_padding(s, device).flip(1)


def _interleaved(s: Shape, device) -> torch.Tensor:
    """Ids that come back: equal ids see each other however they are ordered."""
    return (torch.arange(s.tk, device=device)[None] // 3 + torch.arange(s.batch, device=device)[:, None]) % 2


def _lengths(s: Shape, device) -> torch.Tensor:
    """A full row, a part-filled one, and one with fewer keys than queries."""
    return torch.tensor([s.tk, max(s.tk - 5, 0), max(s.tq - 2, 0)], device=device)[: s.batch]


MASKS: dict[str, Callable[[Shape, torch.device], Mask]] = {
    "none": lambda s, d: Mask(causal=False),
    "causal": lambda s, d: Mask(),
    "window1": lambda s, d: Mask(window=1),
    "window7": lambda s, d: Mask(window=7),
    "window_long": lambda s, d: Mask(window=s.tk + 9),
    "documents": lambda s, d: Mask(documents=_documents(s, d)),
    "documents_interleaved": lambda s, d: Mask(documents=_interleaved(s, d)),
    "documents_both_ways": lambda s, d: Mask(causal=False, documents=_documents(s, d)),
    "packed": lambda s, d: Mask(documents=_documents(s, d), contiguous=True),
    "packed_window": lambda s, d: Mask(window=7, documents=_documents(s, d), contiguous=True, most_documents=11),
    "left_padding": lambda s, d: Mask(padding=_left_padding(s, d)),
    "right_padding": lambda s, d: Mask(padding=_right_padding(s, d)),
    "padding_both_ways": lambda s, d: Mask(causal=False, padding=_left_padding(s, d)),
    "lengths": lambda s, d: Mask(lengths=_lengths(s, d)),
    "all_padded": lambda s, d: Mask(padding=torch.zeros(s.batch, s.tk, dtype=torch.bool, device=d)),
    "everything": lambda s, d: Mask(
        window=9, documents=_documents(s, d), padding=_left_padding(s, d), lengths=_lengths(s, d)
    ),
}

# Every stage at once, in the combinations no named variant has.
COMBINATIONS: dict[str, AttentionSpec] = {
    "sink+affine+gate": AttentionSpec(sink="learned", affine=Affine(), gate="elementwise"),
    "scale_invariant+sink+affine+headwise": AttentionSpec(
        logit=ScaleInvariant(tau=3.0), sink="learned", affine=Affine(phi="sigmoid"), gate="headwise"
    ),
    "alpha_only": AttentionSpec(affine=Affine(beta=False)),
}
SPECS = {name: entry.spec for name, entry in VARIANTS.items()} | COMBINATIONS

_BASE = Shape(2, 4, 2, 37, 37, 32)
SHAPES = [
    Shape(1, 3, 1, 65, 65, 80),  # odd length, head dim off the power of two, group of 3
    Shape(3, 4, 1, 20, 45, 64),  # Tq < Tk, group of 4
    Shape(2, 6, 2, 1, 50, 128),  # decode
    Shape(1, 6, 2, 5, 50, 32),  # a few queries over a cache
    Shape(1, 4, 4, 6, 4, 32),  # more queries than keys: empty rows
    Shape(1, 2, 1, 1, 1, 32),  # a single token
]


def _table() -> list[Case]:
    cases = []
    for name, spec in SPECS.items():
        for make_mask in MASKS.values():
            cases.append(Case(name, spec, replace(_BASE, batch=3), make_mask, torch.float32))
        for shape in SHAPES:
            for mask in ("none", "causal", "everything"):
                cases.append(Case(name, spec, shape, MASKS[mask], torch.float32))
        for dtype in (torch.bfloat16, torch.float16):
            for mask in ("causal", "none", "window7"):
                cases.append(Case(name, spec, Shape(2, 6, 2, 50, 50, 64), MASKS[mask], dtype))
        for dtype in (torch.float32, torch.bfloat16):
            cases.append(Case(name, spec, _BASE, MASKS["causal"], dtype, largest_logit=80.0))
    return [case for case in cases if case.mask(case.shape, torch.device("cpu")).causal or not _needs_causal(case)]


def _needs_causal(case: Case) -> bool:
    return case.spec.logit is not None and case.spec.logit.needs_causal


CASES = _table()
