"""Statistics of whole models, against the weights that ``output_attentions`` shows."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from affine_attn import AttentionLayer, Mask
from affine_attn.models.collect import collect_statistics
from affine_attn.nn.alpha import alpha_gates
from affine_attn.nn.layer import observe
from tests.support.hf import SIZES, left_padded, tiny_model


def sequences(seed: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ["softmax", "sink", "affine", "affine_gated", "scale_invariant"])
def test_statistics_are_those_of_the_weights(attention):
    """Two batches of different sizes, one of them packed: means are over all queries alike."""
    model = tiny_model(attention)
    packed = torch.tensor([[*range(7), *range(5)]]).expand(3, -1)
    batches = [{"input_ids": sequences(0, 3, 12), "position_ids": packed}, {"input_ids": sequences(1, 1, 9)}]
    found = collect_statistics(model, batches, queries=True)
    weights = [model(**batch, output_attentions=True).attentions for batch in batches]
    for index, layer in enumerate(found):
        here = [part[index] for part in weights]
        row_sum = torch.cat([w.sum(-1).transpose(0, 1).flatten(1) for w in here], 1)
        torch.testing.assert_close(layer.row_sum, row_sum.mean(1), rtol=1e-4, atol=1e-5)
        first = [w[..., 0].transpose(0, 1).clone() for w in here]
        first[0][:, :, 7:] = here[0][:, :, 7:, 7].transpose(0, 1)
        torch.testing.assert_close(
            layer.first_token, torch.cat([part.flatten(1) for part in first], 1).mean(1), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(layer.queries[1].row_sum, here[1].sum(-1), rtol=1e-4, atol=1e-5)
        assert len(layer.queries) == 2
        assert (layer.max_logit >= layer.mean_logit).all()
        if attention == "softmax":
            entropy = torch.cat([-torch.xlogy(w, w).sum(-1).transpose(0, 1).flatten(1) for w in here], 1)
            torch.testing.assert_close(layer.entropy, entropy.mean(1), rtol=1e-4, atol=1e-5)
            assert not layer.sink_mass.any()
        if attention == "sink":
            torch.testing.assert_close(layer.sink_mass, 1 - row_sum.mean(1), rtol=1e-4, atol=1e-5)
        if "affine" not in attention:
            assert layer.alpha is layer.alpha_ma is layer.alpha_saturated is None
            assert layer.query_alpha == []


def test_tokens_alone_are_a_batch():
    model, tokens = tiny_model("affine"), sequences(0, 2, 9)
    (expected, *_) = collect_statistics(model, [{"input_ids": tokens}])
    for given in (tokens, {"input_ids": tokens}):
        torch.testing.assert_close(collect_statistics(model, given)[0].row_sum, expected.row_sum)
    assert collect_statistics(model, tokens[0])[0].row_sum.isfinite().all()


def test_mean_logit_weighs_every_visible_pair_alike():
    model = tiny_model("softmax")
    batches = [{"input_ids": sequences(0, 1, 5)}, {"input_ids": sequences(1, 1, 12)}]
    layer = collect_statistics(model, batches, queries=True)[1]
    short, long = (stats.mean_logit[0] for stats in layer.queries)
    torch.testing.assert_close(layer.mean_logit, (15 * short + 78 * long) / 93)


@pytest.mark.parametrize("attention", ["softmax", "affine"])
def test_heads_that_see_different_pairs(attention):
    """The first batch has one mask for all heads, the second one for each."""
    layer = AttentionLayer(16, 4, 2, attention=attention, init_std=0.5)
    by_head = torch.rand(2, 4, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.4
    batches = [(torch.randn(1, 5, 16), Mask()), (torch.randn(2, 9, 16), Mask(allowed=by_head))]
    calls = []
    with observe([layer], lambda _, call: calls.append(call)):
        (found,) = collect_statistics(torch.nn.ModuleList([layer]), batches, forward=lambda batch: layer(*batch))
    total, count, entropies = torch.zeros(4), torch.zeros(4), []
    for call in calls:
        q, k, mask = call["q"], call["k"], call["mask"]
        visible = mask.visible(q.shape[2], k.shape[2], q.device, slice(0, q.shape[2]), slice(0, k.shape[2]))
        logits = q @ k.repeat_interleave(2, 1).mT * q.shape[3] ** -0.5
        total += torch.where(visible, logits, 0.0).sum((0, 2, 3))
        count += visible.expand_as(logits).sum((0, 2, 3))
        p = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
        entropies.append(-torch.xlogy(p, p).sum(-1).transpose(0, 1).flatten(1))
    torch.testing.assert_close(found.mean_logit, total / count)
    if attention == "softmax":
        torch.testing.assert_close(found.entropy, torch.cat(entropies, 1).mean(1))


def test_alpha_and_its_saturation():
    model = tiny_model("affine")
    gate = alpha_gates(model)[1]
    with torch.no_grad():
        # One token in the sequence drives head 2 to the end of its range, whatever the rest does.
        gate.w_a.zero_()
        gate.w_a[2] = 100 * model.model.layers[1].input_layernorm.weight
    layer = collect_statistics(model, [{"input_ids": sequences(0, 2, 8)}], queries=True)[1]
    assert layer.alpha[[0, 1, 3]].tolist() == pytest.approx([0.5] * 3)
    assert layer.alpha_saturated[[0, 1, 3]].tolist() == [0, 0, 0]
    alpha = layer.query_alpha[0]
    assert layer.alpha_saturated[2] == ((alpha[:, 2] == 0) | (alpha[:, 2] == 1)).float().mean() > 0.5
    torch.testing.assert_close(layer.alpha, alpha.mean((0, 2)))
    assert torch.equal(layer.alpha_ma, gate.alpha_ma)


def test_compiled_layers_are_seen_too():
    model, batches = tiny_model("affine"), [{"input_ids": sequences(0, 2, 12)}]
    expected = collect_statistics(model, batches)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with torch.no_grad():
        model.model(**batches[0], use_cache=False)
    for mine, truth in zip(collect_statistics(model, batches), expected, strict=True):
        assert torch.equal(mine.entropy, truth.entropy)


def test_the_model_is_left_as_it_was():
    model = tiny_model("affine").train()
    model.model.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = collect_statistics(model, [{"input_ids": sequences(0, 2, 8)}])
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not gate._count.any() for gate in alpha_gates(model))
    assert all("stages" not in layer.self_attn.__dict__ for layer in model.model.layers)
    assert not any(layer.row_sum.requires_grad for layer in found)


def test_what_a_user_put_on_a_layer_is_respected_and_stays():
    """Sinks that are tried out, say, without a model of their own."""
    model, batches = tiny_model("softmax"), [{"input_ids": sequences(0, 2, 8)}]
    plain = collect_statistics(model, batches)
    layer = model.model.layers[1].self_attn

    def with_sink(*arguments):
        return type(layer).stages(layer, *arguments) | {"sink": 2.0}

    layer.stages = with_sink
    found = collect_statistics(model, batches)
    assert layer.stages is with_sink
    assert not found[0].sink_mass.any()
    assert found[1].sink_mass.min() > 0
    assert torch.equal(found[1].max_logit, plain[1].max_logit)


def test_observers_see_calls_while_they_look_and_not_after_an_exception():
    layer, x, seen = AttentionLayer(16, 4).eval(), torch.randn(1, 3, 16), []
    with observe([layer], lambda _, call: seen.append(call)), observe([layer], lambda _, call: seen.append(call)):
        layer(x)
    assert len(seen) == 2
    assert seen[0]["q"].shape == (1, 4, 3, 4)
    with pytest.raises(ValueError, match="x must be"), observe([layer], lambda _, call: seen.append(call)):
        layer(x[0])
    layer(x)
    assert len(seen) == 2


def test_nobody_pays_for_observers_in_a_compiled_layer():
    """It is compiled once, whether somebody looks in between or not."""
    torch._dynamo.reset()
    layer, x, graphs = AttentionLayer(16, 4).eval(), torch.randn(1, 3, 16), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    layer.compile(backend=backend, fullgraph=True)
    expected, seen = layer(x), []
    with observe([layer], lambda _, call: seen.append(call)):
        torch.testing.assert_close(layer(x), expected)
    layer(x)
    assert len(graphs) == len(seen) == 1


def test_a_forward_of_ones_own_runs_as_in_evaluation():
    model, seen = tiny_model("affine").train(), []

    def forward(batch):
        # Without a cache, whose keys lie in another order and are multiplied with another rounding.
        model(**batch, use_cache=False)
        seen.append((model.training, torch.is_grad_enabled()))

    batch = {"input_ids": sequences(0, 2, 8)}
    own, plain = collect_statistics(model, [batch], forward=forward), collect_statistics(model, [batch])
    assert seen == [(False, False)]
    assert all(torch.equal(a.entropy, b.entropy) for a, b in zip(own, plain, strict=True))


def test_mistakes_are_said():
    model = tiny_model("affine")
    tokens, mask = left_padded()
    with pytest.raises(ValueError, match="without padding"):
        collect_statistics(model, [{"input_ids": tokens, "attention_mask": mask}])
    assert all("stages" not in layer.self_attn.__dict__ for layer in model.model.layers)
    with pytest.raises(ValueError, match="no batches"):
        collect_statistics(model, [])
    plain = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no attention of affine_attn"):
        collect_statistics(plain, [])
