"""Files that are there whole or not at all, their content's hash, and JSON that anybody may have changed."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from affine_attn.errors import UserError


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the name ``path`` once all of it is on the disk.

    Until then, and after an error, ``path`` is what it was before.
    """
    try:
        with errors_naming(path), temporary(path).open("wb") as file:
            yield file
            settle(file, path)
    finally:
        temporary(path).unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with written(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as JSON, whole or not at all, also if the machine loses power."""
    with written(path) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def write_copy(source: Path, path: Path) -> None:
    """Write what a file holds, byte for byte, whole or not at all."""
    with source.open("rb") as given, written(path) as file:
        shutil.copyfileobj(given, file)


def require_writable(folder: Path) -> None:
    """Raise before results are computed that could not be written: beside a shared model this is often so."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"results cannot be written to {folder}: give a folder of your own with --output")


def settle(file: BinaryIO, path: Path) -> None:
    """Give what was written to ``path``.tmp its name, once it is on the disk."""
    file.flush()
    os.fsync(file.fileno())
    temporary(path).replace(path)
    file.close()


def temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of writing, which the system reports without one, as of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sha256(path: Path) -> str:
    """Return the hash of a file's content."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path, *needed: str) -> dict[str, Any]:
    """Return the JSON object in a file. What is no object, or lacks a needed entry, is refused."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not JSON that can be read") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    if missing := [name for name in needed if name not in content]:
        raise UserError(f"{path} is damaged: it has no {missing[0]!r}")
    return content


class JsonLines:
    """A file of JSON objects, one per line and each with its step."""

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        written = self.path.read_bytes() if self.path.exists() else b""
        # A line without an end was cut when its process was killed.
        lines = written[: written.rfind(b"\n") + 1].splitlines()
        return [self._row(number, line) for number, line in enumerate(lines, start=1)]

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"{self.path}, line {number}, is damaged: remove it") from error
        return row

    def cut(self, step: int) -> None:
        """Drop what is later than the checkpoint of this step, which is about to be done again. At step 0 there is no
        checkpoint, and nothing stays."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [json.dumps(row) + "\n" for row in self.rows() if 0 < step >= row["step"]]
        write_text(self.path, "".join(kept))

    def append(self, row: dict[str, Any]) -> None:
        with errors_naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
