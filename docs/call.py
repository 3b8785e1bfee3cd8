"""``python -m docs.call``: the plans in call.md, written from its own code."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

from affine_attn.runs.files import write_text

PAGE = Path(__file__).parent / "call.md"
_BLOCKS = re.compile(r"(```python\n(.*?)```\n\n```text\n).*?```", re.DOTALL)


def written(page: str) -> str:
    """Return the page with what its code prints behind each block."""
    names: dict = {}

    def printed(block: re.Match) -> str:
        text = io.StringIO()
        with redirect_stdout(text):
            exec(block[2], names)
        return f"{block[1]}{text.getvalue()}```"

    return _BLOCKS.sub(printed, page)


if __name__ == "__main__":
    write_text(PAGE, written(PAGE.read_text()))
