"""Tasks of lm-evaluation-harness by name, with the hub's data or with local files in its place.

A local file changes where documents come from and nothing else: the task file that is written for it includes the
harness's own, with its prompts, metrics and few-shot settings.
"""

import difflib
import hashlib
import io
import json
import logging
import lzma
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from affine_attn.errors import MissingPackage, UserError, first_line

try:
    import datasets
    import lm_eval.tasks
    import pyarrow
    import pyarrow.parquet
except ModuleNotFoundError as error:
    raise MissingPackage("tasks need lm-evaluation-harness: pip install 'affine-attn[eval]'") from error
from jinja2 import UndefinedError
from lm_eval.api.task import ConfigurableTask

from affine_attn.data.corpus import decompressed, parse_line
from affine_attn.runs.files import sha256, write_text

_SUFFIXES = (".jsonl", ".json", ".parquet")
_COMPRESSED = ("", ".xz", ".gz", ".bz2", ".zst")
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_ROOT = Path(lm_eval.tasks.__file__).parent
_NAME = re.compile(rb"""^["']?task["']?:[ \t]*["']?([^\s"'#]+)["']?[ \t]*$""", re.MULTILINE)


@dataclass(frozen=True)
class LocalData:
    """Places of local files: folders that are searched by the name of a task, and files for single tasks."""

    folders: tuple[Path, ...] = ()
    files: dict[str, Path] = field(default_factory=dict)

    @staticmethod
    def parse(given: Iterable[str]) -> "LocalData":
        """Read arguments of the form DIR and TASK=FILE."""
        folders, files = [], {}
        for text in given:
            task, sign, file = text.partition("=")
            path = Path(file if sign else text)
            if not (path.is_file() if sign else path.is_dir()):
                raise UserError(f"--data {text}: there is no {'file' if sign else 'folder'} {path}")
            if sign:
                files[task] = path.resolve()
            else:
                folders.append(path.resolve())
        return LocalData(tuple(folders), files)

    def __bool__(self) -> bool:
        return bool(self.folders or self.files)

    def splits(self, name: str, config: dict[str, Any]) -> dict[str, Path]:
        """The file of every split of a task that there is; the one it is evaluated on must be there. None where files
        of other tasks alone are given: its documents come from the hub."""
        if not self.folders and name not in self.files:
            return {}
        evaluated = config.get("test_split") or config.get("validation_split")
        if evaluated is None:
            raise UserError(f"{name} is a program of the harness: its documents come from the hub, not from --data")
        wanted = {config[key] for key in _SPLITS if config.get(key)}
        found = {split: file for split in wanted if (file := self._find(name, split, config)) is not None}
        if name in self.files:
            found[evaluated] = self.files[name]
        if evaluated not in found:
            where = ", ".join(str(folder / name / f"{evaluated}.jsonl") for folder in self.folders)
            raise UserError(
                f"{name} is evaluated on its {evaluated} split, and there is no file with it: "
                f"{f'put it at {where}, or ' if where else ''}give --data {name}=FILE"
            )
        return found

    def _find(self, name: str, split: str, config: dict[str, Any]) -> Path | None:
        # Folders may carry the name of the task, of the dataset's configuration or of the dataset.
        names = [name, config.get("dataset_name"), str(config.get("dataset_path")).split("/")[-1]]
        candidates = (
            folder / place / f"{split}{suffix}{compressed}"
            for folder in self.folders
            for place in names
            if place
            for suffix in _SUFFIXES
            for compressed in _COMPRESSED
        )
        return next((path for path in candidates if path.is_file()), None)


@dataclass(frozen=True)
class Task:
    """A task of the harness, ready to be loaded."""

    name: str
    source: Path
    # Split to file; none: the hub.
    files: dict[str, Path]
    config: dict[str, Any]

    @cached_property
    def digests(self) -> dict[str, str]:
        """Hashes of the files, by split."""
        return {split: sha256(file) for split, file in sorted(self.files.items())}

    def identity(self) -> dict[str, Any]:
        """What decides the documents and how they are asked and scored."""
        return {"task": self.name, "data": self.digests or "hub", "lm_eval": harness_version()}

    def load(self) -> ConfigurableTask:
        with quiet("lm_eval.api.task"):
            try:
                return self._load_local() if self.files else _load(self.source.parent, self.name)
            except UserError:
                raise
            except ModuleNotFoundError as error:
                raise MissingPackage(f"{self.name} needs {error.name}: pip install {error.name}") from error
            except OSError as error:
                lacks, mend = "no data from the hub", "; give local files with --data"
                if self.files:
                    lacks, mend = "it needs more than documents, which is not to be had from the hub", ""
                raise UserError(f"{self.name}: {lacks} ({first_line(error)}){mend}") from error

    def _load_local(self) -> ConfigurableTask:
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder) / f"{self.name}.yaml", self.local_yaml())
            try:
                return _load(Path(folder), self.name)
            except UserError:
                raise
            except (KeyError, SyntaxError, UndefinedError, ValueError) as error:
                files, wanted = ", ".join(map(str, self.files.values())), self.config.get("dataset_path")
                raise UserError(
                    f"{self.name} cannot be made of {files} ({error}); its fields must be those of {wanted}"
                ) from error

    def local_yaml(self) -> str:
        """The harness's task file with another origin of documents. Values are JSON, which is YAML."""
        files = {split: (str(file), self.digests[split]) for split, file in self.files.items()}
        changed = {
            "include": str(self.source),
            "tag": [],
            "dataset_kwargs": {"task": self.name, "files": files},
        }
        # Splits that are not there would be opened for few-shot examples even where none are used.
        absent = [key for key in _SPLITS if self.config.get(key) and self.config[key] not in self.files]
        if absent and self.config.get("num_fewshot"):
            shots = self.config.get("fewshot_split") or self.config.get("training_split")
            if shots and shots not in self.files:
                raise UserError(
                    f"{self.name} takes few-shot examples from its {shots} split, and there is no file with it"
                )
        lines = [f"{key}: {json.dumps(value)}" for key, value in (changed | dict.fromkeys(absent)).items()]
        return "\n".join([*lines, f"custom_dataset: !function {__name__}.local_dataset", ""])


def find_tasks(names: Iterable[str], data: LocalData) -> list[Task]:
    """The harness's task files, found by their text: reading them all as YAML would take half a minute."""
    names = list(names)
    # Files whose path resembles a name first, so that the usual ones are found at once.
    stems = [name.split("_")[0] for name in names]
    paths = sorted(_ROOT.rglob("*.yaml"), key=lambda path: not any(stem in str(path) for stem in stems))
    known: dict[str, Path] = {}
    for path in paths:
        if match := _NAME.search(path.read_bytes()):
            known.setdefault(match[1].decode(), path)
        if all(name in known for name in names):
            break
    return [_task(name, known, data) for name in names]


def _task(name: str, known: dict[str, Path], data: LocalData) -> Task:
    if name not in known:
        members = sorted(task for task in known if task.startswith(f"{name}_"))
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "lm_eval ls tasks lists them"
        if members:
            hint = f"give the tasks of a group by their names, such as {' '.join(members[:3])}"
        raise UserError(f"lm-evaluation-harness has no task {name!r}; {hint}")
    with quiet("lm_eval.tasks"):
        manager = lm_eval.tasks.TaskManager(include_path=str(known[name].parent), include_defaults=False)
    config = manager.task_index[name].cfg or {}
    files = data.splits(name, config) if data else {}
    return Task(name, known[name], files, config)


# click would take an EOFError for Ctrl-D.
_DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error, ValueError, RecursionError, pyarrow.ArrowException)


def local_dataset(task: str, files: dict[str, tuple[str, str]], **_: Any) -> dict[str, datasets.Dataset]:
    """What the harness calls for documents, with the task's metadata beside ``dataset_kwargs``.

    files: by split, the path and the hash that the result will name.
    """
    loaded = {}
    for split, (name, digest) in files.items():
        file = Path(name)
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise UserError(f"{file} was changed while the task was evaluated: run the command again")
        try:
            documents = _documents(file, content)
        except UserError:
            raise
        except _DAMAGED as error:
            raise UserError(f"{file} is damaged, or not JSON lines or parquet") from error
        # The harness takes BoolQ from SuperGLUE, where the answer is called label and is a number.
        if task == "boolq" and "label" not in documents.column_names and "answer" in documents.column_names:
            documents = documents.add_column("label", [int(answer) for answer in documents["answer"]])  # pyright: ignore[reportCallIssue]
        loaded[split] = documents
    return loaded


def _documents(file: Path, content: bytes) -> datasets.Dataset:
    """Documents of a file that was read: the loaders of datasets take a path for a pattern, and keep a cache."""
    text = decompressed(file, io.BytesIO(content)).read()
    if ".parquet" in file.suffixes:
        return datasets.Dataset(pyarrow.parquet.read_table(pyarrow.BufferReader(text)))
    if text.lstrip().startswith(b"["):
        records = json.loads(text)
    else:
        lines = enumerate(text.splitlines(), start=1)
        records = [parse_line(line, f"{file}, line {number},") for number, line in lines if line.strip()]
    if not records:
        raise UserError(f"{file} has no documents")
    fields = dict.fromkeys(name for record in records for name in record)
    return datasets.Dataset.from_dict({name: [record.get(name) for record in records] for name in fields})


def harness_version() -> str:
    return lm_eval.__version__


def _load(folder: Path, name: str) -> ConfigurableTask:
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    task: Any = manager.load([name])["tasks"][name]
    return task


@contextmanager
def quiet(logger: str) -> Iterator[None]:
    """Silence the harness's advice on settings its own task files leave open and on models that are handed over."""
    chosen = logging.getLogger(logger)
    before = chosen.level
    chosen.setLevel(logging.ERROR)
    try:
        yield
    finally:
        chosen.setLevel(before)
