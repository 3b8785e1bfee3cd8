"""Attention of other models, said as a call: T5's, Doge's, and the forgetting gate of flash-linear-attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DogeConfig, T5Config
from transformers.models.doge.modeling_doge import DogeAttention
from transformers.models.doge.modeling_doge import apply_rotary_pos_emb as rotated
from transformers.models.t5.modeling_t5 import T5Attention

from affine_attn import Mask, attention

B, T = 2, 11
IMPLS = ("auto", "blocked", "reference")


def _assert_same(module: nn.Module, x: Tensor, theirs, ours) -> None:
    """y, and the gradients of x and of every parameter; their softmax has 32 bits."""
    leaves = [x.requires_grad_(), *module.parameters()]
    dy = torch.randn_like(x)
    found = []
    for function in (theirs, ours):
        y = function(x)
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def _in_double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def _in_heads(x: Tensor, width: int) -> Tensor:
    return x.unflatten(2, (-1, width)).transpose(1, 2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_decoder", [False, True], ids=["encoder", "decoder"])
def test_t5_with_its_position_bias(is_decoder, impl):
    config = T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=is_decoder, dropout_rate=0.0)
    config._attn_implementation = "eager"
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1) if is_decoder else torch.zeros(T, T, dtype=torch.bool)
    mask = torch.zeros(1, 1, T, T).masked_fill(hidden, -torch.inf)

    def theirs(x: Tensor) -> Tensor:
        return module(x, mask=mask)[0]

    def ours(x: Tensor) -> Tensor:
        q, k, v = (_in_heads(projection(x), 8) for projection in (module.q, module.k, module.v))
        bias = module.compute_bias(T, T)
        y = attention(q, k, v, Mask(causal=is_decoder), scale=1.0, bias=bias, impl=impl)
        return module.o(y.transpose(1, 2).flatten(2))

    _assert_same(module, torch.randn(B, T, 32), theirs, ours)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("most_keys", [T, 4])
def test_doge_with_its_dynamic_mask(most_keys, impl):
    """From most_keys on it drops the keys of the smallest bias, for each query and kv head."""
    config = DogeConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, keep_window_size=most_keys, attention_dropout=0.0
    )
    config._attn_implementation = "eager"
    module = DogeAttention(config, layer_idx=0)
    nn.init.normal_(module.A)
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    angles = torch.randn(1, T, 4).repeat(1, 1, 2)

    def theirs(x: Tensor) -> Tensor:
        return module(x, (angles.cos(), angles.sin()), seen[None, None].expand(B, 1, T, T))[0]

    def ours(x: Tensor) -> Tensor:
        q, k = (
            module.q_norm(module.q_proj(x).unflatten(2, (-1, 8))),
            module.k_norm(module.k_proj(x).unflatten(2, (-1, 8))),
        )
        q, k = rotated(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin())
        values = module.v_proj(x)
        bias = torch.exp(module.A * F.softplus(module.dt_proj(values))).mT[:, :, None]
        kept = bias.where(seen, -torch.inf).topk(min(most_keys, T), -1).indices
        allowed = torch.zeros(B, 2, T, T, dtype=torch.bool).scatter(3, kept, True)
        mask = Mask(allowed=allowed.repeat_interleave(2, 1))
        y = attention(q, k, _in_heads(values, 8), mask, bias=bias.repeat_interleave(2, 1), impl=impl)
        return module.o_proj(y.transpose(1, 2).flatten(2))

    _assert_same(module, torch.randn(B, T, 32), theirs, ours)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_forgetting_gate(impl):
    """The weight of a key is multiplied by the gates of all tokens after it, up to the query's own."""
    shapes = {"q": (B, 4, T, 8), "k": (B, 2, T, 8), "v": (B, 2, T, 8), "logits": (B, T, 4)}
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes.values()]

    def by_products(q, k, v, logits):
        gates = torch.sigmoid(logits).transpose(1, 2)
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        rows = []
        for i in range(T):
            left = torch.stack([gates[..., j + 1 : i + 1].prod(-1) for j in range(i + 1)], -1)
            p = left * torch.exp((q[:, :, i : i + 1] * 8**-0.5 * k[:, :, : i + 1]).sum(-1))
            rows.append((p / p.sum(-1, keepdim=True))[..., None, :] @ v[:, :, : i + 1])
        return torch.cat(rows, 2)

    def as_a_call(q, k, v, logits):
        g = F.logsigmoid(logits)
        return attention(q, k, v, bias=-g.transpose(1, 2).cumsum(-1)[:, :, None], impl=impl)

    dy = torch.randn(B, 4, T, 8)
    found = []
    for function in (by_products, as_a_call):
        y = function(*inputs)
        found.append((y, *torch.autograd.grad(y, inputs, dy)))
    torch.testing.assert_close(found[1], found[0])
