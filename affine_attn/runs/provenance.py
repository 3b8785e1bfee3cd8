"""Provenance of a result: the commit and the versions of the code, the device, and ``environment.json`` of a run."""

import importlib.metadata
import platform
import subprocess
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments


def commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """Return the commit of the package's repository, with ``-dirty`` if files were changed.

    None unless the folder itself is a repository: one further up would be another project's.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        # No git on this machine, or a folder that it does not trust.
        return None


def device_name(device: "torch.device") -> str:
    """Return a GPU's product name, or the kind of machine that a CPU is in."""
    on_gpu = device.type == "cuda"
    return import_module("torch").cuda.get_device_name(device) if on_gpu else platform.machine()


def provenance() -> dict[str, Any]:
    """Return the versions for an evaluation or an analysis, and this package's commit where it runs from a checkout."""
    packages = ("affine-attn", "torch", "transformers", "lm-eval")
    return {"versions": {package: _installed(package) for package in packages}, "commit": commit()}


def environment(args: "TrainingArguments") -> dict[str, Any]:
    """Return on what a run was made, and by which code. An installed package has its version alone, a checkout its
    commit too."""
    version, checkout = _installed("affine-attn"), commit()
    return {
        **({"affine_attn": version} if version else {}),
        **({"commit": checkout} if checkout else {}),
        **{name: import_module(name).__version__ for name in ("torch", "transformers", "accelerate")},
        "python": platform.python_version(),
        "device": device_name(args.device),
        **({"cuda": import_module("torch").version.cuda} if args.device.type == "cuda" else {}),
        "processes": args.world_size,
        "seed": args.seed,
        "data_seed": args.seed if args.data_seed is None else args.data_seed,
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
