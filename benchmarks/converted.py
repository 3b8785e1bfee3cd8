"""What another attention does to a trained model: python -m benchmarks.converted MODEL TEXTS

MODEL is what ``affine-attn convert`` takes, say a GGUF file; TEXTS a text or JSON-lines file. The perplexity of the
model, then of its conversion to each variant, untrained and with ``start_as_softmax``. It goes to
benchmarks/results/converted/, and ``python -m benchmarks.readme`` puts the table into docs/tutorials/hugging-face.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from affine_attn.core.variants import VARIANTS
from affine_attn.errors import UserError
from affine_attn.evaluate.perplexity import text_perplexity
from affine_attn.models.convert import convert
from affine_attn.models.load import load, tokenizer_of
from affine_attn.runs.files import write_json
from benchmarks.record import RESULTS

FILE = RESULTS / "converted" / "perplexity.json"


def place_of(model: str) -> tuple[str, str | None]:
    """The folder and the name of a GGUF file; anything else as it is."""
    path = Path(model)
    return (str(path.parent), path.name) if path.suffix == ".gguf" else (model, None)


def measured(model: str, texts: Path, length: int, limit: int | None) -> dict[str, Any]:
    place = place_of(model)
    source, tokenizer = load(*place, dtype=torch.float32), tokenizer_of(*place)
    if tokenizer is None:
        raise SystemExit(f"{model} has no tokenizer")

    def score(changed: Any) -> dict[str, Any]:
        return text_perplexity(changed.eval(), tokenizer, texts, length, length, limit, batch_size=1)

    first = score(source)
    found: dict[str, Any] = {
        "model": Path(model).stem, "texts": texts.stem, "documents": first["documents"], "tokens": first["tokens"],
        "length": length, "source": first["metrics"]["token_perplexity"]["value"], "variants": {},
    }  # fmt: skip
    for name in VARIANTS:
        row = {}
        for start in (False, True):
            torch.manual_seed(0)
            try:
                converted = convert(source, name, start_as_softmax=start)
            except UserError as error:
                row["softmax" if start else "untrained"] = str(error).removeprefix("start_as_softmax: ")
                continue
            row["softmax" if start else "untrained"] = score(converted)["metrics"]["token_perplexity"]["value"]
        found["variants"][name] = row
        print(name, row, flush=True)
    return found


def table() -> str:
    """The part of docs/tutorials/hugging-face.md."""
    found = json.loads(FILE.read_text())
    shown = {name: [_shown(row[kind]) for kind in ("untrained", "softmax")] for name, row in found["variants"].items()}
    return "\n".join(
        [
            f"Perplexity of {found['model']} on {found['tokens']} tokens of {found['texts']}, as it is: "
            f"{found['source']:.4g}.",
            "",
            "| converted to | untrained | `--start-as-softmax` |",
            "|---|---|---|",
            *(f"| `{name}` | {' | '.join(cells)} |" for name, cells in shown.items()),
        ]
    )


def _shown(value: float | str | None) -> str:
    if value is None:
        return "more than a float holds"
    return f"refused: {value}" if isinstance(value, str) else f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--limit", type=int, help="documents to score")
    options = parser.parse_args()
    write_json(FILE, measured(options.model, options.texts, options.length, options.limit))


if __name__ == "__main__":
    main()
