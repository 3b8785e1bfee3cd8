"""The order in which training sees its sequences: random, one for all ranks, and resumed anywhere at no cost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from affine_attn.data.sampler import GlobalSampler, shuffled


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 1 << 40), epoch=st.integers(0, 1000))
def test_the_order_is_a_permutation(size, seed, epoch):
    order = shuffled(np.arange(size), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))
    # Any part of it can be had alone.
    assert (shuffled(np.arange(size // 2, size), size, seed, epoch) == order[size // 2 :]).all()


def test_the_order_is_random_enough():
    """Every entry comes first about equally often; seeds and epochs give orders of their own."""
    first = np.bincount([int(shuffled(np.array([0]), 10, seed, 0)[0]) for seed in range(2000)], minlength=10)
    # Standard deviation 13.4.
    assert abs(first - 200).max() < 60
    orders = {tuple(shuffled(np.arange(50), 50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    # Numbers whose digits are the same in a row.
    assert len({tuple(shuffled(np.arange(50), 50, *pair)) for pair in ((1, 11), (11, 1), (111, 0), (1, 110))}) == 4
    neighbours = shuffled(np.arange(10_000), 10_000, 0, 0)
    assert abs(np.corrcoef(neighbours[1:], neighbours[:-1])[0, 1]) < 0.05


def test_billions_of_sequences_cost_nothing():
    size = 7_000_000_000
    sampler = GlobalSampler(size, samples=3 * size)
    sampler.load_state_dict({"consumed": 2 * size - 3, "seed": 0, "size": size})
    numbers = iter(sampler)
    found = [next(numbers) for _ in range(6)]
    ends = [int(shuffled(np.array([p]), size, 0, 1)[0]) for p in range(size - 3, size)]
    begins = [int(shuffled(np.array([p]), size, 0, 2)[0]) for p in range(3)]
    assert found == ends + begins
    assert max(found) > 1 << 32


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 50),
    batch_size=st.integers(1, 4),
    steps=st.integers(1, 30),
    world=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_ranks_share_one_sequence_of_batches_and_resume_in_it(size, batch_size, steps, world, data):
    turn = batch_size * world
    whole = list(GlobalSampler(size, samples=steps * turn, seed=3))
    # Epoch by epoch, every sequence once.
    for epoch in range(steps * turn // size):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))
    done = data.draw(st.integers(0, steps))
    ranks = []
    for rank in range(world):
        sampler = GlobalSampler(size, steps * turn, 3, batch_size, rank, world)
        sampler.advance(done * turn)
        fresh = GlobalSampler(size, steps * turn, 3, batch_size, rank, world)
        fresh.load_state_dict(sampler.state_dict())
        ranks.append(list(BatchSampler(fresh, batch_size, drop_last=False)))
        assert len(fresh) == steps * batch_size
    joined = [number for turns in zip(*ranks, strict=True) for batch in turns for number in batch]
    assert joined == whole[done * turn :]


def test_accelerate_deals_out_the_same_sequence():
    """What Trainer wraps around the sampler: the layout of ranks is ours, and so is what is left after skipping."""
    from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler

    sampler = GlobalSampler(13, samples=48, seed=5)
    for rank in range(2):
        theirs = BatchSamplerShard(BatchSampler(sampler, 4, drop_last=False), num_processes=2, process_index=rank)
        own = GlobalSampler(13, 48, 5, batch_size=4, rank=rank, world=2)
        own.advance(16)
        assert list(SkipBatchSampler(theirs, 2)) == list(BatchSampler(own, 4, drop_last=False))
        assert len(theirs) == 6


def test_sampler_refusals():
    with pytest.raises(ValueError, match="some ranks would run out before others"):
        GlobalSampler(10, samples=15, batch_size=2, world=2)
    with pytest.raises(ValueError, match="0 <= rank < world"):
        GlobalSampler(10, rank=2, world=2)
    sampler = GlobalSampler(10, samples=16, batch_size=2, world=2)
    for state, message in (
        ({"consumed": 4, "seed": 1, "size": 10}, "a sampler with seed 1, this one has 0"),
        ({"consumed": 4, "seed": 0, "size": 11}, "a sampler with size 11, this one has 10"),
        ({"consumed": 3, "seed": 0, "size": 10}, "consumed must be a multiple of 4"),
        ({"consumed": 2, "seed": 0, "size": 10}, "consumed must be a multiple of 4"),
        ({"consumed": 20, "seed": 0, "size": 10}, "of at most 16, got 20"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.load_state_dict(state)
