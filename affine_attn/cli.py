"""The ``affine-attn`` command. Heavy imports stay inside the commands so that --help answers at once."""

import json
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from affine_attn import __version__

# Names that a shell completes. Where they are defined torch is loaded, which a keystroke cannot wait for.
VARIANTS = (
    "softmax", "off_by_one", "sink", "gated", "gated_headwise", "affine", "affine_sigmoid", "affine_gated",
    "scale_invariant", "logn", "alibi",
)  # fmt: skip
RECIPES = ("demo", "small", "needle", "paper-0.5b", "paper-1b", "paper-3b")
DTYPES = ("float32", "bfloat16", "float16")
TASKS = ("winogrande", "piqa", "hellaswag", "arc_challenge", "arc_easy", "boolq")

app = typer.Typer(
    name="affine-attn",
    help="Attention whose weights need not sum to one: affine scaling, sinks, gates and distance logits.",
    epilog="From text to a report: prepare, distill, eval, analyze, report; demo does it all in small. "
    "Exit codes: 0 done, 2 wrong input (one line says what), 143 stopped by SIGTERM.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)
console = Console()


def _one_of(*names: str) -> Callable[[str], list[str]]:
    """What completes the beginning of a name."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


# Arguments and options of several commands.
Model = Annotated[str, typer.Argument(metavar="MODEL", help="folder or hub id of a causal model with its tokenizer")]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1, ...; default: cuda where there is one", autocompletion=_one_of("cpu", "cuda")
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(DTYPES)}; default: the checkpoint's on cuda, else float32", autocompletion=_one_of(*DTYPES)
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="sequences at once; default: as many as the memory of their logits allows")
]
# Headings of the list of commands.
START, MODELS, TRAINING, EVALUATION = "Start", "Models", "Training", "Evaluation"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options that stand before a command."""


@app.command(rich_help_panel=START)
def demo() -> None:
    """Minutes on two CPU cores: a corpus, a teacher, students with softmax, sink and affine attention, and their table.

    Writes data/demo and runs/demo. Stopped at any moment, the same command goes on; what is finished is reused.
    """
    with _one_line_errors():
        from affine_attn.demo import run_demo
        from affine_attn.distill.recipes import recipe

        _training_bar_alone()
        with _exit_code_of_sigterm():
            run_demo(recipe("demo"), Path("runs/demo"), console)


@app.command(rich_help_panel=START)
def variants(
    check: Annotated[
        bool,
        typer.Option("--check", help="instead: the engine, the error and the cost of each on this machine"),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="print names, formulas and specs as JSON")] = False,
) -> None:
    """Print the table of attention variants (Markdown)."""
    with _one_line_errors():
        if check and json_output:
            raise ValueError("--json is of the table, not of --check")
        if check:
            from affine_attn.check import check_variants

            check_variants(console)
            return
        from affine_attn.core import variants as family

        # Not through rich: the table must stay on its lines however narrow the terminal is.
        if json_output:
            table = {
                name: {"formula": formula, "source": source, "spec": spec.to_dict()}
                for name, (spec, formula, source) in family.VARIANTS.items()
            }
            print(json.dumps(table, indent=1, ensure_ascii=False))
        else:
            print(family.variants_table())


# --help is the script's, as everything is that follows the command.
@app.command(rich_help_panel=START, add_help_option=False, context_settings={"ignore_unknown_options": True})
def bench(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Time the family against the strongest stock attention on this machine (needs a source checkout)."""
    script = Path(__file__).parent.parent / "benchmarks" / "run.py"
    with _one_line_errors():
        if not script.exists():
            raise ValueError("bench needs a source checkout: benchmarks/run.py is not part of the installed package")
    sys.argv = [str(script), *(arguments or [])]
    runpy.run_path(str(script), run_name="__main__")


@app.command(rich_help_panel=MODELS)
def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="a Llama, Mistral, Qwen2, Qwen3 or AffineAttn model: folder or hub id"),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="the folder to write: a new or an empty one")],
    attention: Annotated[
        str, typer.Option(help="a variant, see: affine-attn variants", autocompletion=_one_of(*VARIANTS))
    ] = "affine",
    start_as_softmax: Annotated[
        bool, typer.Option("--start-as-softmax", help="affine that computes softmax until it is trained")
    ] = False,
    gguf_file: Annotated[str | None, typer.Option(help="read this GGUF file of the source")] = None,
    to_plain: Annotated[
        bool, typer.Option("--to-plain", help="the other way: a softmax AffineAttn model to Llama or Qwen")
    ] = False,
    with_code: Annotated[bool, typer.Option("--with-code", help="add code that loads it without this package")] = False,
) -> None:
    """Give an existing checkpoint another attention (or, with --to-plain, take it back to transformers' own class)."""
    with _one_line_errors():
        from affine_attn.models import folders

        for line in folders.convert_folder(
            source, target, attention, start_as_softmax, gguf_file, to_plain=to_plain, with_code=with_code
        ):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command(rich_help_panel=MODELS)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="the text to continue")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens after which it ends, at the latest")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="of the random numbers, with a temperature")] = 0,
    device: Device = None,
    recent: Annotated[
        int | None, typer.Option(min=1, help="constant memory: keep the first 4 and so many recent tokens")
    ] = None,
) -> None:
    """Continue a prompt, token by token, and say how fast: the text on stdout, the speed on stderr."""
    with _one_line_errors():
        from affine_attn.models.folders import generate_text

        speed = generate_text(model, prompt, max_new_tokens, temperature, seed, device, recent)
    Console(stderr=True).print(speed, markup=False, highlight=False)


@app.command(rich_help_panel=TRAINING)
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
        float, typer.Option(min=0.0, max=1.0, help="part of the documents held out, chosen by their hash")
    ] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="tokens after which a shard is closed")] = 1 << 26,
    end_of_document: Annotated[
        str | None, typer.Option(help="token put after every document; default: the tokenizer's end of sequence")
    ] = None,
    max_files: Annotated[int | None, typer.Option(min=1, help="read only so many files, the first in order")] = None,
) -> None:
    """Turn text into token shards for training. Stopped at any moment, the same command goes on where it was."""
    with _one_line_errors():
        from affine_attn.distill.prepare import prepare as prepare_shards

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
        )
    counts = (
        f"{manifest['tokens'][split]:,} {split} tokens in {n:,} documents" for split, n in manifest["documents"].items()
    )
    line = f"{out}: {', '.join(counts)}; vocabulary {manifest['vocab_size']}, {manifest['dtype']}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command(rich_help_panel=TRAINING)
def distill(
    name: Annotated[
        str, typer.Argument(metavar="RECIPE", help=f"one of {', '.join(RECIPES)}", autocompletion=_one_of(*RECIPES))
    ],
    assignments: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIELD=VALUE", help="what differs from the recipe; --dry-run prints all fields"),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="the folder of the run; default: runs/RECIPE")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on after the last checkpoint, if there is one")] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE,...",
            help="a run for each value, in folders inside the output, and a table; finished ones are reused; "
            "learning_rate alone is the paper's sweep",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what it would cost, train nothing")] = False,
    gpus: Annotated[int, typer.Option(min=1, help="for --dry-run: how many share the work")] = 1,
    mfu: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="for --dry-run: part of the peak that is reached")
    ] = 0.4,
) -> None:
    """Train a student from scratch against a teacher's soft targets (or on the text alone).

    SIGTERM ends it with a checkpoint and exit code 143. With --resume, torchrun --max-restarts goes on by itself.
    """
    with _one_line_errors():
        from affine_attn.distill import estimate
        from affine_attn.distill.recipes import recipe

        chosen = recipe(name, assignments or ())
        if dry_run:
            for line in estimate.dry_run(name, chosen, gpus, mfu):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        _training_bar_alone()
        if sweep is not None:
            from affine_attn.distill.sweep import grid, outcome, table

            folder = output or Path("runs") / f"{name}-sweep"
            rows = []
            with _exit_code_of_sigterm():
                for label, each in grid(chosen, sweep, folder).items():
                    Console(stderr=True).print(label, markup=False, highlight=False)
                    rows.append(outcome(label, each, folder))
            # Not through rich: rows must stay on their lines however narrow the terminal is.
            print(*table(rows), sep="\n")
            return
        from affine_attn.distill.run import run

        with _exit_code_of_sigterm():
            folder = run(chosen, output or Path("runs") / name, resume)
    console.print(str(folder), markup=False, highlight=False, soft_wrap=True)


@app.command(rich_help_panel=TRAINING)
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
            autocompletion=_one_of("bfloat16", "float32"),
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
    """Keep a teacher's largest log-probabilities for every token, to train with teacher=cache and no teacher in memory.

    Stopped at any moment, the same command goes on. Started once per GPU (--device cuda:0, cuda:1, ...), the processes
    share the work.
    """
    with _one_line_errors():
        from affine_attn.distill import cache, estimate, shards

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
        console.print(plan.explain(), markup=False, highlight=False, soft_wrap=True)
        if dry_run:
            return
        line = cache.describe(plan, cache.cache_teacher(plan, teacher, batch_size, device))
    console.print(line, markup=False, highlight=False, soft_wrap=True)


# Headings of eval's options.
TEXTS, LONG, ELSEWHERE = "Perplexity", "Long contexts, on --text or --shards", "Scoring on another machine"


@app.command("eval", rich_help_panel=EVALUATION)
def evaluate(
    model: Model,
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK",
            help=f"tasks of lm-evaluation-harness; default, without --text and --shards: {' '.join(TASKS)}, "
            "zero-shot. c4 is the perplexity of the paper's Table 1",
            autocompletion=_one_of(*TASKS, "c4"),
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR|TASK=FILE",
            help="take documents from local files (DIR/TASK/SPLIT.jsonl or .parquet, also .gz, .xz, .bz2, .zst) "
            "instead of the hub; may be repeated",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="perplexity of a text file or of JSON lines, document by document; may be repeated",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    shards: Annotated[
        list[Path] | None,
        typer.Option(
            help="loss on the valid split of prepared shards, packed as in training; may be repeated",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="tokens of a window of --text, or of a sequence; may be repeated; default: 2048, or as many as the "
            "model has positions",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, help="new tokens per window of --text; default: all of them, no overlap", rich_help_panel=TEXTS
        ),
    ] = None,
    by_position: Annotated[
        bool,
        typer.Option(
            "--by-position",
            help="loss by position over joined documents: give a --length beyond training",
            rich_help_panel=LONG,
        ),
    ] = False,
    needle: Annotated[
        bool,
        typer.Option(
            "--needle",
            help="how often a number hidden in --length tokens of joined documents is found",
            rich_help_panel=LONG,
        ),
    ] = False,
    depth: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="where the needle lies, 0 the beginning of the text and 1 its end; may be repeated; "
            "default: 0, 0.25, 0.5, 0.75 and 1",
            rich_help_panel=LONG,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the needles and the text around them", rich_help_panel=LONG)] = 0,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="only the first documents of every task or text, or sequences of shards; with --needle the haystacks "
            "of every depth, default: 20",
        ),
    ] = None,
    batch_size: BatchSize = None,
    device: Device = None,
    dtype: Dtype = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="folder of the result files; one that is there is taken up. Default: MODEL/evaluation, for a hub id "
            "evaluation/ID"
        ),
    ] = None,
    export_requests: Annotated[
        Path | None,
        typer.Option(
            help="evaluate nothing: write the tasks' requests to a file (.gz) for affine-attn eval-score",
            rich_help_panel=ELSEWHERE,
        ),
    ] = None,
    import_scores: Annotated[
        Path | None,
        typer.Option(
            help="compute the tasks' metrics from a file that affine-attn eval-score wrote", rich_help_panel=ELSEWHERE
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
) -> None:
    """Evaluate a model: tasks of lm-evaluation-harness, perplexity, long contexts. Finished results are taken up."""
    with _one_line_errors():
        from affine_attn.evaluate import results, run

        request = run.Request(
            tasks=tasks or (),
            data=data or (),
            texts=text or (),
            shards=shards or (),
            lengths=length or (),
            stride=stride,
            by_position=by_position,
            needle=needle,
            depths=depth or (),
            seed=seed,
            limit=limit,
            batch_size=batch_size,
        )
        subject = results.Subject(model, device, dtype)
        if export_requests is not None:
            count = run.export_requests(subject, request, export_requests)
            console.print(f"{export_requests}: {count} requests", markup=False, highlight=False, soft_wrap=True)
            return
        summary = run.evaluate(subject, request, output, import_scores)
    if json_output:
        # Not through rich, which breaks lines.
        print(json.dumps(summary, indent=1))
        return
    for table in results.tables(summary):
        console.print(table)


@app.command("eval-score", rich_help_panel=EVALUATION)
def eval_score(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="folder or hub id of the model the requests were exported for")
    ],
    requests: Annotated[Path, typer.Argument(metavar="REQUESTS", help="what affine-attn eval --export-requests wrote")],
    scores: Annotated[
        Path, typer.Argument(metavar="SCORES", help="the file to write, for affine-attn eval --import-scores")
    ],
    batch_size: BatchSize = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Score exported requests on a machine that has torch and transformers, but no harness and none of its data."""
    with _one_line_errors():
        from affine_attn.evaluate.results import Subject
        from affine_attn.evaluate.score import score_file

        subject = Subject(model, device, dtype)
        count = score_file(subject.model, subject.about(), requests, scores, batch_size)
    console.print(f"{scores}: {count} scores", markup=False, highlight=False, soft_wrap=True)


@app.command(rich_help_panel=EVALUATION)
def analyze(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", help="AffineAttn, Llama, Mistral or Qwen models: folders, runs of distill, hub ids"
        ),
    ],
    data: Annotated[
        Path, typer.Option(metavar="FILE|SHARDS", help="text, JSON lines, or a folder that affine-attn prepare made")
    ],
    length: Annotated[int, typer.Option(min=2, help="tokens of a sequence")] = 1024,
    sequences: Annotated[int, typer.Option(min=1, help="how many, from the beginning of the data")] = 10,
    layer: Annotated[
        list[int] | None,
        typer.Option(min=0, help="keep attention maps of this layer, from 0; may be repeated; default: of all"),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(metavar="START:STOP", help="queries and keys of the maps, in the first sequence; default: 0:64"),
    ] = None,
    join: Annotated[
        bool, typer.Option("--join", help="let documents see each other, as one text; default: kept apart")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="folder of the files (OUTPUT/NAME) and figures; default: MODEL/analysis, for a hub id "
            "analysis/ID, and analysis/figures for figures of several models"
        ),
    ] = None,
    figures: Annotated[bool, typer.Option(help="draw PNG and SVG figures, which needs matplotlib")] = True,
    device: Device = None,
    dtype: Dtype = None,
    json_output: Annotated[bool, typer.Option("--json", help="print names, folders and means as JSON")] = False,
) -> None:
    """Show how models attend: row sums, first token, entropy, alpha and beta per layer and head, maps, training curves.

    No matrix of all queries and keys is ever held, so long sequences fit. docs/metrics.md defines every number.
    """
    with _one_line_errors():
        from affine_attn.analyze import run

        draw_all = None
        if figures:
            # Before anything is computed: where matplotlib is missing, this says so.
            from affine_attn.analyze.figures import draw_all
        request = run.Request(data, length, sequences, layer or (), window, join)
        analyses, folders = run.analyze_all(models, request, output, device, dtype)
        drawn = run.figure_folder(folders, output)
        files = draw_all(analyses, drawn) if draw_all else []
    if json_output:
        # Not through rich, which breaks lines.
        print(json.dumps(run.summary(analyses, folders, files), indent=1))
        return
    console.print(run.table(analyses))
    for folder in folders:
        console.print(str(folder), markup=False, highlight=False, soft_wrap=True)
    if files:
        console.print(f"{drawn}: {len(files)} files", markup=False, highlight=False, soft_wrap=True)


@app.command(rich_help_panel=EVALUATION)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="folders of affine-attn distill, finished or not, or of models that eval or analyze has results of",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML file to write")] = Path("report.html"),
    figures: Annotated[
        Path | None,
        typer.Option(help="also draw the figures for papers into this folder, PNG and SVG, which needs matplotlib"),
    ] = None,
) -> None:
    """Make one HTML page of runs side by side: curves, evaluation, how they attend, configuration.

    It needs no network and can be given to others. What affine-attn eval and affine-attn analyze have left beside the
    models is in it; where there is nothing, it names the command. The page can save each figure as PNG and SVG too.
    """
    with _one_line_errors():
        from affine_attn.report import write_report

        path = write_report(runs, output, figures)
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def _training_bar_alone() -> None:
    """Without the bars of transformers for every model that is read or written, which break it."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


@contextmanager
def _exit_code_of_sigterm() -> Iterator[None]:
    """143 for a run that SIGTERM has ended, as the shell has it."""
    from affine_attn.distill.run import Terminated

    try:
        yield
    except Terminated as stopped:
        Console(stderr=True).print(str(stopped), markup=False, soft_wrap=True)
        raise typer.Exit(128 + signal.SIGTERM) from stopped


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Bad input is answered with a sentence, not with a traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        Console(stderr=True).print(_first_line(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


if __name__ == "__main__":
    app()
