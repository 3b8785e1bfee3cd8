"""The public names need torch alone and load when they are used, and imports inside the package point one way."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import affine_attn

PACKAGE = Path(affine_attn.__file__).parent
HEAVY = ("triton", "transformers", "matplotlib", "plotly", "pandas", "datasets", "lm_eval", "typer")

# Rooms from the bottom up: a room may import those in the rows above its own, and itself. A new room gets a place here.
ROOMS = [
    {"__version__", "checks", "errors"},
    {"runs", "core", "figures"},
    {"kernels"},
    {"engines"},
    {"api"},
    {"nn"},
    {"bench", "data"},
    {"models"},
    {"distill"},
    {"evaluate"},
    {"analyze"},
    {"report", "plot"},
    {"demo"},
    {"cli"},
]
# Old names of modules that users import: they point at the new ones, with a warning, for one release.
MOVED = {
    "core.accuracy": "bench.accuracy",
    "distill.shards": "data.shards",
    "distill.sampler": "data.sampler",
    "models.statistics": "models.collect",
}
RANK = {room: rank for rank, row in enumerate(ROOMS) for room in row}


def _room(module: str) -> str:
    """Return the first part of a module's name, which is given without affine_attn."""
    return module.split(".")[0]


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
    own = _room(MOVED.get(module, module))
    assert own in RANK, f"{own} has no place in the table of rooms"
    for imported in _imports(_modules()[module]):
        target = _room(imported)
        assert target in RANK, f"{module} imports {imported}, which has no place in the table of rooms"
        assert target == own or RANK[target] < RANK[own], f"{module} imports {imported}, which stands above it"


def test_the_table_would_catch_an_upward_import(tmp_path):
    file = tmp_path / "spec.py"
    file.write_text("def f():\n    from affine_attn.api import attention\n")
    (imported,) = _imports(file)
    assert RANK[_room(imported)] > RANK["core"]


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_old_names_of_moved_modules_warn_and_have_everything(old, new):
    with pytest.warns(FutureWarning, match=f"affine_attn.{old} is affine_attn.{new} now"):
        moved = importlib.reload(importlib.import_module(f"affine_attn.{old}"))
    there = vars(importlib.import_module(f"affine_attn.{new}"))
    assert all(vars(moved)[name] is value for name, value in there.items() if not name.startswith("_"))
    assert f"| `affine_attn.{old}` | `affine_attn.{new}` |" in (PACKAGE.parent / "CHANGELOG.md").read_text()


def test_core_needs_torch_alone():
    """Not even the package's other rooms; a kernel or an engine there would be a step in the wrong direction."""
    core = [name for name in _modules() if name.startswith("core.") and name not in MOVED]
    for name in core:
        assert {_room(imported) for imported in _imports(_modules()[name])} <= {"core", "checks", "errors"}, name
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in HEAVY)
    program = (
        f"{blocked}\nimport {', '.join(f'affine_attn.{name}' for name in core)}\nfor x in {HEAVY}: del sys.modules[x]"
    )
    assert _loaded(program) == ["torch"]


DEVICE_FILES = {
    name: path
    for name, path in _modules().items()
    if re.fullmatch(r"kernels\.\w+\.(\w*kernels?|scores|pipeline)", name)
}


@pytest.mark.parametrize("module", DEVICE_FILES)
def test_device_files_have_compiled_functions_and_constants_alone(module):
    for node in ast.parse(DEVICE_FILES[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            assert any("jit" in ast.unparse(decorator) for decorator in node.decorator_list), node.name
        elif not isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant), ast.unparse(node)  # noqa: PT018


def test_remote_code_is_put_together_from_modules_that_need_only_each_other():
    pytest.importorskip("transformers")
    from affine_attn.models import remote_code

    modules = {m.__name__.removeprefix("affine_attn.") for m in remote_code.MODULES}
    for name in modules:
        for imported in _imports(_modules()[name]):
            own = imported in modules or imported.rpartition(".")[0] in modules
            stood_in = imported in ("api.attention", "models.folder.write_beside")
            assert own or stood_in, f"{name} imports {imported}, which remote code has not"


def _loaded(program: str) -> list[str]:
    """Which of the heavy modules a program has loaded, torch among them."""
    report = f"import sys\n{program}\nprint(*sorted({ ({*HEAVY, 'torch'})!r} & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True).stdout.split()


def test_files_of_a_run_are_read_without_torch():
    """places.py alone knows errors of libraries: those of the hub and of safetensors."""
    runs = [f"affine_attn.{name}" for name in _modules() if name.startswith("runs.") and name != "runs.places"]
    assert _loaded(f"import {', '.join(runs)}") == []


def test_titles_of_metrics_and_colours_have_one_place():
    """Names of formulas, as of alpha, are no titles; the page's own colours are in its style sheet."""
    from affine_attn.figures.style import METRICS

    modules = {name: path.read_text(encoding="utf-8") for name, path in _modules().items() if name != "figures.style"}
    titles = "|".join(re.escape(title) for title in METRICS.values() if " " in title)
    written = re.compile(rf"[\"'](?:#[0-9a-fA-F]{{6}}|{titles})[\"']")
    assert written.search('axis.set_ylabel("mean α", color="red")')
    assert written.search("color='#222222'")
    assert {name: found for name, source in modules.items() if (found := written.findall(source))} == {}


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
