"""The commit of the code that runs, as the files of its results name it."""

import subprocess
from pathlib import Path


def commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """Of the package's repository, with ``-dirty`` if files were changed.

    None unless the folder itself is a repository: one further up would be another project's.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        # No git on this machine, or a folder that it does not trust.
        return None
