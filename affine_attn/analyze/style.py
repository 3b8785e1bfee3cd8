"""How matplotlib draws: one colour per variant wherever it is shown, and text from data that is only ever text."""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from affine_attn.errors import MissingPackage
from affine_attn.figures.style import GRID, OTHER_VARIANT, VARIANT_COLOURS

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise MissingPackage("figures need matplotlib: pip install 'affine-attn[plots]'") from error

from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

# Several models of a variant.
_DASHES = ("-", "--", ":", "-.")
_RC: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "image.interpolation": "nearest",
    "figure.facecolor": "white",
    "savefig.dpi": 200,
    # Files that differ only where figures differ.
    "svg.hashsalt": "affine-attn",
}


@contextmanager
def style() -> Iterator[None]:
    with matplotlib.rc_context(_RC):
        yield


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure in inches and its axes [rows, columns], without the global state of pyplot."""
    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def lines(variants: Iterable[str | None]) -> list[dict[str, Any]]:
    """Colour and dashes of each: the colour is the variant's, the dashes tell several of one variant apart."""
    seen: dict[str | None, int] = {}
    found = []
    for variant in variants:
        number = seen[variant] = seen.get(variant, -1) + 1
        found.append(
            {"color": VARIANT_COLOURS.get(variant or "", OTHER_VARIANT), "linestyle": _DASHES[number % len(_DASHES)]}
        )
    return found


def plain(text: str, most: int = 40) -> str:
    """Text as it is: no mathematics, no line ends, nothing that the font lacks or that a legend would hide."""
    shown = text if len(text) <= most else text[: most - 1] + "…"
    shown = "".join(_shown(character) for character in shown).replace("$", r"\$")
    return " " + shown if shown.startswith("_") else shown


def _shown(character: str) -> str:
    if character == " ":
        return character
    if unicodedata.category(character)[0] in "CZ":
        return {"\n": "↵", "\t": "⇥"}.get(character, "·")
    return character if _has_glyph(character) else "□"


@cache
def _has_glyph(character: str) -> bool:
    return get_font(findfont("DejaVu Sans")).get_char_index(ord(character)) != 0


def token_labels(tokens: Sequence[str]) -> list[str]:
    """Label ticks with tokens, whose spaces are seen."""
    return [plain(token.replace(" ", "␣"), 9) for token in tokens]
