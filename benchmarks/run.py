"""Times the attention family side by side with the strongest stock attention; run it with ``make bench``.

Every case is first checked against the tolerance rule on this device: a wrong one is not timed, and the command fails.
Cases of a group take turns for several rounds; a ratio is the median of the ratios of the rounds. Results go to
runs/bench/<device>.csv, one row per (shape, what, mode), after every group; with --update-docs to
benchmarks/results/<device>.csv, and from there into the documents.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from affine_attn import VARIANTS
from affine_attn.bench.timing import Timing, side_by_side
from benchmarks import decoders, masks, readme, record
from benchmarks.cases import DECODE_SHAPES, MODES, TRAINING_SHAPES, Group, groups
from benchmarks.checks import largest_error
from benchmarks.memory import peak_mib
from benchmarks.record import Row
from benchmarks.steps import Step, ceilings, engine_of, prepare

ROUND_MS = 25.0
console = Console(width=140)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments = parsed(device)
    work = groups(device, arguments.modes, arguments.variants, arguments.shapes, arguments.quick)
    if not work:
        raise SystemExit("nothing to time: no selected shape has a selected mode and variant")
    path = destination(arguments, device)
    # A selection is an update of what is there; a whole run starts afresh.
    old = record.read(path) if arguments.is_selection and path.exists() else []
    machine, start = record.provenance(device), time.perf_counter()
    rows = [row | machine for row in ceiling_rows(device, arguments.rounds)]
    copy_gbps = float(rows[0]["gbps"])
    record.write(path, record.merged(old, rows))
    interrupted = False
    try:
        for number, group in enumerate(work, 1):
            title = f"[{number}/{len(work)}] {group.name} {group.shape}, {group.mode}"
            console.print(
                f"{title}: {len(group.cases)} cases, {time.perf_counter() - start:.0f} s so far", markup=False
            )
            new = group_rows(group, device, arguments.rounds, copy_gbps)
            rows += [row | machine for row in new]
            show(title, new)
            # After every group: an interrupted run keeps what it measured.
            record.write(path, record.merged(old, rows))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    except KeyboardInterrupt:
        interrupted = True
    if device.type == "cpu" and not (arguments.is_selection or interrupted):
        for suite in (masks, decoders):
            suite.main([] if arguments.output is None else ["--output", str(arguments.output)])
    console.print(f"{'interrupted; ' if interrupted else ''}wrote {path} in {time.perf_counter() - start:.0f} s")
    if arguments.update_docs:
        readme.main()
    if failed := [f"{r['shape']} {r['what']} ({r['mode']}): {r['note']}" for r in rows if is_failure(r)]:
        raise SystemExit("not timed:\n" + "\n".join(failed))
    if interrupted:
        raise SystemExit(130)


def destination(arguments: argparse.Namespace, device: torch.device) -> Path:
    """Return the file of the rows, which is one that git tracks only if that is asked for."""
    own = record.results_path(device)
    return own if arguments.update_docs else arguments.output or Path("runs") / "bench" / own.name


def parsed(device: torch.device) -> argparse.Namespace:
    known = [*TRAINING_SHAPES[device.type], *DECODE_SHAPES[device.type]]
    everything = ["softmax", *(name for name in VARIANTS if name != "softmax")]
    modes = "; ".join(f"{mode}: {meaning}" for mode, meaning in MODES.items())
    parser = argparse.ArgumentParser(
        prog="affine-attn bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", metavar="S", help=f"of {', '.join(known)}; default: all")
    parser.add_argument(
        "--variants", nargs="+", metavar="V", default=everything, help=f"of {', '.join(everything)}; default: all"
    )
    parser.add_argument("--modes", nargs="+", metavar="M", default=list(MODES), help=f"of {modes}; default: all")
    parser.add_argument("--quick", action="store_true", help="leave out what torch.compile needs long for")
    rounds = 7 if device.type == "cuda" else 5
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"turns of every case in its group; default: {rounds}"
    )
    parser.add_argument("--output", type=Path, help="CSV to write; default: see above")
    parser.add_argument(
        "--update-docs", action="store_true", help="write the results of this checkout, and README and docs from them"
    )
    arguments = parser.parse_args()
    for name, allowed in (("shapes", known), ("variants", everything), ("modes", MODES)):
        if unknown := set(getattr(arguments, name) or []) - set(allowed):
            parser.error(f"unknown {name} {sorted(unknown)} for this device; allowed are {', '.join(allowed)}")
    if arguments.update_docs and arguments.output:
        parser.error("--update-docs writes the results of this checkout, not --output")
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")
    whole = arguments.shapes is None and arguments.variants == everything and arguments.modes == list(MODES)
    arguments.is_selection = not whole or arguments.quick
    return arguments


def ceiling_rows(device: torch.device, rounds: int) -> list[Row]:
    steps = ceilings(device)
    timings = side_by_side(
        {what: step.run for what, step in steps.items()}, next(iter(steps)), device, rounds, ROUND_MS
    )
    rows = [
        {"shape": "", "what": what, "engine": "torch", "mode": "ceiling"} | time_columns(timing, steps[what])
        for what, timing in timings.items()
    ]
    show("ceilings of this machine", rows)
    return rows


def group_rows(group: Group, device: torch.device, rounds: int, copy_gbps: float) -> list[Row]:
    """A row per case: timed where it is right and runs, else with the reason in its note."""
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    for case in group.cases:
        row = rows[case.what] = {"shape": group.name, "what": case.what, "engine": case.method, "mode": group.mode}
        with console.status(f"checking {case.what}"), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                row["engine"] = engine_of(case, group.shape, group.mode, device)
                if (error := largest_error(case, group.shape, group.mode, device)) is not None:
                    row["error"] = f"{error:.2e}"
                step = prepare(case, group.shape, group.mode, device)
                step.run()
                steps[case.what] = step
            except Exception as problem:  # whatever a backend refuses with becomes the note of its row
                row["note"] = reason(problem, [str(warning.message) for warning in said])
    stock = [case.what for case in group.cases if case.is_stock and case.what in steps]
    if not steps:
        return list(rows.values())
    baseline = stock[0] if stock else next(iter(steps))
    with console.status("timing"):
        timings = side_by_side({what: s.run for what, s in steps.items()}, baseline, device, rounds, ROUND_MS)
    for case in group.cases:
        if (timing := timings.get(case.what)) is None:
            continue
        row, step = rows[case.what], steps[case.what]
        row |= time_columns(timing, step, copy_gbps)
        if stock:
            row |= {"ratio": f"{timing.ratio:.4f}", "baseline": baseline}
        # On the CPU a peak costs a process of its own.
        if device.type == "cuda" or group.mode == "forward+backward":
            with console.status(f"memory of {case.what}"):
                row["peak_mib"] = f"{peak_mib(case, group.shape, group.mode, device, step.run):.1f}"
        rows[case.what] = row
    return list(rows.values())


def time_columns(timing: Timing, step: Step, copy_gbps: float | None = None) -> Row:
    columns = record.times(timing)
    if step.moved is not None:
        gbps = step.moved / timing.p50 / 1e6
        columns["gbps"] = f"{gbps:.1f}"
        if copy_gbps is not None:
            columns["fraction_of_copy"] = f"{gbps / copy_gbps:.3f}"
    if step.flops is not None:
        columns["tflops"] = f"{step.flops / timing.p50 / 1e9:.2f}"
    return columns


def reason(problem: Exception, said: list[str]) -> str:
    """One line; torch says in warnings why a backend refuses."""
    refusals = [text for text in said if "attention" in text.lower() or "sdp" in text.lower()]
    line = " ".join("; ".join([f"{type(problem).__name__}: {problem}", *refusals]).split())
    return line if len(line) <= 400 else f"{line[:400]}…"


def is_failure(row: Row) -> bool:
    """Ours or a rival of ours; stock attention may refuse a shape."""
    return bool(row.get("note")) and not row["what"].startswith("plain SDPA")


def show(title: str, rows: list[Row]) -> None:
    columns = {
        "what": "what", "engine": "engine", "ms_p50": "ms", "ms_p20": "p20", "ms_p80": "p80", "ratio": "ratio",
        "gbps": "GB/s", "fraction_of_copy": "of copy", "tflops": "TFLOP/s", "peak_mib": "MiB", "error": "error",
        "note": "note",
    }  # fmt: skip
    used = [column for column in columns if any(row.get(column) for row in rows)]
    table = Table(*(columns[column] for column in used), title=title)
    for row in rows:
        table.add_row(*(row.get(column, "") for column in used))
    console.print(table)


if __name__ == "__main__":
    main()
