"""Locks that keep two processes from writing the same files. They are the kernel's: a killed process leaves none."""

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from affine_attn.errors import UserError
from affine_attn.runs.files import temporary
from affine_attn.runs.layout import RunFolder


@contextmanager
def alone_in_run(run: RunFolder) -> Iterator[None]:
    """Two runs in one folder would mix their lines and checkpoints.

    The lock is of this process alone, unlike one of flock: workers that outlive a killed run do not hold it.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    with run.lock.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UserError(f"another process is training in {run.path}: let it end, or give a new folder") from error
        except OSError as error:
            # Some file systems of clusters have no locks: no reason not to train there.
            warnings.warn(
                f"{run.path} cannot be locked ({error}): see to it that nothing else trains there", stacklevel=2
            )
        yield


@contextmanager
def alone_in(folder: Path, wait: bool = False) -> Iterator[None]:
    """Two commands in one folder would mix their bytes. It is the folder that is locked, which needs no file in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    except BlockingIOError as error:
        raise UserError(f"another process is preparing {folder}") from error
    finally:
        os.close(handle)


@contextmanager
def claimed(path: Path) -> Iterator[BinaryIO | None]:
    """The temporary file of ``path``, empty; None if another process has it or has completed it.

    Nothing is cut before the lock is held: the file that was opened may by then be the complete one, under its new
    name.
    """
    with open(os.open(temporary(path), os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if path.exists():
            # A file of the temporary name was made anew after the other process had renamed its own.
            temporary(path).unlink(missing_ok=True)
            yield None
            return
        file.truncate()
        yield file
