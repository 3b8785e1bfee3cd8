"""What a recipe will cost, by calculation: parameters, FLOPs, memory and time. No weight is allocated."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from affine_attn.distill.losses import CHUNK_BYTES
from affine_attn.distill.recipes import LEARNING_RATES, TEACHERS, Recipe, summary, title
from affine_attn.errors import UserError
from affine_attn.models import PRESETS, preset
from affine_attn.models.load import read_config

# FLOP/s of dense bf16 products by the name torch gives a device, from its maker's data sheet.
PEAKS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
}
# Of the device that a dry run calculates with.
PEAK_FLOPS = PEAKS["NVIDIA H200"]
# Part of the peak that is reached, where it was not measured.
ASSUMED_MFU = 0.4


@dataclass(frozen=True)
class Size:
    """Size of a decoder: all parameters, those that multiply (the head, not the embedding's look-up), its shape."""

    parameters: int
    matmul: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int

    def forward_flops(self, sequence_length: int) -> int:
        """Return the FLOPs of a token; causal attention counts as the half it is."""
        return 2 * self.matmul + 2 * self.layers * sequence_length * self.heads * self.head_dim

    def training_flops(self, sequence_length: int) -> int:
        return 3 * self.forward_flops(sequence_length)


def size(config: PreTrainedConfig) -> Size:
    with torch.device("meta"):
        return size_of(AutoModelForCausalLM.from_config(config))


def size_of(model: PreTrainedModel) -> Size:
    config: Any = model.config
    # Module by module, because a tied head is one parameter with the embedding.
    multiplying = (module for module in model.modules() if not isinstance(module, nn.Embedding))
    own = (parameter for module in multiplying for parameter in module.parameters(recurse=False))
    return Size(
        parameters=model.num_parameters(),
        matmul=sum(parameter.numel() for parameter in own if parameter.dim() == 2),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        hidden=config.hidden_size,
        # GPT-2 and its kin leave out what is four times as wide.
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocab=config.vocab_size,
    )


def teacher_config(recipe: Recipe) -> PreTrainedConfig | None:
    """Return the config of the teacher; None if the recipe needs none in memory."""
    if recipe.teacher is None or recipe.teacher_cache:
        return None
    if trained := recipe.teacher_recipe:
        return trained.student_config
    return architecture(recipe.teacher)


def architecture(teacher: str, offline: bool = True) -> PreTrainedConfig:
    """A preset's, that of a folder or, where the network may be asked, of a hub id."""
    name = TEACHERS.get(teacher, teacher)
    if name in PRESETS:
        return preset(name, "softmax")
    if offline and not Path(name).is_dir():
        raise UserError(f"teacher={name} is no folder and no preset: its size is not known without the network")
    return read_config(name, local_files_only=offline)


def flops_per_token(recipe: Recipe, student: Size, teacher: Size | None) -> int:
    """Training of the student and the teacher's forward (and training, if it is); recomputation does not count."""
    length = recipe.sequence_length
    total = student.training_flops(length)
    if teacher:
        total += teacher.forward_flops(length)
        total += teacher.training_flops(length) if recipe.teacher_recipe else 0
    return total


def memory(recipe: Recipe, student: Size, teacher: Size | None, devices: int) -> dict[str, float]:
    """Bytes per device: student and optimizer whole (DDP) or in shards (FSDP), the teacher whole, and what a step adds.

    An estimate: activations are counted as what the decoder's layers must keep for their backward.
    """
    width = 2 if recipe.dtype == "bfloat16" else 4
    # fp32: weights, gradients and two moments.
    training = 16 * student.parameters
    step = width * _activations(recipe, student) + _loss_buffers(student, teacher, width)
    teacher_bytes = width * teacher.parameters if teacher else 0
    return {"DDP": training + teacher_bytes + step, "FSDP": training / devices + teacher_bytes + step}


def bytes_moved(recipe: Recipe, student: Size, devices: int) -> dict[str, float]:
    """Bytes that every device must send in an optimizer step, whatever the algorithm of the collectives hides or adds.

    DDP: one all-reduce of fp32 gradients, a reduce-scatter and an all-gather of all but the device's own part. FSDP2:
    the weights in the arithmetic's dtype, gathered by every micro-batch for its forward and again for its backward, and
    one reduce-scatter of the gradients in fp32.
    """
    width = 2 if recipe.dtype == "bfloat16" else 4
    others = (devices - 1) / devices * student.parameters
    return {"DDP": 2 * others * 4, "FSDP": (2 * recipe.accumulation(devices) * width + 4) * others}


def _activations(recipe: Recipe, s: Size) -> int:
    """Numbers kept for the backward by the layers of a micro-batch."""
    tokens = recipe.micro_batch * recipe.sequence_length
    # Two residuals (fp32: twice as wide), two normed inputs; q, k before and after rotation, v, o; four of the MLP.
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    layer = 6 * s.hidden + 3 * queries + 3 * keys + 4 * s.intermediate
    kept = s.layers * 2 * s.hidden + layer if recipe.gradient_checkpointing else s.layers * layer
    return tokens * (kept + 2 * s.hidden)


def _loss_buffers(student: Size, teacher: Size | None, width: int) -> int:
    """Logits of a chunk, the head in the dtype of the products and its gradient in fp32."""
    return (2 if teacher else 1) * CHUNK_BYTES + (width + 4) * student.vocab * student.hidden


def dry_run(name: str, recipe: Recipe, devices: int = 8, mfu: float = ASSUMED_MFU) -> Iterator[str]:
    """What ``affine-attn distill --dry-run`` prints, line by line."""
    recipe.accumulation(devices)
    student, config = size(recipe.student_config), teacher_config(recipe)
    teacher = None if config is None else size(config)
    total = flops_per_token(recipe, student, teacher) * recipe.tokens
    seconds = total / (devices * PEAK_FLOPS * mfu)
    needed = memory(recipe, student, teacher, devices)
    yield f"{title(name)}: {summary(name)}"
    yield f"student     {recipe.student}, {recipe.attention} attention, {student.parameters:,} parameters"
    if teacher:
        yield f"teacher     {recipe.teacher}, {teacher.parameters:,} parameters"
    elif recipe.teacher_cache:
        yield f"teacher     none in memory: its targets are read from {recipe.teacher_cache}"
    else:
        yield "teacher     none: plain pretraining"
    shape = f"{recipe.steps:,} steps x {recipe.global_batch} sequences x {recipe.sequence_length}"
    yield f"tokens      {recipe.tokens:,} = {shape}"
    yield f"FLOPs       {total:.3g}, {total / recipe.tokens:.3g} per token"
    gib = ", ".join(f"{kind} {value / 2**30:.1f} GiB" for kind, value in needed.items())
    yield f"memory      per GPU, estimated, at micro_batch={recipe.micro_batch}: {gib}"
    speed = recipe.tokens / seconds
    many = f"{devices} GPU{'s' if devices > 1 else ''} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s"
    yield f"time        {duration(seconds)} on {many} at {mfu:.0%} of peak ({speed:,.0f} tokens/s), by calculation"
    yield f"lr sweep    {', '.join(f'learning_rate={rate:g}' for rate in LEARNING_RATES)} (the ends are the paper's)"
    ours = recipe.ours()
    yield "the paper's " + " ".join(f"{key}={value}" for key, value in vars(recipe).items() if key not in ours)
    yield "ours        " + " ".join(f"{key}={value}" for key, value in ours.items())


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} seconds"
