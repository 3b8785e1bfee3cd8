"""Saved folders in a process that knows nothing of this package: what loads, what is said where it cannot."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from affine_attn import Affine, AttentionSpec
from affine_attn.models import (
    AffineAttnForCausalLM,
    AffineAttnForQuestionAnswering,
    AffineAttnForSequenceClassification,
    AffineAttnForTokenClassification,
    convert,
    save_with_code,
)
from tests.support.hf import left_padded, tiny_model, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "tiny"
    model = tiny_model("affine", eos_token_id=3)
    model.save_pretrained(path)
    tokenizer = words()
    tokenizer.eos_token = "w3"
    tokenizer.save_pretrained(path)
    tokens, mask = left_padded()
    torch.save((tokens, mask, model(tokens, mask).logits), path / "expected.pt")
    return path


def fresh(program, folder, **environment):
    """Run a program in a new Python, without a terminal, with the folder as its first argument."""
    command = [sys.executable, "-c", program, str(folder)]
    given = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"} | environment
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=given, check=False)


WITH_THE_FLAG = """
import sys, torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
folder = sys.argv[1]
AutoTokenizer.from_pretrained(folder)
assert "affine_attn" not in sys.modules
# The harness as its command calls it, without reading its fourteen thousand tasks first.
tasks = TaskManager(include_path=folder, include_defaults=False)
told = {"pretrained": folder, "trust_remote_code": True}
found = simple_evaluate("hf", told, tasks=["choice"], task_manager=tasks, device="cpu", bootstrap_iters=0)
assert "acc,none" in found["results"]["choice"]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokens, mask, logits = torch.load(folder + "/expected.pt")
torch.testing.assert_close(model(tokens, mask).logits, logits, rtol=0, atol=1e-6)
assert type(model).__module__ == "affine_attn.models.modeling"
text = pipeline("text-generation", folder, trust_remote_code=True)("w1 w2", max_new_tokens=3)
assert text[0]["generated_text"].startswith("w1 w2")
reward = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, trust_remote_code=True)
assert reward(tokens, mask).logits.shape == (2, 1)
model.save_pretrained(folder + "/again")
"""


def test_the_flag_loads_it_wherever_the_package_is(folder):
    (folder / "choice.jsonl").write_text('{"q": "w1 w2", "a": ["w3", "w4"], "l": 1}\n')
    task = {
        "task": "choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "choice.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{a}}",
        "doc_to_target": "{{l}}",
    }
    (folder / "choice.yaml").write_text(json.dumps(task))
    result = fresh(WITH_THE_FLAG, folder, HF_DATASETS_OFFLINE="1", HF_DATASETS_CACHE=str(folder / "datasets"))
    assert result.returncode == 0, result.stderr
    names = {path.name for path in (folder / "again").iterdir()}
    assert {"README.md", "modeling_affine_attn.py"} < names
    assert not any(name in names for name in ("configuration.py", "modeling.py"))
    assert len((folder / "modeling_affine_attn.py").read_text().splitlines()) == 3


WITHOUT = """
import sys
from transformers import AutoConfig, pipeline
folder = sys.argv[1]

def refusal(**options):
    try:
        AutoConfig.from_pretrained(folder, **options)
    except (ValueError, ImportError) as error:
        return str(error)

class NotInstalled:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "affine_attn":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert "pass the argument `trust_remote_code=True`" in refusal()
sys.meta_path.insert(0, NotInstalled())
assert "Run `pip install affine_attn`" in refusal(trust_remote_code=True)
sys.meta_path.pop(0)
import affine_attn.models
pipeline("text-generation", folder)
"""


def test_without_flag_or_package_a_sentence_says_what_to_do_and_an_import_does(folder):
    result = fresh(WITHOUT, folder)
    assert result.returncode == 0, result.stderr


def test_the_card_says_which_attention_and_how_to_load(folder, tmp_path):
    card = (folder / "README.md").read_text()
    for part in (
        "library_name: transformers",
        "| all | `affine` |",
        "import affine_attn.models",
        "trust_remote_code=True",
    ):
        assert part in card
    assert "arXiv 2602.23057" in card
    assert "imports the installed package" in card
    mixed = tiny_model(["softmax", AttentionSpec(sink=2.0, affine=Affine(length=7))], window=[None, 5])
    mixed.save_pretrained(tmp_path / "mixed")
    card = (tmp_path / "mixed" / "README.md").read_text()
    assert "| 0 | `softmax` |" in card
    assert "| 1 | its own | | | 5 |" in card
    assert '"length": 7' in card
    save_with_code(tiny_model("softmax"), tmp_path / "code")
    card = (tmp_path / "code" / "README.md").read_text()
    assert "needs torch and transformers alone" in card
    assert "--to-plain" in card


def test_a_card_that_is_there_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    tiny_model().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_folders_without_the_file_still_load(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "auto_map"}))
    (tmp_path / "modeling_affine_attn.py").unlink()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is AffineAttnForCausalLM
    assert again.config.auto_map["AutoConfig"] == "modeling_affine_attn.AffineAttnConfig"
    again.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        (AffineAttnForSequenceClassification, {"labels": torch.tensor([0, 1])}),
        (AffineAttnForTokenClassification, {"labels": torch.zeros(2, 10, dtype=torch.long)}),
        (
            AffineAttnForQuestionAnswering,
            {"start_positions": torch.tensor([4, 1]), "end_positions": torch.tensor([6, 2])},
        ),
    ],
)
@pytest.mark.parametrize("attention", ["affine", "sink", "gated"])
def test_other_heads_take_the_decoder_and_learn(kind, labels, attention, tmp_path):
    model = tiny_model(attention)
    model.save_pretrained(tmp_path)
    tokens, mask = left_padded()
    headed = kind.from_pretrained(tmp_path, num_labels=2)
    hidden = headed.eval().model(tokens, mask).last_hidden_state
    assert torch.equal(hidden, model.model(tokens, mask).last_hidden_state)
    headed.train()(tokens, mask, **labels).loss.backward()
    assert all(parameter.grad is not None for parameter in headed.parameters())
    headed.eval().save_pretrained(tmp_path / "headed")
    again = kind.from_pretrained(tmp_path / "headed")
    assert torch.equal(again(tokens, mask)[0], headed(tokens, mask)[0])


def test_a_config_without_code_beside_it_is_converted_as_before(folder):
    assert convert(folder, "affine").config.spec(0) == tiny_model("affine").config.spec(0)
