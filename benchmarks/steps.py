"""Cases made runnable: one function without arguments per case, and the bytes that it cannot avoid to move."""

import functools
import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from affine_attn import VARIANTS, attention, attention_stats
from affine_attn.bench.accuracy import Shape, random_inputs
from affine_attn.core.call import Call, Gradients, Output, checked_call
from affine_attn.engines import needs
from affine_attn.engines.needs import facts_of
from affine_attn.engines.plan import choose
from affine_attn.kernels.epilogue import eager, launch
from affine_attn.kernels.sm90 import backward, forward
from benchmarks.cases import Case

# Enough data between two uses of the same tensor that no cache holds it: five times the L2 of an H200.
_COLD_BYTES, _MOST_SETS = 256 * 2**20, 16

Inputs = dict[str, Any]
Method = Callable[..., Tensor]


class Step(NamedTuple):
    run: Callable[[], object]
    moved: int | None = None  # bytes, each tensor once
    flops: float | None = None


def prepare(case: Case, shape: Shape, mode: str, device: torch.device) -> Step:
    """The case with inputs of its own."""
    if mode == "epilogue":
        return _epilogue(case, shape, device)
    if mode == "decode":
        return _decode(case, shape, device)
    inputs = inputs_of(case, shape, device)
    if case.method == "statistics":
        return Step(functools.partial(attention_stats, **{n: x for n, x in inputs.items() if n not in ("v", "gate")}))
    method, dy = method_of(case), torch.randn_like(inputs["q"])
    # Two matmuls over the causal half of the pairs, and five more in the backward.
    flops = 2.0 * shape.batch * shape.heads * shape.tq * shape.tk * shape.head_dim
    if mode != "forward+backward":
        return Step(torch.no_grad()(lambda: method(**inputs)), flops=flops)
    tensors = [x.requires_grad_() for x in inputs.values() if isinstance(x, Tensor)]
    return Step(lambda: torch.autograd.grad(method(**inputs), tensors, dy), flops=3.5 * flops)


def inputs_of(case: Case, shape: Shape, device: torch.device, seed: int = 0) -> Inputs:
    """Arguments of the case's method: a stock attention takes q, k and v alone."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = random_inputs(VARIANTS[case.variant].spec, shape, dtype, device, seed)
    return {name: inputs[name] for name in "qkv"} if case.is_stock else inputs


def engine_of(case: Case, shape: Shape, mode: str, device: torch.device) -> str:
    """The engine behind an attention of ours; what else there is names itself."""
    if case.method != "auto":
        return case.method
    small = Shape(1, shape.heads, shape.kv_heads, min(shape.tq, 128), min(shape.tk, 128), shape.head_dim)
    inputs = inputs_of(case, small, device)
    if mode == "forward+backward":
        inputs["q"].requires_grad_()
    return choose(facts_of(checked_call(**inputs)))


def method_of(case: Case) -> Method:
    return _METHODS[case.method]


def _plain(backend: SDPBackend | None) -> Method:
    """F.scaled_dot_product_attention pinned to one backend; a single query sees every key without a mask."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)

    return run


def _by(impl: str) -> Method:
    return functools.partial(attention, impl=impl)


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


def _dense(**inputs: Any) -> Tensor:
    return attention(**inputs, impl="reference")


def _product(y: Tensor, gate: Tensor) -> Tensor:
    return y * gate


def _multiply(gate: Tensor, **inputs: Any) -> Tensor:
    """What a gate costs without an epilogue that knows it."""
    return _compiled(_product)(attention(**inputs), gate)


_METHODS: dict[str, Method] = {
    "plain": _plain(None),
    "cudnn": _plain(SDPBackend.CUDNN_ATTENTION),
    "flash": _plain(SDPBackend.FLASH_ATTENTION),
    "auto": attention,
    "decode": _by("decode"),
    "flex": _by("flex"),
    "dense": _dense,
    "dense compiled": lambda **inputs: _compiled(_dense)(**inputs),
    "multiply": _multiply,
}


def ceilings(device: torch.device) -> dict[str, Step]:
    """What the machine can do at best: a long copy, and a large matmul in the precision of the inputs."""
    on_gpu = device.type == "cuda"
    source = torch.empty((1024 if on_gpu else 256) * 2**20, dtype=torch.uint8, device=device)
    target, n = torch.empty_like(source), 8192 if on_gpu else 1024
    a, b = torch.randn(2, n, n, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    return {
        "copy bandwidth": Step(lambda: target.copy_(source), moved=2 * _bytes(source)),
        f"matmul {n} cubed": Step(lambda: a @ b, flops=2.0 * n**3),
    }


def _decode(case: Case, shape: Shape, device: torch.device) -> Step:
    method, inputs = method_of(case), inputs_of(case, shape, device)
    moved = _bytes(inputs["k"], inputs["v"])
    sets = min(_MOST_SETS, -(-_COLD_BYTES // moved))
    rotating = itertools.cycle([inputs, *(inputs_of(case, shape, device, seed) for seed in range(1, sets))])
    return Step(torch.no_grad()(lambda: method(**next(rotating))), moved)


def _epilogue(case: Case, shape: Shape, device: torch.device) -> Step:
    """Time the epilogue on a made-up (o, z), forward or backward, with an attention that costs nothing; ``rows`` is the
    preprocess kernel of the sm90 backward."""
    call = checked_call(**inputs_of(case, shape, device))
    if case.method == "rows":
        rows = backward.Preprocess(call, torch.randn_like(call.q), forward.forward(call))
        return Step(rows.launch, _gradient_bytes(call))
    epilogue: Any = eager if needs.epilogue(facts_of(call)) else launch
    o, z = torch.randn_like(call.q), torch.randn(call.q.shape[:3], device=device)
    # Kernels alone: with nothing to run beside, a second stream would only wait.
    in_line = mock.patch.object(launch, "_LONG", sys.maxsize)

    def finish() -> Output:
        return epilogue.apply_epilogue(call, o, z, epilogue.begin(call))

    if case.method == "finish":
        return Step(in_line(finish), _forward_bytes(call))
    output, dy = finish(), torch.randn_like(call.q)
    of_attention = [torch.zeros_like(x) for x in (call.q, call.k, call.v)]

    def gradients() -> Gradients:
        rows = epilogue.RowGradients(call, dy, output)
        with rows.incoming():
            pass
        return rows.finish(*of_attention)

    return Step(
        in_line(gradients),
        _gradient_bytes(call) + 2 * _values_bytes(call),  # dv, which it adds to
    )


def _forward_bytes(call: Call) -> int:
    """What must be moved, each tensor once: o, v, gate, alpha and beta in, y out; with a sink z in, log-sum-exp out."""
    numbers = _number_bytes(call) + 4 * call.q.shape[:3].numel() * (2 if call.sink is not None else 0)
    return 2 * _bytes(call.q) + _values_bytes(call) + _gate_bytes(call) + numbers


def _gradient_bytes(call: Call) -> int:
    """Return what must be moved: dy, o, v, an elementwise gate, alpha, beta and with a learned sink the log-sum-exp in;
    the gradients of gate, alpha and beta out, and with a gate the gated dy that the attention's backward takes."""
    numbers = 2 * _number_bytes(call) + 4 * call.q.shape[:3].numel() * isinstance(call.sink, Tensor)
    return 2 * _bytes(call.q) + _values_bytes(call) + 3 * _gate_bytes(call) + numbers


def _number_bytes(call: Call) -> int:
    return sum(_bytes(x) for x in (call.alpha, call.beta) if x is not None)


def _values_bytes(call: Call) -> int:
    return 0 if call.beta is None else _bytes(call.v)


def _gate_bytes(call: Call) -> int:
    return 0 if call.gate is None else _bytes(call.gate)


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
