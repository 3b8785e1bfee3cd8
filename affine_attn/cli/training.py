"""Commands from text to a trained student."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from affine_attn.cli.early import require_files, require_recipe
from affine_attn.cli.options import RECIPES, Device, Recipe, fields, one_of
from affine_attn.cli.terminal import (
    console,
    exit_codes_of_signals,
    note,
    one_line_errors,
    say,
    tell,
    training_bar_alone,
)
from affine_attn.runs.layout import RunFolder

app = typer.Typer()
PANEL = "Training"


@app.command(rich_help_panel=PANEL)
def prepare(
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="the folder to write; one that was begun with the same settings goes on"),
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="text files, JSON lines (.jsonl; also .gz, .xz, .bz2, .zst), parquet, folders of those, or a dataset "
            "of the hub as ID[:CONFIG[:SPLIT]]; none: this Python's standard library",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="tokenizer.json, a folder with one, or a hub id; default: byte-level BPE trained on the sources"
        ),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=258, help="of a tokenizer that is trained")] = 4096,
    text_field: Annotated[
        str, typer.Option(help="the field of JSON, parquet and datasets that holds the text")
    ] = "text",
    separator: Annotated[
        str | None, typer.Option(help="a line that divides documents in text files; default: a file is a document")
    ] = None,
    valid: Annotated[
        float, typer.Option(min=0.0, help="part of the documents held out, below 1, chosen by their hash")
    ] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="tokens after which a shard is closed")] = 1 << 26,
    end_of_document: Annotated[
        str | None, typer.Option(help="token put after every document; default: the tokenizer's end of sequence")
    ] = None,
    max_files: Annotated[int | None, typer.Option(min=1, help="read only so many files, the first in order")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="end with the document that brings the training tokens to so many; a later call with more, or without "
            "this option, goes on",
        ),
    ] = None,
) -> None:
    """Turn text into token shards for training. Stopped at any moment, the same command goes on where it was."""
    with one_line_errors():
        from affine_attn.data.prepare import prepare as prepare_shards

        manifest = prepare_shards(
            out,
            sources or (),
            tokenizer=tokenizer,
            text_field=text_field,
            separator=separator,
            valid=valid,
            shard_tokens=shard_tokens,
            vocab_size=vocab_size,
            end_token=end_of_document,
            max_files=max_files,
            max_tokens=max_tokens,
        )
    counts = (
        f"{manifest['tokens'][split]:,} {split} tokens in {n:,} documents" for split, n in manifest["documents"].items()
    )
    line = f"{out}: {', '.join(counts)}; vocabulary {manifest['vocab_size']}, {manifest['dtype']}"
    tell(line)


@app.command(rich_help_panel=PANEL)
def distill(
    name: Recipe,
    assignments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE",
            help="what differs from the recipe; affine-attn recipes NAME explains all fields",
            autocompletion=fields,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="the folder of the run; default: runs/RECIPE, or runs/RECIPE-FIELD=VALUE")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="no longer needed: a run that was begun goes on after its last checkpoint")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE,...",
            help="a run for each value, in folders inside the output (a slash in a value becomes --), and a table; "
            "finished ones are reused; "
            "learning_rate alone is the paper's sweep",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what it would cost, with --sweep run by run; train nothing")
    ] = False,
    gpus: Annotated[int, typer.Option(min=1, help="for --dry-run: how many share the work")] = 1,
    mfu: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="for --dry-run: part of the peak that is reached")
    ] = 0.4,
) -> None:
    """Train a student from scratch against a teacher's soft targets (or on the text alone).

    Ctrl-C and SIGTERM end it with a checkpoint (exit codes 130 and 143), a second Ctrl-C at once. The same command goes
    on: torchrun --max-restarts does so by itself.
    """
    with one_line_errors():
        require_recipe(name, assignments or ())
        from affine_attn.distill import estimate
        from affine_attn.distill.recipes import recipe, schedule_note, title

        chosen, called = recipe(name, assignments or ()), title(name)
        if shrunk := schedule_note(name, assignments or ()):
            note(shrunk)
        if dry_run:
            lines = estimate.dry_run(name, chosen, gpus, mfu)
            if sweep is not None:
                from affine_attn.distill import sweep as sweeps

                lines = sweeps.dry_run(name, chosen, sweep, gpus, mfu)
            for line in lines:
                tell(line)
            return
        training_bar_alone()
        if sweep is not None:
            from affine_attn.distill.sweep import grid, outcome, stopped, table

            folder = output or Path("runs") / f"{called}-sweep"
            rows = []
            with exit_codes_of_signals():
                for label, each in grid(chosen, sweep, folder).items():
                    note(label)
                    rows.append(outcome(label, each, folder))
            console.print(table(rows))
            for line in stopped(rows):
                tell(line)
            return
        from affine_attn.distill.run import default_output, run

        place = RunFolder(output or default_output(chosen, name, assignments or ()))
        finished = place.has_model
        with exit_codes_of_signals("the same command goes on after the last checkpoint, if there is one"):
            folder = run(chosen, place.path, resume or None, note)
        from affine_attn.models.folder import HOW_TO_LOAD
    # Once per job.
    if os.environ.get("RANK", "0") == "0":
        if finished:
            note(f"{place.path}: finished before")
        say(str(folder))
        tell(HOW_TO_LOAD)


@app.command(rich_help_panel=PANEL)
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="a name, or a file; default: list the names", autocompletion=one_of(*RECIPES)
        ),
    ] = None,
) -> None:
    """List the recipes, or explain one: every field, its value, who chose it, and what it means.

    Source: paper, where the affine paper states this value; default, a choice of this package; else the recipe.
    """
    with one_line_errors():
        if name is not None:
            require_recipe(name, ())
        from affine_attn.distill.recipes import RECIPES, explained, summary, title

        heads = ("field", "value", "source", "meaning") if name else ("recipe", "what for")
        table = Table(*heads, box=None, padding=(0, 2, 0, 0), pad_edge=False)
        if name is None:
            for each in RECIPES:
                table.add_row(each, Text(summary(each)))
        else:
            for entry in explained(name):
                table.add_row(entry.name, Text(str(entry.value)), entry.source, Text(entry.says))
            tell(f"{title(name)}: {summary(name)}")
    console.print(table)


@app.command(rich_help_panel=PANEL)
def cache_teacher(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="a folder of shards, see: affine-attn prepare")],
    teacher: Annotated[
        str, typer.Argument(metavar="TEACHER", help="a causal model of the same tokenizer: folder or hub id")
    ],
    sequence_length: Annotated[int, typer.Option(min=1, help="of the training that will read the cache")] = 2048,
    top_k: Annotated[int, typer.Option(min=1, help="largest entries kept of every token")] = 64,
    dtype: Annotated[
        str,
        typer.Option(
            help="of the teacher and of the logits that are kept: bfloat16 or float32",
            autocompletion=one_of("bfloat16", "float32"),
        ),
    ] = "bfloat16",
    documents: Annotated[bool, typer.Option(help="keep documents apart, as the recipe's field documents")] = True,
    shared_vocab: Annotated[
        int | None, typer.Option(min=1, help="leading entries that student and teacher share, where sizes differ")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="the folder to write; default: DATA/teacher-cache")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="sequences at once")] = 8,
    shard_tokens: Annotated[int, typer.Option(min=1, help="tokens of a file; a killed run loses one at most")] = 1
    << 22,
    device: Device = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print how large it will be, write nothing")] = False,
) -> None:
    """Keep a teacher's largest logits for every token, to train with teacher=cache and no teacher in memory.

    Stopped at any moment, the same command goes on. Started once per GPU (--device cuda:0, cuda:1, ...), the processes
    share the work.
    """
    with one_line_errors():
        require_files([data])
        from affine_attn.data import shards
        from affine_attn.distill import cache, estimate

        # Before the teacher, which the network may be asked for.
        shards.read_manifest(data)
        plan = cache.CachePlan(
            data=data,
            out=output or data / shards.TEACHER_CACHE,
            sequence_length=sequence_length,
            k=top_k,
            vocabulary=shared_vocab or estimate.architecture(teacher, offline=False).vocab_size,
            documents=documents,
            dtype=dtype,
            shard_tokens=shard_tokens,
        )
        tell(plan.explain())
        if dry_run:
            return
        line = cache.describe(plan, cache.cache_teacher(plan, teacher, batch_size, device))
    tell(line)
