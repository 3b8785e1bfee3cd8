"""A user's own variants, logits, activations and gates, imported for a command: ``--import``, and entry points."""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from affine_attn.cli.terminal import one_line_errors
from affine_attn.errors import UserError, first_line

# What a package names its module of definitions under, so that every command knows them.
ENTRY_POINTS = "affine_attn.variants"


def import_all(context: typer.Context, places: list[str] | None) -> list[str] | None:
    """Import files and modules, before anything else of the command is read."""
    if places and not context.resilient_parsing:  # not while a shell completes
        with one_line_errors():
            for place in places:
                import_definitions(place)
    return places


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE|MODULE",
        help="import your own variants, logits, activations and gates first; may be repeated",
        callback=import_all,
        is_eager=True,
        expose_value=False,
    ),
]


def import_definitions(place: str) -> ModuleType:
    """A Python file under its own name, or a module as ``import`` finds it, in the current folder too."""
    file = Path(place)
    try:
        if file.suffix == ".py":
            return _import_file(file)
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    except UserError:
        raise
    except Exception as error:  # whatever the code of a user raises
        raise UserError(f"--import {place}: {type(error).__name__}: {first_line(error)}") from error


def import_entry_points() -> None:
    """Import what installed packages define."""
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:
            raise UserError(
                f"{entry.value}, which an installed package names under {ENTRY_POINTS}, cannot be imported: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error


def _import_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UserError(f"--import {file}: there is no such file")
    known = sys.modules.get(file.stem)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "").resolve() == file.resolve():
            return known
        raise UserError(f"--import {file}: a module {file.stem} is there already: give the file another name")
    spec: Any = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses look up the module they are in.
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[file.stem]
        raise
    return module
