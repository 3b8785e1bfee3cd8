"""Adapters and trainers that are not transformers'."""

import lightning
import peft
import torch
from torch.utils.data import DataLoader

from affine_attn import track_alpha
from tests.support.hf import left_padded, tiny_model


def test_peft(model, tmp_path):
    """PEFT, LoRA: the adapter that is saved and loaded again, and the merged model, give the trained logits."""
    tokens, _ = left_padded(padded=0)
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["alpha"],  # glue
        ),
    ).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    track_alpha(adapted, optimizer)  # glue
    for _ in range(3):
        adapted(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval().save_pretrained(tmp_path)
    logits = adapted(tokens).logits
    assert not torch.equal(logits, tiny_model("affine")(tokens).logits)
    loaded = peft.PeftModel.from_pretrained(tiny_model("affine"), tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, logits)
    torch.testing.assert_close(loaded.merge_and_unload()(tokens).logits, logits)


class Learner(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, tokens, _):
        return self.model(tokens, labels=tokens).loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        track_alpha(self.model, optimizer)  # glue
        return optimizer


def test_lightning(model, tmp_path):
    """Lightning with accumulation: weights and alpha_ma are those of a loop by hand."""
    sequences = torch.randint(1, 61, (12, 10))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", **options)
    model.train()
    trainer.fit(Learner(model), DataLoader(sequences, 2))
    expected = tiny_model("affine", eos_token_id=3).train()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    track_alpha(expected, optimizer)
    for batch in sequences.split(4):
        for part in batch.split(2):
            (expected(part, labels=part).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)
