"""The ``affine-attn`` command, a file for each subject.

Heavy imports stay inside the commands, so that --help and the completion of a shell answer at once.
"""

from typing import Annotated

import typer

from affine_attn import __version__
from affine_attn.cli import evaluation, models, start, training
from affine_attn.cli.commands import Commands
from affine_attn.cli.imports import Imports, import_entry_points
from affine_attn.cli.terminal import one_line_errors, show_tracebacks

app = typer.Typer(
    name="affine-attn",
    cls=Commands,
    help="Attention whose weights need not sum to one: affine scaling, sinks, gates and distance logits.",
    epilog="From text to a report: prepare, distill, eval, analyze, report; demo does it small, without eval. "
    "Exit codes: 0 done, 1 a bug (with its traceback), 2 wrong input (one line says what), "
    "130 stopped by Ctrl-C, 143 by SIGTERM.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)
for subject in (start, models, training, evaluation):
    app.add_typer(subject.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of every error, also of wrong input.")
    ] = False,
    imports: Imports = None,
) -> None:
    """Options that stand before a command."""
    show_tracebacks(debug)
    with one_line_errors():
        import_entry_points()
