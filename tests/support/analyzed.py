"""Small models with a tokenizer, a text for them that is hostile to whoever shows it, and their analyses."""

from pathlib import Path

import torch
from transformers import AutoTokenizer

from affine_attn.analyze.run import Request, analyze_all
from affine_attn.data.tokenizer import train_tokenizer
from affine_attn.models import AffineAttnForCausalLM, preset
from affine_attn.nn.alpha import alpha_gates

# Markup, mathtext, formats, terminal codes, quotes, half characters, letters that fonts lack, right to left.
HOSTILE = (
    "<script>alert('x')</script> $\\frac{1}{0$ {0} %s </svg> --> \x1b[31m \"&amp;\" \U0001f600 漢字 \u202eabc\n\t\x00\r"
)


def text_file(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(f"{HOSTILE} and line {i} of a text.\n" for i in range(60)), encoding="utf-8")
    return path


def models(folder: Path, *variants: str, **changes) -> list[Path]:
    """Untrained nano models, their stage parameters away from where they start."""
    train_tokenizer([HOSTILE], 280, folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    found = []
    for name in variants:
        torch.manual_seed(1)
        model = AffineAttnForCausalLM(preset("nano", name, vocab_size=len(tokenizer), initializer_range=0.2, **changes))
        for gate in alpha_gates(model):
            gate.alpha_ma.uniform_(0.3, 0.7)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        found.append(folder / name)
    return found


def example_analyses(folder: Path, *variants: str) -> list[Path]:
    """Folders that affine_attn.runs.analysis.read takes: softmax, sink and affine if nothing else is asked for."""
    places = models(folder, *(variants or ("softmax", "sink", "affine")))
    request = Request(text_file(folder), length=96, sequences=3, window="0:48")
    return analyze_all([str(place) for place in places], request)[1]
