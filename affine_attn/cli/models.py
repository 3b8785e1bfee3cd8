"""Commands on the folder of a model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from affine_attn.cli.early import require_model
from affine_attn.cli.options import MAX_SEED, VARIANTS, Device, Model, one_of
from affine_attn.cli.terminal import one_line_errors, tell
from affine_attn.errors import UserError

app = typer.Typer()
PANEL = "Models"


@app.command(rich_help_panel=PANEL)
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="a Llama, Mistral, Qwen2, Qwen3 or AffineAttn model: folder, hub id or GGUF file"
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="the folder to write: a new or an empty one")],
    attention: Annotated[
        str | None,
        typer.Option(
            help="a variant (see: affine-attn variants) or several with +, or a spec or a list with one per layer as "
            "JSON; default: an AffineAttn model keeps its own, others get affine",
            autocompletion=one_of(*VARIANTS),
        ),
    ] = None,
    start_as_softmax: Annotated[
        bool, typer.Option("--start-as-softmax", help="the same logits until it is trained, where a stage can")
    ] = False,
    length: Annotated[
        int | None, typer.Option(min=2, help="of training sequences, for affine's N and logn's start; default: 2048")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="read this GGUF file of a folder or hub id")] = None,
    to_plain: Annotated[
        bool, typer.Option("--to-plain", help="the other way: a softmax AffineAttn model to Llama or Qwen")
    ] = False,
    with_code: Annotated[bool, typer.Option("--with-code", help="add code that loads it without this package")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="list the new tensors")] = False,
) -> None:
    """Give an existing checkpoint another attention (or, with --to-plain, take it back to transformers' own class)."""
    with one_line_errors():
        require_model(source)
        from affine_attn.models.convert import convert_folder

        for line in convert_folder(
            source, target, attention, start_as_softmax, gguf_file, length, to_plain, with_code, verbose
        ):
            tell(line)


@app.command(rich_help_panel=PANEL)
def export(
    model: Model,
    onnx: Annotated[bool, typer.Option("--onnx", help="as ONNX, the one format there is")] = False,
    output: Annotated[Path | None, typer.Option(help="the file to write; default: MODEL/model.onnx")] = None,
) -> None:
    """Write a model for programs without this package, and compare what onnxruntime makes of it with torch."""
    with one_line_errors():
        require_model(model)
        from affine_attn.models.onnx import export_folder

        if not onnx:
            raise UserError("export: give --onnx; it is the one format there is")
        # Which takes longer than one waits without a sign.
        with Console(stderr=True).status("tracing the model, then comparing the file with torch"):
            lines = list(export_folder(model, output))
        for line in lines:
            tell(line)


@app.command(rich_help_panel=PANEL)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="the text to continue")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens after which it ends, at the latest")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="of the random numbers, with a temperature")] = 0,
    device: Device = None,
    recent: Annotated[
        int | None, typer.Option(min=1, help="constant memory: keep the first 4 and so many recent tokens")
    ] = None,
) -> None:
    """Continue a prompt, token by token, and say how fast: the text on stdout, the speed on stderr."""
    with one_line_errors():
        require_model(model)
        from affine_attn.models.generate import generate_text

        speed = generate_text(model, prompt, max_new_tokens, temperature, seed, device, recent)
    Console(stderr=True).print(speed, markup=False, highlight=False)
