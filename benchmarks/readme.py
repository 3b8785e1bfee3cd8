"""Writes the README's generated tables: the variants, and forward + backward ratios from benchmarks/results/*.csv."""

import csv
import re
from pathlib import Path

from affine_attn.core.variants import variants_table

ROOT = Path(__file__).parent.parent


def speed_table() -> str:
    """One table per device: rows are what was timed, columns are shapes, cells the ratio to that shape's baseline."""
    parts = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.csv")):
        rows = [row for row in csv.DictReader(path.open()) if row["mode"] == "forward+backward"]
        if not rows:
            continue
        shapes = list(dict.fromkeys(row["shape"] for row in rows))
        first = rows[0]
        parts.append(
            f"{first['device']}, torch {first['torch']}, triton {first['triton']}, commit {first['commit']}; "
            f"ratio to {first['baseline']} (milliseconds):\n"
        )
        parts.append("| | " + " | ".join(shapes) + " |\n|---|" + "---|" * len(shapes))
        for what in dict.fromkeys(row["what"] for row in rows):
            cells = {
                r["shape"]: f"{float(r['ratio']):.2f} ({float(r['ms_p50']):.3g})" for r in rows if r["what"] == what
            }
            parts.append(f"| {what} | " + " | ".join(cells.get(shape, "") for shape in shapes) + " |")
        parts.append("")
    return "\n".join(parts).strip()


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text()
    for name, table in (("variants", variants_table()), ("speed", speed_table())):
        pattern = rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", text, flags=re.DOTALL)
    path.write_text(text)


if __name__ == "__main__":
    main()
