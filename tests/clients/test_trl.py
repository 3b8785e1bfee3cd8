"""trl's trainers, which are made from transformers' Trainer and take the path of a folder or a model."""

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

from affine_attn.models import AffineAttnForCausalLM, AffineAttnForSequenceClassification, TrackAlpha
from affine_attn.nn.alpha import alpha_gates
from tests.support.hf import tiny_model

SETTINGS = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
}
LOG_2 = 0.6931
PAIR = {"prompt": "w1 w2", "chosen": " w5 w6 w7", "rejected": " w5 w9 w1"}
TEXTS = ["w5 w6 w7 w8 w9", "w5 w6 w7", "w9 w8 w7 w6", "w4 w5 w6 w7 w8 w9"] * 2


def rows(**columns):
    return Dataset.from_dict({name: [value] * 8 for name, value in columns.items()})


def texts():
    return Dataset.from_dict({"text": TEXTS})


def trained(trainer):
    """Train, which updates the average of alpha in every layer, and return the losses."""
    before = [gate.alpha_ma.clone() for gate in alpha_gates(trainer.model)]
    trainer.train()
    for gate, was in zip(alpha_gates(trainer.model), before, strict=True):
        assert not torch.equal(gate.alpha_ma, was)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


SFT_OF_A_FOLDER = """
import sys
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

folder, output = sys.argv[1:]
texts = Dataset.from_dict({"text": ["w5 w6 w7 w8 w9", "w9 w8 w7 w6"] * 4})
settings = SFTConfig(
    output, max_steps=4, learning_rate=1e-2, use_cpu=True, bf16=False, report_to=[], logging_steps=1,
    trust_remote_code=True,  # glue
)
trainer = SFTTrainer(folder, args=settings, train_dataset=texts)
from affine_attn.models import TrackAlpha  # glue
trainer.add_callback(TrackAlpha())  # glue
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
assert losses[-1] < losses[0], losses
trainer.save_model(output)
"""


def test_sft_of_a_folder(folder, command, tmp_path):
    """trl, SFT of a folder in a process that does not import this package: the loss falls; what is saved loads."""
    command("python", "-W", "error:.*alpha_ma:UserWarning", "-c", SFT_OF_A_FOLDER, folder, tmp_path / "output")
    saved = AffineAttnForCausalLM.from_pretrained(tmp_path / "output")
    for gate, before in zip(alpha_gates(saved), alpha_gates(tiny_model("affine")), strict=True):
        assert not torch.equal(gate.alpha_ma, before.alpha_ma)


def test_sft_of_a_model(model, tokenizer, tmp_path):
    """trl, SFT of a model: the loss falls."""
    trainer = SFTTrainer(
        model,
        args=SFTConfig(str(tmp_path), **SETTINGS),
        train_dataset=texts(),
        processing_class=tokenizer,
        callbacks=[TrackAlpha()],  # glue
    )
    losses = trained(trainer)
    assert losses[-1] < losses[0]


def test_a_trainer_without_the_callback_says_what_is_missing(model, tokenizer, tmp_path):
    trainer = SFTTrainer(
        model, args=SFTConfig(str(tmp_path), **SETTINGS), train_dataset=texts(), processing_class=tokenizer
    )
    with pytest.warns(UserWarning, match="alpha_ma was not updated: call track_alpha"):
        trainer.train()


def test_sft_packing(model, tokenizer, tmp_path):
    """trl, SFT with packing: the loss of packed texts is that of each text alone."""
    trainer = SFTTrainer(
        model,
        args=SFTConfig(str(tmp_path), **SETTINGS, packing=True, max_length=16),
        train_dataset=texts(),
        processing_class=tokenizer,
        callbacks=[TrackAlpha()],  # glue
    )
    for batch in trainer.get_train_dataloader():
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        assert len(starts) > 2
        alone = [
            model(tokens, labels=tokens).loss.item() * (tokens.shape[1] - 1)
            for tokens in batch["input_ids"].tensor_split(starts[1:], dim=1)
        ]
        labels = batch.pop("labels")
        packed = model(**batch, labels=labels).loss.item()
        assert packed == pytest.approx(sum(alone) / (batch["input_ids"].numel() - len(starts)), rel=1e-4)
    losses = trained(trainer)
    assert losses[-1] < losses[0]


def test_dpo(folder, tmp_path):
    """trl, DPO of a folder, which it loads again as the reference: the loss falls from log 2."""
    import affine_attn.models  # noqa: F401  # glue

    trainer = DPOTrainer(
        folder,
        args=DPOConfig(str(tmp_path), **SETTINGS),
        train_dataset=rows(**PAIR),
        callbacks=[TrackAlpha()],  # glue
    )
    losses = trained(trainer)
    assert losses[0] == pytest.approx(LOG_2, abs=1e-4)
    assert losses[-1] < losses[0]


def test_dpo_of_a_model(model, tokenizer, tmp_path):
    """trl, DPO of a model that no folder has: the loss falls from log 2."""
    trainer = DPOTrainer(
        model,
        ref_model=tiny_model("affine"),  # glue
        args=DPOConfig(str(tmp_path), **SETTINGS),
        train_dataset=rows(**PAIR),
        processing_class=tokenizer,
        callbacks=[TrackAlpha()],  # glue
    )
    losses = trained(trainer)
    assert losses[0] == pytest.approx(LOG_2, abs=1e-4)
    assert losses[-1] < losses[0]


def test_gkd(model, tokenizer, tmp_path):
    """trl, GKD with a softmax teacher and tokens of the student's own: the loss falls."""
    said = [{"role": "user", "content": "w4 w5"}, {"role": "assistant", "content": "w6 w7 w8"}]
    trainer = GKDTrainer(
        model,
        teacher_model=tiny_model("softmax"),
        args=GKDConfig(str(tmp_path), **SETTINGS, max_new_tokens=4, lmbda=0.5, seed=1),
        train_dataset=rows(messages=said),
        processing_class=tokenizer,
        callbacks=[TrackAlpha()],  # glue
    )
    losses = trained(trainer)
    assert losses[-1] < losses[0]


def test_reward(folder, tmp_path):
    """trl, Reward model of a folder: it takes the class with a score, and the loss falls."""
    import affine_attn.models  # noqa: F401  # glue

    trainer = RewardTrainer(
        folder,
        args=RewardConfig(str(tmp_path), **SETTINGS),
        train_dataset=rows(chosen="w5 w6 w7", rejected="w5 w9 w1"),
        callbacks=[TrackAlpha()],  # glue
    )
    assert isinstance(trainer.model, AffineAttnForSequenceClassification)
    losses = trained(trainer)
    assert losses[-1] < losses[0]


def test_grpo(model, tokenizer, tmp_path):
    """trl, GRPO: it generates, its completions get rewards, and the weights change."""
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(text.split().count("w5")) for text in completions],
        args=GRPOConfig(str(tmp_path), **SETTINGS, num_generations=4, max_completion_length=6, seed=1),
        train_dataset=rows(prompt="w1 w2"),
        processing_class=tokenizer,
        callbacks=[TrackAlpha()],  # glue
    )
    trained(trainer)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == SETTINGS["max_steps"]
    assert max(rewards) > 0
    assert not torch.equal(model.lm_head.weight, tiny_model("affine").lm_head.weight)
