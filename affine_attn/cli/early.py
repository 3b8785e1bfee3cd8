"""What can be refused before torch and transformers are loaded, which takes seconds."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from affine_attn.checks import nearest
from affine_attn.cli.options import FIELDS, RECIPES
from affine_attn.errors import UserError
from affine_attn.runs.layout import model_and_run
from affine_attn.runs.places import require_place


def require_model(model: str) -> None:
    """The folder of a model, not that of a run, or what may be a hub id."""
    require_place(model)


def require_models(*models: str) -> None:
    """Folders of models or of runs, or what may be a hub id."""
    for model in models:
        require_place(model_and_run(model)[0] if Path(model).exists() else model)


def require_files(files: Iterable[Path]) -> None:
    """Files or folders to read."""
    for file in files:
        if not file.exists():
            raise UserError(f"there is no file or folder {file}")


def require_recipe(name: str, assignments: Sequence[str]) -> None:
    """A known name or a file, and names of fields; values are read later."""
    if Path(name).suffix in (".toml", ".json"):
        require_files([Path(name)])
    elif name not in RECIPES and (hint := nearest(name, RECIPES)):
        raise UserError(f"there is no recipe {name!r}{hint}")
    for assignment in assignments:
        field, equals, _ = assignment.partition("=")
        if equals and field not in FIELDS and (hint := nearest(field, FIELDS)):
            raise UserError(f"a recipe has no field {field!r}{hint}")
