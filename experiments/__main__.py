"""Experiments: python -m experiments {prepare,run,bigram,questions,answer,count,tables,page} --help"""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from affine_attn.evaluate.run import Request
    from experiments.grid import Group

ROOT = Path(__file__).parent
RESULTS = ROOT / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = parser.add_subparsers(required=True)

    prepare = commands.add_parser("prepare", help="shards of corpora that have a split of their own")
    prepare.add_argument("out", type=Path)
    prepare.add_argument("--train", nargs="+", required=True, help="as the sources of affine-attn prepare")
    prepare.add_argument("--valid", nargs="+", required=True)
    prepare.add_argument("--tokenizer", required=True, help="tokenizer.json of the teacher, or its folder")
    prepare.add_argument("--end-of-document", default="<|endoftext|>")
    prepare.set_defaults(command=_prepare)

    run = commands.add_parser("run", help="train what is not finished, group after group, until the time is up")
    run.add_argument("--data", required=True, help="a folder of shards")
    run.add_argument("--teacher", required=True, help="a folder with a model of the same tokenizer")
    run.add_argument("--output", type=Path, default=Path("runs/experiments"))
    run.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS")
    run.add_argument("--only", default="", metavar="PREFIX", help="groups whose name begins so")
    run.add_argument("--small", action="store_true", help="instead: controls with the demo's students, on a CPU")
    run.add_argument("--commit", help="of this code, where git cannot tell")
    run.add_argument("--dry-run", action="store_true", help="print the plan, train nothing")
    run.set_defaults(command=_run)

    bigram = commands.add_parser("bigram", help="a bigram's perplexity on the held-out text, for table A")
    bigram.add_argument("--data", required=True, help="a folder of shards")
    bigram.set_defaults(command=_bigram)

    asked = argparse.ArgumentParser(add_help=False)
    asked.add_argument("--questions", type=Path, default=Path("questions.jsonl.gz"))
    harness = argparse.ArgumentParser(add_help=False)
    harness.add_argument("--data", required=True, help="a folder of shards, for their tokenizer")
    harness.add_argument("--sets", nargs="*", default=[], help="local copies of the tasks, as affine-attn eval --data")
    harness.add_argument("--limit", type=int, default=1000, help="documents of a task (default: %(default)s)")
    questions = commands.add_parser("questions", parents=[asked, harness], help="write those of the zero-shot tasks")
    questions.set_defaults(command=_questions)
    answer = commands.add_parser("answer", parents=[asked], help="let the models of table A at one rate answer")
    answer.add_argument("--runs", type=Path, default=Path("runs/experiments"))
    answer.set_defaults(command=_answer)
    count = commands.add_parser("count", parents=[asked, harness], help="make accuracies of the answers")
    count.add_argument("--runs", type=Path, default=RESULTS / "runs")
    count.set_defaults(command=_count)

    tables = commands.add_parser("tables", help="rewrite tables, figures and docs/reproduction.md from run folders")
    tables.add_argument("--runs", type=Path, default=RESULTS / "runs")
    tables.set_defaults(command=_tables)

    page = commands.add_parser("page", help="the report page of affine-attn report, of the runs that were analysed")
    page.add_argument("--runs", type=Path, default=RESULTS / "runs")
    page.add_argument("--output", type=Path, default=Path("report.html"))
    page.set_defaults(command=_page)

    arguments = parser.parse_args()
    try:
        return arguments.command(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


def _prepare(arguments: argparse.Namespace) -> int:
    from experiments.data import SHARD_TOKENS, prepare_split

    manifest = prepare_split(
        arguments.out,
        arguments.train,
        arguments.valid,
        arguments.tokenizer,
        arguments.end_of_document,
        SHARD_TOKENS,
    )
    for split, tokens in manifest["tokens"].items():
        print(f"{split}: {tokens:,} tokens in {manifest['documents'][split]:,} documents")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    deadline = time.monotonic() + arguments.time_limit
    from experiments import carry_out, controls, grid
    from experiments.plan import plan
    from experiments.runs import read_runs

    recipe = grid.base_recipe(arguments.data, arguments.teacher)
    everything = grid.groups(recipe) + controls.groups(recipe)
    if arguments.small:
        everything = controls.small_groups(controls.small_recipe(arguments.data, arguments.teacher))
    chosen = [group for group in everything if group.name.startswith(arguments.only)]
    if not chosen:
        raise ValueError(f"no group begins with {arguments.only!r}; --dry-run prints them all")
    if arguments.dry_run:
        print(*plan(chosen, list(read_runs(arguments.output))), sep="\n")
        return 0
    finished = carry_out.carry_out(chosen, arguments.output, deadline, arguments.commit)
    print("all groups are finished" if finished else "the time is up; the same command goes on")
    return 0


def _bigram(arguments: argparse.Namespace) -> int:
    from affine_attn.runs.files import write_json
    from experiments.bigram import bigram
    from experiments.grid import base_recipe

    recipe = base_recipe(arguments.data, teacher="")
    found = bigram(recipe.data, recipe.sequence_length, recipe.documents)
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / "bigram.json", found)
    print(found)
    return 0


def _questions(arguments: argparse.Namespace) -> int:
    from experiments import zero_shot

    group, request = _harness(arguments)
    print(f"{arguments.questions}: {zero_shot.write_questions(group, request, arguments.questions)} requests")
    return 0


def _answer(arguments: argparse.Namespace) -> int:
    from experiments import zero_shot
    from experiments.grid import COMMON_RATE
    from experiments.runs import read_runs

    chosen = [run for run in read_runs(arguments.runs) if run.table == "a" and run.rate == COMMON_RATE]
    if not chosen:
        raise ValueError(f"{arguments.runs} has no runs of table A at a rate of {COMMON_RATE:g}")
    for path in zero_shot.answer(chosen, arguments.questions):
        print(path, flush=True)
    return 0


def _count(arguments: argparse.Namespace) -> int:
    from experiments import zero_shot
    from experiments.runs import read_runs

    group, request = _harness(arguments)
    for path in zero_shot.count(read_runs(arguments.runs), group, request, arguments.questions):
        print(path, flush=True)
    return 0


def _harness(arguments: argparse.Namespace) -> "tuple[Group, Request]":
    """A group whose students the questions are for, and what affine-attn eval is asked for."""
    from affine_attn.evaluate.run import Request
    from experiments.grid import base_recipe, groups

    group = groups(base_recipe(arguments.data, teacher=""))[0]
    return group, Request(data=arguments.sets, limit=arguments.limit)


def _tables(arguments: argparse.Namespace) -> int:
    from experiments.report import write_report

    for path in write_report(arguments.runs, RESULTS):
        print(path)
    return 0


def _page(arguments: argparse.Namespace) -> int:
    from experiments import page
    from experiments.runs import read_runs

    page.write(read_runs(arguments.runs), arguments.output)
    print(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
