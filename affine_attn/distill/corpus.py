"""Where text comes from: files, a dataset of the hub, or the standard library of this Python."""

import bz2
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
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from affine_attn.errors import MissingPackage, UserError

JSON_LINES = (".jsonl", ".ndjson", ".json")
PLAIN_TEXT = (".txt", ".text", ".md", ".rst", ".py")
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order.

    ``read(skip)`` gives, from document number ``skip`` on, each text with the bytes of the source read so far. Empty
    texts are documents too, so that a number means the same in every run.
    """

    name: str
    read: Callable[[int], Iterator[tuple[str, int]]]
    # None where it is not known beforehand.
    bytes: int | None = None
    # Of the whole text, for a source whose name and size do not tell its content.
    sha256: str | None = None

    @property
    def identity(self) -> dict[str, str | int | None]:
        """What must be the same for two sources to count as one."""
        return {"name": self.name, "bytes": self.bytes, "sha256": self.sha256}


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
    return Source(path.as_posix(), read, path.stat().st_size)


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
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


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """Lines with the (compressed) bytes read so far."""
    with path.open("rb") as raw:
        try:
            for line in _decompressed(path, raw):
                yield line, raw.tell()
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise UserError(f"{path} is damaged or cut short: {error}") from error


def _read_text(path: Path, separator: str | None, skip: int) -> Iterator[tuple[str, int]]:
    number, lines, position = 0, [], 0
    wanted = None if separator is None else separator.encode()
    for line, position in _lines(path):
        if line.rstrip(b"\r\n") != wanted:
            lines.append(line)
            continue
        if number >= skip:
            yield _decode(b"".join(lines).strip(b"\r\n"), path), position
        number, lines = number + 1, []
    if number >= skip:
        rest = b"".join(lines)
        yield _decode(rest if wanted is None else rest.strip(b"\r\n"), path), position


def _decode(text: bytes, path: Path) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start} of a document)") from error


def _read_json_lines(path: Path, text_field: str, skip: int) -> Iterator[tuple[str, int]]:
    for number, (line, position) in enumerate(_lines(path)):
        if number < skip:
            continue
        try:
            record = json.loads(line) if line.strip() else {text_field: ""}
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number + 1}, is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number + 1}, is not an object with fields")
        yield _text(record, text_field, f"{path}, line {number + 1},"), position


def _text(record: Mapping[str, object], text_field: str, where: str) -> str:
    if text_field not in record:
        raise UserError(f"{where} has no field {text_field!r}, only {', '.join(map(repr, record))}; give --text-field")
    text = record[text_field]
    if not isinstance(text, str | None):
        raise UserError(f"{where} has a {type(text).__name__} in field {text_field!r}, not text")
    # JSON can spell half of a surrogate pair, which is no text that could be encoded.
    return (text or "").encode("utf-8", "replace").decode("utf-8")


def _read_parquet(path: Path, text_field: str, skip: int) -> Iterator[tuple[str, int]]:
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
                            yield _text({text_field: text}, text_field, f"{path}, row {number},"), size * number // rows
    # Of the file's end at once, of a page within when it is its turn.
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from error


def _read_hub(name: str, text_field: str, skip: int) -> Iterator[tuple[str, int]]:
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
    position = 0
    for number, record in enumerate(stream.skip(skip), start=skip):
        text = _text(record, text_field, f"{name}, row {number + 1},")
        position += len(text)
        yield text, position


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

    def read(skip: int) -> Iterator[tuple[str, int]]:
        position = sum(file.stat().st_size for file in files[:skip])
        for file in files[skip:]:
            content = file.read_bytes()
            position += len(content)
            yield content.decode("utf-8", "replace"), position

    digest = hashlib.sha256()
    size = 0
    for text, size in read(0):  # noqa: B007 (the last one is the size)
        digest.update(hashlib.sha256(text.encode()).digest())
    name = f"standard library of Python {platform.python_version()}, {len(files)} files"
    return Source(name, read, size, digest.hexdigest())
