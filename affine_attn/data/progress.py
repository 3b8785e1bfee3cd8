"""The bar of commands that go through data: tokens and their rate, time gone and left."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text


class _Tokens(ProgressColumn):
    """Tokens of this run and their rate."""

    def render(self, task: Task) -> Text:
        tokens = task.fields["tokens"]
        return Text(f"{tokens:,} tokens, {tokens / task.elapsed if task.elapsed else 0:,.0f}/s")


def token_progress(console: Console) -> Progress:
    """Its tasks have a field ``tokens``, those of this run; ``completed`` may count in another unit."""
    tokens = _Tokens(table_column=Column(no_wrap=True))
    return Progress(BarColumn(), tokens, TimeElapsedColumn(), "left", TimeRemainingColumn(), console=console)
