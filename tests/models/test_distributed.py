"""Tensor parallelism, FSDP2 and LoRA: the plans of the model give the numbers of one process."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.distributed import DistributedConfig

from affine_attn import VARIANTS, commit_alpha, track_alpha
from affine_attn.models import AffineAttnForCausalLM
from tests.support.hf import left_padded, tiny_model

RANKS = 2
PLANS = {"tensor parallel": {"tp_plan": "auto"}, "fsdp": {"fsdp_size": RANKS}}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model):
    """Logits, gradients and averages after one training forward and one commit."""
    tokens, mask = left_padded()
    logits = model.train()(tokens, mask, use_cache=False).logits
    logits[mask.bool()].square().mean().backward()
    commit_alpha(model)
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters()}
    averages = {name: b.clone() for name, b in model.named_buffers() if name.endswith("alpha_ma")}
    return {"logits": full(logits).detach()} | gradients | averages


def _rank(rank, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for name in VARIANTS:
        for kind, plan in PLANS.items():
            if (kind, name) == ("tensor parallel", "alibi"):
                with pytest.raises(ValueError, match="Alibi depends on a head's number"):
                    AffineAttnForCausalLM.from_pretrained(
                        f"{folder}/{name}", distributed_config=DistributedConfig(**plan)
                    )
                continue
            model = AffineAttnForCausalLM.from_pretrained(
                f"{folder}/{name}", distributed_config=DistributedConfig(**plan)
            )
            torch.save(trained(model), f"{folder}/{name}-{kind}-{rank}.pt")
    dist.destroy_process_group()


def ranks(folder):
    mp.start_processes(_rank, args=(folder,), nprocs=RANKS, start_method="fork")


def test_two_ranks_give_the_numbers_of_one(tmp_path):
    expected = {}
    for name in VARIANTS:
        model = tiny_model(name, qk_norm=True, vocab_size=62)
        model.save_pretrained(tmp_path / name)
        expected[name] = trained(model)
    # In a Python of its own: this one may have threads by now, whose locks a forked rank would wait for in vain.
    program = "import sys; from tests.models.test_distributed import ranks; ranks(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for name in VARIANTS:
        for kind in PLANS:
            if (kind, name) == ("tensor parallel", "alibi"):
                continue
            for rank in range(RANKS):
                got = torch.load(tmp_path / f"{name}-{kind}-{rank}.pt")
                assert got.keys() == expected[name].keys()
                for key, tensor in expected[name].items():
                    where = f"{kind}, {name}, rank {rank}, {key}"
                    torch.testing.assert_close(
                        got[key], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, w=where: f"{w}: {m}"
                    )


def test_lora_trains_projections_and_gate():
    peft = pytest.importorskip("peft")
    model = tiny_model("affine_gated")
    tokens, mask = left_padded()
    before = model(tokens, mask).logits
    targets = ["q_proj", "v_proj", "attn_gate"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
    torch.testing.assert_close(adapted(tokens, attention_mask=mask).logits, before)
    adapted(tokens, attention_mask=mask, labels=tokens).loss.backward()
    trained_names = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert trained_names
    assert all("lora_" in name for name in trained_names)
    assert {name.split(".self_attn.")[1].split(".")[0] for name in trained_names} == set(targets)
    assert torch.equal(
        adapted.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=4, do_sample=False),
        tiny_model("affine_gated").generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False),
    )


def test_an_adapter_that_keeps_alpha_is_the_model_that_was_trained(tmp_path):
    peft = pytest.importorskip("peft")
    tokens, _ = left_padded()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["alpha"])
    adapted = peft.get_peft_model(tiny_model("affine"), config).train()
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    track_alpha(adapted, optimizer)
    adapted(tokens, labels=tokens).loss.backward()
    optimizer.step()
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny_model("affine"), tmp_path)
    logits = adapted.eval()(tokens).logits
    assert not torch.equal(logits, tiny_model("affine")(tokens).logits)
    torch.testing.assert_close(loaded(tokens).logits, logits)
    torch.testing.assert_close(loaded.merge_and_unload()(tokens).logits, logits)
