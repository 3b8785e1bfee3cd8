"""Numbers per row with loads a step ahead, simulated on the CPU: the same as those in use."""

import pytest
import torch

from affine_attn.core import hopper_backward
from affine_attn.core.accuracy import Shape, random_inputs
from affine_attn.core.call import checked_call
from benchmarks import rows_ahead
from tests.cases import SPECS
from tests.conftest import interpreted, rerun_in_interpreter
from tests.simulated_hopper import simulate  # noqa: F401, a fixture


def test_the_kernel_on_the_cpu():
    rerun_in_interpreter(__file__)


@pytest.fixture
def ahead(simulate, monkeypatch):  # noqa: F811
    """Turns to the simulated kernel, with an edit of its source."""
    simulate(seed=0)

    def turn_to(edit=lambda source: source) -> None:
        from benchmarks import rows_ahead_kernel
        from tests.gluon_on_cpu import Simulated

        kernel = Simulated(rows_ahead_kernel, "rows_ahead_kernel", 0, edit)
        monkeypatch.setattr(rows_ahead, "kernel", lambda: kernel)
        monkeypatch.setattr(rows_ahead, "multiprocessors", lambda _: 1)
        monkeypatch.setattr(rows_ahead, "PROGRAMS", {64: 3, 128: 3})

    return turn_to


@interpreted
@pytest.mark.parametrize("shape", [Shape(1, 4, 2, 96, 96, 64), Shape(2, 2, 2, 80, 80, 128)], ids=str)
def test_the_same_numbers(shape, ahead):
    ahead()
    inputs = random_inputs(SPECS["affine"], shape, torch.float16)
    inputs["alpha"] = inputs["alpha"].clamp(min=0.01)
    assert list(rows_ahead.functions(checked_call(**inputs))) == ["a copy", "in use", "ahead"]


@interpreted
def test_the_end_within_a_step(ahead):
    """What was not copied there must not be seen."""
    ahead()
    inputs = random_inputs(SPECS["affine"], Shape(1, 2, 2, 70, 70, 128), torch.float16)
    call = checked_call(**inputs | {"alpha": inputs["alpha"].clamp(min=0.01)})
    assert len(rows_ahead.functions(call)) == 3
    assert hopper_backward.STEPS[128] == 1  # whose totals are compared one by one


@interpreted
def test_steps_that_are_not_waited_for_are_seen(ahead):
    from tests.gluon_on_cpu import Fault, mistake

    ahead(mistake("async_copy.wait_group(STAGES - 1)", "pass"))
    call = checked_call(**random_inputs(SPECS["affine"], Shape(1, 2, 2, 96, 96, 64), torch.float16))
    with pytest.raises(Fault, match="while a copy into it is under way"):
        rows_ahead.functions(call)
