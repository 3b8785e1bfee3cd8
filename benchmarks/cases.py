"""What the benchmark times: shapes, modes, and for each pair of them a group of cases that take turns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from affine_attn.bench.accuracy import Shape
from affine_attn.kernels.device import capability

# Attention of the paper's students at their training length, and the 3B one at longer contexts (B, H, Hkv, Tq, Tk, D).
TRAINING_SHAPES = {
    "cuda": {
        "1B": Shape(16, 32, 8, 2048, 2048, 64),
        "3B": Shape(8, 24, 8, 2048, 2048, 128),
        "0.5B": Shape(16, 16, 16, 2048, 2048, 64),
        "3B-8k": Shape(2, 24, 8, 8192, 8192, 128),
        "3B-32k": Shape(1, 24, 8, 32768, 32768, 128),
    },
    "cpu": {"cpu": Shape(2, 8, 2, 2048, 2048, 64)},
}
# One new token per sequence over a cache of 8192.
DECODE_SHAPES = {
    "cuda": {
        "3B-decode-32": Shape(32, 24, 8, 1, 8192, 128),
        "3B-decode-1": Shape(1, 24, 8, 1, 8192, 128),
        "1B-decode-32": Shape(32, 32, 8, 1, 8192, 64),
        "1B-decode-1": Shape(1, 32, 8, 1, 8192, 64),
    },
    "cpu": {"cpu-decode": Shape(4, 8, 2, 1, 8192, 64)},
}

MODES = {
    "forward": "without gradients",
    "forward+backward": "gradients of every input",
    "decode": "one query per sequence over a cache, without gradients",
    "epilogue": "the row-wise stages alone, against copy bandwidth",
    "statistics": "attention_stats over one plain forward",
}
SHAPES_OF = {"epilogue": ("3B", "1B", "0.5B", "cpu"), "statistics": ("3B", "cpu")}
VARIANTS_OF = {
    "decode": ("softmax", "off_by_one", "sink", "affine", "affine_gated", "scale_invariant"),
    "epilogue": ("sink", "affine", "affine_gated"),
    "statistics": ("softmax", "affine"),
}
# FlexAttention compiles for each shape; a dense matrix fits where the length is 2048.
FLEX_SHAPES = ("1B", "3B", "3B-8k")
DENSE_SHAPES = ("3B", "cpu")


@dataclass(frozen=True)
class Case:
    """One thing to time: inputs of a variant, and the name of the method (benchmarks/steps.py) that takes them."""

    what: str
    method: str = "auto"
    variant: str = "softmax"

    @property
    def is_stock(self) -> bool:
        """Plain attention of torch, which ratios may refer to."""
        return self.what.startswith("plain SDPA")


@dataclass(frozen=True)
class Group:
    """Cases that take turns; ratios refer to the first stock one of them that runs."""

    name: str
    shape: Shape
    mode: str
    cases: tuple[Case, ...]


STOCK = {
    "cuda": (Case("plain SDPA (cuDNN)", "cudnn"), Case("plain SDPA (flash)", "flash")),
    "cpu": (Case("plain SDPA (flash_for_cpu)", "plain"),),
}


def groups(
    device: torch.device,
    modes: Sequence[str],
    variants: Sequence[str],
    shapes: Sequence[str] | None = None,
    quick: bool = False,
) -> list[Group]:
    """Everything to time, what must compile for long last, so that an interrupted run has the rest."""
    stock = STOCK[device.type]
    found = [
        Group(name, shape, mode, cases)
        for mode in modes
        for name, shape in _shapes(device, mode).items()
        if (cases := _own_cases(device, mode, variants))
    ]
    for name, shape in TRAINING_SHAPES[device.type].items():
        rivals = tuple(case for case in _rivals(device, name, quick) if case.variant in variants)
        found += [Group(name, shape, mode, (stock[0], *rivals)) for mode in modes if rivals and "forward" in mode]
    return [group for group in found if shapes is None or group.name in shapes]


def _shapes(device: torch.device, mode: str) -> dict[str, Shape]:
    if mode == "decode":
        return DECODE_SHAPES[device.type]
    wanted = SHAPES_OF.get(mode)
    return {name: s for name, s in TRAINING_SHAPES[device.type].items() if wanted is None or name in wanted}


def _own_cases(device: torch.device, mode: str, variants: Sequence[str]) -> tuple[Case, ...]:
    wanted = [v for v in variants if v in VARIANTS_OF.get(mode, variants)]
    if mode == "epilogue":
        halves = {"forward": "finish", "backward": "gradients"}
        if capability(device) == (9, 0):
            halves["backward on Hopper"] = "rows"
        return tuple(Case(f"{v}, {half}", method, v) for v in wanted for half, method in halves.items())
    if mode == "statistics":
        return (STOCK[device.type][0], *(Case(v, "statistics", v) for v in wanted))
    method = "decode" if mode == "decode" and device.type == "cuda" else "auto"
    return (*STOCK[device.type], *(Case(v, method, v) for v in wanted))


def _rivals(device: torch.device, name: str, quick: bool) -> list[Case]:
    """Other ways to compute members of the family."""
    rivals = []
    if name in DENSE_SHAPES:
        rivals.append(Case("affine, dense", "dense", "affine"))
    if quick or device.type != "cuda":
        return rivals
    if name in DENSE_SHAPES:
        rivals.append(Case("affine, dense compiled", "dense compiled", "affine"))
        rivals.append(Case("affine, then a compiled multiply", "multiply", "affine_gated"))
    if name in FLEX_SHAPES:
        rivals += [Case(f"{v}, FlexAttention", "flex", v) for v in ("softmax", "scale_invariant")]
    return rivals
