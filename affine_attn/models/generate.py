"""``affine-attn generate``: text from a model."""

import time
from typing import Any

from transformers import TextStreamer, set_seed

from affine_attn.errors import UserError
from affine_attn.models.configuration import AffineAttnConfig
from affine_attn.models.load import load, read_config, tokenizer_of, usable_device
from affine_attn.models.streaming import StreamingCache


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
