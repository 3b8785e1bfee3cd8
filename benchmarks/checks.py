"""Is a case right? The tolerance rule of affine_attn/bench/accuracy.py, on the device that is about to be timed."""

import functools
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from affine_attn import attention, attention_stats
from affine_attn.bench.accuracy import Shape, deviations
from affine_attn.engines import operator
from affine_attn.engines.needs import NO_SIZES
from benchmarks.cases import Case
from benchmarks.steps import Inputs, inputs_of, method_of

# Row statistics are fp32 whatever the inputs are.
_STATISTICS_TOLERANCE = 1e-4
# Methods that compile for a shape: checked with as many tokens as are timed, or they would compile once more.
_COMPILED = ("flex", "dense compiled", "multiply")


class WrongResult(Exception):
    """What is wrong, with numbers: such a case is not timed."""


def largest_error(case: Case, shape: Shape, mode: str, device: torch.device) -> float | None:
    """Largest relative error of what the case computes; None for stock attention, which is not ours to judge."""
    if case.is_stock:
        return None
    if mode == "decode":
        return _decode_error(case, shape, device)
    # The dense float64 reference bounds the length; the kernels of a length are those of 2048 on CUDA.
    length = min(shape.tq, 2048 if device.type == "cuda" else 320)
    small = replace(shape, batch=1, tq=length, tk=length)
    if case.method == "statistics":
        return _statistics_error(case, small, device)
    if mode == "epilogue":
        # The whole attention: the same kernels, with a real backward between them. NO_SIZES keeps the sm90 kernels out,
        # which have the epilogue within.
        with nullcontext() if case.method == "rows" else mock.patch.object(operator, "sizes_of", return_value=NO_SIZES):
            return _attention_error(Case(case.what, "auto", case.variant), small, 1, device)
    batch = shape.batch * (shape.tq // length) if case.method in _COMPILED else 1
    return _attention_error(case, small, batch, device)


@functools.cache
def _attention_error(case: Case, shape: Shape, batch: int, device: torch.device) -> float:
    method = method_of(case)

    def repeated(**inputs) -> Tensor:
        """The method at the full batch: copies of one sequence, of which the first is judged."""
        if batch == 1:
            return method(**inputs)
        return method(**{name: _repeated(x, batch) for name, x in inputs.items()})[:1]

    return _judged(inputs_of(case, shape, device), repeated)


def _decode_error(case: Case, shape: Shape, device: torch.device) -> float:
    method = method_of(case)

    def with_reference_gradients(**inputs) -> Tensor:
        """The method's values on the reference's graph: decoding has no gradients to judge."""
        y = attention(**inputs, impl="reference")
        with torch.no_grad():
            y.copy_(method(**inputs))
        return y

    return _judged(inputs_of(case, shape, device), with_reference_gradients)


def _judged(inputs: Inputs, function) -> float:
    result = deviations("auto", inputs, function=function)
    if wrong := [f"{d.name} {d.error:.1e} > {d.allowed:.1e}" for d in result if not d.within]:
        raise WrongResult(f"wrong: {', '.join(wrong)}")
    return max(d.error for d in result)


def _statistics_error(case: Case, shape: Shape, device: torch.device) -> float:
    inputs = {n: x for n, x in inputs_of(case, shape, device).items() if n not in ("v", "gate")}
    exact = {n: x.double() if isinstance(x, Tensor) else x for n, x in inputs.items()}
    errors = {
        name: float((measured - truth).abs().max() / (1 + truth.abs().max()))
        for (name, measured), truth in zip(
            attention_stats(**inputs)._asdict().items(), attention_stats(**exact), strict=True
        )
    }
    if wrong := [f"{name} {error:.1e}" for name, error in errors.items() if not error <= _STATISTICS_TOLERANCE]:
        raise WrongResult(f"wrong: {', '.join(wrong)} > {_STATISTICS_TOLERANCE:.0e}")
    return max(errors.values())


def _repeated(x: object, batch: int) -> object:
    """A learned sink [H] and a number have no batch."""
    return x.repeat(batch, *[1] * (x.ndim - 1)) if isinstance(x, Tensor) and x.ndim > 1 else x
