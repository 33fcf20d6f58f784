"""Errors that are the user's to mend, told apart from defects of ours."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user gave us cannot be used: a parameter, a file, a folder.

    The message is one sentence (or a sentence and a table) that names the file,
    the field and both numbers: what was found and what was expected. Command
    lines print it without a traceback and exit with code 2. What refuses something
    (``require_...``, ``check_...``, and what reads parameters or files) raises it.
    """


class MissingToolError(InputError):
    """A program or package that the request needs is not installed.

    The message says what to install, in one sentence.
    """
