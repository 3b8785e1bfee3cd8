"""Llama, Mistral, Qwen2 and Qwen3 checkpoints to AffineAttn models with a chosen attention, and back."""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from affine_attn.core.spec import AttentionSpec
from affine_attn.errors import UserError
from affine_attn.models.configuration import OWN_ROPE_TYPES, AffineAttnConfig, as_spec
from affine_attn.models.load import load, tokenizer_of
from affine_attn.models.modeling import AffineAttnForCausalLM
from affine_attn.models.remote_code import save_with_code
from affine_attn.nn.alpha import alpha_gates

_SOURCES = ("llama", "mistral", "qwen2", "qwen3", "affine_attn")
# Fields that mean the same in all of them.
_SHARED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
]


def convert(
    path_or_model: str | Path | PreTrainedModel,
    attention: Any = "affine",
    start_as_softmax: bool = False,
    gguf_file: str | None = None,
    **loading: Any,
) -> AffineAttnForCausalLM:
    """The same decoder with another attention.

    path_or_model: a Llama, Mistral, Qwen2, Qwen3 or AffineAttn model, its folder or its hub id (``gguf_file``: a GGUF
    file there); ``loading`` goes to from_pretrained. All its tensors are taken over; those of the new attention, listed
    by :func:`stage_keys`, start afresh. start_as_softmax: an affine attention that is softmax until it is trained.
    """
    if not isinstance(path_or_model, str | Path | PreTrainedModel):
        given = type(path_or_model).__name__
        raise UserError(f"convert: path_or_model must be a transformers model, its folder or its hub id, got a {given}")
    source = path_or_model if isinstance(path_or_model, PreTrainedModel) else load(path_or_model, gguf_file, **loading)
    if source.config.model_type not in _SOURCES:
        raise UserError(f"convert: model_type must be one of {', '.join(_SOURCES)}, got {source.config.model_type!r}")
    if not isinstance(source, GenerationMixin):
        raise UserError(f"convert: the source must be a causal model with its head, got a {type(source).__name__}")
    each = attention if isinstance(attention, list | tuple) else [attention]
    specs = [_softmax_start(as_spec(entry)) if start_as_softmax else as_spec(entry) for entry in each]
    if start_as_softmax and not any(spec.affine for spec in specs):
        raise UserError("start_as_softmax: no layer's attention has an affine stage; affine is one that does")
    config = decoder_config(source.config, specs if isinstance(attention, list | tuple) else specs[0])
    model = AutoModelForCausalLM.from_config(config, dtype=source.dtype).to(source.device)
    _fill(model, source, new=stage_keys(model))
    if start_as_softmax:
        # Also where the source has an alpha of its own.
        for gate in alpha_gates(model):
            gate.reset_parameters()
            nn.init.zeros_(gate.w_a)
    return model


def export(model: AffineAttnForCausalLM) -> PreTrainedModel:
    """A softmax AffineAttn model as transformers' own Llama, Mistral, Qwen2 or Qwen3 model, whichever has its parts."""
    config = model.config
    specs = {config.spec(layer) for layer in range(config.num_hidden_layers)}
    if specs != {AttentionSpec()}:
        raise UserError(f"export: only softmax attention exists in plain models, got {sorted(map(str, specs))}")
    kind = (config.rope_parameters or {}).get("rope_type")
    if kind in OWN_ROPE_TYPES:
        raise UserError(f"export: plain models have no rope_type {kind!r}; transformers alone could not load this one")
    target = AutoModelForCausalLM.from_config(_plain_config(config), dtype=model.dtype).to(model.device)
    _fill(target, model, new=[])
    return target


def stage_keys(model: AffineAttnForCausalLM) -> list[str]:
    """Names of the tensors that the attention's stages add to a plain model's."""
    plain = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    return [
        key
        for key in model.state_dict()
        if ".self_attn." in key and key.split(".self_attn.")[1].split(".")[0] not in plain
    ]


def convert_folder(
    source: str,
    target: Path,
    attention: str | None = None,
    start_as_softmax: bool = False,
    gguf_file: str | None = None,
    to_plain: bool = False,
    with_code: bool = False,
) -> Iterator[str]:
    """Convert, save with the tokenizer, and say line by line what was done.

    attention: a variant's name; None keeps that of an AffineAttn model, with its length, and gives others affine.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not empty; give a new folder")
    if to_plain and (attention or start_as_softmax or with_code):
        raise UserError("--to-plain goes with none of --attention, --start-as-softmax and --with-code")
    given, tokenizer = load(source, gguf_file), tokenizer_of(source, gguf_file)
    if to_plain:
        if not isinstance(given, AffineAttnForCausalLM):
            raise UserError(f"--to-plain needs an AffineAttn model, {source} is a {given.config.model_type} model")
        plain = export(given)
        plain.save_pretrained(target)
        yield f"{target}: {type(plain).__name__}, {plain.num_parameters():,} parameters"
    else:
        keeps = attention is None and isinstance(given, AffineAttnForCausalLM)
        attention = "its own" if keeps else "affine" if attention is None else attention
        model = convert(given, given.config.attention if keeps else attention, start_as_softmax)
        save_with_code(model, target) if with_code else model.save_pretrained(target)
        yield f"{target}: {attention} attention, {model.num_parameters():,} parameters"
        carried = set(given.state_dict())
        new = [key for key in stage_keys(model) if key not in carried]
        yield f"{len(new)} new tensors" + (":" if new else "")
        yield from (f"  {key} {list(model.state_dict()[key].shape)}" for key in new)
    if tokenizer is None:
        yield f"{source} has no tokenizer, so none was written"
    else:
        tokenizer.save_pretrained(target)


def decoder_config(source: PreTrainedConfig, attention: Any) -> AffineAttnConfig:
    """The configuration of a source model with another attention; what it cannot express is refused."""
    if isinstance(source, AffineAttnConfig):
        return AffineAttnConfig.from_dict(source.to_dict() | {"attention": attention})
    fields: dict[str, Any] = {name: getattr(source, name) for name in _SHARED if hasattr(source, name)}
    kind = source.model_type
    fields["attention_bias"] = bool(getattr(source, "attention_bias", False)) and kind != "qwen2"
    fields["mlp_bias"] = bool(getattr(source, "mlp_bias", False))
    return AffineAttnConfig(
        attention=attention,
        attention_dropout=source.attention_dropout,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        window=_windows(source),
        **fields,
    )


def _windows(source: PreTrainedConfig) -> int | list[int | None] | None:
    window, types = getattr(source, "sliding_window", None), getattr(source, "layer_types", None)
    if window is None or types is None:
        return window
    windows = [window if kind == "sliding_attention" else None for kind in types]
    return windows[0] if len(set(windows)) == 1 else windows


def _plain_config(config: AffineAttnConfig) -> PreTrainedConfig:
    fields: dict[str, Any] = {name: getattr(config, name) for name in _SHARED}
    windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
    widths = {window for window in windows if window is not None}
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    sliding = {"use_sliding_window": bool(widths), "sliding_window": max(widths, default=None), "layer_types": types}
    parts = (config.qk_norm, config.qkv_bias, config.attention_bias, config.mlp_bias, len(widths))
    match parts:
        case (False, False, bias, mlp_bias, 0):
            return LlamaConfig(attention_bias=bias, mlp_bias=mlp_bias, **fields)
        case (False, False, False, False, 1) if None not in windows:
            return MistralConfig(sliding_window=widths.pop(), **fields)
        case (False, True, False, False, 0 | 1):
            return Qwen2Config(**sliding, **fields)
        case (True, False, bias, False, 0 | 1):
            return Qwen3Config(attention_bias=bias, **sliding, **fields)
    names = ("qk_norm", "qkv_bias", "attention_bias", "mlp_bias")
    present = [name for name, has in zip(names, parts[:4], strict=True) if has]
    parts_said = ", ".join([*present, f"windows {windows}"])
    raise UserError(f"export: no plain model of transformers has exactly these parts: {parts_said}")


def _softmax_start(spec: AttentionSpec) -> AttentionSpec:
    rest = replace(spec, affine=None)
    if rest != AttentionSpec():
        raise UserError(f"start_as_softmax: only the affine stage can start as softmax, got {rest}")
    return replace(spec, affine=spec.affine and spec.affine.as_softmax())


def _fill(target: PreTrainedModel, source: PreTrainedModel, new: list[str]) -> None:
    """Copy all tensors, generation settings and the mode; only the ``new`` ones of the target may stay as they are."""
    target.generation_config = deepcopy(source.generation_config)
    target.train(source.training)
    given = source.state_dict()
    _refuse(given.keys() - target.state_dict().keys(), "of the source has no place in the target")
    _refuse(target.state_dict().keys() - given.keys() - set(new), "of the target is not in the source")
    target.load_state_dict(given, strict=False)


def _refuse(keys: Iterable[str], what: str) -> None:
    if keys := sorted(keys):
        raise UserError(f"convert: {keys[0]} {what}" + (f", and so for {len(keys) - 1} more" if keys[1:] else ""))
