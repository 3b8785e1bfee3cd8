"""A training step as one CUDA graph. A small student's thousands of kernels take the host longer to launch one by one
than the GPU to run."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Steps that run as they are: they compile, choose algorithms and make the optimizer's state, which a graph cannot.
EAGER_STEPS = 3


class Replay:
    """Calls a step: at first as it is, then by replaying what it launched once. On the CPU, or where it is not to
    record, always as it is.

    The step must do the same at every call but for its inputs, tensors that keep their shapes, and for what the tensors
    it holds contain.
    """

    def __init__(self, records: bool = True) -> None:
        self._records = records
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._output: Tensor

    def __call__(self, step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        self._calls += 1
        if not inputs[0].is_cuda:
            return step(*inputs)
        if not self._records or self._calls <= EAGER_STEPS:
            return _on_a_side_stream(step, inputs)
        if self._graph is None:
            self._record(step, inputs)
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._output.clone()

    def _record(self, step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        self._inputs = [torch.empty_like(given) for given in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as a data loader's, may go on with what a recording thread must not do.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._output = step(*self._inputs)


def _on_a_side_stream(step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """Run on a side stream, as recording does: what autograd keeps must not tie the graph to the default stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        output = step(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    return output
