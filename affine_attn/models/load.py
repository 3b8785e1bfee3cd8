"""A model, its configuration and its tokenizer from a folder or the hub, or what is wrong there in a sentence."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from affine_attn.errors import UserError, first_line
from affine_attn.runs.files import read_object
from affine_attn.runs.places import named_place, require_place


def load(path: str | Path, gguf_file: str | None = None, **loading: Any) -> PreTrainedModel:
    """Any causal model of transformers, all of it from the checkpoint: transformers would start what is missing there
    from random numbers. Code that comes with one is never run."""
    more: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    # Refused here: of a model that cannot be made from it, transformers would not say what is wrong.
    read_config(path, **more)
    # Not ignored, but named below: transformers says only that there are some.
    more |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with named_place(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(str(path), trust_remote_code=False, **more, **loading)
    model, info = loaded
    for key, held, wanted in sorted(info["mismatched_keys"]):
        raise UserError(f"{path}: {key} is {list(held)} in the checkpoint and {list(wanted)} by its config")
    for key in sorted(info["missing_keys"]):
        raise UserError(f"{path}: the checkpoint does not hold {key}, which a {type(model).__name__} needs")
    # Others may be of a part that a causal model has no use for.
    for key in sorted(key for key in info["unexpected_keys"] if "layers." in key):
        raise UserError(f"{path}: the checkpoint holds {key}, which a {type(model).__name__} of its config has not")
    return model


def read_config(path: str | Path, **options: Any) -> PreTrainedConfig:
    """The configuration of a model of a known type, with ``options`` for transformers."""
    require_place(path)
    for file in (*Path(path).glob("*config.json"), *Path(path).glob("*.index.json")):
        read_object(file)
    with named_place(path):
        try:
            fields, _ = PreTrainedConfig.get_config_dict(str(path), **options)
            own_code = "auto_map" in fields and fields.get("model_type") not in CONFIG_MAPPING
            config = None if own_code else AutoConfig.from_pretrained(str(path), trust_remote_code=False, **options)
        except (OSError, ImportError, StrictDataclassError):
            raise
        except Exception as error:  # every type of model has checks of its own, or none
            raise UserError(f"the config of {path} is wrong: {first_line(error)}") from error
    if config is None:
        raise UserError(f"{path} brings its own model code, which is not run here; only known model types are loaded")
    return config


def usable_device(name: str | None = None) -> torch.device:
    """The one of that name, by default cuda where there is one; refused before a model is loaded for it."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"--device {name} is none that torch knows; cpu and cuda are usual") from error
    try:
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {device}: torch has no such device to compute on here") from error
    return device


def tokenizer_of(path: str, gguf_file: str | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model; None where a folder has none."""
    folder = Path(path)
    if folder.is_dir() and not gguf_file and not any(folder.glob("tokenizer*")):
        return None
    more = {"gguf_file": gguf_file} if gguf_file else {}
    with named_place(path):
        try:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=False, **more)
        except OSError:
            raise
        except Exception as error:  # every tokenizer has errors of its own for files of another shape
            raise UserError(f"the tokenizer of {path} cannot be read: {first_line(error)}") from error
