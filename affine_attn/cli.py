"""The ``affine-attn`` command. Heavy imports stay inside the commands so that --help answers at once."""

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="affine-attn",
    help="Attention whose weights need not sum to one: affine scaling, sinks, gates and distance logits.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
console = Console()


@app.command()
def demo() -> None:
    """Check every variant against the float64 reference on this machine and time it against plain attention."""
    from affine_attn.demo import run_demo

    run_demo(console)


@app.command()
def variants() -> None:
    """Print the table of attention variants (Markdown)."""
    from affine_attn.core.variants import variants_table

    # Not through rich: the table must stay on its lines however narrow the terminal is.
    print(variants_table())


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    arguments: Annotated[list[str] | None, typer.Argument(help="passed on; try: affine-attn bench -- --help")] = None,
) -> None:
    """Time the family against the strongest stock attention on this machine (needs a source checkout)."""
    script = Path(__file__).parent.parent / "benchmarks" / "run.py"
    if not script.exists():
        console.print(
            "[red]bench needs a source checkout: benchmarks/run.py is not part of the installed package[/red]"
        )
        raise typer.Exit(2)
    sys.argv = [str(script), *(arguments or [])]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    app()
