"""The list of mistakes fits the code as it is, and its runner tells a mistake that is noticed from one that is not.

`make test-mutations` applies them.
"""

import pytest

from tests.support.mutations import MUTATIONS, Mutation
from tests.support.run_mutations import ROOT, mutated, outcome


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_text_that_is_replaced_is_there_once_and_so_are_the_tests(name):
    mutation = MUTATIONS[name]
    source = (ROOT / mutation.file).read_text()
    assert mutated(source, mutation) != source
    assert mutation.tests
    for test in mutation.tests:
        file, function = test.split("[")[0].split("::")
        assert f"\ndef {function}(" in (ROOT / file).read_text(), test


def test_no_mistake_is_listed_twice():
    assert len({(m.file, m.old, m.new) for m in MUTATIONS.values()}) == len(MUTATIONS)


def test_the_runner_tells_what_was_noticed(tmp_path):
    (tmp_path / "doubling.py").write_text("def double(x):\n    return x + x\n")
    (tmp_path / "test_code.py").write_text("from doubling import double\n\n\ndef test():\n    assert double(2) == 4\n")
    for old, new, reason, found in (
        ("x + x", "x - x", "", "killed"),
        ("x + x", "x * x", "", "lived"),
        ("x + x", "2 * x", "twice is the sum", "equivalent"),
        ("x + x", "3 * x", "of no effect, it was thought", "killed"),
    ):
        assert outcome(tmp_path, Mutation("doubling.py", old, new, ("test_code.py",), reason)) == found
    with pytest.raises(RuntimeError, match="did not run"):
        outcome(tmp_path, Mutation("doubling.py", "x + x", "2 *", ("test_code.py",)))
    with pytest.raises(ValueError, match="occurs 3 times, not once: 'x'"):
        outcome(tmp_path, Mutation("doubling.py", "x", "y", ("test_code.py",)))
    assert (tmp_path / "doubling.py").read_text() == "def double(x):\n    return x + x\n"
