"""``AttentionLayer``: projections, positions, the parameters of the stages, and one call to ``attention``."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from affine_attn.api import attention
from affine_attn.core.masks import Mask
from affine_attn.core.spec import GATES, LEARNED_GATE, AttentionSpec, LogN, check_counts
from affine_attn.core.variants import name_of, variant
from affine_attn.nn.alpha import AlphaGate
from affine_attn.nn.rope import Rope, rotate


class KeyValueCache(Protocol):
    """What the layer asks of a key/value cache; every Hugging Face cache has it."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...


class AttentionLayer(nn.Module):
    """Causal self-attention of any member of the family, [B, T, dim] -> [B, T, dim].

    attention: a variant's name or an ``AttentionSpec``. kv_heads: by default as many as heads. head_dim: by default
    dim / heads. qkv_bias, out_bias: biases of the projections. qk_norm: RMSNorm on the heads of q and k, with norm_eps.
    rope: None for no positions. layer_idx: the layer's number in a cache. init_std: of weights and learned sinks.

    The gates read the same (normed) hidden state as q_proj. Submodules are named as in Hugging Face Llama models.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        attention: AttentionSpec | str = "affine",
        qkv_bias: bool = False,
        qk_norm: bool = False,
        rope: Rope | None = Rope(),
        norm_eps: float = 1e-6,
        init_std: float = 0.02,
        layer_idx: int = 0,
        out_bias: bool = False,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        given = {} if head_dim is None else {"head_dim": head_dim}
        check_counts("AttentionLayer", dim=dim, heads=heads, kv_heads=kv_heads, **given)
        check_counts("AttentionLayer", 0, layer_idx=layer_idx)
        if heads % kv_heads:
            raise ValueError(f"AttentionLayer: heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
        if head_dim is None and dim % heads:
            raise ValueError(f"AttentionLayer: dim ({dim}) must be a multiple of heads ({heads}), or give head_dim")
        if not isinstance(attention, AttentionSpec | str):
            raise ValueError(
                f"AttentionLayer: attention must be a variant's name or an AttentionSpec, got {attention!r}"
            )
        if not isinstance(rope, Rope | None):
            raise ValueError(f"AttentionLayer: rope must be a Rope or None, got {rope!r}")
        self.spec = variant(attention) if isinstance(attention, str) else attention
        # What a forward reads of it, as plain values: see AlphaGate.
        self.logit, self.sink, self.gate = self.spec.logit, self.spec.sink, self.spec.gate
        self.heads, self.kv_heads = heads, kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        if rope is not None and self.head_dim % 2:
            raise ValueError(f"AttentionLayer: head_dim must be even for RoPE, got {self.head_dim}; or give rope=None")
        self.rope, self.layer_idx, self.init_std = rope, layer_idx, init_std
        width = heads * self.head_dim
        self.q_proj = nn.Linear(dim, width, bias=qkv_bias)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(width, dim, bias=out_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.alpha = AlphaGate(dim, heads, self.spec.affine, init_std) if self.spec.affine else None
        self.sinks = nn.Parameter(torch.empty(heads)) if self.spec.sink == "learned" else None
        gate = self.spec.projected_gate
        self.attn_gate = nn.Linear(dim, width if gate.per_channel else heads, bias=False) if gate else None
        self.gate_scale = nn.Parameter(torch.empty(heads)) if self.spec.gate == "learned" else None
        self.logn_scale = nn.Parameter(torch.empty(heads)) if isinstance(self.spec.scores.logit, LogN) else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.alpha is not None:
            self.alpha.reset_parameters()
        if self.sinks is not None:
            nn.init.normal_(self.sinks, std=self.init_std)
        if self.logn_scale is not None and isinstance(logit := self.spec.scores.logit, LogN):
            nn.init.constant_(self.logn_scale, logit.start)
        if self.attn_gate is not None and (gate := self.spec.projected_gate) and gate.starts_at_zero:
            nn.init.zeros_(self.attn_gate.weight)
        if self.gate_scale is not None:
            nn.init.constant_(self.gate_scale, LEARNED_GATE)

    def extra_repr(self) -> str:
        spec = name_of(self.spec) or repr(self.spec)
        return f"{spec}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"

    def forward(
        self,
        x: Tensor,
        mask: Mask = Mask(),
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
        impl: str = "auto",
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]. positions: [B or 1, T] for RoPE, by default 0 to T - 1; a cache needs them.

        mask: over all keys, the cached ones included. impl: as in :func:`attention`.
        """
        if x.ndim != 3:
            raise ValueError(f"AttentionLayer: x must be [batch, tokens, dim], got {list(x.shape)}")
        if not isinstance(mask, Mask):
            raise ValueError(f"AttentionLayer: mask must be a Mask, got {type(mask).__name__}")
        # A single position would be broadcast to all tokens.
        if positions is not None and positions.shape not in (x.shape[:2], (1, x.shape[1]), x.shape[1:2]):
            raise ValueError(f"AttentionLayer: positions must be [B or 1, T] of x, got {list(positions.shape)}")
        if cache is None and mask.lengths is not None:
            raise ValueError(
                "AttentionLayer: mask.lengths counts filled slots of a cache; without one give mask.padding"
            )
        # Keys are cached rotated, so positions must be known before the cache grows.
        if cache is not None and self.rope is not None and positions is None:
            raise ValueError("AttentionLayer: positions must be given together with a cache")
        q, k, v = self.project(x)
        if self.rope is not None:
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device)[None]
            cos, sin = self.rope.table(positions, self.head_dim)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        # Before alpha counts the tokens that it leaves visible; attention would say so too late.
        mask.check((*q.shape[:3], k.shape[2]), x.device)
        y = self.attend(x, q, k, v, mask, impl)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, D], k and v [B, Hkv, T, D], normed but not rotated."""
        v = _split(self.v_proj(x), self.head_dim)
        # Autocast on CUDA returns norms in fp32; q, k and v share a dtype.
        q = self.q_norm(_split(self.q_proj(x), self.head_dim)).to(v.dtype)
        k = self.k_norm(_split(self.k_proj(x), self.head_dim)).to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, impl: str = "auto") -> Tensor:
        """The stages: everything that depends on the spec, between the projections and o_proj; y [B, H, T, D]."""
        return attention(**self.arguments(x, q, k, v, mask), impl=impl)

    def arguments(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> dict[str, Any]:
        """Those of ``attention``: what ``stages`` returns, once those who ``observe`` the layer have seen it."""
        call = self.stages(x, q, k, v, mask)
        # Nothing of it is in a compiled graph, nor is it asked there.
        if not torch.compiler.is_compiling():
            for visit in tuple(_visits.get(self, ())):
                visit(self, call)
        return call

    def stages(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> dict[str, Any]:
        """The arguments of ``attention``: the parameters of the stages applied to x [B, T, dim].

        q [B, H, T, D] belongs to x; k and v [B, Hkv, keys, D] may hold cached tokens before it.
        """
        alpha = beta = gate = None
        if self.alpha is not None:
            alpha = self.alpha(x, None if mask.padding is None else mask.padding[:, -x.shape[1] :])
            beta = self.alpha.beta(alpha, mask, k.shape[2])
        if isinstance(self.gate, str) and self.attn_gate is not None:
            activation = GATES[self.gate].activation
            # The heads of q, not of the spec: under tensor parallelism a rank has only its own.
            gate = activation(self.attn_gate(x))
            gate = _split(gate, gate.shape[-1] // q.shape[1]).transpose(1, 2)
        elif self.gate_scale is not None:
            gate = self.gate_scale.float()[:, None, None] * _ones(q)
        elif self.gate is not None:
            gate = self.gate * _ones(q)
        if self.logn_scale is not None:
            q = q * self.logn_scale.to(q.dtype)[:, None, None]
        sink = self.sinks if self.sink == "learned" else self.sink
        return {
            "q": q, "k": k, "v": v, "mask": mask, "logit": self.logit,
            "sink": sink, "alpha": alpha, "beta": beta, "gate": gate,
        }  # fmt: skip


def head_parameters(model: nn.Module) -> set[str]:
    """Names of learned sinks and scales, a number per head: weight decay would pull them to a value that means
    something else than "off", a sink to one more key with a score of 0, a scale to an attention that says nothing."""
    return {
        name
        for prefix, module in model.named_modules()
        if isinstance(module, AttentionLayer)
        for name, _ in module.named_parameters(prefix, recurse=False)
    }


def _ones(q: Tensor) -> Tensor:
    """A gate of 1 for every row, fp32: one that does not depend on x scales it."""
    return torch.ones(*q.shape[:3], 1, dtype=torch.float32, device=q.device)


Visit = Callable[[AttentionLayer, dict[str, Any]], None]
# Of the layers that are observed now.
_visits: dict[AttentionLayer, list[Visit]] = {}


@contextmanager
def observe(layers: Iterable[AttentionLayer], visit: Visit) -> Iterator[None]:
    """While open, show ``visit`` the arguments of ``attention`` in every call of these layers, before it runs.

    Compiled layers run uncompiled meanwhile: they would go on as they were compiled and show nothing.
    """
    observed = list(layers)
    for layer in observed:
        _visits.setdefault(layer, []).append(visit)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for layer in observed:
            _visits[layer].remove(visit)
            if not _visits[layer]:
                del _visits[layer]


def _split(x: Tensor, size: int) -> Tensor:
    """The last dimension in pieces of that size: unflatten, which torch.compile cannot trace while a default device is
    set. It would cut the graph there."""
    return x.view(*x.shape[:-1], x.shape[-1] // size, size)
