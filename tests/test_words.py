"""Docstrings are sentences, and public ideas have the field's words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = [path for room in ("affine_attn", "benchmarks", "experiments", "docs") for path in (ROOT / room).rglob("*.py")]
TESTS = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
# The log keeps the words of its time.
PAGES = [path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if "log" not in path.parts]

# A docstring says what something is or does, so it does not begin in the middle of a sentence.
DANGLING = """
    Above After Also Among As At Before Behind Below Beside Between Beyond By During Else For From If In Inside Into
    Like Not Of On Onto Out Over Per Since Than Through To Towards Under Until Up Upon When Where Whether With Within
    Without
"""
# Private words for what the field has names for.
PRIVATE = {
    r"numbers? per row|numbers of (the )?rows": "row statistics",
    r"kernel for the rows": "the preprocess kernel",
    r"copy engine": "TMA",
    r"of our own\b": "the sm90 kernel, this package's",
    r"gates? by channel": "elementwise gate",
    r"quarantine": "non-finite handling",
    r"\blook_on\b": "check_devices",
    r"_multiprocessors?\b|\bmultiprocessors?\b(?! \(SM)": "SM",
}
# Words that mean something else elsewhere.
ON_GPUS = {
    r"\bproducts\b": "matmuls, MMAs",
    r"\bat_once\b": "what the function does",
    r"\bslots of (a|the) ring|\bring of slots": "pipeline stages",
    r"\bbytes under way": "bytes in flight",
    r"\bgroups? of( four)? warps": "warpgroup",
}
GPU_ROOMS = (
    "affine_attn/kernels/",
    "affine_attn/engines/",
    "tests/kernels/",
    "docs/kernels.md",
    "docs/adding-a-kernel.md",
)


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "name", "module"), ast.get_docstring(node) or "A docstring."


def _dangles(docstring: str) -> bool:
    return docstring.split()[0].strip(",.:") in DANGLING.split()


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_are_sentences(path):
    assert not [f"{name}: {text}" for name, text in _docstrings(path) if _dangles(text)]


def test_a_docstring_that_begins_in_the_middle_of_a_sentence_is_found(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('def f():\n    """By the copy engine."""\n\ndef g():\n    """Bytes that TMA can load."""\n')
    assert [name for name, text in _docstrings(file) if _dangles(text)] == ["f"]


def _private(path: str, text: str) -> list[str]:
    words = PRIVATE | (ON_GPUS if path.startswith(GPU_ROOMS) else {})
    found = ((re.search(word, text, re.IGNORECASE), instead) for word, instead in words.items())
    return [f"{word[0]!r}: write {instead}" for word, instead in found if word]


@pytest.mark.parametrize("path", [*CODE, *TESTS, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_public_ideas_have_the_words_of_the_field(path):
    assert not _private(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def test_private_words_are_found():
    assert _private("docs/kernels.md", "two products, by the copy engine") == [
        "'copy engine': write TMA",
        "'products': write matmuls, MMAs",
    ]
    assert not _private("docs/equations.md", "two products")
