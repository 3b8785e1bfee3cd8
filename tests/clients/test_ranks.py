"""Loops of one's own, on two processes with accumulation; as a program, what each of the processes runs."""

import os
import sys

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from affine_attn import track_alpha
from affine_attn.nn.alpha import alpha_gates
from tests.support.hf import tiny_model

STEPS, SEQUENCES, LENGTH = 3, 4, 10  # sequences of a step: of all processes and micro-batches
TORCHRUN = ("torchrun", "--nproc-per-node", 2, "--master-port", 29541)
# `accelerate launch --cpu --num_processes 2` starts one process where there is no MPI.
ACCELERATE = ("accelerate", "launch", "--multi_gpu", "--num_processes", 2, "--main_process_port", 29542)


def loss(model, tokens):
    return model(tokens, labels=tokens, use_cache=False).loss


def with_torch(model, batches, accumulation):
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    track_alpha(model, optimizer)  # glue
    for number, batch in enumerate(batches, 1):
        (loss(model, batch) / accumulation).backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


def with_accelerate(model, batches, accumulation):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    track_alpha(model, optimizer)  # glue
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()


def is_that_of_one_process(command, folder, loop, launcher):
    program = ("-m", "tests.clients.test_ranks", loop.__name__, folder)
    command("python", *program, 1)
    command(*launcher, *program, 2)
    alone, first, second = (torch.load(folder / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert alone.abs().min() > 0
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone)


def test_torchrun(command, tmp_path):
    """DDP under torchrun, 2 processes, accumulation: alpha_ma is equal on both, and to that of one process."""
    is_that_of_one_process(command, tmp_path, with_torch, TORCHRUN)


def test_accelerate(command, tmp_path):
    """accelerate, 2 processes, accumulation: alpha_ma is equal on both, and to that of one process."""
    is_that_of_one_process(command, tmp_path, with_accelerate, ACCELERATE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop, folder, accumulation = globals()[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model = tiny_model("affine").train()
    for gate in alpha_gates(model):
        gate.alpha_ma.zero_()
    sequences = torch.randint(1, 61, (STEPS * SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(2))
    batches = sequences.view(-1, world, SEQUENCES // world // accumulation, LENGTH)[:, rank]
    loop(model, batches, accumulation)
    torch.save(torch.stack([gate.alpha_ma for gate in alpha_gates(model)]), f"{folder}/{world}-{rank}.pt")
