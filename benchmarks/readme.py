"""Writes the generated parts of README and docs: the variants, and from benchmarks/results tables and the picture.

``make bench`` calls it; ``python -m benchmarks.readme`` does the same for files that came from elsewhere.
"""

import re
from collections.abc import Callable
from pathlib import Path

from affine_attn.core.variants import VARIANTS, variants_table
from affine_attn.runs.files import write_text
from benchmarks import converted, plot, scaling
from benchmarks.record import RESULTS, ROOT, Row, read

# The README's table: what it compares, at which shapes, on which device.
HEADLINE = RESULTS / "nvidia-h200.csv"
HEADLINE_ROWS = ("plain SDPA (cuDNN)", "plain SDPA (flash)", "softmax", "sink", "affine", "affine_gated")
HEADLINE_SHAPES = ("1B", "3B", "0.5B", "3B-8k")


def headline() -> str:
    """Return the README's part: a caption and forward + backward of a few variants beside stock attention."""
    rows = [
        row
        for row in _of("forward+backward", read(HEADLINE))
        if row["what"] in HEADLINE_ROWS and row["shape"] in HEADLINE_SHAPES
    ]
    return f"{caption(rows)} {_commits(rows).capitalize()}.\n\n{_table(rows, _ratio_and_ms)}"


def results() -> str:
    """Return a caption, a picture and one table per topic for every device, for docs/benchmarks.md."""
    parts = []
    for path in sorted(RESULTS.glob("*.csv")):
        rows = read(path)
        parts.append(f"## {rows[0]['device']}")
        parts.append(caption(rows))
        picture = path.with_suffix(".svg")
        if picture.exists():
            parts.append(f"![training cost over context length](../{picture.relative_to(ROOT)})")
        parts += tables(rows)
        if any(map(_unsteady, rows)):
            parts.append("~ unsteady: the slowest 20 % of the times exceed the fastest 20 % by more than 50 %.")
    return "\n\n".join(parts)


def caption(rows: list[Row]) -> str:
    first = rows[0]
    text = f"**{first['device']}**, torch {first['torch']}, triton {first['triton']}"
    ceilings = []
    for row in rows:
        if row["mode"] == "ceiling":
            figure = f"{float(row['gbps']):.0f} GB/s" if row["gbps"] else f"{float(row['tflops']):.3g} TFLOP/s"
            ceilings.append(f"{row['what']} {figure}")
    return f"{text}; {', '.join(ceilings)}." if ceilings else f"{text}."


def _commits(rows: list[Row]) -> str:
    return "commit " + ", ".join(dict.fromkeys(row["commit"] for row in rows))


def tables(rows: list[Row]) -> list[str]:
    """Training, decoding, generation, epilogue and statistics, those that were measured."""
    parts = []
    if training := _of("forward+backward", rows):
        memory = training[0]["shape"]
        peaks = {r["what"]: f"{float(r['peak_mib']):.0f}" for r in training if r["shape"] == memory and r["peak_mib"]}
        parts += [
            f"Forward + backward, ratio to {_baseline(training)} (milliseconds); MiB beyond the inputs at {memory}; "
            f"{_commits(training)}:",
            _table(training, _ratio_and_ms, {f"{memory} MiB": peaks}),
        ]
    if decoding := _of("decode", rows):
        parts += [
            f"Decoding, ratio to {_baseline(decoding)} (bytes of K and V per second over those of a copy); "
            f"{_commits(decoding)}:",
            _table(decoding, _ratio_and_fraction),
        ]
    if masks := _of("masks", rows):
        parts += [
            "Masks and distance logits (forward + backward, or forward) and a decoded token, at so many tokens: CPU "
            "time of one thread, ratio to the fastest of what torch alone has, named in the CSV (milliseconds); "
            f"{_commits(masks)}:",
            _table(masks, _ratio_and_ms),
        ]
    if decoders := _of("decoders", rows):
        parts += [
            "Whole decoders: a training step of 2 x 512 tokens, optimizer included, and a forward of 8 left-padded "
            f"prompts of 16 to 128 tokens: CPU time of one thread, ratio to {_baseline(decoders)} of the same weights "
            f"(milliseconds); {_commits(decoders)}:",
            _table(decoders, _ratio_and_ms),
        ]
    if memory := [row for row in rows if row["mode"] == "memory"]:
        parts += [
            "Peak of memory of a forward and backward at so many tokens, 8 query and 2 kv heads of 64 channels in "
            f"fp32, inputs aside: ratio to {_baseline(memory)} (MiB); {_commits(memory)}:",
            _table(memory, lambda row: f"{float(row['ratio']):.2f} ({float(row['peak_mib']):.0f})"),
        ]
    if generation := _of("generation", rows):
        parts += [
            f"`generate` with a static cache, cached tokens x batch, ratio to {_baseline(generation)} (ms a token); "
            f"{_commits(generation)}:",
            _table(generation, _ratio_and_ms),
        ]
    if epilogue := _of("epilogue", rows):
        parts += [
            "The epilogue alone, microseconds (bytes that must move per second over those of a copy). Forward and "
            "backward are those around a stock attention. On Hopper a causal forward has none, its backward another; "
            f"{_commits(epilogue)}:",
            _table(epilogue, _us_and_fraction),
        ]
    if statistics := _of("statistics", rows):
        own = ", ".join(f"{r['what']} {float(r['ratio']):.2f}" for r in statistics if r["what"] != r["baseline"])
        parts.append(
            f"`attention_stats` at {statistics[0]['shape']}, ratio to one {_baseline(statistics)} forward: {own}; "
            f"{_commits(statistics)}."
        )
    return parts


def _of(mode: str, rows: list[Row]) -> list[Row]:
    """The rows that were timed; a row without a time has its reason in the CSV."""
    return [row for row in rows if row["mode"] == mode and row["ms_p50"]]


def _baseline(rows: list[Row]) -> str:
    return " or ".join(dict.fromkeys(row["baseline"] for row in rows if row["baseline"]))


def _table(rows: list[Row], cell: Callable[[Row], str], extra: dict[str, dict[str, str]] | None = None) -> str:
    """Rows are what was timed, columns are shapes and then ``extra`` ones."""
    shapes, extra = list(dict.fromkeys(row["shape"] for row in rows)), extra or {}
    heads = [*shapes, *extra]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for what in sorted(dict.fromkeys(row["what"] for row in rows), key=_place):
        cells = {row["shape"]: cell(row) + _unsteady(row) for row in rows if row["what"] == what}
        columns = [cells.get(shape, "") for shape in shapes] + [column.get(what, "") for column in extra.values()]
        lines.append(f"| {what} | " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _place(what: str) -> int:
    """Stock attention, variants in their own order, then what they are compared with; a file has them as they came."""
    if what.startswith(("plain", "transformers")):
        return -1
    return list(VARIANTS).index(what) if what in VARIANTS else len(VARIANTS)


def _unsteady(row: Row) -> str:
    """A mark for times of which no median says much."""
    return " ~" if row["ms_p20"] and float(row["ms_p80"]) > 1.5 * float(row["ms_p20"]) else ""


def _ratio_and_ms(row: Row) -> str:
    return f"{float(row['ratio']):.2f} ({_three_digits(float(row['ms_p50']))})"


def _ratio_and_fraction(row: Row) -> str:
    return f"{float(row['ratio']):.2f} ({float(row['fraction_of_copy']):.0%})"


def _us_and_fraction(row: Row) -> str:
    return f"{_three_digits(1e3 * float(row['ms_p50']))} ({float(row['fraction_of_copy']):.0%})"


def _three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def rewrite(text: str, parts: dict[str, str]) -> str:
    """Return a document with each generated section written anew."""
    for name, generated in parts.items():
        pattern = rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(pattern, lambda m, new=generated: f"{m[1]}\n{new}\n\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the marks of part {name} are there {count} times, not once")
    return text


def documents() -> dict[Path, dict[str, str]]:
    """Return the generated parts of each document."""
    return {
        ROOT / "README.md": {"variants": variants_table(), "speed": headline()},
        ROOT / "docs" / "benchmarks.md": {"benchmarks": results()},
        ROOT / "docs" / "scaling.md": {"training": scaling.measurements(), "scaling": scaling.tables()},
        ROOT / "docs" / "tutorials" / "hugging-face.md": {"converted": converted.table()},
    }


def main() -> None:
    for path in RESULTS.glob("*.csv"):
        plot.draw(read(path), path.with_suffix(".svg"))
    for path, parts in documents().items():
        write_text(path, rewrite(path.read_text(), parts))


if __name__ == "__main__":
    main()
