"""Sources of text: files, a dataset of the hub, or the standard library of this Python."""

import bz2
import codecs
import gzip
import hashlib
import io
import json
import lzma
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from affine_attn.errors import MissingPackage, UserError
from affine_attn.runs.files import sha256

JSON_LINES = (".jsonl", ".ndjson", ".json")
PLAIN_TEXT = (".txt", ".text", ".md", ".rst", ".py")
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")


# Text files are read so many bytes at a time.
BLOCK = 1 << 20


class Part(NamedTuple):
    """A stretch of a document, with the bytes of the source read so far."""

    text: str
    position: int
    ends: bool = True  # the document ends with it


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order.

    ``parts(skip)`` gives the parts of document number ``skip`` and of all after it. Empty texts are documents too, so
    that a number means the same in every run.
    """

    name: str
    parts: Callable[[int], Iterator[Part]]
    # None where it is not known beforehand.
    bytes: int | None = None
    # Makes the hash of the content, where there is one to be had without the network.
    sha256: Callable[[], str] | None = None

    @cached_property
    def identity(self) -> dict[str, str | int | None]:
        """What must be the same for two sources to count as one."""
        return {"name": self.name, "bytes": self.bytes, "sha256": None if self.sha256 is None else self.sha256()}

    def read(self, skip: int) -> Iterator[tuple[str, int]]:
        """Whole documents from number ``skip`` on, each with the bytes of the source read so far."""
        texts = []
        for text, position, ends in self.parts(skip):
            texts.append(text)
            if ends:
                yield "".join(texts), position
                texts = []


def find_sources(
    names: Iterable[str],
    text_field: str = "text",
    separator: str | None = None,
    max_files: int | None = None,
    shards: Path | None = None,
) -> list[Source]:
    """Files, folders (their files, sorted) and hub datasets ``ID[:CONFIG[:SPLIT]]``; if none, the standard library.

    A text file is one document, or with a separator one document between any two lines that hold only that. The folder
    ``shards``, which may lie inside another, is no source.
    """
    found: list[Source] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.is_file() and _format(file) is not None]
            if shards is not None and path.resolve() in shards.resolve().parents:
                files = [file for file in files if not file.resolve().is_relative_to(shards.resolve())]
            if not files:
                raise UserError(f"{name} holds no text, JSON-lines or parquet files")
            found += [_file(file, text_field, separator) for file in files]
        elif path.exists():
            found.append(_file(path, text_field, separator))
        elif path.is_absolute() or name.startswith(".") or _format(path) is not None:
            raise UserError(f"there is no file or folder {name}")
        else:
            found.append(Source(name, partial(_read_hub, name, text_field)))
    return found[:max_files] if found else [standard_library(max_files)]


def _format(path: Path) -> str | None:
    suffixes = [suffix for suffix in map(str.lower, path.suffixes[-2:]) if suffix not in COMPRESSED]
    suffix = suffixes[-1] if suffixes else ""
    kinds = {"json lines": JSON_LINES, "text": PLAIN_TEXT, "parquet": (".parquet",)}
    return next((kind for kind, known in kinds.items() if suffix in known), None)


def _file(path: Path, text_field: str, separator: str | None) -> Source:
    match _format(path):
        case "json lines":
            read = partial(_read_json_lines, path, text_field)
        case "parquet":
            read = partial(_read_parquet, path, text_field)
        case _:  # A file named by hand is text whatever its suffix; one that is not UTF-8 is refused while reading.
            read = partial(_read_text, path, separator)
    found = path.stat()

    def parts(skip: int) -> Iterator[Part]:
        yield from read(skip)
        now = path.stat()
        if (now.st_size, now.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
            raise UserError(f"{path} was changed while it was read")

    return Source(path.as_posix(), parts, found.st_size, partial(sha256, path))


def decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    """What the compressed bytes of a file hold, by its suffix."""
    match path.suffix.lower():
        case ".gz":
            return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        case ".xz":
            return cast(BinaryIO, lzma.LZMAFile(raw))
        case ".bz2":
            return cast(BinaryIO, bz2.BZ2File(raw))
        case ".zst":
            try:
                import pyarrow
            except ModuleNotFoundError as error:
                raise MissingPackage(f"{path} needs pyarrow: pip install 'affine-attn[data]'") from error
            # Buffered for its lines: pyarrow's own stream has none.
            return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, pyarrow.input_stream(raw, compression="zstd"))))
    return raw


def _lines(path: Path, most: int = -1) -> Iterator[tuple[bytes, int]]:
    """Lines with the (compressed) bytes read so far; a line of more than ``most`` bytes comes in several stretches."""
    with path.open("rb") as raw:
        try:
            stream = decompressed(path, raw)
            while line := stream.readline(most):
                yield line, raw.tell()
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise UserError(f"{path} is damaged or cut short: {error}") from error


def _read_text(path: Path, separator: str | None, skip: int) -> Iterator[Part]:
    wanted = None if separator is None else separator.encode()
    number, position, line_begins = 0, 0, True
    document = _Utf8(path, stripped=wanted is not None)
    # A line that is the separator must come in one stretch.
    for line, position in _lines(path, BLOCK + len(wanted or b"")):
        if line_begins and line.rstrip(b"\r\n") == wanted:
            if number >= skip:
                yield Part(document.text(ends=True), position)
            number, document = number + 1, _Utf8(path, stripped=True)
        elif number >= skip:
            document.lines.append(line)
            document.bytes += len(line)
            if document.bytes >= BLOCK:
                yield Part(document.text(), position, ends=False)
        line_begins = line.endswith(b"\n")
    if number >= skip:
        yield Part(document.text(ends=True), position)


class _Utf8:
    """A document's bytes on their way to text; ``stripped``: without the line ends before and after it."""

    def __init__(self, path: Path, stripped: bool):
        self.lines: list[bytes] = []
        self.bytes = 0
        self._path, self._stripped, self._is_empty = path, stripped, True
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._decoded = 0

    def text(self, ends: bool = False) -> str:
        """The text of the lines since the last call."""
        content = b"".join(self.lines)
        self.lines, self.bytes = [], 0
        if self._stripped:
            content = content.lstrip(b"\r\n") if self._is_empty else content
            kept = content.rstrip(b"\r\n")
            self._is_empty = self._is_empty and not kept
            if not ends:
                # Whether they are the last is seen when more has come.
                self.lines.append(content[len(kept) :])
            content = kept
        waiting = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(content, ends)
        except UnicodeDecodeError as error:
            place = self._decoded - waiting + error.start
            raise UserError(f"{self._path} is not UTF-8 text ({error.reason} at byte {place} of a document)") from error
        self._decoded += len(content)
        return text


def _read_json_lines(path: Path, text_field: str, skip: int) -> Iterator[Part]:
    for number, (line, position) in enumerate(_lines(path)):
        if number < skip:
            continue
        record = parse_line(line, f"{path}, line {number + 1},") if line.strip() else {text_field: ""}
        yield Part(_text(record, text_field, f"{path}, line {number + 1},"), position)


def parse_line(line: bytes, where: str) -> dict[str, object]:
    """The object of a line of JSON lines."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where} is not an object with fields")
    return record


def _text(record: Mapping[str, object], text_field: str, where: str) -> str:
    if text_field not in record:
        raise UserError(f"{where} has no field {text_field!r}, only {', '.join(map(repr, record))}; give --text-field")
    text = record[text_field]
    if not isinstance(text, str | None):
        raise UserError(f"{where} has a {type(text).__name__} in field {text_field!r}, not text")
    # JSON can spell half of a surrogate pair, which is no text that could be encoded.
    return (text or "").encode("utf-8", "replace").decode("utf-8")


def _read_parquet(path: Path, text_field: str, skip: int) -> Iterator[Part]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingPackage(f"{path} needs pyarrow: pip install 'affine-attn[data]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if text_field not in (columns := file.schema_arrow.names):
                raise UserError(f"{path} has no field {text_field!r}, only {', '.join(map(repr, columns))}")
            size, rows = path.stat().st_size, file.metadata.num_rows
            number = 0
            for group in range(file.metadata.num_row_groups):
                group_rows = file.metadata.row_group(group).num_rows
                if number + group_rows <= skip:
                    number += group_rows
                    continue
                for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=[text_field]):
                    for text in batch.column(0).to_pylist():
                        number += 1
                        if number > skip:
                            found = _text({text_field: text}, text_field, f"{path}, row {number},")
                            yield Part(found, size * number // rows)
    # Of the file's end at once, of a page within when it is its turn.
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from error


def _read_hub(name: str, text_field: str, skip: int) -> Iterator[Part]:
    try:
        import datasets  # pyright: ignore[reportMissingImports] (an extra)
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{name} is no file here, and a dataset of the hub needs datasets: pip install 'affine-attn[data]'"
        ) from error
    dataset, config, split, *more = [*name.split(":"), "", ""]
    if len(more) > 2:
        raise UserError(f"{name} is neither a file here nor a dataset ID[:CONFIG[:SPLIT]]")
    try:
        stream = datasets.load_dataset(dataset, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:  # what datasets raises for no network, no such dataset, config or split
        raise UserError(f"{name} is no file here and could not be opened on the hub: {error}") from error
    position, rows = 0, iter(enumerate(stream.skip(skip), start=skip))
    while True:
        try:
            number, record = next(rows, (0, None))
        except OSError as error:
            raise UserError(f"{name} could not be read on from the hub: {error}") from error
        if record is None:
            return
        text = _text(record, text_field, f"{name}, row {number + 1},")
        position += len(text)
        yield Part(text, position)


# Tests and teaching programs, and mapping tables: much repetition for little language.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "site-packages", "dist-packages"}


def standard_library(max_files: int | None = None) -> Source:
    """The source files of this Python's standard library, sorted by path: about 10 MB that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Build settings (_sysconfigdata, config-*) differ between machines with the same Python.
    files = [
        file
        for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix())
        if not LEFT_OUT & set(file.relative_to(root).parts)
        and not file.relative_to(root).as_posix().startswith(("_sysconfigdata", "config-"))
    ][:max_files]
    if not files:
        raise UserError(f"the standard library's source files are not in {root}: name files to prepare")

    def parts(skip: int) -> Iterator[Part]:
        position = sum(file.stat().st_size for file in files[:skip])
        for file in files[skip:]:
            content = file.read_bytes()
            position += len(content)
            yield Part(content.decode("utf-8", "replace"), position)

    digest = hashlib.sha256()
    size = 0
    for text, size, _ in parts(0):  # noqa: B007 (the last one is the size)
        digest.update(hashlib.sha256(text.encode()).digest())
    name = f"standard library of Python {platform.python_version()}, {len(files)} files"
    return Source(name, parts, size, digest.hexdigest)
