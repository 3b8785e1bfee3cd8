"""Names that a shell completes, and what several commands have in common."""

from collections.abc import Callable
from typing import Annotated

import typer

# Where these are defined torch is loaded, which a keystroke cannot wait for.
VARIANTS = (
    "softmax", "off_by_one", "sink", "gated", "gated_headwise", "affine", "affine_sigmoid", "affine_gated",
    "scale_invariant", "logn", "alibi",
)  # fmt: skip
RECIPES = ("demo", "small", "needle", "paper-0.5b", "paper-1b", "paper-3b")
DTYPES = ("float32", "bfloat16", "float16")
# What numpy's generator takes.
MAX_SEED = 2**32 - 1
TASKS = ("winogrande", "piqa", "hellaswag", "arc_challenge", "arc_easy", "boolq")


def one_of(*names: str) -> Callable[[str], list[str]]:
    """What completes the beginning of a name."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


Model = Annotated[str, typer.Argument(metavar="MODEL", help="folder or hub id of a causal model with its tokenizer")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ...; default: cuda where there is one", autocompletion=one_of("cpu", "cuda")),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(DTYPES)}; default: the checkpoint's on cuda, else float32", autocompletion=one_of(*DTYPES)
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="sequences at once; default: as many as the memory of their logits allows")
]
