"""Folders that load without this package: ``from_pretrained(folder, trust_remote_code=True)``.

Where other folders have a file that imports the package, these have its code, put together from the package's own
sources, the dense reference in place of the engines. So there is no second implementation to keep in step.
"""

import ast
import inspect
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedModel

from affine_attn import checks, errors
from affine_attn.core import blocks, call, masks, nonfinite, reference, spec, stages, variants
from affine_attn.errors import UserError
from affine_attn.models import attn_implementation, callback, configuration, modeling, streaming, tensor_parallel
from affine_attn.models import masks as prepared_masks
from affine_attn.models.configuration import MODULE
from affine_attn.models.folder import CARD, model_card
from affine_attn.nn import alpha, layer, rope
from affine_attn.runs.files import write_text

_BEFORE_ATTENTION = (checks, errors, spec, rope, masks, variants, call, stages, blocks, nonfinite, reference)
_AFTER_ATTENTION = (
    *(alpha, layer, prepared_masks, attn_implementation),
    *(configuration, tensor_parallel, streaming, modeling, callback),
)
# The rule for these modules: they import only each other and what is below in another form, and no two define the same
# name.
MODULES = (*_BEFORE_ATTENTION, *_AFTER_ATTENTION)
# api.py without the engines.
_ATTENTION = '''
def attention(*arguments, impl: str = "reference", **named) -> Tensor:
    """The dense reference; the package affine-attn runs the same on fast kernels."""
    return run(checked_call(*arguments, **named))
'''
# folder.py where the package is not.
_WRITE_BESIDE = '''
def write_beside(config: Any, folder: Path) -> None:
    """Hand this file on."""
    (folder / f"{MODULE}.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
'''


def save_with_code(model: PreTrainedModel, folder: str | Path) -> None:
    """``save_pretrained`` plus the code that ``trust_remote_code=True`` runs; without that flag nothing of it is."""
    folder = Path(folder)
    model.save_pretrained(folder)
    write_text(folder / f"{MODULE}.py", modeling_source())
    write_text(folder / CARD, model_card(model.config, folder.name, own_code=True))


def modeling_source() -> str:
    """One module that needs torch and transformers alone."""
    imports: list[str] = []
    bodies: list[str] = []
    names: dict[str, str] = {}
    for module in _BEFORE_ATTENTION:
        _take(module, imports, bodies, names)
    bodies += [_ATTENTION, _WRITE_BESIDE]
    for module in _AFTER_ATTENTION:
        _take(module, imports, bodies, names)
    # A name of its own, so that this code and the package can be loaded side by side.
    name = f'NAME = "{attn_implementation.NAME}"'
    (body,) = (body for body in bodies if name in body)
    bodies[bodies.index(body)] = body.replace(name, f'NAME = "{attn_implementation.NAME}_code"')
    head = '"""Written by affine-attn from its own sources; Apache-2.0."""\n\n'
    return head + "\n".join(dict.fromkeys(imports)) + "\n\n" + "\n".join(bodies)


def _take(module: ModuleType, imports: list[str], bodies: list[str], names: dict[str, str]) -> None:
    """Split a module into imports from elsewhere and the rest; names must not meet, all end up in one module."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    drop: set[int] = set()
    for index, node in enumerate(ast.parse(source).body):
        docstring = index == 0 and isinstance(node, ast.Expr)
        if isinstance(node, ast.Import | ast.ImportFrom):
            text = ast.unparse(node)
            if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("affine_attn")):
                imports.append(text)
                for alias in node.names:
                    _claim(alias.asname or alias.name, text, names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            _claim(node.name, module.__name__, names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                _claim(ast.unparse(target), module.__name__, names)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            drop.update(range(node.lineno - 1, node.end_lineno or node.lineno))
    bodies.append("\n".join(line for number, line in enumerate(lines) if number not in drop).strip() + "\n\n")


def _claim(name: str, owner: str, names: dict[str, str]) -> None:
    """The same name imported twice is one thing only where both lines import it from one place."""
    place = owner.split(" import ")[0]
    if names.setdefault(name, place) != place:
        raise UserError(f"{name} is a name of both {names[name]} and {place}; one of them must be renamed")
