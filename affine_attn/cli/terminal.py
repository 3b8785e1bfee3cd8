"""What commands print, and how they end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from affine_attn.errors import UserError, first_line

console = Console()


def say(line: str) -> None:
    """Print a line as it is, to be copied: names of files are no markup, and the terminal alone breaks it."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def tell(line: str, to: Console = console, **style: Any) -> None:
    """Print text: a terminal gets it wrapped at words, a program whole, and so is a command, which is to be copied."""
    whole = not to.is_terminal or line.startswith("  affine-attn ")
    to.print(line, markup=False, highlight=False, soft_wrap=whole, **style)


def note(line: str) -> None:
    """The same for what is no result: to stderr."""
    tell(line, Console(stderr=True))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Answer what a user can mend with a sentence: a ``UserError``, and what the operating system refuses, such as a
    missing file or a full disk. Any other error is a bug, whose traceback must be seen; ``--debug`` shows them all."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read the output has had enough; click ends quietly
    except (UserError, OSError) as error:
        mendable = isinstance(error, UserError) or error.errno is not None
        if _debug or not mendable:
            raise
        tell(_sentence(error), Console(stderr=True), style="red")
        raise typer.Exit(2) from error


_debug = False


def show_tracebacks(wanted: bool) -> None:
    """Decide, for the command that follows, whether errors are shown whole."""
    global _debug
    _debug = wanted


def tracebacks_are_shown() -> bool:
    return _debug


def _sentence(error: Exception) -> str:
    if not isinstance(error, UserError) and isinstance(error, OSError):
        # Without the number that stands before it.
        return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror)
    return first_line(error)


@contextmanager
def exit_codes_of_signals(goes_on: str = "the same command goes on") -> Iterator[None]:
    """143 for a run that SIGTERM has ended and 130 for one that Ctrl-C has, as the shell has it."""
    from affine_attn.distill.run import Terminated

    try:
        yield
    except (Terminated, KeyboardInterrupt) as stopped:
        terminated = isinstance(stopped, Terminated)
        told = str(stopped) if terminated else f"stopped by Ctrl-C: {goes_on}"
        note(told)
        raise typer.Exit(128 + (stopped.number if terminated else signal.SIGINT)) from stopped


def training_bar_alone() -> None:
    """Hide the bars of transformers for every model that is read or written: they break that of training."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
