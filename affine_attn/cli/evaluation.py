"""Commands that say what a model can do and how it attends."""

import json
from pathlib import Path
from typing import Annotated

import typer

from affine_attn.cli.early import require_files, require_model, require_models
from affine_attn.cli.options import MAX_SEED, TASKS, BatchSize, Device, Dtype, Model, one_of
from affine_attn.cli.terminal import console, one_line_errors, say, tell

app = typer.Typer()
PANEL = "Evaluation"
# Headings of eval's options.
TEXTS, LONG, ELSEWHERE = "Perplexity", "Long contexts, on --text or --shards", "Scoring on another machine"


@app.command("eval", rich_help_panel=PANEL)
def evaluate(
    model: Model,
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK",
            help=f"tasks of lm-evaluation-harness; default, without --text and --shards: {' '.join(TASKS)}, "
            "zero-shot. c4 is the perplexity of the paper's Table 1",
            autocompletion=one_of(*TASKS, "c4"),
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
            help="tokens of a window of --text, or of a sequence; may be repeated; default: as many as in the model's "
            "training, where that is not known 2048, and no more than it has positions",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="new tokens per window of --text; default: --length, so that windows do not overlap. The last window "
            "of a document has fewer new tokens, and more of those before them as context",
            rich_help_panel=TEXTS,
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
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="of the needles and the text around them", rich_help_panel=LONG)
    ] = 0,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="only the first documents of every task or text, or sequences of shards; with --needle the haystacks "
            "of every depth, default: 20",
        ),
    ] = None,
    log_samples: Annotated[
        bool,
        typer.Option(
            "--log-samples",
            help="write each item of the tasks beside its result, with its choices and their log-likelihoods",
        ),
    ] = False,
    batch_size: BatchSize = None,
    device: Device = None,
    dtype: Dtype = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="folder of the result files; those that are there are reused. Default: MODEL/evaluation, for a hub id "
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
    """Evaluate a model: tasks of lm-evaluation-harness, perplexity, long contexts. Finished results are reused."""
    with one_line_errors():
        require_model(model)
        require_files([*(text or ()), *(shards or ()), *([import_scores] if import_scores else [])])
        from affine_attn.evaluate import results, run
        from affine_attn.models.load import ModelHandle

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
            log_samples=log_samples,
        )
        handle = ModelHandle(model, device, dtype)
        if export_requests is not None:
            count = run.export_requests(handle, request, export_requests)
            say(f"{export_requests}: {count} requests")
            return
        summary = run.evaluate(handle, request, output, import_scores)
    if json_output:
        # Not through rich, which breaks lines.
        print(json.dumps(summary, indent=1))
        return
    for part in results.tables(summary):
        tell(part) if isinstance(part, str) else console.print(part)


@app.command("eval-score", rich_help_panel=PANEL)
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
    with one_line_errors():
        require_model(model)
        require_files([requests])
        from affine_attn.evaluate.score import score_file
        from affine_attn.models.load import ModelHandle

        handle = ModelHandle(model, device, dtype)
        count = score_file(handle.model, handle.about(), requests, scores, batch_size)
    say(f"{scores}: {count} scores")


@app.command(rich_help_panel=PANEL)
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
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="tokens of a sequence; default: as many as in the models' training, where that is not known 1024",
        ),
    ] = None,
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
            help="folder of the results (OUTPUT/NAME) and of figures of several models; default: MODEL/analysis, for "
            "a hub id analysis/ID, and analysis/figures"
        ),
    ] = None,
    figures: Annotated[bool, typer.Option(help="draw PNG and SVG figures, which needs matplotlib")] = True,
    device: Device = None,
    dtype: Dtype = None,
    json_output: Annotated[bool, typer.Option("--json", help="print names, folders and means as JSON")] = False,
) -> None:
    """Show how models attend: row sums, first token, entropy, alpha and beta per layer and head, maps, training curves.

    Another length or other data is another result beside the first; finished ones are reused. No matrix of all queries
    and keys is ever held, so long sequences fit. docs/metrics.md defines every number.
    """
    with one_line_errors():
        require_models(*models)
        require_files([data])
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
    tell(run.caption(analyses))
    for folder in folders:
        say(str(folder))
    if files:
        say(f"{drawn}: {len(files)} files")


@app.command(rich_help_panel=PANEL)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="folders of affine-attn distill, finished or not, or of models that eval or analyze has results of",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="the HTML file to write; default: report.html, which a report of other runs is not replaced in",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="also draw the figures for papers into this folder, PNG and SVG, which needs matplotlib"),
    ] = None,
) -> None:
    """Make one HTML page of runs side by side: curves, evaluation, how they attend, configuration.

    It needs no network and can be given to others. What affine-attn eval and affine-attn analyze have left beside the
    models is in it; where there is nothing, it names the command. The page can save each figure as PNG and SVG too.
    """
    with one_line_errors():
        require_files(runs)
        from affine_attn.report import write_report

        path = write_report(runs, output, figures)
    say(str(path))
