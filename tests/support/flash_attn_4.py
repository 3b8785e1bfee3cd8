"""A package flash-attn-4 made up in plain torch: the functions that engine ``fa4`` calls, with their conventions.

Layouts [B, T, H, D], or with cu_seqlens [tokens, H, D] and a log-sum-exp [H, tokens]; a window counts keys without the
query's own; causal and windows are aligned at the end of the keys; outputs have a layout of their own.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from affine_attn.engines import needs
from affine_attn.engines.flash_attn_4 import PACKAGE

VERSION = "4.0.0b36"


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
):
    assert return_lse
    assert softmax_scale is not None
    assert k.shape[:-1] == v.shape[:-1]
    out, lse = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype), _empty_rows(q)
    if learnable_sink is not None:
        assert learnable_sink.shape == q.shape[-2:-1]
    for of_q, of_k, of_lse in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        s = _scores(q[of_q], k[of_k], softmax_scale, causal, window_size_left, window_size_right)
        z = s.logsumexp(-1)
        if learnable_sink is not None:
            z = torch.logaddexp(z, learnable_sink.float()[:, None])
        out[of_q] = torch.einsum("hij,jhd->ihd", (s - z[..., None]).exp(), _repeated(v[of_k], q)).to(q.dtype)
        lse[of_lse] = z
    return out, lse, None, None, None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    learnable_sink: Tensor | None = None,
):
    assert softmax_scale is not None
    assert out.shape == dout.shape == (*q.shape[:-1], v.shape[-1])
    assert out.dtype == dout.dtype == q.dtype
    assert 0 not in dout.stride()
    assert lse.shape == _empty_rows(q).shape
    assert lse.is_contiguous()
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    dsink = torch.zeros(q.shape[-2])
    _flash_attn_bwd.deterministic = deterministic
    for of_q, of_k, of_lse in _sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        s = _scores(q[of_q], k[of_k], softmax_scale, causal, window_size_left, window_size_right)
        p = (s - lse[of_lse][..., None]).exp()
        do = dout[of_q].float()
        along = torch.einsum("ihd,ihd->hi", do, out[of_q].float())
        ds = p * (torch.einsum("ihd,jhd->hij", do, _repeated(v[of_k], q)) - along[..., None]) * softmax_scale
        dq[of_q] = torch.einsum("hij,jhd->ihd", ds, _repeated(k[of_k], q))
        dk[of_k] = _summed(torch.einsum("hij,ihd->jhd", ds, q[of_q].float()), k)
        dv[of_k] = _summed(torch.einsum("hij,ihd->jhd", p, do), k)
        if learnable_sink is not None:
            dsink -= ((learnable_sink.float()[:, None] - lse[of_lse]).exp() * along).sum(1)
    gradients = tuple(d.to(x.dtype) for d, x in ((dq, q), (dk, k), (dv, v)))
    return gradients if learnable_sink is None else (*gradients, dsink.to(learnable_sink.dtype))


def _empty_rows(q: Tensor) -> Tensor:
    *batch, tokens, heads, _ = q.shape
    return torch.empty(*batch, heads, tokens)


def _sequences(q: Tensor, k: Tensor, starts_q, starts_k, most_q, most_k):
    """(indices of q, of k, of the log-sum-exp) of each sequence."""
    assert q.dtype == k.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    if starts_q is None:
        yield from (((b,), (b,), (b,)) for b in range(q.shape[0]))
        return
    for starts, x in ((starts_q, q), (starts_k, k)):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        # Each token belongs to a sequence.
        assert starts[0] == 0
        assert starts[-1] == x.shape[0]
    for i in range(starts_q.numel() - 1):
        of_q, of_k = (slice(int(starts[i]), int(starts[i + 1])) for starts in (starts_q, starts_k))
        assert 0 <= of_q.stop - of_q.start <= most_q
        assert 0 <= of_k.stop - of_k.start <= most_k
        yield (of_q,), (of_k,), (slice(None), of_q)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int | None, right: int | None) -> Tensor:
    """[T, H, D] and [S, Hkv, D] -> [H, T, S], -inf where a key is hidden."""
    s = torch.einsum("ihd,jhd->hij", q.float(), _repeated(k, q)) * scale
    back = torch.arange(q.shape[0])[:, None] + (k.shape[0] - q.shape[0]) - torch.arange(k.shape[0])
    right = 0 if causal else right
    hidden = torch.zeros_like(back, dtype=torch.bool)
    if left is not None:
        hidden |= back > left
    if right is not None:
        hidden |= back < -right
    return s.masked_fill(hidden, -torch.inf)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[-2] // x.shape[-2], -2)


def _summed(d: Tensor, k: Tensor) -> Tensor:
    return d.unflatten(1, (k.shape[-2], -1)).sum(2)


def install(monkeypatch, **replaced) -> ModuleType:
    """Let engine ``fa4`` find this package, and take the CPU for a Hopper GPU; return its module."""
    module = ModuleType("flash_attn.cute.interface")
    for function in (_flash_attn_fwd, _flash_attn_bwd):
        setattr(module, function.__name__, replaced.get(function.__name__, function))
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    known = needs.version
    monkeypatch.setattr(needs, "version", lambda package: VERSION if package == PACKAGE else known(package))
    on_cpu = needs.machine_of(torch.device("cpu"), needs.launch.INTERPRETED)
    machine = needs.Machine("cuda", (9, 0), on_cpu.triton)
    monkeypatch.setattr(needs, "_known_machine", lambda *_: machine)
    monkeypatch.setattr(needs, "machine_of", lambda *_, **__: machine._replace(capability=None))
    needs._flash_attn_4_package.cache_clear()
    return module


@pytest.fixture
def flash_attn_4(monkeypatch):
    yield install(monkeypatch)
    monkeypatch.undo()
    needs._flash_attn_4_package.cache_clear()
