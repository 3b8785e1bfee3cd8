"""Turns an engine's plain forward and backward into a differentiable function of a call.

Eager calls run the two as they are. Under a compiler, with fake tensors and in an export they are a torch.library
operator pair: being opaque, with fake implementations, engines may loop and branch on data and still compile with
``fullgraph=True``, recompute under activation checkpointing and shard. An engine brings

    forward(call, plan)  -> Output     the result, and what the backward wants back
    backward(call, plan, dy, Output) -> Gradients, None where the input is None
    fake(call, facts) -> Output        shapes and strides, known from facts alone
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from affine_attn.core.call import Call, Gradients, Options, Output
from affine_attn.core.masks import Mask
from affine_attn.core.spec import Logit, logit_of_kind
from affine_attn.engines.needs import Facts, facts_of, sizes_of
from affine_attn.engines.plan import Plan, facts_now, kernels, runnable
from affine_attn.errors import UserError

Forward = Callable[[Call, Plan], Output]
Backward = Callable[[Call, Plan, Tensor, Output], Gradients]
Fake = Callable[[Call, Facts], Output]
Run = Callable[[Call, Facts], Tensor]

# A call as the arguments of an operator: tensors that have gradients, those of its mask, then what is no tensor. Names,
# types and places follow from the fields of Gradients, Mask and Options.
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int | None: "int?", float: "float"}
_TYPES |= {float | None: "float?", Logit | None: "str"}
_OF_MASK = {name: _TYPES[kind] for name, kind in Mask.__annotations__.items()}
_FIELDS = {name: _TYPES[kind] for name, kind in Gradients.__annotations__.items()}
_GRADIENTS = len(_FIELDS)
_FIELDS |= {name: kind for name, kind in _OF_MASK.items() if kind == "Tensor?"}
_TENSORS = len(_FIELDS)
_FIELDS |= _OF_MASK | {name: _TYPES[kind] for name, kind in Options.__annotations__.items()}
_MASK = tuple(name for name in _FIELDS if name in _OF_MASK)
_ARGUMENTS = ", ".join(f"{kind} {name}" for name, kind in _FIELDS.items())


def flatten(call: Call) -> tuple[Any, ...]:
    """Return a call as the arguments of an operator."""
    options = (encode_logit(x) if _FIELDS[name] == "str" else x for name, x in call.options._asdict().items())
    return *call.tensors, *(getattr(call.mask, name) for name in _MASK), *options


def unflatten(flat: tuple[Any, ...]) -> Call:
    """Return the call of :func:`flatten`."""
    end = _GRADIENTS + len(_MASK)
    options = Options._make(decode_logit(x) if isinstance(x, str) else x for x in flat[end:])
    mask = Mask(**dict(zip(_MASK, flat[_GRADIENTS:end], strict=True)))
    return Call.of(options, mask, *flat[:_GRADIENTS])


def encode_logit(logit: Logit | None) -> str:
    """One string for a logit: custom operators take strings, not objects."""
    if logit is None:
        return ""
    # __match_args__ are the fields of a dataclass, in a form that a compiler can trace.
    values = [getattr(logit, name) for name in logit.__match_args__]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        raise UserError(f"the parameters of a logit must be int or float, got {logit!r}")
    if torch.compiler.is_compiling():
        # A number that was another before, in another layer say, is a variable to the compiler; a name needs its value.
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        values = [guard_scalar(value) for value in values]
    return " ".join([logit.kind, *(str(value) for value in values)])


def decode_logit(text: str) -> Logit | None:
    if not text:
        return None
    name, *values = text.split(" ")
    kind: Any = logit_of_kind(name)
    # Those that __match_args__ leaves out would have their defaults, whatever the call had.
    if any(field.kw_only or not field.init for field in dataclasses.fields(kind)):
        raise UserError(f"a compiled call needs a logit whose fields are positional, {kind.__name__} has others")
    return kind(*(float(value) if _is_float(value) else int(value) for value in values))


def _is_float(text: str) -> bool:
    return not text.lstrip("-").isdecimal()


def on_its_device(function):
    """The same function, run with the device of the call's tensors as the current one. Triton launches on the current
    device, which a model that is spread over several GPUs does not set."""

    @functools.wraps(function)
    def run(call: Call, *rest):
        device = call.q.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(call, *rest)
        with torch.cuda.device(device):
            return function(call, *rest)

    return run


def register(name: str, forward: Forward, backward: Backward, fake: Fake, without: tuple[str, ...] = ()) -> Run:
    """Define ``affine_attn::name`` and its backward; return the differentiable function of a call.

    ``without``: inputs that it has no gradient for, and refuses where they need one.
    """
    has_gradient = [field not in without for field in Gradients._fields]

    planned = _planned(name, forward)

    @on_its_device
    def planned_backward(call: Call, facts: Facts, dy: Tensor, output: Output) -> Gradients:
        # From the tensors that it is given: hooks may have laid them out otherwise.
        return backward(call, kernels(name, facts, sizes_of(call, facts)), dy, output)

    def run_backward(dy: Tensor, y: Tensor, out: Tensor, lse: Tensor, sums: Tensor, *flat) -> list[Tensor]:
        call = unflatten(flat)
        # Gradients are asked for, whatever the grad mode is inside of an operator.
        saved = Output(y, _given(out), _given(lse), _given(sums))
        gradients = planned_backward(call, runnable(name, facts_of(call)._replace(has_grad=True)), dy, saved)
        # An operator returns tensors only: absent gradients travel as empty ones.
        return [
            dy.new_empty(0) if gradient is None else _laid_out_like(x, gradient)
            for x, gradient in zip(flat[:_GRADIENTS], gradients, strict=True)
        ]

    def fake_backward(dy: Tensor, y: Tensor, out: Tensor, lse: Tensor, sums: Tensor, *flat) -> list[Tensor]:
        return [
            torch.empty_like(x) if x is not None and is_there else dy.new_empty(0)
            for x, is_there in zip(flat[:_GRADIENTS], has_gradient, strict=True)
        ]

    def given(tensors: list[Tensor | None], gradients: list[Tensor]) -> list[Tensor | None]:
        """Return gradients of the operator, without the empty ones."""
        found = zip(tensors[:_GRADIENTS], gradients, has_gradient, strict=True)
        return [gradient if x is not None and is_there else None for x, gradient, is_there in found]

    op = _operator(name, planned, fake)
    op_backward = torch.library.custom_op(
        f"affine_attn::{name}_backward",
        run_backward,
        mutates_args=(),
        schema=f"(Tensor dy, Tensor y, Tensor out, Tensor lse, Tensor sums, {_ARGUMENTS}) -> Tensor[]",
    )
    op_backward.register_fake(fake_backward)
    op_backward.register_autograd(_no_second_derivative)

    def setup_context(ctx, inputs, output):
        tensors, ctx.options = inputs[:_TENSORS], inputs[_TENSORS:]
        y, out, lse, sums = output
        # y is kept only where it doubles as the attention output that the backward needs.
        ctx.save_for_backward(y if lse.numel() and not out.numel() else lse.new_empty(0), out, lse, sums, *tensors)
        ctx.set_materialize_grads(False)

    def autograd_backward(ctx, dy, *_):
        y, out, lse, sums, *tensors = ctx.saved_tensors
        if dy is None:
            return (None,) * len(_FIELDS)
        gradients = op_backward(dy, y, out, lse, sums, *tensors, *ctx.options)
        return (*given(tensors, gradients), *(None,) * (len(_FIELDS) - _GRADIENTS))

    op.register_autograd(autograd_backward, setup_context=setup_context)

    class Eager(torch.autograd.Function):
        """The same functions without the operator's dispatch, which costs more than a small kernel runs."""

        @staticmethod
        def forward(ctx, call: Call, facts: Facts, *tensors):
            output = planned(call, facts)
            # Of the call the options and the mask alone: what else it holds is saved, where hooks can see it.
            y, out, lse, sums, ctx.is_clean = output
            ctx.facts, ctx.options, ctx.mask = facts, call.options, call.mask
            kept = y if out is None and lse is not None else None
            # Those of the mask too, so that a change of one in place is told.
            ctx.save_for_backward(kept, out, lse, sums, *tensors, *call.mask.tensors.values())
            ctx.set_materialize_grads(False)
            return y

        # torch declares *grad_outputs and documents naming them, as here.
        @staticmethod
        def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
            y, out, lse, sums, *tensors = ctx.saved_tensors
            if dy is None:
                return (None,) * (2 + _GRADIENTS)
            if is_legacy_batchedtensor(dy):
                raise RuntimeError(
                    "attention takes no batched gradients (is_grads_batched, vectorize) on its fast engines; "
                    "attention(..., impl='reference') does"
                )
            call = Call.of(ctx.options, ctx.mask, *tensors[:_GRADIENTS])
            if torch.is_grad_enabled():
                # With create_graph=True: the operator will say that it has no derivative. Plain functions would not.
                saved = Output(dy.new_empty(0) if y is None else y, out, lse, sums)
                found = op_backward(dy, *_filled(saved), *flatten(call))
                gradients = given(tensors, found)
            else:
                saved = Output(y, out, lse, sums, ctx.is_clean)
                gradients = planned_backward(call, facts_now(name, ctx.facts), dy, saved)
            return (None, None, *gradients)

    def run(call: Call, facts: Facts) -> Tensor:
        if facts.is_traced:
            return op(*flatten(call))[0]
        return Eager.apply(call, facts, *call.tensors) if facts.has_grad else planned(call, facts).y

    return run


def _filled(output: Output) -> tuple[Tensor, ...]:
    """Return an output as an operator has it: what is not there is an empty tensor, and row statistics are dense."""
    y, out, lse, sums, _ = output
    of_rows = y if lse is None else lse
    return (
        y,
        y.new_empty(0) if out is None else out,
        of_rows.new_empty(0) if lse is None else lse.contiguous(),
        of_rows.new_empty(0) if sums is None else sums,
    )


def _given(x: Tensor) -> Tensor | None:
    """Return what :func:`_filled` was given in the place of this tensor."""
    return x if x.numel() else None


def _no_second_derivative(ctx, *_):
    raise RuntimeError("attention has no second derivative on its fast engines; attention(..., impl='reference') has")


def register_inference(name: str, forward: Forward, fake: Fake) -> Run:
    """The same for an engine without a backward."""

    planned = _planned(name, forward)
    op = _operator(name, planned, fake)
    return lambda call, facts: op(*flatten(call))[0] if facts.is_traced else planned(call, facts).y


def _planned(name: str, forward: Forward) -> Callable[[Call, Facts], Output]:
    """Return the forward of engine ``name`` with the kernels that the call is planned to have."""

    @on_its_device
    def planned(call: Call, facts: Facts) -> Output:
        return forward(call, kernels(name, facts, sizes_of(call, facts)))

    return planned


def _operator(name: str, planned: Callable[[Call, Facts], Output], fake: Fake):
    def run(*flat) -> tuple[Tensor, ...]:
        call = unflatten(flat)
        output = planned(call, facts_of(call))
        out = None if output.saved_out is None else _like_new(output.saved_out, call)
        return _filled(output._replace(y=_like_new(output.y, call), saved_out=out))

    def run_fake(*flat) -> tuple[Tensor, ...]:
        call = unflatten(flat)
        return _filled(fake(call, facts_of(call)))

    schema = f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
    op = torch.library.custom_op(f"affine_attn::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(run_fake)
    return op


def _like_new(x: Tensor, call: Call) -> Tensor:
    """A result in the layout of a new one, which fakes promise; stock kernels choose their own."""
    if x.stride() == call.q.stride() and x.shape == call.q.shape:
        return x
    promised = call.new_output()
    return x if x.stride() == promised.stride() else promised.copy_(x)


def _laid_out_like(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides its fake promises; stock backwards choose their own."""
    promised = torch.empty_like(x, device="meta")
    if gradient.stride() == promised.stride():
        return gradient
    return torch.empty_like(x).copy_(gradient)
