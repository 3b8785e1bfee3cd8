"""The group of all commands: what each of them has, needs and is started with."""

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from affine_attn.cli.terminal import note, tracebacks_are_shown

# The extras that a command needs for all it can do; those not here need torch alone.
EXTRAS = {
    "demo": "demo", "bench": "kernels,models,plots", "convert": "models,gguf", "export": "models,onnx",
    "generate": "models", "prepare": "models,data", "distill": "models", "recipes": "models", "cache-teacher": "models",
    "eval": "models,eval", "eval-score": "models", "analyze": "models,plots", "report": "report,plots",
}  # fmt: skip


class Commands(TyperGroup):
    """Its commands have its ``--import`` too, which may stand before the name of a command or after it. A package that
    one of them lacks is named with the extra that brings it."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        shared = [parameter for parameter in self.params if "--import" in parameter.opts]
        for command in self.commands.values():
            command.params = [*command.params, *shared]

    def main(self, *arguments: Any, **settings: Any) -> Any:
        # Threads that wait by spinning make steps many times slower where other programs use the cores. OpenMP reads
        # this when torch is loaded, which is later.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        return super().main(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            package, extra = (error.name or "").partition(".")[0], EXTRAS.get(ctx.invoked_subcommand)
            if (
                not package
                or package in ("affine_attn", *sys.stdlib_module_names)
                or not extra
                or tracebacks_are_shown()
            ):
                raise
            note(f"affine-attn {ctx.invoked_subcommand} needs {package}: pip install 'affine-attn[{extra}]'")
            raise typer.Exit(2) from error
