"""The public names need torch alone and load when they are used, and imports inside the package point one way."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import affine_attn

PACKAGE = Path(affine_attn.__file__).parent
HEAVY = ("triton", "transformers", "matplotlib", "plotly", "pandas", "datasets", "lm_eval", "typer")

# From the bottom up: a file may import from its own layer and from layers earlier in this list. A new file gets a place
# here. In short: spec <- reference, masks, epilogue <- engines <- api <- layer <- models
# <- distill <- evaluate <- analyze <- report <- cli.
LAYERS = [
    {"__version__", "errors", "files", "json_files", "core.spec", "core.rope", "core.kernels", "commit", "measure"},
    {"core.gpu", "core.masks", "core.variants"},
    {"core.call"},
    {"core.stages", "core.blocks", "core.ops"},
    {"core.visible_sums", "core.nonfinite"},
    {"core.reference", "core.stats"},
    {"core.epilogue", "core.fused", "core.hopper", "core.hopper_backward"},
    {"core.engines"},
    {"api"},
    {"core.alpha", "core.layer", "core.accuracy"},
    {"check"},
    {"models"},
    {"distill"},
    {"evaluate"},
    {"analyze"},
    {"report"},
    {"demo"},
    {"cli"},
]
RANK = {prefix: rank for rank, layer in enumerate(LAYERS) for prefix in layer}


def _layer(module: str) -> str | None:
    """The longest prefix of a module (named without affine_attn) that the table knows."""
    parts = module.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in RANK), None)


def _modules() -> dict[str, Path]:
    files = {path.relative_to(PACKAGE).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(part for part in name.parts if part != "__init__"): path for name, path in files.items()}


def _imports(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, also inside functions, named without affine_attn."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide where they point"
            if (node.module or "").split(".")[0] == "affine_attn":
                # The name may be a module itself, as in "from affine_attn.core import reference".
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "affine_attn"}
    return {name.removeprefix("affine_attn").removeprefix(".") for name in found}


@pytest.mark.parametrize("module", [name for name, path in _modules().items() if name and _imports(path)])
def test_imports_point_down(module):
    own = _layer(module)
    assert own is not None, f"{module} has no place in the table of layers"
    for imported in _imports(_modules()[module]):
        target = _layer(imported)
        assert target is not None, f"{module} imports {imported}, which has no place in the table of layers"
        assert RANK[target] <= RANK[own], f"{module} imports {imported}, which stands above it"


def test_the_table_would_catch_an_upward_import(tmp_path):
    file = tmp_path / "spec.py"
    file.write_text("def f():\n    from affine_attn.api import attention\n")
    (imported,) = _imports(file)
    assert RANK[_layer(imported)] > RANK["core.spec"]


def _loaded(program: str) -> list[str]:
    """Which of the heavy modules a program has loaded, torch among them."""
    report = f"import sys\n{program}\nprint(*sorted({ ({*HEAVY, 'torch'})!r} & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True).stdout.split()


def test_importing_the_package_loads_nothing_and_its_names_torch_alone():
    assert _loaded("import affine_attn") == []
    # torch itself may load some of these: a CUDA build brings triton.
    assert _loaded("from affine_attn import *") == _loaded("import torch")


def test_names_load_from_where_type_checkers_see_them():
    for node in ast.walk(ast.parse(Path(affine_attn.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("affine_attn"):
            names = tuple(alias.name for alias in node.names)
            assert affine_attn._MODULES[node.module.removeprefix("affine_attn.")] == names
    assert sorted(affine_attn.__all__) == sorted(name for names in affine_attn._MODULES.values() for name in names)
    assert {*affine_attn.__all__, "__version__"} <= set(dir(affine_attn))
    with pytest.raises(AttributeError, match="no attribute 'softmax_attention'"):
        _ = affine_attn.softmax_attention


def test_every_public_name_exists():
    for name in affine_attn.__all__:
        assert hasattr(affine_attn, name), name
    # Names that users and outside checks import.
    published = "attention attention_stats explain Mask AttentionSpec Affine ScaleInvariant LogN Alibi variant VARIANTS"
    assert set(published.split()) | {"AlphaGate", "AttentionLayer", "track_alpha"} <= set(affine_attn.__all__)


def test_public_names_say_what_they_are():
    import affine_attn.models as models

    for module in (affine_attn, models):
        for name in module.__all__:
            assert getattr(module, name).__doc__, name


@pytest.mark.parametrize("name", ["attention", "AttentionLayer", "AlphaGate"])
def test_every_argument_is_explained(name):
    found = getattr(affine_attn, name)
    words = set(re.findall(r"\w+", found.__doc__))
    assert not set(inspect.signature(found).parameters) - words
