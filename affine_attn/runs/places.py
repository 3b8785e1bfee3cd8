"""Places of models, a folder or a hub id, and what is wrong with one in a sentence that names it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from affine_attn.checks import nearest
from affine_attn.errors import MissingPackage, UserError, first_line
from affine_attn.runs.layout import MODEL


def require_place(path: str | Path) -> None:
    """A path that cannot be a hub id (owner/name) must exist, and so must one that is meant to be here: in a folder
    that is, or almost by the name of one. The hub is not asked for it, which takes long without a network. And what is
    wanted is a model, not the run that made it."""
    text, place = str(path), Path(path)
    if not place.exists():
        local = text.startswith((".", "/", "~")) or text.count("/") > 1
        inside = "/" in text and place.parent.is_dir()
        here = [entry.name for entry in place.parent.iterdir() if entry.is_dir()] if place.parent.is_dir() else []
        hint = nearest(place.name, here, cutoff=0.5 if inside else 0.8)
        if local or inside or hint:
            raise UserError(f"there is no folder {path}{hint}")
    inside = Path(path) / MODEL
    if (inside / "config.json").exists() and not (Path(path) / "config.json").exists():
        raise UserError(f"{path} is the folder of a run: its model is {inside}")


@contextmanager
def named_place(path: str | Path) -> Iterator[None]:
    """Raise errors that name the place: what the hub lacks is most often a folder with a slip in its name."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except UserError:
        raise
    except ImportError as error:  # of what a quantised checkpoint needs, say
        raise MissingPackage(f"{path} cannot be loaded: {first_line(error)}") from error
    except SafetensorError as error:
        raise UserError(f"{path} holds a damaged safetensors file: {error}") from error
    except StrictDataclassError as error:
        raise UserError(f"the config of {path} is wrong: {str(error).splitlines()[-1].strip()}") from error
    except OSError as error:
        if Path(path).exists():
            raise UserError(first_line(error)) from error
        raise UserError(f"{path} is no folder here, nor read from the hub: {first_line(error)}") from error
    # What transformers and torch raise for a checkpoint of other sizes, or of such that no model can have.
    except (ValueError, LookupError, RuntimeError, AssertionError, ArithmeticError) as error:
        raise UserError(f"{path} cannot be loaded: {first_line(error)}") from error
