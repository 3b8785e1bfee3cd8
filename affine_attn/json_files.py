"""JSON files that anybody may have changed."""

import json
from pathlib import Path
from typing import Any

from affine_attn.errors import UserError


def read_object(path: Path, *needed: str) -> dict[str, Any]:
    """Return the JSON object in a file. What is no object, or lacks a needed entry, is refused."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not JSON that can be read") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    if missing := [name for name in needed if name not in content]:
        raise UserError(f"{path} is damaged: it has no {missing[0]!r}")
    return content
