"""What is derived from a mask is made once, for all layers and both directions, and never for another mask."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from affine_attn import AttentionLayer, Mask, attention
from affine_attn.bench.accuracy import Shape, random_inputs
from affine_attn.core import masks
from affine_attn.kernels import launch
from affine_attn.models import AffineAttnForCausalLM, preset
from affine_attn.models.masks import PreparedMask
from tests.support.cases import SPECS

IDS = torch.tensor([[3, 3, 3, 1, 1, 1, 1, 7, 7]])
LENGTHS = [3, 4, 2]


@pytest.fixture
def sorts(monkeypatch) -> list:
    """The ids that have been sorted."""
    made, in_order = [], masks._in_order
    monkeypatch.setattr(masks, "_in_order", lambda ids, contiguous: made.append(ids) or in_order(ids, contiguous))
    return made


@pytest.fixture
def gpu(monkeypatch) -> list[str]:
    """Launches that do nothing on tensors of the CPU, as if Triton ran there: the names of their kernels."""
    launched = []

    class Kernel(SimpleNamespace):
        def __getitem__(self, _):
            return lambda **_: launched.append(self.name)

    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(launch, "function", lambda name: Kernel(name=name))
    return launched


def _leaves(shape: Shape) -> dict:
    inputs = random_inputs(SPECS["affine"], shape)
    return {name: x.requires_grad_() for name, x in inputs.items() if isinstance(x, torch.Tensor)}


def test_ids_are_sorted_once_for_all_layers_of_a_model_and_both_directions(sorts):
    model = AffineAttnForCausalLM(preset("nano", "affine")).train()
    assert len(model.model.layers) > 1
    for _ in range(2):
        batch = torch.randint(0, 256, (1, 9))
        model(batch, document_ids=IDS.clone(), labels=batch).loss.backward()
    assert len(sorts) == 2  # once for each batch


def test_kernels_of_all_layers_and_both_directions_share_one_sort(sorts, gpu):
    inputs = _leaves(Shape(1, 4, 2, 9, 9, 16))
    mask = Mask(documents=IDS.clone())
    for _ in range(3):
        n = mask.count(9, 9, IDS.device)
        attention(**inputs | {"beta": inputs["beta"] / n}, mask=mask, impl="triton").sum().backward()
    assert {"flash.backward_kernels.flash_dq_kernel", "visible_sums.kernels.visible_sums_kernel"} <= set(gpu)
    assert len(sorts) == 1


def test_another_mask_of_the_same_tensors_has_the_same_tables(sorts):
    """FSDP makes a new mask of every layer's, and so does whoever moves one."""
    documents = IDS.clone()
    for window in (None, 2):
        for _ in range(2):
            replace(Mask(documents=documents), window=window).count(9, 9, IDS.device)
    assert len(sorts) == 1


def test_fsdp_with_mixed_precision_sorts_once(sorts, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layers = torch.nn.ModuleList(AttentionLayer(16, 4, 2, attention="affine", init_std=0.3) for _ in range(2))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        x, mask, seen = torch.randn(1, 9, 16), Mask(documents=IDS.clone()), []
        for layer in layers:
            layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
            x = layer(x, mask).float()
        x.sum().backward()
        assert seen[0] is not seen[1]  # each layer has a mask of its own
        assert seen[0].documents is mask.documents
    finally:
        dist.destroy_process_group()
    assert len(sorts) == 1


def test_changed_tensors_have_other_tables(sorts):
    documents, padding = IDS.clone(), torch.ones(1, 9, dtype=torch.bool)
    mask = Mask(documents=documents, padding=padding)
    for change in (lambda: documents.add_(1), lambda: documents[:, 2:].fill_(5), lambda: padding[:, 4:].fill_(False)):
        change()
        found = mask.count(9, 9, IDS.device)[0, 0]
        assert torch.equal(found, mask.visible(9, 9, IDS.device, slice(None), slice(None))[0, 0].sum(-1))
    # A tensor that lies where another lay, with as many changes.
    for _ in range(20):
        other = Mask(documents=documents, padding=torch.rand(1, 9) < 0.5)
        expected = other.visible(9, 9, IDS.device, slice(None), slice(None))[0, 0].sum(-1)
        assert torch.equal(other.count(9, 9, IDS.device)[0, 0], expected)


def test_tables_go_with_their_tensor_and_are_bounded():
    documents = IDS.clone()
    for length in range(1, 40):
        Mask(documents=documents, window=length).count(9, 9, IDS.device)
    assert len(masks._tables[documents]) <= masks._MOST_TABLES
    before = len(masks._tables)
    del documents
    assert len(masks._tables) < before


def test_while_a_graph_is_captured_tables_are_neither_read_nor_remembered(sorts, monkeypatch):
    """Replays copy other documents into the tensor, and what is allocated is the graph's."""
    mask = Mask(documents=IDS.clone())
    mask.documents_in_order()
    monkeypatch.setattr(masks, "_is_captured", lambda _: True)
    mask.documents_in_order()
    mask.documents_in_order()
    monkeypatch.setattr(masks, "_is_captured", lambda _: False)
    mask.documents_in_order()
    assert len(sorts) == 3


def test_two_streams_have_tables_of_their_own(sorts, monkeypatch):
    """One might read what the other has not written yet."""
    mask = Mask(documents=IDS.clone())
    for stream in (1, 2, 1, 2):
        monkeypatch.setattr(masks, "_stream", lambda _, stream=stream: stream)
        mask.documents_in_order()
    assert len(sorts) == 2


def test_recomputation_under_a_mode_counts_on_the_same_operations(sorts):
    """Selective checkpointing pairs the operations of the forward with those of the recomputation."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    layer = AttentionLayer(16, 4, 2, attention="affine", init_std=0.3).train()
    x, mask = torch.randn(1, 9, 16, requires_grad=True), Mask(documents=IDS.clone())
    saved = {torch.ops.aten.sort.stable, torch.ops.aten.searchsorted.Tensor}

    def policy(_, operation, *__, **___):
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(layer, x, mask, use_reentrant=False, context_fn=contexts).sum().backward()
    (expected,) = torch.autograd.grad(layer(x, mask).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_a_prepared_mask_has_one_mask_per_window():
    prepared = PreparedMask(Mask(documents=IDS))
    assert prepared.windowed(None) is prepared.mask
    assert prepared.windowed(4) is prepared.windowed(4)
    given = {"documents": IDS, "contiguous": True, "most_documents": 3, "allowed": torch.ones(1, IDS.shape[1]) > 0}
    windowed = PreparedMask(Mask(**given)).windowed(4)
    assert windowed.window == 4
    assert all(getattr(windowed, name) is value for name, value in given.items())
    moved = prepared.to(torch.device("meta"))
    assert moved.windowed(4).documents.is_meta


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    "given",
    [
        {"lengths": LENGTHS},
        {"lengths": torch.tensor(LENGTHS, dtype=torch.int32)},
        {"cu_seqlens": torch.tensor([0, 3, 7, 9], dtype=torch.int32)},
    ],
    ids=["list", "lengths", "cu_seqlens"],
)
def test_packed_is_documents_without_a_sort(given, window, monkeypatch):
    packed, plain = Mask.packed(**given, window=window), Mask(documents=IDS, window=window)
    assert packed.documents.shape == (1, 9)
    blocks = (9, 9, IDS.device, slice(None), slice(None))
    assert torch.equal(packed.visible(*blocks), plain.visible(*blocks))
    of_ids = plain.documents_in_order(), plain.count(9, 9, IDS.device), plain.first(9, 9, IDS.device)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    found = packed.documents_in_order()
    assert torch.equal(found.first, of_ids[0].first)
    assert torch.equal(found.last, of_ids[0].last)
    assert torch.equal(packed.count(9, 9, IDS.device), of_ids[1])
    assert torch.equal(packed.first(9, 9, IDS.device), of_ids[2])


def test_packed_on_a_gpu_waits_for_nothing():
    """Tokens are told, as the sum of the lengths would be waited for; meta tensors have no numbers at all."""
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="tokens must be given, as the lengths are on meta"):
        Mask.packed(lengths)
    assert Mask.packed(lengths, tokens=9).documents.shape == (1, 9)


def test_tokens_after_the_last_document_are_one_of_their_own():
    assert Mask.packed([2, 1], tokens=5).documents.tolist() == [[0, 0, 1, 2, 2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either lengths or cu_seqlens"),
        ({"lengths": [1], "cu_seqlens": torch.tensor([0, 1])}, "give either lengths or cu_seqlens"),
        ({"lengths": 3}, r"lengths must be a list of integers or an int Tensor \[n\], got int"),
        ({"lengths": torch.tensor([1.0])}, r"lengths must be .*got \[1\] torch.float32"),
        ({"cu_seqlens": [0, 3]}, r"cu_seqlens must be .*got list"),
        ({"lengths": [3, 4], "tokens": 5}, r"documents must end in order, within the 5 tokens, got ends \[3, 7\]"),
        ({"lengths": [-3, 10]}, r"documents must end in order, .*got ends \[-3, 7\]"),
        ({"cu_seqlens": torch.tensor([5, 10])}, r"cu_seqlens must begin with 0, got \[5, 10\]"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, r"cu_seqlens must begin with 0, got \[\]"),
        ({"cu_seqlens": torch.tensor([0, 4, 2])}, r"documents must end in order, .*got ends \[4, 2\]"),
    ],
)
def test_packed_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mask.packed(**arguments)


@pytest.mark.gpu
def test_a_cuda_graph_is_replayed_with_other_documents():
    inputs = random_inputs(SPECS["affine"], Shape(1, 4, 2, 300, 300, 64), torch.bfloat16, "cuda")
    first, second = (torch.arange(300, device="cuda")[None] // length for length in (70, 110))
    documents = first.clone()
    mask = Mask(documents=documents)
    warm_up = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(warm_up):
        for _ in range(3):
            attention(**inputs, mask=mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = attention(**inputs, mask=mask)
    for ids in (second, first):
        documents.copy_(ids)
        graph.replay()
        with torch.no_grad():
            expected = attention(**inputs, mask=Mask(documents=ids.clone()))
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
