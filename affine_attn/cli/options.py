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
FIELDS = (
    "student", "attention", "teacher", "rho", "vocab_size", "start", "data", "documents", "sequence_length", "needles",
    "global_batch", "micro_batch", "steps", "learning_rate", "weight_decay", "warmup_steps", "decay_steps", "decay",
    "beta1", "beta2", "max_grad_norm", "loss", "temperature", "hard", "shared_vocab", "top_k", "seed", "dtype",
    "gradient_checkpointing", "compile", "valid_sequences", "valid_steps", "statistics_steps", "save_steps",
    "keep_checkpoints", "report_to", "workers",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
# What numpy's generator takes.
MAX_SEED = 2**32 - 1
TASKS = ("winogrande", "piqa", "hellaswag", "arc_challenge", "arc_easy", "boolq")


def one_of(*names: str) -> Callable[[str], list[str]]:
    """What completes the beginning of a name."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def fields(incomplete: str) -> list[str]:
    """What completes a FIELD=VALUE of a recipe: its name, and a variant's."""
    return one_of(*(f"{name}=" for name in FIELDS), *(f"attention={name}" for name in VARIANTS))(incomplete)


Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help=f"one of {', '.join(RECIPES)}; or a file: .toml, or the recipe.json of a run",
        autocompletion=one_of(*RECIPES),
    ),
]
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
