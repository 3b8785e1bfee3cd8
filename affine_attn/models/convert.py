"""Llama, Mistral, Qwen2 and Qwen3 checkpoints to AffineAttn models with a chosen attention, and back."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

from affine_attn.core.spec import GATES, AttentionSpec
from affine_attn.core.variants import at_length
from affine_attn.errors import UserError
from affine_attn.models.configuration import OWN_ROPE_TYPES, AffineAttnConfig, as_given, as_spec
from affine_attn.models.folder import HOW_TO_LOAD
from affine_attn.models.load import load, tokenizer_of
from affine_attn.models.modeling import AffineAttnForCausalLM
from affine_attn.models.remote_code import save_with_code
from affine_attn.nn.layer import AttentionLayer

_SOURCES = ("llama", "mistral", "qwen2", "qwen3", "affine_attn")
# exp(-20) is nothing beside the weight of any key, and a step of the optimizer moves it all the same.
_NO_SINK = -20.0
# Of the tokens with which a change of the logits is measured.
_SAMPLE, _SAMPLE_TOKENS = "The cat sat on the mat, looked at the dog, and went back to sleep. Then it rained. " * 4, 64
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
    length: int | None = None,
    **loading: Any,
) -> AffineAttnForCausalLM:
    """The same decoder with another attention.

    path_or_model: a Llama, Mistral, Qwen2, Qwen3 or AffineAttn model, its folder or hub id (``gguf_file``: a GGUF file
    there), or a GGUF file; ``loading`` goes to from_pretrained. All its tensors are taken over; those of the new
    attention, listed by :func:`stage_keys`, start afresh. start_as_softmax: attention that is softmax until it is
    trained. length: of the training sequences, where the attention's formula has it.
    """
    if not isinstance(path_or_model, str | Path | PreTrainedModel):
        given = type(path_or_model).__name__
        raise UserError(f"convert: path_or_model must be a transformers model, its folder or its hub id, got a {given}")
    if isinstance(path_or_model, PreTrainedModel):
        source = path_or_model
    else:
        source = load(*_gguf(path_or_model, gguf_file), **loading)
    if source.config.model_type not in _SOURCES:
        raise UserError(f"convert: model_type must be one of {', '.join(_SOURCES)}, got {source.config.model_type!r}")
    if not isinstance(source, GenerationMixin):
        raise UserError(f"convert: the source must be a causal model with its head, got a {type(source).__name__}")
    each = attention if isinstance(attention, list | tuple) else [attention]
    specs = [as_spec(entry) for entry in each]
    if length is not None:
        specs = _at_length(specs, length)
    if start_as_softmax:
        specs = [_softmax_start(spec) for spec in specs]
    config = decoder_config(source.config, specs if isinstance(attention, list | tuple) else specs[0])
    model = AutoModelForCausalLM.from_config(config, dtype=source.dtype).to(source.device)
    _fill(model, source, new=stage_keys(model))
    if start_as_softmax:
        _start_as_softmax(model)
    return model


@torch.no_grad()
def logits_moved(model: PreTrainedModel, source: PreTrainedModel, tokens: Tensor) -> tuple[float, float]:
    """What a change of the model does to the next token, over tokens [B, T].

    The mean Kullback-Leibler divergence of its distribution from the source's, in nats, and the share of places with
    another likeliest one.
    """
    with _evaluated(source), _evaluated(model):
        before, after = (each(tokens.to(each.device)).logits.float().cpu() for each in (source, model))
    moved = nn.functional.kl_div(after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="none")
    return moved.sum(-1).mean().item(), (before.argmax(-1) != after.argmax(-1)).float().mean().item()


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
    length: int | None = None,
    to_plain: bool = False,
    with_code: bool = False,
    verbose: bool = False,
) -> Iterator[str]:
    """Convert, save with the tokenizer, and say line by line what was done.

    attention: a variant's name, or a spec or a list of both as JSON; None keeps that of an AffineAttn model, with its
    length, and gives others affine.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not empty; give a new folder")
    if to_plain and (attention or start_as_softmax or with_code or length):
        raise UserError("--to-plain goes with none of --attention, --start-as-softmax, --length and --with-code")
    place, gguf_file = _gguf(source, gguf_file)
    given, tokenizer = load(place, gguf_file), tokenizer_of(place, gguf_file)
    if to_plain:
        if not isinstance(given, AffineAttnForCausalLM):
            raise UserError(f"--to-plain needs an AffineAttn model, {source} is a {given.config.model_type} model")
        made = export(given)
        made.save_pretrained(target)
        yield f"{target}: {type(made).__name__}, {made.num_parameters():,} parameters"
    else:
        keeps = attention is None and isinstance(given, AffineAttnForCausalLM)
        attention = "its own" if keeps else "affine" if attention is None else attention
        chosen = given.config.attention if keeps else as_given(attention)
        made = convert(given, chosen, start_as_softmax, length=length)
        save_with_code(made, target) if with_code else made.save_pretrained(target)
        yield f"{target}: {attention} attention, {made.num_parameters():,} parameters"
        yield from _about_tensors(made, given, verbose)
        yield _about_logits(made, given, tokenizer, start_as_softmax)
        yield HOW_TO_LOAD
    if tokenizer is None:
        yield f"{source} has no tokenizer, so none was written"
    else:
        tokenizer.save_pretrained(target)
        yield from _disagreements(tokenizer, made)


def _about_tensors(model: AffineAttnForCausalLM, source: PreTrainedModel, verbose: bool) -> Iterator[str]:
    state, carried = model.state_dict(), set(source.state_dict())
    new = [key for key in stage_keys(model) if key not in carried]
    yield f"{len(new)} new tensors" + ("" if verbose or not new else " (--verbose lists them)")
    if verbose:
        yield from (f"  {key} {list(state[key].shape)}" for key in new)


def _about_logits(
    model: AffineAttnForCausalLM, source: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, started: bool
) -> str:
    tokens = torch.randint(model.config.vocab_size, (1, _SAMPLE_TOKENS), generator=torch.Generator().manual_seed(0))
    if (
        tokenizer is not None
        and (known := tokenizer(_SAMPLE, return_tensors="pt")["input_ids"][:, :_SAMPLE_TOKENS]).numel()
    ):
        tokens = known.clamp(max=model.config.vocab_size - 1)
    divergence, changed = logits_moved(model, source, tokens)
    line = (
        f"on {tokens.numel()} tokens the next one's distribution moves by {divergence:.2g} nats, and the likeliest is "
        f"another one at {changed:.0%} of them"
    )
    return line if started or not divergence > 0.01 else f"{line}: train it, or try --start-as-softmax"


def _disagreements(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Iterator[str]:
    """Ends and padding that the tokenizer writes and the model does not know for what they are."""
    for name in ("eos", "pad"):
        written = getattr(tokenizer, f"{name}_token_id")
        read = getattr(model.generation_config, f"{name}_token_id") or getattr(model.config, f"{name}_token_id")
        if written is not None and read is not None and written not in (read if isinstance(read, list) else [read]):
            token = getattr(tokenizer, f"{name}_token")
            yield f"{name}: the tokenizer's is {written} ({token}), the model's {read}; generate goes by the model's"


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


def _gguf(source: str | Path, file: str | None) -> tuple[str, str | None]:
    """The folder and the name of a GGUF file that is given by its path; anything else as it is."""
    path = Path(source)
    if file is None and path.suffix == ".gguf" and path.is_file():
        return str(path.parent), path.name
    return str(source), file


def _at_length(specs: list[AttentionSpec], length: int) -> list[AttentionSpec]:
    changed = [at_length(spec, length) for spec in specs]
    if not any(spec.affine or hasattr(spec.logit, "length") for spec in specs):
        raise UserError("length: this attention has none; affine has, and logn")
    return changed


def _softmax_start(spec: AttentionSpec) -> AttentionSpec:
    """The spec with its stages in the forms that can be softmax; those that cannot are refused by name."""
    if spec.logit is not None:
        raise UserError(f"start_as_softmax: {type(spec.logit).__name__} changes the logits whatever its parameters are")
    if spec.sink not in (None, "learned", -math.inf):
        raise UserError(
            f"start_as_softmax: the constant sink {spec.sink} takes weight from the keys; a learned one starts at none"
        )
    return replace(spec, affine=spec.affine and spec.affine.as_softmax(), gate=_identity(spec.gate))


def _identity(gate: str | float | None) -> str | float | None:
    """The gate of the same shape that can be 1 everywhere."""
    if gate in (None, "learned", 1):
        return gate
    if isinstance(gate, str):
        for name in (gate, f"{gate}_identity"):
            if name in GATES and GATES[name].starts_at_zero and GATES[name].activation(torch.zeros(())) == 1:
                return name
    raise UserError(f"start_as_softmax: no form of the gate {gate!r} is 1 before it is trained")


def _start_as_softmax(model: AffineAttnForCausalLM) -> None:
    """Set the parameters of all stages, also those that the source had."""
    for layer in model.modules():
        if not isinstance(layer, AttentionLayer):
            continue
        if layer.alpha is not None:
            layer.alpha.reset_parameters()
            nn.init.zeros_(layer.alpha.w_a)
        if layer.sinks is not None:
            nn.init.constant_(layer.sinks, _NO_SINK)
        if layer.attn_gate is not None:
            nn.init.zeros_(layer.attn_gate.weight)
        if layer.gate_scale is not None:
            nn.init.ones_(layer.gate_scale)


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


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
