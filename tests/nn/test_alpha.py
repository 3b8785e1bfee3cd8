"""Alpha and its moving average: one commit per optimizer step, whatever happens between two steps."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from affine_attn import Affine, AlphaGate, AttentionLayer, AttentionSpec, Mask, commit_alpha, track_alpha
from affine_attn.core.spec import linear_clipping
from affine_attn.nn import alpha as alpha_module

DIM, HEADS = 8, 2


def _gate(**affine) -> AlphaGate:
    return AlphaGate(DIM, HEADS, Affine(**affine), init_std=0.5).train()


def _layer(**affine) -> AttentionLayer:
    return AttentionLayer(DIM, HEADS, attention=AttentionSpec(affine=Affine(**affine)), init_std=0.5).train()


def _step(model: nn.Module, batches: list[Tensor], optimizer: torch.optim.Optimizer, **kwargs) -> None:
    optimizer.zero_grad()
    for x in batches:
        model(x, **kwargs).square().sum().backward()
    optimizer.step()


def _tracked_sgd(model: nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    track_alpha(model, optimizer)
    return optimizer


def _mean_alpha(gate: AlphaGate, x: Tensor, valid: Tensor | None = None) -> Tensor:
    """The mean of alpha over tokens, from the formula."""
    alpha = (0.1 * x @ gate.w_a.T + 0.5).clamp(0, 1)
    return alpha.flatten(0, 1).mean(0) if valid is None else alpha[valid].mean(0)


@pytest.mark.parametrize(("x", "y"), [(-6, 0), (-5, 0), (-2, 0.3), (0, 0.5), (2, 0.7), (5, 1), (6, 1)])
def test_linear_clipping_has_the_paper_s_values(x, y):
    assert linear_clipping(torch.tensor(float(x), dtype=torch.float64)).item() == pytest.approx(y, abs=1e-15)


@pytest.mark.parametrize(("x", "slope"), [(-5.5, 0.0), (-4.9, 0.1), (0.0, 0.1), (4.9, 0.1), (5.5, 0.0)])
def test_linear_clipping_has_slope_a_tenth_inside_and_none_outside(x, slope):
    at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    linear_clipping(at).backward()
    assert at.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("affine", "expected"),
    [
        ({}, lambda z: (0.1 * z + 0.5).clamp(0, 1)),
        ({"phi": "sigmoid"}, lambda z: 1 / (1 + torch.exp(-z))),
        ({"alpha_range": 2.0}, lambda z: 2 * (0.1 * z + 0.5).clamp(0, 1)),
    ],
    ids=["linear_clipping", "sigmoid", "alpha_range"],
)
def test_alpha_is_phi_of_a_projection_per_head(affine, expected):
    gate = _gate(**affine)
    x = 4 * torch.randn(2, 5, DIM)
    torch.testing.assert_close(gate(x), expected(x @ gate.w_a.T).transpose(1, 2))


@pytest.mark.parametrize(
    ("length", "n"),
    [(0, [1, 2, 3, 4]), (3, [3, 3, 3, 4]), (2048, [2048] * 4), ("keys", [4] * 4)],
    ids=str,
)
def test_beta_divides_by_the_larger_of_length_and_visible_keys(length, n):
    gate = _gate(length=length, start=0.7)
    alpha = torch.rand(1, HEADS, 4)
    torch.testing.assert_close(gate.beta(alpha, Mask(), 4), (0.7 - alpha) / torch.tensor(n))
    # Without the number of keys there are as many as queries, or as the mask has.
    torch.testing.assert_close(gate.beta(alpha), gate.beta(alpha, Mask(), 4))
    documents = Mask(documents=torch.zeros(1, 9, dtype=torch.int64))
    torch.testing.assert_close(gate.beta(alpha, documents), gate.beta(alpha, documents, 9))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int64], ids=str)
def test_the_keys_of_a_call_are_the_filled_slots(dtype):
    gate, alpha = _gate(length="keys", start=0.7), torch.rand(2, HEADS, 4)
    beta = gate.beta(alpha, Mask(lengths=torch.tensor([6, 0], dtype=dtype)), 9)
    torch.testing.assert_close(beta, (0.7 - alpha) / torch.tensor([6, 1])[:, None, None])


@pytest.mark.parametrize(("length", "n"), [(0, [1, 2]), (3, [3, 3]), ("keys", [1, 2])], ids=str)
def test_beta_divides_by_the_filled_slots_of_a_cache_and_never_by_none(length, n):
    gate = _gate(length=length, start=0.7)
    alpha = torch.rand(2, HEADS, 1)
    beta = gate.beta(alpha, Mask(lengths=torch.tensor([0, 2])), 4)
    torch.testing.assert_close(beta, (0.7 - alpha) / torch.tensor(n)[:, None, None])


def test_tokens_behind_a_cache_are_counted_by_their_own_padding():
    """The mask covers all keys, the cached ones before them included."""
    layer, x, padding = _layer(), torch.randn(2, 5, DIM), torch.ones(2, 5, dtype=torch.bool)
    padding[0, 0] = padding[1, 3:] = False
    layer(x, Mask(padding=padding))
    whole, layer.alpha._sum = layer.alpha._sum, torch.zeros(HEADS)
    cache = DynamicCache()
    for part in (slice(0, 2), slice(2, 5)):
        positions = torch.arange(part.start, part.stop)[None]
        layer(x[:, part], Mask(padding=padding[:, : part.stop]), positions, cache)
    torch.testing.assert_close(layer.alpha._sum, whole)


def test_the_average_of_a_constant_alpha_is_the_paper_s_sequence():
    gate = _gate()
    nn.init.zeros_(gate.w_a)
    optimizer = _tracked_sgd(gate)
    for expected in (0.05, 0.095, 0.1355):
        _step(gate, [torch.randn(2, 3, DIM)], optimizer)
        torch.testing.assert_close(gate.alpha_ma, torch.full((HEADS,), expected))


def test_a_forward_uses_the_average_from_before_the_step():
    """Use, then update: the forward itself must not move alpha_ma, or beta would depend on the micro-batch."""
    gate = _gate(start=0.3)
    gate(torch.randn(2, 3, DIM))
    assert gate.alpha_ma.tolist() == pytest.approx([0.3] * HEADS)


def test_a_single_token_is_averaged():
    gate, x = _gate(), torch.randn(1, 1, DIM)
    _step(gate, [x], _tracked_sgd(gate))
    torch.testing.assert_close(gate.alpha_ma, 0.1 * _mean_alpha(gate, x))


@pytest.mark.parametrize("sizes", [[8], [2, 2, 2, 2], [1, 4, 1, 2]], ids=str)
def test_micro_batches_do_not_change_the_average(sizes):
    """The mean is over tokens, so a small micro-batch must not weigh as much as a large one."""
    gate, x = _gate(), torch.randn(8, 3, DIM)
    _step(gate, list(x.split(sizes)), _tracked_sgd(gate))
    torch.testing.assert_close(gate.alpha_ma, 0.1 * _mean_alpha(gate, x))


def test_micro_batches_of_different_lengths_are_weighted_by_their_tokens():
    gate, short, long = _gate(), torch.randn(1, 2, DIM), torch.randn(1, 11, DIM)
    _step(gate, [short, long], _tracked_sgd(gate))
    torch.testing.assert_close(gate.alpha_ma, 0.1 * _mean_alpha(gate, torch.cat((short, long), 1)))


class _Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, use_reentrant: bool):
        super().__init__()
        self.layer, self.use_reentrant = layer, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        # The reentrant kind recomputes only if an input wants a gradient.
        return checkpoint(self.layer, x.clone().requires_grad_(), use_reentrant=self.use_reentrant)


def _each_kind(name: str):
    return pytest.mark.parametrize(name, [False, True], ids=["non_reentrant", "reentrant"])


@_each_kind("use_reentrant")
@pytest.mark.parametrize("sizes", [[4], [1, 3]], ids=str)
def test_activation_checkpointing_does_not_change_the_average(use_reentrant, sizes):
    layer, x = _layer(), torch.randn(4, 5, DIM)
    model = _Checkpointed(layer, use_reentrant)
    _step(model, list(x.split(sizes)), _tracked_sgd(model))
    torch.testing.assert_close(layer.alpha.alpha_ma, 0.1 * _mean_alpha(layer.alpha, x))


@_each_kind("use_reentrant")
def test_micro_batches_that_are_checkpointed_count_once_as_the_others_do(use_reentrant):
    layer, x = _layer(), torch.randn(4, 5, DIM)
    model = _Checkpointed(layer, use_reentrant)
    optimizer = _tracked_sgd(layer)
    for run, part in zip((layer, model), x.split([1, 3]), strict=True):
        run(part).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.alpha.alpha_ma, 0.1 * _mean_alpha(layer.alpha, x))


@_each_kind("outer")
@_each_kind("inner")
def test_checkpoints_inside_of_checkpoints_count_once(outer, inner):
    layer, x = _layer(), torch.randn(4, 5, DIM)
    _Checkpointed(_Checkpointed(layer, inner), outer)(x).square().sum().backward()
    assert layer.alpha._count.tolist() == [20] * HEADS


@_each_kind("use_reentrant")
def test_a_function_of_ones_own_may_be_what_asks_for_the_recomputation(use_reentrant):
    """The region ends with the attention, whose backward is such a function; nothing before it saves a tensor."""
    layer, x = _layer(), torch.randn(2, 5, DIM)

    def attended(x: Tensor) -> Tensor:
        return layer.attend(x, *layer.project(x), Mask())

    _Checkpointed(attended, use_reentrant)(x).sum().backward()
    assert layer.alpha._count.tolist() == [10] * HEADS


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "by_hand"])
@_each_kind("use_reentrant")
def test_steps_inside_of_the_backward_commit_after_it(use_reentrant, tracked):
    """An optimizer for each parameter, that steps as soon as its gradient is there: earlier layers are recomputed only
    then, and must see the average of their forward."""
    torch.manual_seed(0)
    layers = nn.ModuleList(_layer(length=1) for _ in range(3))
    x, gradients, averages, sums = torch.randn(2, 5, DIM), [], [], []
    for checkpointed in (False, True):
        model = copy.deepcopy(layers)
        for layer in model:
            layer.alpha.alpha_ma.fill_(0.5)
        expected = torch.stack([layer.alpha.alpha_ma for layer in model])
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.0)
            if tracked:
                track_alpha(model, optimizer)
            else:
                optimizer.register_step_post_hook(lambda *_, model=model: commit_alpha(model))
            p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        y = x
        for layer in model:
            y = _Checkpointed(layer, use_reentrant)(y) if checkpointed else layer(y)
        assert torch.equal(expected, torch.stack([layer.alpha.alpha_ma for layer in model]))
        y.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        averages.append([layer.alpha.alpha_ma for layer in model])
        sums.append([layer.alpha._count.sum().item() for layer in model])
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(*averages)
    assert sums == [[0, 0, 0]] * 2
    assert all((average != 0.5).all() for average in averages[0])


def test_padding_tokens_are_not_averaged():
    layer, x = _layer(), torch.randn(2, 5, DIM)
    padding = torch.tensor([[False, False, True, True, True], [True] * 5])
    x[~padding] = 50.0  # would show in the mean
    _step(layer, [x], _tracked_sgd(layer), mask=Mask(padding=padding))
    torch.testing.assert_close(layer.alpha.alpha_ma, 0.1 * _mean_alpha(layer.alpha, x, padding))


@pytest.mark.parametrize("kind", [torch.bool, torch.int64], ids=str)
def test_nothing_of_a_token_that_is_not_counted_reaches_the_average(kind):
    gate, x = _gate(), torch.randn(2, 5, DIM)
    valid = torch.tensor([[False, False, True, True, True], [True] * 5])
    x[~valid] = float("nan")
    optimizer = _tracked_sgd(gate)
    gate(x, valid.to(kind))
    optimizer.step()
    torch.testing.assert_close(gate.alpha_ma, 0.1 * _mean_alpha(gate, x, valid))


def _forward_in_eval(gate: AlphaGate, x: Tensor) -> None:
    gate.eval()(x)


@torch.no_grad()
def _forward_without_grad(gate: AlphaGate, x: Tensor) -> None:
    gate(x)


@pytest.mark.parametrize("forward", [_forward_in_eval, _forward_without_grad])
def test_the_average_is_frozen_outside_training(forward):
    gate = _gate(start=0.25)
    forward(gate, torch.randn(2, 3, DIM))
    commit_alpha(gate)
    assert gate.alpha_ma.tolist() == [0.25] * HEADS


def test_torch_func_is_told_to_leave_the_average_alone():
    gate, x = _gate(), torch.randn(3, 1, 5, DIM)
    of_each = torch.vmap(torch.func.grad(lambda x: gate(x).sum()))
    with pytest.raises(ValueError, match=r"^AlphaGate: .*torch.func.*alpha_ma; call eval\(\)"):
        of_each(x)
    gate.eval()
    assert of_each(x).shape == x.shape


def test_evaluation_between_two_steps_leaves_no_trace():
    gate, x = _gate(), torch.randn(2, 3, DIM)
    optimizer = _tracked_sgd(gate)
    gate.eval()(100 * torch.randn(2, 3, DIM))
    _step(gate.train(), [x], optimizer)
    torch.testing.assert_close(gate.alpha_ma, 0.1 * _mean_alpha(gate, x))


def test_a_model_told_again_where_it_is_goes_on():
    """As evaluation does, under inference_mode, between two micro-batches or two steps."""
    gate, x = _gate(), torch.randn(2, 2, 3, DIM)
    optimizer = _tracked_sgd(gate)
    gate(x[0]).sum().backward()
    with torch.inference_mode():
        gate.to("cpu")
    gate(x[1]).sum().backward()
    optimizer.step()
    torch.testing.assert_close(gate.alpha_ma, 0.1 * _mean_alpha(gate, x.flatten(0, 1)))


def test_tracking_twice_commits_once(monkeypatch):
    commits = []
    monkeypatch.setattr(alpha_module, "commit_alpha", lambda *args: commits.append(args))
    gate = _gate()
    optimizer = _tracked_sgd(gate)
    track_alpha(gate, optimizer)
    _step(gate, [torch.randn(2, 3, DIM)], optimizer)
    assert len(commits) == 1


def test_an_optimizer_that_accelerate_has_prepared_commits_once_per_accumulation():
    # A process has one state: a Trainer's in another test may stand at the end of its data, where every step counts.
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    gate = _gate()
    gate, optimizer = accelerator.prepare(gate, torch.optim.SGD(gate.parameters(), lr=0.0))
    track_alpha(gate, optimizer)
    micro_batches = torch.randn(2, 2, 3, DIM, device=accelerator.device)
    for x in micro_batches:
        with accelerator.accumulate(gate):
            accelerator.backward(gate(x).sum())
            optimizer.step()
    torch.testing.assert_close(gate.alpha_ma, 0.1 * _mean_alpha(gate, micro_batches.flatten(0, 1)))


def test_a_second_optimizer_of_the_same_step_does_not_decay_the_average():
    layer, x = _layer(), torch.randn(2, 3, DIM)
    first, second = _tracked_sgd(layer), _tracked_sgd(layer)
    _step(layer, [x], first)
    second.step()
    torch.testing.assert_close(layer.alpha.alpha_ma, 0.1 * _mean_alpha(layer.alpha, x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_that_was_left_out_does_not_ruin_the_average(bad):
    """A loop without the step whose loss is not finite, as a GradScaler is one, goes on afterwards."""
    layer, x = _layer(start=0.25), torch.randn(2, 3, DIM)
    optimizer = _tracked_sgd(layer)
    layer(torch.full((2, 3, DIM), bad))
    _step(layer, [x], optimizer)
    assert layer.alpha.alpha_ma.tolist() == [0.25] * HEADS
    _step(layer, [x], optimizer)
    torch.testing.assert_close(layer.alpha.alpha_ma, 0.9 * torch.tensor(0.25) + 0.1 * _mean_alpha(layer.alpha, x))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_commits_nothing(fused):
    """What it counted joins the next step, whichever optimizer it is; a fused one is called and skips by itself."""
    gate, (bad, good) = _gate(start=0.25), torch.randn(2, 2, 3, DIM)
    optimizer = torch.optim.AdamW(gate.parameters(), lr=0.1, fused=fused)
    track_alpha(gate, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before, mean = gate.w_a.detach().clone(), _mean_alpha(gate, torch.cat((bad, good))).detach()
    for x, factor in ((bad, float("inf")), (good, 1.0)):
        assert torch.equal(gate.w_a, before)
        assert gate.alpha_ma.tolist() == [0.25] * HEADS
        optimizer.zero_grad()
        scaler.scale(factor * gate(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(gate.w_a, before)
    torch.testing.assert_close(gate.alpha_ma, 0.9 * torch.tensor(0.25) + 0.1 * mean)


@pytest.mark.parametrize("swapped", [False, True])
def test_what_has_no_steps_to_follow_is_refused(swapped):
    """An optimizer that a Trainer has not made yet is None."""
    gate = _gate()
    arguments = (_tracked_sgd(gate), gate) if swapped else (gate, None)
    with pytest.raises(ValueError, match=r"^track_alpha: a module and its torch optimizer .*got \w+ and \w+$"):
        track_alpha(*arguments)


def test_one_average_for_all_heads():
    gate, x = _gate(per_head=False), torch.randn(2, 3, DIM)
    _step(gate, [x], _tracked_sgd(gate))
    torch.testing.assert_close(gate.alpha_ma, (0.1 * _mean_alpha(gate, x).mean()).expand(HEADS))


def test_no_gradient_reaches_the_average():
    gate = _gate()
    assert not gate.alpha_ma.requires_grad
    _step(gate, [torch.randn(2, 3, DIM)], _tracked_sgd(gate))
    assert not gate.alpha_ma.requires_grad


# 0.1 and its neighbours have no exact bfloat16 or float16 value: any rounding shows.
UNROUNDED = torch.tensor([0.1, 0.123456789])


def _with_average() -> AlphaGate:
    gate = _gate()
    gate.alpha_ma.copy_(UNROUNDED)
    return gate


@pytest.mark.parametrize(
    "convert",
    [
        lambda gate: gate.to(torch.bfloat16),
        lambda gate: gate.half(),
        lambda gate: gate.double(),
        lambda gate: gate.to(torch.bfloat16).float(),
        copy.deepcopy,
        lambda gate: copy.deepcopy(gate.to(torch.bfloat16)),
    ],
    ids=["bfloat16", "half", "double", "there_and_back", "deepcopy", "bfloat16_deepcopy"],
)
def test_the_average_stays_unrounded_float32(convert):
    gate = convert(_with_average())
    assert gate.alpha_ma.dtype == torch.float32
    assert torch.equal(gate.alpha_ma, UNROUNDED)


def test_a_bfloat16_gate_still_averages_in_float32():
    gate, x = _gate().to(torch.bfloat16), torch.randn(2, 300, DIM).to(torch.bfloat16)
    _step(gate, [x], _tracked_sgd(gate))
    torch.testing.assert_close(gate.alpha_ma, 0.1 * _mean_alpha(gate.float(), x.float()), rtol=1e-5, atol=0)


def test_an_average_that_something_rounded_is_refused():
    """FSDP 1 casts buffers in place, by accelerate's default to the dtype of mixed precision."""
    gate = _with_average()
    gate.alpha_ma.data = gate.alpha_ma.data.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"alpha_ma is torch.bfloat16.*buffer_dtype=torch.float32"):
        _step(gate, [torch.randn(2, 3, DIM)], _tracked_sgd(gate))


def test_alpha_is_float32_under_autocast():
    gate, x = _gate(), torch.randn(2, 3, DIM)
    exact = gate(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate(x), exact)


@pytest.mark.gpu
def test_on_cuda_autocast_rounds_what_is_multiplied_and_nothing_else():
    gate, x = _gate().cuda(), torch.randn(2, 300, DIM, device="cuda").requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        alpha = gate(x)
    weights = torch.randn_like(alpha)
    gradients = torch.autograd.grad((alpha * weights).sum(), (x, gate.w_a))
    rounded, w_a = (y.detach().bfloat16().double().requires_grad_() for y in (x, gate.w_a))
    exact = linear_clipping(F.linear(rounded, w_a)).transpose(1, 2)
    assert alpha.dtype == torch.float32
    torch.testing.assert_close(alpha.double(), exact, rtol=0, atol=1e-6)
    expected = torch.autograd.grad((exact * weights).sum(), (rounded, w_a))
    for mine, truth in zip(gradients, expected, strict=True):
        assert (mine - truth).norm() < 0.01 * truth.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_round_trip(dtype):
    saved = _with_average().to(dtype).state_dict()
    assert set(saved) == {"w_a", "alpha_ma"}
    gate = _gate().to(dtype)
    gate.load_state_dict(saved)
    assert torch.equal(gate.alpha_ma, UNROUNDED)
    assert torch.equal(gate.w_a, saved["w_a"])


@pytest.mark.parametrize("assign", [False, True])
def test_the_average_of_a_rounded_checkpoint_goes_on_in_float32(assign):
    """Updates of a tenth of a difference would be lost in 8 bits."""
    rounded = {name: x.to(torch.bfloat16) for name, x in _with_average().state_dict().items()}
    gate, x = _gate(), torch.randn(2, 3, DIM)
    gate.load_state_dict(rounded, assign=assign)
    assert gate.alpha_ma.dtype == torch.float32
    _step(gate, [x], _tracked_sgd(gate))
    torch.testing.assert_close(gate.alpha_ma, 0.9 * rounded["alpha_ma"].float() + 0.1 * _mean_alpha(gate.float(), x))


@pytest.mark.parametrize(
    "restart",
    [lambda gate: gate.load_state_dict(gate.state_dict()), lambda gate: gate.reset_parameters()],
    ids=["load", "reset"],
)
def test_what_other_weights_counted_is_forgotten(restart):
    gate = _gate()
    optimizer = _tracked_sgd(gate)
    gate(torch.full((2, 3, DIM), float("nan")))
    restart(gate)
    x = torch.randn(2, 3, DIM)
    _step(gate, [x], optimizer)
    torch.testing.assert_close(gate.alpha_ma, 0.1 * _mean_alpha(gate, x))


def test_a_deep_copy_has_its_own_average():
    gate = _gate()
    twin = copy.deepcopy(gate)
    _step(twin, [torch.randn(2, 3, DIM)], _tracked_sgd(twin))
    assert gate.alpha_ma.tolist() == [0.0] * HEADS
    assert twin.alpha_ma.min() > 0


def test_start_as_softmax_is_exactly_the_softmax_layer_and_can_learn():
    spec = AttentionSpec(affine=Affine(alpha_range=2.0, start=1.0))
    affine, plain = (AttentionLayer(16, 4, 2, attention=a, init_std=0.5) for a in (spec, "softmax"))
    affine.load_state_dict(plain.state_dict(), strict=False)
    nn.init.zeros_(affine.alpha.w_a)
    x = torch.randn(2, 9, 16)
    y = affine(x)
    assert torch.equal(y, plain(x))
    y.square().sum().backward()
    assert affine.alpha.w_a.grad.abs().min() > 0


def _assert_warned_without_tracking(gate: AlphaGate, **options) -> None:
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.1, **options)
    _step(gate, [torch.randn(2, 3, DIM)], optimizer)
    with pytest.warns(UserWarning, match="track_alpha"):
        _step(gate, [torch.randn(2, 3, DIM)], optimizer)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_loop_that_never_commits_is_warned(options):
    _assert_warned_without_tracking(_gate(), **options)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda gate: pickle.loads(pickle.dumps(gate))], ids=["copy", "file"])
def test_a_copy_of_what_was_tracked_is_not(copied):
    gate = _gate()
    optimizer = _tracked_sgd(gate, lr=0.1)
    _step(gate, [torch.randn(2, 3, DIM)], optimizer)
    _assert_warned_without_tracking(copied(gate))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda gate: pickle.loads(pickle.dumps(gate))], ids=["copy", "file"])
def test_a_copy_warns_anew(copied):
    gate = _gate()
    _assert_warned_without_tracking(gate)
    _assert_warned_without_tracking(copied(gate))


def test_an_optimizer_that_takes_the_place_of_the_tracked_one_is_not():
    gate = _gate()
    _step(gate, [torch.randn(2, 3, DIM)], _tracked_sgd(gate, lr=0.1))
    gc.collect()
    _assert_warned_without_tracking(gate)


def _tracked_loop(gate: AlphaGate) -> None:
    optimizer = _tracked_sgd(gate, lr=0.1)
    for _ in range(3):
        _step(gate, [torch.randn(2, 3, DIM)], optimizer)


def _loop_with_explicit_commits(gate: AlphaGate) -> None:
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.1)
    for _ in range(3):
        _step(gate, [torch.randn(2, 3, DIM)], optimizer)
        commit_alpha(gate)


def _gradient_accumulation(gate: AlphaGate) -> None:
    _step(gate, [torch.randn(2, 3, DIM) for _ in range(4)], torch.optim.SGD(gate.parameters(), lr=0.1))


def _resumed(gate: AlphaGate) -> None:
    gate(torch.randn(2, 3, DIM))
    gate.load_state_dict(copy.deepcopy(gate.state_dict()))
    gate(torch.randn(2, 3, DIM))


def _two_models(gate: AlphaGate) -> None:
    other = nn.Linear(DIM, 1)
    optimizer = torch.optim.SGD([*other.parameters(), gate.requires_grad_(False).w_a], lr=0.1)
    for _ in range(2):
        _step(lambda x: gate(x).sum() * other(x), [torch.randn(2, 3, DIM)], optimizer)


@pytest.mark.parametrize(
    "loop", [_tracked_loop, _loop_with_explicit_commits, _gradient_accumulation, _resumed, _two_models]
)
def test_a_proper_loop_is_not_warned(loop):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(_gate())


def test_gates_may_count_while_an_optimizer_of_something_else_steps():
    """The hook that watches for steps is that of all optimizers, and threads make gates while it looks through them."""
    gates = [_gate() for _ in range(50)]
    unrelated = torch.optim.SGD(nn.Linear(DIM, 1).parameters(), lr=0.1)
    for gate in gates:
        gate(torch.randn(1, 2, DIM))

    class Meddling(type(gates[0])):
        """Stands for another thread: it counts a token of a new gate at the moment it is looked at."""

        def __getattribute__(self, name: str):
            if name == "_weight_version":
                gates.append(_gate())
                gates[-1](torch.randn(1, 2, DIM))
            return super().__getattribute__(name)

    gates[0].__class__ = Meddling
    unrelated.step()


RANKS, STEPS = 2, 3


def _small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(_layer(), nn.Tanh(), _layer())


def _data() -> Tensor:
    return torch.randn(STEPS, RANKS * 2, 5, DIM, generator=torch.Generator().manual_seed(1))


def _train(model: nn.Module, data: Tensor) -> Tensor:
    optimizer = _tracked_sgd(model, lr=0.5)
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return torch.stack([gate.alpha_ma for gate in alpha_module.alpha_gates(model)])


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    averages = []
    for broadcast_buffers in (True, False):
        model = DistributedDataParallel(_small_model(), broadcast_buffers=broadcast_buffers)
        averages.append(_train(model, _data().chunk(RANKS, 1)[rank]))
        # A step that one rank leaves out is left out by all.
        model(_data()[0])
        commit_alpha(model, found_inf=torch.tensor(float(rank)))
        assert torch.equal(averages[-1], torch.stack([gate.alpha_ma for gate in alpha_module.alpha_gates(model)]))
    torch.save(averages, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_agree_with_one_process_on_the_whole_batch(tmp_path):
    """Each rank sees other data; DDP broadcasts buffers from rank 0 by default, which must not lose rank 1's part."""
    # Forked, because a fresh interpreter spends ten times the test's own time on importing torch.
    mp.start_processes(_rank, args=(str(tmp_path),), nprocs=RANKS, start_method="spawn")
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(RANKS)]
    expected = _train(_small_model(), _data())
    assert not torch.allclose(_train(_small_model(), _data()[:, :2]), expected)  # rank 0's data alone differs
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected)
