"""``AffineAttnConfig``: a Llama configuration plus the attention of each layer."""

# transformers annotates as strings and class variables what it makes properties of and sets on instances.
# pyright: reportIncompatibleVariableOverride=false, reportAttributeAccessIssue=false

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from affine_attn.core.masks import Mask
from affine_attn.core.spec import AttentionSpec, ScaleInvariant, check_counts
from affine_attn.core.variants import variant
from affine_attn.errors import MissingDefinition, UserError
from affine_attn.models.attn_implementation import NAME
from affine_attn.models.folder import write_beside
from affine_attn.nn.rope import Rope

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# In config.json: the modules that have defined its attention, where that is not of this package.
DEFINED_IN = "attention_defined_in"
# Of the code in a saved folder.
MODULE = "modeling_affine_attn"
OWN_ROPE_TYPES = ("p_rope", "p_rope_top", "nope")


class AffineAttnConfig(LlamaConfig):
    """A Llama-like decoder with any attention of the family.

    attention: a variant's name, an ``AttentionSpec``, its dict, or a list of those, one per layer. Kept as plain JSON.
    window: keys a query sees, itself included; one integer, or one per layer (None: all).
    qkv_bias: biases on q, k and v only (Qwen2); ``attention_bias`` is Llama's, on o_proj too.
    qk_norm: RMSNorm on the heads of q and k (Qwen3).
    rope_parameters: besides the types of transformers, ``{"rope_type": "p_rope" | "p_rope_top" | "nope"}``, with
        ``slowest`` or ``p`` as in ``Rope``.
    """

    model_type = "affine_attn"
    # Which class of that file each Auto class takes, where this package is not imported.
    auto_map = {  # noqa: RUF012 (as in transformers)
        "AutoConfig": f"{MODULE}.AffineAttnConfig",
        "AutoModel": f"{MODULE}.AffineAttnModel",
        "AutoModelForCausalLM": f"{MODULE}.AffineAttnForCausalLM",
        "AutoModelForSequenceClassification": f"{MODULE}.AffineAttnForSequenceClassification",
        "AutoModelForTokenClassification": f"{MODULE}.AffineAttnForTokenClassification",
        "AutoModelForQuestionAnswering": f"{MODULE}.AffineAttnForQuestionAnswering",
    }

    attention: Any = "affine"
    window: int | list[int | None] | None = None
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self, **kwargs):
        # Before Llama's, which divides by some of them.
        self._check_sizes()
        super().__post_init__(**kwargs)
        self.settle_layers()

    def _check_sizes(self) -> None:
        given = {name: size for name in _SIZES if (size := getattr(self, name)) is not None}
        check_counts("AffineAttnConfig", **given)

    def settle_layers(self) -> None:
        """Check the layers, and plan how they are sharded. A model does so again: fields may be set at any time."""
        self._check_sizes()
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise UserError(
                f"AffineAttnConfig: num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.attention_dropout:
            raise UserError(f"AffineAttnConfig: attention_dropout must be 0, got {self.attention_dropout}")
        if (self.head_dim or 0) % 2:
            raise UserError(f"AffineAttnConfig: head_dim must be even for RoPE, got {self.head_dim}")
        for name in ("sliding_window", "layer_types", "attention_chunk_size"):
            # Caches of transformers would read it and drop keys that the layers see.
            if (value := getattr(self, name, None)) is not None:
                raise UserError(f"AffineAttnConfig: {name} is no setting here, got {value}; window is the one to give")
        rope: dict[str, Any] = dict(self.rope_parameters or {})
        # This type has a frequency of 0 for the other channels. Others give a table that is too short, or ignore it.
        if rope.get("rope_type") != "proportional" and (rope.get("partial_rotary_factor") or 1) != 1:
            raise UserError(
                "AffineAttnConfig: partial_rotary_factor needs rope_type 'proportional', "
                f"got {rope['partial_rotary_factor']} with {rope.get('rope_type')!r}"
            )
        for name in ("attention", "window"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != self.num_hidden_layers:
                raise UserError(
                    f"AffineAttnConfig: {name} has {len(value)} entries, num_hidden_layers is {self.num_hidden_layers}"
                )
        specs = [self.spec(layer) for layer in range(self.num_hidden_layers)]
        for layer in range(self.num_hidden_layers):
            Mask(window=self.layer_window(layer))  # raises where it is none
        plan = (self.base_model_tp_plan or {}) | self._stages_tp_plan(specs)
        self.base_model_tp_plan = {name: style for name, style in plan.items() if style}
        if not self.qk_norm and any(isinstance(spec.scores.logit, ScaleInvariant) for spec in specs):
            warnings.warn(
                "scale-invariant attention without qk_norm=True: its derivation assumes logits of unit variance",
                stacklevel=2,
            )

    def __setattr__(self, name: str, value: Any) -> None:
        # Plain JSON, since save_pretrained cannot write objects; also what from_pretrained(attention=...) sets later.
        if name == "attention" and isinstance(value, list | tuple):
            value = [as_spec(entry).to_dict() for entry in value]
        elif name == "attention":
            value = as_spec(value).to_dict()
        elif name == "window" and isinstance(value, tuple):
            value = list(value)
        super().__setattr__(name, value)

    def _stages_tp_plan(self, specs: list[AttentionSpec]) -> dict[str, str | None]:
        """How tensor parallelism shards a layer: what the stages have per query head goes with the heads of q_proj.
        None: not there."""
        styles = {
            "q_norm": "replicated_with_grad_allreduce" if self.qk_norm else None,
            "k_norm": "replicated_with_grad_allreduce" if self.qk_norm else None,
            "attn_gate": "colwise" if any(spec.projected_gate for spec in specs) else None,
            "alpha": "affine_attn_alpha" if any(spec.affine for spec in specs) else None,
        }
        plan = {f"layers.*.self_attn.{name}": style for name, style in styles.items()}
        return plan | {"layers.*.self_attn": "affine_attn_heads"}

    @property
    def _attn_implementation(self) -> str:
        return NAME

    @_attn_implementation.setter
    def _attn_implementation(self, value: str | None) -> None:
        # "eager" is how one asks transformers for attention weights; they are to be had here anyway.
        if value not in (None, "eager", NAME):
            raise UserError(f"AffineAttn models run attn_implementation={NAME!r} only, got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        # That of what will be written: what was read may have named other files.
        written = super().to_dict() | {"auto_map": dict(type(self).auto_map)}
        modules = set().union(*(self.spec(layer).modules for layer in range(self.num_hidden_layers)))
        return written | {DEFINED_IN: sorted(modules)} if modules else written

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        missing = [name for name in config_dict.get(DEFINED_IN, ()) if name not in sys.modules]
        try:
            return super().from_dict(config_dict, **kwargs)
        except UserError as error:
            if not missing:
                raise
            names = ", ".join(missing)
            raise MissingDefinition(
                f"the attention of this checkpoint is defined in {names}: import that first "
                f"(commands: --import {missing[0]}, or --import with its file)"
            ) from error

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save config.json, and beside it the code that ``trust_remote_code=True`` runs and a model card."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_beside(self, folder)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: transformers would write the file of this class beside the weights, without what it imports."""

    def spec(self, layer: int) -> AttentionSpec:
        """The attention of one layer."""
        return AttentionSpec.from_dict(self.attention[layer] if isinstance(self.attention, list) else self.attention)

    def layer_window(self, layer: int) -> int | None:
        return self.window[layer] if isinstance(self.window, list) else self.window

    @property
    def output_attentions(self) -> bool:
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        # transformers allows this for eager attention only; here the weights are to be had whatever runs the layer.
        self._output_attentions = value

    def validate_output_attentions(self) -> None:
        """Nothing to refuse, see the setter."""

    def _validate_p_rope_rope_parameters(self, rope_parameters: dict, ignore_keys: set | None = None) -> None:
        self._validate_default_rope_parameters(rope_parameters, (ignore_keys or set()) | {"slowest"})
        if "slowest" in rope_parameters:
            Rope("p_rope", slowest=rope_parameters["slowest"])

    def _validate_nope_rope_parameters(self, rope_parameters: dict, ignore_keys: set | None = None) -> None:
        self._validate_default_rope_parameters(rope_parameters, ignore_keys)

    def _validate_p_rope_top_rope_parameters(self, rope_parameters: dict, ignore_keys: set | None = None) -> None:
        self._validate_default_rope_parameters(rope_parameters, (ignore_keys or set()) | {"p"})


def as_given(text: str) -> Any:
    """The attention that a command or a recipe names: a variant's name as it is, JSON as what it stands for."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"attention={text} is not JSON: {error}") from error


def as_spec(attention: Any) -> AttentionSpec:
    if isinstance(attention, AttentionSpec):
        return attention
    if isinstance(attention, str):
        return variant(attention)
    if isinstance(attention, dict):
        return AttentionSpec.from_dict(attention)
    raise UserError(
        "AffineAttnConfig: attention must be a variant's name, an AttentionSpec, a dict or a list of those, "
        f"got {attention!r}"
    )


def _frequencies(config: LlamaConfig, device=None, **_) -> tuple[Tensor, float]:
    """What transformers asks of a rope type: the frequencies of the channel pairs and a factor on cos and sin."""
    # Named, since transformers patches some functions (linspace) to the CPU while it builds a model on meta.
    device = torch.get_default_device() if device is None else device
    settings: dict[str, Any] = dict(config.rope_parameters or {})
    head_dim, kind = config.head_dim or 0, settings["rope_type"]
    if kind == "nope":
        return torch.zeros(head_dim // 2, dtype=torch.float32, device=device), 1.0
    further = {name: settings[name] for name in ("p", "slowest") if name in settings}
    return Rope(kind=kind, theta=settings["rope_theta"], **further).frequencies(head_dim, device), 1.0


ROPE_INIT_FUNCTIONS.update(dict.fromkeys(OWN_ROPE_TYPES, _frequencies))
