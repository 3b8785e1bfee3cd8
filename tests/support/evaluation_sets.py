"""A handful of documents in the formats of the evaluation sets, and a small model to evaluate on them."""

import json
import lzma
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from affine_attn.data.tokenizer import train_tokenizer
from tests.support.hf import SIZES


def _multiple_choice(question, options, answer):
    labels = "ABCD"[: len(options)]
    choices = {"text": options, "label": list(labels)}
    return {"id": question[:8], "question": question, "choices": choices, "answerKey": labels[answer]}


def _hellaswag(activity, first, second, endings, label):
    return {
        "ind": label,
        "activity_label": activity,
        "ctx_a": first,
        "ctx_b": second,
        "ctx": f"{first} {second}",
        "endings": endings,
        "label": str(label),
    }


DOCUMENTS = {
    "winogrande": [
        {
            "sentence": "The kettle did not fit in the box because the _ was too wide.",
            "option1": "kettle",
            "option2": "box",
            "answer": "1",
        },
        {
            "sentence": "Nora lent Ida a coat since _ was freezing on the pier.",
            "option1": "Nora",
            "option2": "Ida",
            "answer": "2",
        },
        {
            "sentence": "The lamp outshone the candle, so we kept the _ for dinner.",
            "option1": "lamp",
            "option2": "candle",
            "answer": "2",
        },
        {
            "sentence": "A ladder beat the rope because the _ was firm.",
            "option1": "ladder",
            "option2": "rope",
            "answer": "1",
        },
    ],
    "piqa": [
        {
            "goal": "Keep a door from slamming.",
            "sol1": "Put a folded towel over its top.",
            "sol2": "Put a folded towel in the oven.",
            "label": 0,
        },
        {
            "goal": "Cool a cup of tea.",
            "sol1": "Wrap it in wool.",
            "sol2": "Pour it into a wide bowl and wait.",
            "label": 1,
        },
        {"goal": "Find a lost key.", "sol1": "Look under the mat.", "sol2": "Sell the mat.", "label": 0},
    ],
    "hellaswag": [
        _hellaswag(
            "Baking bread",
            "A woman kneads dough on a table.",
            "she",
            ["sets it aside to rise.", "rides it downhill.", "reads it aloud.", "nails it to a boat."],
            0,
        ),
        _hellaswag(
            "Mowing",
            "A boy pushes a mower over the lawn.",
            "he",
            ["eats the blades.", "paints a door.", "leaves neat stripes in the grass.", "sings to a judge."],
            2,
        ),
        _hellaswag(
            "Sailing",
            "Two friends untie a small boat.",
            "they",
            ["bury it.", "push off from the dock.", "fold it twice.", "call it a taxi."],
            1,
        ),
    ],
    "arc_easy": [
        _multiple_choice("What melts when it is warmed?", ["ice", "sand", "brick"], 0),
        _multiple_choice("Which of these do plants take in?", ["music", "light", "glass", "wool"], 1),
        _multiple_choice("What pulls a ball to the ground?", ["paint", "noise", "colour", "gravity"], 3),
    ],
    "arc_challenge": [
        _multiple_choice(
            "Why does a metal spoon feel colder than a wooden one?",
            ["It holds ice.", "It carries heat away faster.", "It is newer.", "It is round."],
            1,
        ),
        _multiple_choice(
            "What happens to most gases that are pressed together?", ["They warm up.", "They vanish.", "They rust."], 0
        ),
        _multiple_choice(
            "Which change makes a pendulum swing more slowly?",
            ["a lighter bob", "a red string", "a longer string", "a warmer room"],
            2,
        ),
    ],
    "boolq": [
        {
            "question": "is the harbour open in winter",
            "answer": False,
            "passage": "The harbour freezes from December on and is closed until the thaw.",
        },
        {
            "question": "can the bridge be crossed on foot",
            "answer": True,
            "passage": "Since its repair the bridge has had a footpath on its northern side.",
        },
        {
            "question": "does the mill still grind grain",
            "answer": False,
            "passage": "The mill was turned into a museum; its stones have not moved in years.",
        },
    ],
}
TEXTS = [
    "The ferry left before sunrise and reached the island at noon.",
    # More tokens than the model has positions.
    " ".join(f"Loaf {i} needs flour, water and {i % 7} hours." for i in range(60)),
    "Nobody knew who had wound the clock in the tower, and nobody asked twice.",
]


def write_sets(folder: Path) -> Path:
    """Files as ``--data`` takes them: one compressed, one in a folder of its configuration's name."""
    for task, documents in DOCUMENTS.items():
        split = "test" if task.startswith("arc") else "validation"
        place = folder / ("winogrande_xl" if task == "winogrande" else task)
        place.mkdir(parents=True)
        lines = "".join(json.dumps(document) + "\n" for document in documents)
        if task == "piqa":
            (place / f"{split}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
        else:
            (place / f"{split}.jsonl").write_text(lines)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


def small_llama(folder: Path, vocab_size: int = 300, **changes) -> LlamaForCausalLM:
    """Saved with a tokenizer that was trained on the documents."""
    train_tokenizer([json.dumps(DOCUMENTS), *TEXTS], vocab_size, folder)
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | ends | {"vocab_size": vocab_size} | changes))).eval()
    model.save_pretrained(folder)
    return model
