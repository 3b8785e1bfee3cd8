"""A model, its configuration and its tokenizer from a folder or the hub, or what is wrong there in a sentence."""

import hashlib
from functools import cached_property
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

from affine_attn.checks import is_count
from affine_attn.errors import UserError, first_line
from affine_attn.models.configuration import AffineAttnConfig
from affine_attn.runs.files import read_object, sha256
from affine_attn.runs.layout import model_and_run
from affine_attn.runs.places import named_place, require_place
from affine_attn.runs.provenance import device_name

DTYPES = ("float32", "bfloat16", "float16")
# Files of a model folder that decide what it computes.
_DECISIVE = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")


class ModelHandle:
    """A model that is evaluated or analysed; loaded when something has to be computed with it."""

    def __init__(self, path: str, device: str | None = None, dtype: str | None = None):
        require_place(path)
        if dtype not in (None, *DTYPES):
            raise UserError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        self.path = path
        self.device = usable_device(device)
        # A CPU computes bfloat16 many times slower than float32, and no better.
        self.dtype = dtype or ("auto" if self.device.type == "cuda" else "float32")

    @cached_property
    def config(self) -> PreTrainedConfig:
        return read_config(self.path)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        found = tokenizer_of(self.path)
        if found is None:
            raise UserError(f"{self.path} has no tokenizer")
        return found

    @cached_property
    def model(self) -> PreTrainedModel:
        network: Any = load(self.path, dtype=self.dtype)
        return network.to(self.device).eval()

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """That of the run which made the model; empty where it lies in none."""
        run = model_and_run(self.path)[1]
        return read_object(run.recipe) if run is not None and run.recipe.exists() else {}

    @property
    def training_length(self) -> int | None:
        """Tokens of its training sequences, where its run or the formula of its attention says so."""
        if is_count(length := self.recipe.get("sequence_length"), 1):
            return length
        if not isinstance(self.config, AffineAttnConfig):
            return None
        specs = map(self.config.spec, range(self.config.num_hidden_layers))
        lengths = [getattr(part, "length", None) for spec in specs for part in (spec.logit, spec.affine)]
        return max((length for length in lengths if isinstance(length, int) and is_count(length, 1)), default=None)

    def trained_on(self, length: int, apart: bool) -> bool:
        """Was it trained on sequences of shards that have this length, with documents kept apart or not?"""
        return (self.recipe.get("sequence_length"), self.recipe.get("documents")) == (length, apart)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the weights, the configuration and the tokenizer, not with the place."""
        folder = Path(self.path)
        if not folder.is_dir():
            return f"{self.path}@{self.config._commit_hash}"
        total = hashlib.sha256()
        for file in sorted(path for path in folder.iterdir() if path.suffix in _DECISIVE):
            total.update(f"{file.name} {sha256(file)}\n".encode())
        return total.hexdigest()

    def can_be_compared(self, fingerprint: str) -> bool:
        """True where the model's own fingerprint is of the same kind: of a hub id, or of files with the weights."""
        folder, of_hub = Path(self.path), "@" in fingerprint
        if not folder.is_dir():
            return of_hub
        return not of_hub and any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir())

    @property
    def identity(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint, "dtype": self.dtype}

    def about(self) -> dict[str, Any]:
        """Describe the model and where it ran, for a result that was computed with it."""
        return {
            "path": self.path,
            **self.identity,
            "model_type": self.config.model_type,
            "attention": self.config.to_dict().get("attention"),
            "parameters": self.model.num_parameters(),
            "device": device_name(self.device),
        }


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
