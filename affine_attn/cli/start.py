"""Commands to look around: the demo, the table of variants, the benchmark."""

import json
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from affine_attn.cli.terminal import console, exit_codes_of_signals, one_line_errors, training_bar_alone
from affine_attn.errors import UserError

app = typer.Typer()
PANEL = "Start"


@app.command(rich_help_panel=PANEL)
def demo() -> None:
    """Minutes on two CPU cores: a corpus, a teacher, students with softmax, sink and affine attention, and their table.

    Writes data/demo and runs/demo. Stopped at any moment, the same command goes on; what is finished is reused.
    """
    with one_line_errors():
        from affine_attn.demo import run_demo
        from affine_attn.distill.recipes import recipe

        training_bar_alone()
        with exit_codes_of_signals():
            run_demo(recipe("demo"), Path("runs/demo"), console)


@app.command(rich_help_panel=PANEL)
def variants(
    check: Annotated[
        bool,
        typer.Option("--check", help="instead: the engine, the error and the cost of each on this machine"),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="print names, formulas and specs as JSON")] = False,
) -> None:
    """Print the table of attention variants: on a terminal the formulas, elsewhere all of it (Markdown)."""
    with one_line_errors():
        if check and json_output:
            raise UserError("--json is of the table, not of --check")
        if check:
            from affine_attn.bench.check import check_variants

            check_variants(console)
            return
        from affine_attn.core import variants as family

        if json_output:
            table = {
                name: {"formula": formula, "source": source, "spec": spec.to_dict()}
                for name, (spec, formula, source) in family.VARIANTS.items()
            }
            # Not through rich, which breaks lines.
            print(json.dumps(table, indent=1, ensure_ascii=False))
        elif console.is_terminal:
            shown = Table("variant", "output", "source", box=box.SIMPLE, padding=(0, 1, 0, 0))
            for name, (_, formula, source) in family.VARIANTS.items():
                shown.add_row(*map(Text, (name, formula, source)))
            console.print(shown)
        else:
            print(family.variants_table())


# --help is the script's, as everything is that follows the command.
@app.command(rich_help_panel=PANEL, add_help_option=False, context_settings={"ignore_unknown_options": True})
def bench(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Time the family against the strongest stock attention on this machine (needs a source checkout)."""
    script = Path(__file__).parents[2] / "benchmarks" / "run.py"
    with one_line_errors():
        if not script.exists():
            raise UserError("bench needs a source checkout: benchmarks/run.py is not part of the installed package")
        sys.argv = [str(script), *(arguments or [])]
        runpy.run_path(str(script), run_name="__main__")
