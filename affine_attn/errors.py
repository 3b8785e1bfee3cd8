"""Errors that a user can mend: what was given is wrong, or a package is missing.

Their message is one sentence, and commands print it alone. Any other error is a bug of this package, and commands show
its traceback. Checks of arguments that only Python code passes (attention, masks) raise plain ValueErrors.
"""


class UserError(ValueError):
    """An argument, a file or a recipe is wrong; the message says which, what was given and what is allowed."""


class MissingPackage(UserError, ModuleNotFoundError):
    """An optional package is not installed; the message has the command that installs it."""


class MissingDefinition(UserError, ImportError):
    """The attention of a checkpoint is not defined here; the message names the module to import."""


class FileError(UserError, OSError):
    """The operating system refuses a file, say because the disk is full; the message says what that means here."""


class NotFinite(UserError, FloatingPointError):
    """A NaN or an infinity ended the computation: a run that diverged, a teacher or a model with such weights."""


def first_line(error: Exception) -> str:
    """What an error says, without its details; of one that says nothing, its type."""
    line, kind = next(iter(str(error).splitlines()), ""), type(error).__name__
    # A KeyError says but the key.
    return f"{kind}: {line}" if line and isinstance(error, KeyError) else line or kind
