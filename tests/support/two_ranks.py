"""The program of each rank of test_two_ranks.py.

``torchrun --nproc-per-node 2 -m tests.support.two_ranks FOLDER``
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from affine_attn.data.sampler import GlobalSampler
from affine_attn.distill.recipes import Recipe
from affine_attn.models import AffineAttnForCausalLM, preset
from tests.support.tiny_runs import VOCAB, averages, tiny, trainer

STEPS = 20
# Sequences of a forward on each of two ranks, of the four of a step.
WAYS = {"plain": {"micro_batch": 2}, "accumulated, recomputed": {"micro_batch": 1, "gradient_checkpointing": True}}


def recipe_of(data: Path, **changes) -> Recipe:
    return tiny(data, steps=STEPS, decay_steps=5, loss="forward_kl", hard=0.25, **changes)


def teacher() -> AffineAttnForCausalLM:
    torch.manual_seed(1)
    return AffineAttnForCausalLM(preset("nano", "softmax", vocab_size=VOCAB))


def ddp(chosen: Recipe, output: Path) -> torch.nn.Module:
    """Train through Trainer, once whole and once resumed from the middle."""
    resumed = Path(f"{output}, resumed")
    trainer(chosen, output, teacher()).train()
    if dist.get_rank() == 0:
        shutil.copytree(output, resumed)
        shutil.rmtree(resumed / f"checkpoint-{STEPS}")
    dist.barrier()
    made = trainer(chosen, resumed, teacher())
    made.train(resume_from_checkpoint=True)
    return made.release()


def fsdp(chosen: Recipe, output: Path) -> torch.nn.Module:
    """torch's own loop: on CPUs, Trainer takes DDP where FSDP is asked for."""
    made = trainer(chosen, output, teacher())
    student = made.model
    if chosen.gradient_checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for module in (*student.model.layers, student):
        fully_shard(module, mesh=mesh)
    made.create_optimizer_and_scheduler(STEPS)
    samples, batch = STEPS * chosen.global_batch, chosen.micro_batch
    sampler = GlobalSampler(len(made.train_dataset), samples, chosen.seed, batch_size=batch, rank=rank, world=world)
    batches = iter(DataLoader(made.train_dataset, batch, sampler=sampler, collate_fn=made.data_collator))
    rows, student = [], student.train()
    for step in range(STEPS):
        parts, tokens = made.get_batch_samples(batches, chosen.accumulation(world), torch.device("cpu"))
        total = torch.zeros(())
        for part in parts:
            student.set_requires_gradient_sync(part is parts[-1])
            loss = made.compute_loss(student, part, num_items_in_batch=tokens)
            loss.backward()
            total += loss.detach() / world
        dist.all_reduce(total)
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), chosen.max_grad_norm).full_tensor()
        made.optimizer.step()
        made.lr_scheduler.step()
        made.optimizer.zero_grad()
        rows.append({"step": step + 1, "loss": total.item(), "grad_norm": norm.item()})
    if rank == 0:
        (output / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return student


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in (ddp, fsdp):
        for way, changes in WAYS.items():
            model = kind(
                recipe_of(folder / "data", save_steps=STEPS // 2, **changes), folder / f"{kind.__name__}, {way}"
            )
            torch.save(averages(model), folder / f"{kind.__name__}, {way}, {dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
