"""The picture of a device's CSV: training cost over plain cuDNN attention as the context grows."""

from pathlib import Path

from affine_attn.runs.files import written
from benchmarks.record import Row

LENGTHS = {"3B": 2048, "3B-8k": 8192, "3B-32k": 32768}
# Two panels, for scale-invariant logits need kernels of their own and a scale of their own. Colours and the grey of the
# text have enough contrast on white and on black.
PANELS = (
    {"affine_gated": "#d6604d", "affine": "#e08214", "sink": "#2a9d5c", "off_by_one": "#3a8fd6", "softmax": "#8c7ae6"},
    {"scale_invariant, FlexAttention": "#909090", "scale_invariant": "#c2569b"},
)
_GREY = "#808890"


def curves(rows: list[Row]) -> dict[str, dict[int, float]]:
    """{what: {length: ratio}} of forward + backward at the 3B heads."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["mode"] == "forward+backward" and row["shape"] in LENGTHS and row["ratio"]:
            found.setdefault(row["what"], {})[LENGTHS[row["shape"]]] = float(row["ratio"])
    return found


def draw(rows: list[Row], path: Path) -> bool:
    """Write the picture; False where the rows have fewer than two lengths or matplotlib is not installed."""
    found = curves(rows)
    if len({length for curve in found.values() for length in curve}) < 2:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY)
    # Fixed ids and no date: the same rows give the same file.
    with pyplot.rc_context(style | {"font.size": 10, "svg.hashsalt": "affine-attn"}):
        figure, axes = pyplot.subplots(1, 2, figsize=(8.4, 3.4), width_ratios=(3, 2), layout="constrained")
        for axis, panel in zip(axes, PANELS, strict=True):
            _panel(axis, {what: found[what] for what in panel if what in found}, panel)
        axes[0].set_ylabel(f"time / {next(r['baseline'] for r in rows if r['baseline'])}")
        figure.suptitle("forward + backward, 3B heads, causal", color=_GREY, fontsize=10)
        with written(path) as file:
            figure.savefig(file, format=path.suffix[1:], transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return True


def _panel(axis, found: dict[str, dict[int, float]], colours: dict[str, str]) -> None:
    for what, curve in found.items():
        lengths = sorted(curve)
        ratios = [curve[length] for length in lengths]
        axis.plot(lengths, ratios, marker="o", markersize=4, linewidth=1.8, color=colours[what], label=what)
    axis.axhline(1, color=_GREY, linewidth=0.8, linestyle="--")
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(LENGTHS.values()), [f"{length // 1024}k" for length in LENGTHS.values()])
    axis.minorticks_off()
    axis.set_xlabel("tokens")
    axis.set_ylim(bottom=min([0.95, *(ratio for curve in found.values() for ratio in curve.values())]))
    axis.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    if found:
        axis.legend(frameon=False, labelcolor=_GREY, fontsize=9)
