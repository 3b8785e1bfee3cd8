"""What ``affine-attn convert`` and ``affine-attn generate`` do with model folders."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, TextStreamer, set_seed

from affine_attn.errors import UserError, first_line
from affine_attn.models.configuration import AffineAttnConfig
from affine_attn.models.convert import convert, export, load, read_config, stage_keys, usable_device
from affine_attn.models.modeling import AffineAttnForCausalLM
from affine_attn.models.remote_code import save_with_code
from affine_attn.models.streaming import StreamingCache
from affine_attn.runs.places import named_place


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


def generate_text(
    model: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    device: str | None = None,
    recent: int | None = None,
) -> str:
    """Print the continuation as it comes; the return value says how fast it came."""
    place = usable_device(device)
    read_config(model)
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise UserError(f"{model} has no tokenizer")
    # Any: transformers types generate for a protocol that its own models do not meet.
    network: Any = load(model)
    network.to(place).eval()
    if recent is not None and network.config.model_type != AffineAttnConfig.model_type:
        raise UserError(f"--recent needs an AffineAttn model, {model} is a {network.config.model_type} model")
    inputs = tokenizer(prompt, return_tensors="pt").to(network.device)
    if not inputs["input_ids"].numel():
        raise UserError("the prompt has no tokens")
    last, known = int(inputs["input_ids"].max()), network.get_input_embeddings().num_embeddings
    if last >= known:
        raise UserError(f"{model}: its tokenizer makes token {last} of the prompt, the model knows {known} tokens")
    inputs.pop("token_type_ids", None)
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    if recent is not None:
        options["past_key_values"] = StreamingCache(recent=recent)
    set_seed(seed)
    begin = time.perf_counter()
    generated = network.generate(
        **inputs, max_new_tokens=max_new_tokens, streamer=TextStreamer(tokenizer, skip_prompt=True), **options
    )
    seconds = time.perf_counter() - begin
    count = generated.shape[1] - inputs["input_ids"].shape[1]
    return f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s on {network.device}"


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
