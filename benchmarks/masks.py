"""Times masks, distance logits and decoding on a CPU against the best of torch alone: python -m benchmarks.masks

The peers are those of affine_attn/bench/peers.py; ratios refer to the fastest of them on this machine. What counts is
CPU time, with one thread; cases take turns in every round. `make bench` does the same on a CPU. Rows go to
benchmarks/results/<device>.csv. Ours and every peer are first checked against the reference, at a length that suits it;
the scale-invariant logit, for which torch has none, is timed over plain causal attention.
"""

import argparse
import functools
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn import Alibi, Mask, ScaleInvariant, attention
from affine_attn.bench import peers
from affine_attn.bench.timing import side_by_side
from affine_attn.core.spec import Logit
from benchmarks import record
from benchmarks.record import Row

MODE = "masks"
TOKENS = (512, 2048)
CHECKED = 320
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
DECODED = {"heads": 24, "kv_heads": 8, "head_dim": 128}
WINDOW = 128
# Of a peer's result from the reference, at logits of a few.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
DEVICE = torch.device("cpu")

Peer = Callable[[Tensor, Tensor, Tensor], Tensor]
Functions = dict[str, Callable[[], object]]


class Case(NamedTuple):
    what: str
    mask: Mask
    peers: dict[str, Peer]
    real: Tensor | None = None  # rows that the peers compute, [B, T]; None: all
    logit: Logit | None = None
    yardsticks: dict[str, Peer] = {}  # noqa: RUF012  # they compute something else, and are not checked
    without_backward: dict[str, Peer] = {}  # noqa: RUF012


def documents(tokens: int) -> Case:
    """Documents of exponential lengths, mean 256, at least 16 tokens."""
    generator, lengths = random.Random(0), []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(16, round(generator.expovariate(1 / 256)))))
    mask = Mask.packed(lengths)
    loop = functools.partial(peers.document_loop, lengths=lengths)
    return Case("documents", mask, {"a loop of SDPA": loop, **_dense(mask, tokens)})


def padding(tokens: int, on_the_left: bool) -> Case:
    lengths = [tokens, 3 * tokens // 4, tokens // 2, tokens // 4]
    real = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    real = real.flip(1) if on_the_left else real
    parts = functools.partial(peers.real_parts, lengths=lengths, on_the_left=on_the_left)
    what = f"padding on the {'left' if on_the_left else 'right'}"
    return Case(what, Mask(padding=real), {"SDPA on the real parts": parts}, real)


def padding_of_tokens(tokens: int) -> Case:
    """Padding on the right that is another document too: its queries see nothing."""
    case = padding(tokens, on_the_left=False)
    assert case.real is not None
    mask = Mask(padding=case.real, documents=case.real.byte())
    return case._replace(what="padding on the right, of tokens", mask=mask)


def padding_of_all_rows(tokens: int) -> Case:
    """The same over a peer that computes the queries at padding, too."""
    case = padding(tokens, on_the_left=False)
    what = "padding on the right, over all rows"
    return case._replace(what=what, peers={"SDPA on all rows": peers.causal})


def window(tokens: int) -> Case:
    mask = Mask(window=WINDOW)
    blocks = {
        f"SDPA on blocks of {rows}": functools.partial(peers.window_blocks, window=WINDOW, rows=rows)
        for rows in (32, 64, 128)
        if tokens % rows == 0
    }
    flex = functools.partial(peers.flex_compiled, sees=mask.predicate(tokens, tokens))
    case = Case(f"window of {WINDOW}", mask, {**blocks, **_dense(mask, tokens)})
    return case._replace(without_backward={"FlexAttention, compiled": flex})


def alibi(tokens: int) -> Case:
    slopes = torch.exp2(-torch.arange(1.0, HEADS + 1))[:, None, None]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    mask = torch.where(distance >= 0, -slopes * distance, float("-inf"))[None]
    with_mask = functools.partial(peers.float_mask, mask=mask)
    return Case("alibi", Mask(), {"SDPA with a float mask": with_mask}, logit=Alibi())


def scale_invariant(tokens: int) -> Case:
    """Return the case over plain causal attention, too: torch alone has no operator for it."""
    logit, nothing = ScaleInvariant(), torch.zeros(())

    def coefficients(distance: Tensor) -> tuple[Tensor, Tensor]:
        factor, offset = logit.coefficients(distance, nothing, nothing, HEADS)
        assert factor is not None
        assert offset is not None
        return factor, offset

    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).float()
    factor, offset = coefficients(distance)
    mask = torch.where(distance < 0, float("-inf"), offset)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        a, m = coefficients((i - j).float())
        return a * s + m

    dense = functools.partial(peers.dense_compiled, mask=mask, factor=factor)
    flex = functools.partial(peers.flex_compiled, sees=Mask().predicate(tokens, tokens), score=score)
    return Case(
        "scale_invariant", Mask(), {"dense, compiled": dense}, None, logit,
        {"SDPA, plain scores": peers.causal}, {"FlexAttention, compiled": flex},
    )  # fmt: skip


def _dense(mask: Mask, tokens: int) -> dict[str, Peer]:
    everything = slice(0, tokens)
    visible = mask.visible(tokens, tokens, DEVICE, everything, everything)
    dense = torch.where(visible, 0.0, float("-inf"))
    return {"SDPA with a float mask": functools.partial(peers.float_mask, mask=dense)}


CASES: tuple[Callable[[int], Case], ...] = (
    documents,
    functools.partial(padding, on_the_left=True),
    functools.partial(padding, on_the_left=False),
    padding_of_tokens,
    padding_of_all_rows,
    window,
    alibi,
    scale_invariant,
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="CSV to write; default: that of the device")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        path = options.output or record.results_path(DEVICE)
        machine = record.provenance(DEVICE)
        for tokens in TOKENS:
            for make in CASES:
                # A compiler keeps no more than a few versions of a function.
                torch.compiler.reset()
                check(make(CHECKED))
                rows = training_rows(case := make(tokens), tokens, options.rounds)
                rows += forward_rows(case, tokens, options.rounds)
                record.update(path, [row | machine for row in rows])
        for dtype in (torch.bfloat16, torch.float32):
            record.update(path, [row | machine for row in decoding_rows(dtype, options.rounds)])
    finally:
        torch.set_num_threads(threads)
    print(f"wrote {path}")


def inputs_of(batch: int, tokens: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    found = {x: torch.randn(batch, heads, tokens, HEAD_DIM, generator=generator) for x, heads in shapes.items()}
    found |= {x: torch.rand(batch, HEADS, tokens, generator=generator) for x in ("alpha", "beta")}
    return {name: x.requires_grad_() for name, x in found.items()}


def ours_of(case: Case, inputs: dict[str, Any], impl: str = "auto") -> dict[str, Callable[[], Tensor]]:
    qkv = {name: inputs[name] for name in ("q", "k", "v")}
    options = {"mask": case.mask, "logit": case.logit, "impl": impl}
    return {"softmax": lambda: attention(**qkv, **options), "affine": lambda: attention(**inputs, **options)}


def check(case: Case) -> None:
    """Raise if ours or a peer is not the reference's, values and gradients of q, k and v."""
    inputs = inputs_of(1 if case.real is None else case.real.shape[0], CHECKED)
    exact, ours = ours_of(case, inputs, "reference"), ours_of(case, inputs)
    leaves = [inputs[name] for name in ("q", "k", "v")]
    checked = [(name, ours[name], exact[name]) for name in ours]
    checked += [(name, functools.partial(peer, *leaves), exact["softmax"]) for name, peer in case.peers.items()]
    for name, function, truth in checked:
        (found, gradients), (expected, true_gradients) = (
            _with_gradients(f, leaves, case.real) for f in (function, truth)
        )
        for a, b in zip((found, *gradients), (expected, *true_gradients), strict=True):
            _check_close(f"{case.what}, {name}", a, b, TOLERANCE[torch.float32])

    with torch.no_grad():
        expected = exact["softmax"]()
        for name, peer in case.without_backward.items():
            found = peer(*(x.detach() for x in leaves))
            _check_close(f"{case.what}, {name}", found, expected, TOLERANCE[torch.float32])


def _with_gradients(
    function: Callable[[], Tensor], leaves: list[Tensor], real: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    y = function()
    y = y if real is None else y * real[:, None, :, None]
    return y.detach(), torch.autograd.grad(y.sin().sum(), leaves)


def _check_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((found - expected).abs().max() / (1 + expected.abs().max()))
    if not error <= tolerance:
        raise SystemExit(f"{what} is wrong: {error:.1e} from the reference, allowed is {tolerance:.0e}")


def training_rows(case: Case, tokens: int, rounds: int) -> list[Row]:
    inputs = inputs_of(1 if case.real is None else case.real.shape[0], tokens)
    dy, qkv = torch.randn_like(inputs["q"]), [inputs[name] for name in ("q", "k", "v")]

    def step(function: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(), leaves, dy)

    every = case.peers | case.yardsticks
    rivals = {name: step(functools.partial(peer, *qkv), qkv) for name, peer in every.items()}
    ours = ours_of(case, inputs)
    own = {name: step(ours[name], qkv if name == "softmax" else list(inputs.values())) for name in ours}
    return _timed(case.what, str(tokens), rivals, own, rounds)


@torch.no_grad()
def forward_rows(case: Case, tokens: int, rounds: int) -> list[Row]:
    """Return the rows over peers without a backward, of cases that have one."""
    if not case.without_backward:
        return []
    inputs = {name: x.detach() for name, x in inputs_of(1, tokens).items()}
    every = case.without_backward | case.peers | case.yardsticks
    rivals: Functions = {name: functools.partial(peer, *(inputs[x] for x in "qkv")) for name, peer in every.items()}
    return _timed(f"{case.what}, forward", str(tokens), rivals, {**ours_of(case, inputs)}, rounds)


@torch.no_grad()
def decoding_rows(dtype: torch.dtype, rounds: int, keys: int = 4096) -> list[Row]:
    heads, kv_heads, dim = DECODED.values()
    q = torch.randn(1, heads, 1, dim).to(dtype)
    k, v = (torch.randn(1, kv_heads, keys, dim).to(dtype) for _ in range(2))
    what = f"one query, {heads} heads on {kv_heads}, {str(dtype).removeprefix('torch.')}"
    stock, own = (lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)), (lambda: attention(q, k, v))
    expected = attention(q.double(), k.double(), v.double(), impl="reference")
    for name, function in (("SDPA", stock), ("softmax", own)):
        _check_close(f"{what}, {name}", function().double(), expected, TOLERANCE[dtype])
    return _timed(what, str(keys), {"SDPA, enable_gqa": stock}, {"softmax": own}, rounds)


def _timed(
    what: str,
    shape: str,
    rivals: Functions,
    own: Functions,
    rounds: int,
) -> list[Row]:
    """A row for the fastest peer, and one for each of ours over it."""
    first = next(iter(rivals))
    tried = side_by_side(rivals, first, DEVICE, 3, clock=time.process_time) if len(rivals) > 1 else {}
    fastest = min(tried, key=lambda name: tried[name].ratio) if tried else first
    timings = side_by_side({fastest: rivals[fastest], **own}, fastest, DEVICE, rounds, clock=time.process_time)
    rows = []
    for name, timing in timings.items():
        rows.append({
            "shape": shape, "what": f"{what}: {'torch' if name == fastest else name}", "mode": MODE,
            "engine": name if name == fastest else "auto", "ratio": f"{timing.ratio:.4f}", "baseline": fastest,
            **record.times(timing),
        })  # fmt: skip
        print(f"{what} {shape}: {name} {timing.p50:.2f} ms, {timing.ratio:.2f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
