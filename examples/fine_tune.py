"""Convert a Llama to affine attention, fine-tune it with Trainer and LoRA: ``python examples/fine_tune.py [FOLDER]``.

FOLDER is a Llama, Mistral or Qwen folder or hub id; without it a small random Llama stands in. LoRA trains adapters of
the projections and, whole, the gates of alpha: an adapter holds no buffers, and the moving average of alpha is one.
"""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from affine_attn.models import TrackAlpha, convert


class Counting(Dataset):
    """Sequences that count up, in place of your data."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index + torch.arange(32)) % 128
        return {"input_ids": ids, "labels": ids}


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def fine_tune(original: str | PreTrainedModel, steps: int = 20) -> tuple[float, float]:
    """Return the training loss at the beginning and at the end."""
    model = convert(original, "affine", start_as_softmax=True)  # the original's logits until it is trained
    lora = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], modules_to_save=["alpha"])
    model = get_peft_model(model, lora)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[TrackAlpha()])
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[0], losses[-1]


if __name__ == "__main__":
    first, last = fine_tune(sys.argv[1] if len(sys.argv) > 1 else small_llama())
    print(f"loss {first:.2f} -> {last:.2f}")
