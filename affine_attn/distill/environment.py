"""``environment.json``: on what a run was made, and by which code."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from transformers import TrainingArguments

ENVIRONMENT = "environment.json"


def environment(args: TrainingArguments) -> dict[str, Any]:
    """``commit`` is that of the package's repository, with ``-dirty`` if files were changed; an installed package has
    its version alone."""
    cuda = args.device.type == "cuda"
    code = {"affine_attn": importlib.metadata.version("affine-attn")} if _installed() else {}
    commit = _commit(Path(__file__).parents[2])
    return {
        **code,
        **({"commit": commit} if commit else {}),
        **{module.__name__: module.__version__ for module in (torch, transformers, accelerate)},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(args.device) if cuda else platform.machine(),
        **({"cuda": torch.version.cuda} if cuda else {}),
        "processes": args.world_size,
        "seed": args.seed,
        "data_seed": args.seed if args.data_seed is None else args.data_seed,
    }


def _installed() -> bool:
    return any(found.name == "affine-attn" for found in importlib.metadata.distributions())


def _commit(root: Path) -> str | None:
    """None unless the folder itself is a repository: one further up would be another project's."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        # No git on this machine, or a folder that it does not trust.
        return None
