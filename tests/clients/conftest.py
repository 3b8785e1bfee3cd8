"""A tiny affine model with a tokenizer, as a folder and as an object; see ``make test-clients``."""

import os
import subprocess
import sys

import pytest

# Before the clients are imported, which read it once: nothing here comes from a hub.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

from tests.support.hf import tiny_model, words

CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture
def tokenizer():
    made = words()
    made.pad_token, made.eos_token, made.chat_template = "w0", "w3", CHAT
    return made


@pytest.fixture
def model():
    return tiny_model("affine", eos_token_id=3)


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    path = tmp_path / "tiny"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def command(tmp_path):
    """Run a command of the environment in a new process, which must end well, and return what it printed."""

    def run(name, *arguments):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        }
        program = [os.path.join(os.path.dirname(sys.executable), name), *map(str, arguments)]
        result = subprocess.run(
            program, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
