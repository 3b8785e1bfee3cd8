"""``python -m tests.clients.page`` writes docs/clients.md: each client and its lines of glue, from the tests here.

A test whose docstring is "client: what is checked" is a row. Its glue are the lines that end in ``# glue``, in the test
and in what it names of its file.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "clients.md"
# What does not work as it is, and why.
WALLS = {
    "`trl sft` and trl's other commands": "they take no callbacks, so alpha's moving average stays as it is: "
    "run the trainer in Python",
    "`accelerate launch --cpu --num_processes 2`": "starts one process where there is no MPI, for any model: "
    "`accelerate launch --multi_gpu --num_processes 2` with `Accelerator(cpu=True)`, or torchrun, starts two",
}


def versions() -> str:
    """Those of the clients, as they are installed."""
    pinned = dict(
        line.split("==")
        for name in ("constraints.txt", "tests/clients/requirements.txt")
        for line in (ROOT / name).read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    shown = ("transformers", "trl", "peft", "lightning", "accelerate", "torchao", "bitsandbytes", "lm_eval")
    return ", ".join(f"{name} {pinned[name]}" for name in shown)


def rows() -> Iterator[tuple[str, list[str], str]]:
    """Client, glue, what is checked."""
    for file in sorted(HERE.glob("test_*.py")):
        source = file.read_text()
        named = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                named[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                named[node.targets[0].id] = node
        for name, node in named.items():
            if name.startswith("test_") and (said := ast.get_docstring(node)):
                client, checked = said.split(": ", 1)
                used = [node, *(named[n.id] for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in named)]
                lines = "\n".join(ast.get_source_segment(source, part) or "" for part in used).splitlines()
                glue = [f"`{line.split('#')[0].strip().rstrip(',')}`" for line in lines if line.endswith("# glue")]
                yield client, list(dict.fromkeys(glue)), checked.rstrip(".")


def page() -> str:
    lines = [
        "# Which clients run",
        "",
        "Programs of others on a small affine model, as they are, and the lines that it takes besides. Attention",
        "without alpha needs neither `TrackAlpha` nor `track_alpha`. To load a folder, `import affine_attn.models` and",
        "`trust_remote_code=True` do the same. [Models of transformers](hf-models.md) have a page of their own.",
        "",
        f"Written by `make test-clients`: {versions()}.",
        "",
        "| client | lines of glue | what is checked |",
        "|---|---|---|",
        *(
            f"| {client} | {'<br>'.join(f'`{g}`' for g in glue) or 'none'} | {checked} |"
            for client, glue, checked in rows()
        ),
        "",
        "What does not work as it is:",
        "",
        *(f"- {client}: {why}." for client, why in WALLS.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
