"""The one case table: every variant and engine meets every shape, mask and dtype that is different in kind."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from affine_attn import VARIANTS, Affine, Alibi, AttentionSpec, LogN, Mask, ScaleInvariant, SoftCap
from affine_attn.bench.accuracy import Shape, random_inputs

# Learned sinks of six heads, of all kinds.
SINKS = torch.tensor([-torch.inf, -8.0, 8.0, 40.0, torch.inf, 0.0])


class Case(NamedTuple):
    name: str
    spec: AttentionSpec
    shape: Shape
    mask: Callable[[Shape, torch.device], Mask]
    dtype: torch.dtype
    largest_logit: float | None = None
    bias: str | None = None  # a key of BIASES

    def __str__(self) -> str:
        hot = "" if self.largest_logit is None else f"-logit{self.largest_logit:g}"
        bias = "" if self.bias is None else f"-bias_{self.bias}"
        mask = next(name for name, make in (MASKS | PAIR_MASKS).items() if make is self.mask)
        return f"{self.name}-{self.shape}-{mask}-{str(self.dtype).removeprefix('torch.')}{hot}{bias}"

    def arguments(self, device: str = "cpu") -> tuple[dict[str, Any], Mask]:
        """Return the arguments of ``attention``, and its mask."""
        bias = None if self.bias is None else BIASES[self.bias](self.shape)
        inputs = random_inputs(self.spec, self.shape, self.dtype, device, 0, self.largest_logit, bias)
        return inputs, self.mask(self.shape, torch.device(device))


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


def _pairs(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)).to(device) > 0.3


# Masks of single pairs and of two-sided windows: only some engines have them.
PAIR_MASKS: dict[str, Callable[[Shape, torch.device], Mask]] = {
    "allowed": lambda s, d: Mask(allowed=_pairs(s.tq, s.tk, device=d)),
    "allowed_by_head": lambda s, d: Mask(documents=_documents(s, d), allowed=_pairs(s.heads, s.tq, s.tk, device=d)),
    "allowed_by_row": lambda s, d: Mask(padding=_left_padding(s, d), allowed=_pairs(s.batch, 1, s.tq, 1, device=d)),
    "two_sided": lambda s, d: Mask(causal=False, window=3, window_after=2),
    "after": lambda s, d: Mask(causal=False, window_after=4, lengths=_lengths(s, d)),
    "all_both_ways": lambda s, d: Mask(
        causal=False,
        window=9,
        window_after=1,
        documents=_documents(s, d),
        lengths=_lengths(s, d),
        allowed=_pairs(s.batch, s.heads, s.tq, s.tk, device=d),
    ),
}
BIASES: dict[str, Callable[[Shape], tuple[int, ...]]] = {
    "all": lambda s: (s.batch, s.heads, s.tq, s.tk),
    "by_head": lambda s: (s.heads, s.tq, s.tk),
    "by_key": lambda s: (s.batch, s.heads, 1, s.tk),
    "pairs": lambda s: (s.tq, s.tk),
}

# Every stage at once, in the combinations no named variant has.
COMBINATIONS: dict[str, AttentionSpec] = {
    "sink+affine+gate": AttentionSpec(sink="learned", affine=Affine(), gate="elementwise"),
    "scale_invariant+sink+affine+headwise": AttentionSpec(
        logit=ScaleInvariant(tau=3.0), sink="learned", affine=Affine(phi="sigmoid"), gate="headwise"
    ),
    "alpha_only": AttentionSpec(affine=Affine(beta=False)),
}
CURVES: dict[str, AttentionSpec] = {
    "softcap": AttentionSpec(logit=SoftCap(2.0)),
    "softcap+alibi+sink": AttentionSpec(logit=(SoftCap(2.0), Alibi()), sink="learned"),
    "softcap+logn+gated": AttentionSpec(logit=(LogN(), SoftCap(2.0)), gate="elementwise"),
    "softcap+every_stage": AttentionSpec(
        logit=(SoftCap(2.0), ScaleInvariant(tau=3.0)), sink="learned", affine=Affine(), gate="elementwise"
    ),
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
    cases += _with_options()
    return [case for case in cases if case.mask(case.shape, torch.device("cpu")).causal or not _needs_causal(case)]


def _with_options() -> list[Case]:
    """Curves, biases, masks of pairs and other widths of values, with each other and with every stage: thinned out."""
    specs = {name: SPECS[name] for name in (*COMBINATIONS, "softmax", "logn")} | CURVES
    masks = [*PAIR_MASKS.values(), *(MASKS[name] for name in ("causal", "none", "documents", "everything"))]
    biases = (None, *BIASES)
    # Half and twice the width of keys, that of DeepSeek-V3, each to train and to decode with; as wide: empty rows.
    shapes = [
        replace(_BASE, value_dim=16),
        Shape(1, 3, 1, 35, 35, 32, 64),
        Shape(1, 4, 2, 29, 29, 192, 128),
        Shape(2, 4, 2, 1, 50, 192, 128),
        Shape(2, 4, 2, 1, 40, 32, 16),
        Shape(2, 4, 1, 1, 40, 32, 64),
        Shape(1, 4, 4, 6, 4, 32),
        replace(_BASE, tq=13),
    ]
    every = itertools.product(specs.items(), masks, biases, shapes)
    cases = [Case(*spec, shape, mask, torch.float32, bias=bias) for spec, mask, bias, shape in every][::19]
    for dtype in (torch.bfloat16, torch.float16):
        every = itertools.product(specs.items(), masks[:1] + masks[-4:], ("by_head", None), shapes[:4])
        cases += [Case(*spec, shape, mask, dtype, bias=bias) for spec, mask, bias, shape in every][::11]
    return cases


def _needs_causal(case: Case) -> bool:
    return any(part is not None and part.needs_causal for part in case.spec.scores)


CASES = _table()
