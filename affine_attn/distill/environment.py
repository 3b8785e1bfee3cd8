"""``environment.json``: on what a run was made, and by which code; ``data_sha256`` tells its shards from others."""

import importlib.metadata
import platform
from typing import Any

import accelerate
import torch
import transformers
from transformers import TrainingArguments

from affine_attn.runs.provenance import commit

ENVIRONMENT = "environment.json"


def environment(args: TrainingArguments) -> dict[str, Any]:
    """An installed package has its version alone, a checkout its commit too."""
    cuda = args.device.type == "cuda"
    code = {"affine_attn": importlib.metadata.version("affine-attn")} if _installed() else {}
    checkout = commit()
    return {
        **code,
        **({"commit": checkout} if checkout else {}),
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
