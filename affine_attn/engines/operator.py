"""Turns an engine's plain forward and backward into a torch.library operator pair.

Being opaque operators with fake implementations, engines may loop and branch on data and still compile with
``fullgraph=True``, recompute under activation checkpointing and shard. An engine brings two functions:

    forward(call)  -> Output     the result, and what the backward wants back
    backward(call, dy, Output) -> (dq, dk, dv, dsink, dalpha, dbeta, dgate), None where the input is None
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from affine_attn.core.call import Backward, Call, Flat, Forward, Output

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? alpha, Tensor? beta, Tensor? gate, "
    "Tensor? documents, Tensor? padding, Tensor? lengths, bool causal, int? window, float scale, "
    "str logit, float? constant_sink"
)


def on_its_device(function):
    """The same function, run with the device of the call's tensors as the current one. Triton launches on the current
    device, which a model that is spread over several GPUs does not set."""

    @functools.wraps(function)
    def run(call: Call, *rest):
        device = call.q.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return function(call, *rest)

    return run


def register(name: str, forward: Forward, backward: Backward, fake: Forward) -> Callable[[Call], Tensor]:
    """Define ``affine_attn::name`` and its backward; returns the differentiable function of a call."""
    forward, backward = on_its_device(forward), on_its_device(backward)

    def run_backward(dy: Tensor, y: Tensor, out: Tensor, lse: Tensor, sums: Tensor, *flat) -> list[Tensor]:
        gradients = backward(Flat(*flat).call(), dy, Output(y, out, lse, sums))
        # An operator returns tensors only: absent gradients travel as empty ones.
        return [
            dy.new_empty(0) if gradient is None else _laid_out_like(x, gradient)
            for x, gradient in zip(flat[:7], gradients, strict=True)
        ]

    def fake_backward(dy: Tensor, y: Tensor, out: Tensor, lse: Tensor, sums: Tensor, *flat) -> list[Tensor]:
        return [dy.new_empty(0) if x is None else torch.empty_like(x) for x in flat[:7]]

    op = _operator(name, forward, fake)
    op_backward = torch.library.custom_op(
        f"affine_attn::{name}_backward",
        run_backward,
        mutates_args=(),
        schema=f"(Tensor dy, Tensor y, Tensor out, Tensor lse, Tensor sums, {_ARGUMENTS}) -> Tensor[]",
    )
    op_backward.register_fake(fake_backward)
    op_backward.register_autograd(_no_second_derivative)

    def setup_context(ctx, inputs, output):
        tensors, ctx.options = inputs[:10], inputs[10:]
        y, out, lse, sums = output
        # y is kept only where it doubles as the attention output that the backward needs.
        y = y if lse.numel() and not out.numel() else lse.new_empty(0)
        ctx.save_for_backward(y, out, lse, sums, *tensors)
        ctx.set_materialize_grads(False)

    def autograd_backward(ctx, dy, *_):
        y, out, lse, sums, *tensors = ctx.saved_tensors
        if dy is None:
            return (None,) * (len(tensors) + len(ctx.options))
        gradients = op_backward(dy, y, out, lse, sums, *tensors, *ctx.options)
        given = [None if x is None else gradient for x, gradient in zip(tensors[:7], gradients, strict=True)]
        return (*given, *(None,) * (len(tensors) - 7 + len(ctx.options)))

    op.register_autograd(autograd_backward, setup_context=setup_context)

    class Eager(torch.autograd.Function):
        """The same functions without the operator's dispatch, which costs more than a small kernel runs."""

        @staticmethod
        def forward(ctx, *flat):
            output = forward(Flat(*flat).call())
            setup_context(ctx, flat, output)
            return output.y

        # torch declares *grad_outputs and documents naming them, as here.
        @staticmethod
        def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
            if torch.is_grad_enabled():
                # With create_graph=True: the operator will say that it has no derivative. Plain functions would not.
                return autograd_backward(ctx, dy)
            y, out, lse, sums, *tensors = ctx.saved_tensors
            if dy is None:
                return (None,) * (len(tensors) + len(ctx.options))
            if is_legacy_batchedtensor(dy):
                raise RuntimeError(
                    "attention takes no batched gradients (is_grads_batched, vectorize) on its fast engines; "
                    "attention(..., impl='reference') does"
                )
            gradients = backward(Flat(*tensors, *ctx.options).call(), dy, Output(y, out, lse, sums))
            return (*gradients, *(None,) * (len(tensors) - 7 + len(ctx.options)))

    return lambda call: op(*call.flat())[0] if is_traced(call) else Eager.apply(*call.flat())


def _no_second_derivative(ctx, *_):
    raise RuntimeError("attention has no second derivative on its fast engines; attention(..., impl='reference') has")


def register_inference(name: str, forward: Forward, fake: Forward) -> Callable[[Call], Tensor]:
    """The same for an engine without a backward."""
    forward = on_its_device(forward)
    op = _operator(name, forward, fake)
    return lambda call: op(*call.flat())[0] if is_traced(call) else forward(call).y


def _operator(name: str, forward: Forward, fake: Forward):
    def run(*flat) -> tuple[Tensor, ...]:
        return tuple(forward(Flat(*flat).call()))

    schema = f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
    op = torch.library.custom_op(f"affine_attn::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(lambda *flat: tuple(fake(Flat(*flat).call())))
    return op


def is_traced(call: Call) -> bool:
    """Return True under torch.compile or with fake tensors."""
    return torch.compiler.is_compiling() or type(call.q) not in (Tensor, torch.nn.Parameter)


def _laid_out_like(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides its fake promises; stock backwards choose their own."""
    promised = torch.empty_like(x, device="meta")
    if gradient.stride() == promised.stride():
        return gradient
    return torch.empty_like(x).copy_(gradient)
