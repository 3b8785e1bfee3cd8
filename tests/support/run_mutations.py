"""Apply the mistakes of mutations.py one at a time, on a copy of the tree, and run the tests that must notice.

``python -m tests.support.run_mutations [PART_OF_A_NAME ...]``, by default all of them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.support.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
# For the tests of one mistake: what takes longer hangs, and is noticed too.
_SECONDS = 900


def copy_of_the_tree(place: Path) -> None:
    """Copy what git tracks or would track, as it is now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, place / name)


def mutated(source: str, mutation: Mutation) -> str:
    """The source with the mistake in it."""
    if (count := source.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.file}: the old text occurs {count} times, not once: {mutation.old!r}")
    return source.replace(mutation.old, mutation.new)


def tests_pass(tree: Path, tests: Iterable[str]) -> bool:
    """Run them in the tree; those of kernels at once in Triton's interpreter, not in the process they would start."""
    by_mode: dict[bool, list[str]] = {False: [], True: []}
    for test in tests:
        source = (tree / test.split("::")[0]).read_text()
        by_mode["rerun_in_interpreter(" in source].append(test)
    return all(_pass(tree, some, is_interpreted) for is_interpreted, some in by_mode.items() if some)


def _pass(tree: Path, tests: list[str], is_interpreted: bool) -> bool:
    # No bytecode: it is told from the source's by size and second, and a mutation may keep both.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment["TRITON_INTERPRET"] = "1" if is_interpreted else "0"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests]
    options = {"cwd": tree, "env": environment, "capture_output": True, "text": True, "timeout": _SECONDS}
    try:
        result = subprocess.run(command, check=False, **options)
    except subprocess.TimeoutExpired:
        return False
    if result.returncode == 0 and " passed" in result.stdout:
        return True
    # A test failed, or the process crashed. Anything else says nothing about the tests: there was none, say.
    if result.returncode == 1 or result.returncode < 0:
        return False
    raise RuntimeError(f"{' '.join(tests)} did not run:\n{result.stdout[-4000:]}{result.stderr[-2000:]}")


def outcome(tree: Path, mutation: Mutation) -> str:
    """killed, equivalent or lived; the tree is left as it was."""
    path = tree / mutation.file
    source = path.read_text()
    path.write_text(mutated(source, mutation))
    try:
        passed = tests_pass(tree, mutation.tests)
    finally:
        path.write_text(source)
    return "killed" if not passed else "equivalent" if mutation.equivalent else "lived"


def main(parts: list[str]) -> int:
    chosen = {name: m for name, m in MUTATIONS.items() if not parts or any(part in name for part in parts)}
    with tempfile.TemporaryDirectory() as folder:
        tree, wrong = Path(folder), []
        copy_of_the_tree(tree)
        if not tests_pass(tree, dict.fromkeys(test for m in chosen.values() for test in m.tests)):
            print("the tests fail, or there are none, without any of these mutations")
            return 1
        for name, mutation in chosen.items():
            start = time.monotonic()
            found = outcome(tree, mutation)
            if found != ("equivalent" if mutation.equivalent else "killed"):
                wrong.append(name)
            note = f" ({mutation.equivalent})" if mutation.equivalent else ""
            print(f"{found:10} {time.monotonic() - start:4.0f} s  {mutation.file}: {name}{note}", flush=True)
    print(
        f"{len(chosen) - len(wrong)} of {len(chosen)} as they should be",
        *(f"not so: {name}" for name in wrong),
        sep="\n",
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
