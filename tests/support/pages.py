"""The commands of the README and the tutorials, taken from the pages themselves.

``python -m tests.support.pages`` (``make test-readme``) runs all of them, in the order of the pages, in a fresh
checkout: it installs, trains and evaluates as a reader would. ``tests/test_pages.py`` does it small.
"""

import gzip
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/quickstart.md",
    *(f"docs/tutorials/{name}.md" for name in ("distil", "analyse", "hugging-face", "own-gpt", "examples")),
    "docs/adding-a-variant.md",
)
PROGRAMS = "affine-attn|make|pip|python|torchrun|accelerate|lm_eval|pytest"
_COMMAND = re.compile(rf"^    ((?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) .*)$|`((?:{PROGRAMS}) [^`]*)`", re.MULTILINE)
_COMMENT = re.compile(r"\s{2,}#.*$")

# What is not run, and why.
_ON_GPUS = "eight GPUs; make test-faults starts both launchers with two processes"
_THE_HUB = "needs the hub"
_NAMED = "is named here, not given"
SKIPPED = {
    "pip install affine-attn": "from the package index; the checkout is what is tested",
    "make test": "runs this",
    "make docs": "make test builds the site",
    "affine-attn --install-completion": "changes the settings of the shell",
    "affine-attn analyze": _NAMED,
    "affine-attn distill small sequence_length=1024 steps=1250": "a GPU, minutes",
    "torchrun --nproc-per-node 8 -m affine_attn.cli distill paper-1b --output runs/1b": _ON_GPUS,
    "accelerate launch --multi_gpu --num_processes 8 -m affine_attn.cli distill paper-1b --output runs/1b": _ON_GPUS,
    "affine-attn prepare data/web HuggingFaceFW/fineweb-edu:sample-10BT --tokenizer meta-llama/Llama-3.2-1B": _THE_HUB,
    "affine-attn eval runs/demo/attention=affine/model": f"{_THE_HUB}; the next line takes the same tasks from files",
    "lm_eval --model hf --model_args pretrained=folder,trust_remote_code=True --tasks ...": _THE_HUB,
    "make test-gpu": "a GPU",
    "python -m benchmarks.readme": "writes README.md, as a test compares it",
    "python -m tests.support.golden_losses": "writes what tests/distill/test_golden_losses.py compares",
    "python -m experiments tables": "writes pages, as tests/experiments compares them",
}


class Command(NamedTuple):
    page: str
    line: str


def commands() -> list[Command]:
    """Every command, those in the text too, in the order of the pages."""
    found = []
    for page in PAGES:
        # Comments name what writes a part of the page.
        text = re.sub(r"```.*?```|<!--.*?-->", "", (ROOT / page).read_text(), flags=re.DOTALL).replace("\\\n", "")
        for block, inline in _COMMAND.findall(text):
            found.append(Command(page, _COMMENT.sub("", block) or " ".join(inline.split())))
    return found


def code(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def write_inputs(folder: Path) -> None:
    """What the pages take for granted: a reader's texts, models, question sets and files. In place of a model of the
    hub stands a small one in a folder of that name."""
    from tests.support.evaluation_sets import small_llama, write_sets
    from tests.support.gguf_file import write_gguf

    (toml,) = code("docs/tutorials/distil.md", "toml")
    combination, name, *_ = code("docs/adding-a-variant.md", "python")
    texts = {
        "mine.toml": toml,
        "my_variants.py": combination + name,
        "book.txt": "The ferry left before sunrise and reached the island at noon. " * 80,
        "corpus/first.txt": "Nobody knew who had wound the clock in the tower. " * 40,
        "corpus/second.txt": "Loaves need flour, water and seven hours. " * 40,
    }
    inputs = [*texts, "more.jsonl.gz", "sets", "texts.jsonl", "path/or/hub-id", "llama-folder", "model.gguf"]
    (folder / ".git" / "info" / "exclude").write_text("".join(f"/{place}\n" for place in inputs))
    for place, text in texts.items():
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(text)
    with gzip.open(folder / "more.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"Line {i} of many. " * 9}) + "\n" for i in range(40))
    shutil.copy(write_sets(folder / "sets") / "texts.jsonl", folder)
    small_llama(folder / "path" / "or" / "hub-id")
    write_gguf(small_llama(folder / "llama-folder"), folder / "model.gguf")


def track_everything(folder: Path) -> None:
    """A repository of what lies in the folder."""
    git = ["git", "-c", "user.name=reader", "-c", "user.email=reader@localhost", "-c", "init.defaultBranch=main"]
    for line in (["init", "-q"], ["add", "-A"], ["commit", "-q", "--no-verify", "-m", "checkout"]):
        subprocess.run([*git, *line], cwd=folder, check=True)


def untracked_or_changed(folder: Path) -> str:
    return subprocess.run(
        ["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def main() -> None:
    from tests.support.run_mutations import copy_of_the_tree

    place = ROOT / "build" / "readme"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    copy_of_the_tree(place)
    track_everything(place)
    write_inputs(place)
    # As with `source .venv/bin/activate`, and without the hub.
    environment = os.environ | {"PATH": f"{place / '.venv' / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    begun = time.monotonic()
    for page in PAGES:
        for line in [command.line for command in commands() if command.page == page]:
            if line in SKIPPED:
                print(f"# {page}: {line}\n# skipped: {SKIPPED[line]}", flush=True)
            else:
                _run(page, line, ["bash", "-c", line], place, environment)
        if python := "".join(code(page, "python")):
            _run(page, "its Python code", ["python", "-W", "ignore", "-c", python], place, environment)
    if left := untracked_or_changed(place):
        sys.exit(f"the commands left what git does not ignore, or changed what it tracks:\n{left}")
    print(f"# all commands of {len(PAGES)} pages ran, in {(time.monotonic() - begun) / 60:.0f} minutes: {place}")


def _run(page: str, what: str, command: list[str], place: Path, environment: dict[str, str]) -> None:
    """Run a command as on a terminal, and say how long nothing was heard of it."""
    print(f"# {page}: {what}", flush=True)
    begun = heard = time.monotonic()
    silent = 0.0
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(command, cwd=place, env=environment, stdout=its_end, stderr=its_end)
    os.close(its_end)
    while True:
        try:
            output = os.read(terminal, 1 << 16)
        except OSError:  # the last one has closed it
            break
        silent, heard = max(silent, time.monotonic() - heard), time.monotonic()
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()
    os.close(terminal)
    if code := process.wait():
        sys.exit(f"{page}: {what}\nended with exit code {code}, in {place}")
    ended = time.monotonic()
    print(f"# {ended - begun:.0f} s, silent for {max(silent, ended - heard):.0f} s at most", flush=True)


if __name__ == "__main__":
    main()
