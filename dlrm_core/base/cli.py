"""``python -m dlrm_core``: a table of subcommands, each loaded only when it is called.

What torchrun, profilers and bare GPU nodes start. Only the standard library is imported
here. The workbook's ``dlrm`` has the same subcommands and more, from a longer table.
"""

from __future__ import annotations

import argparse
import atexit
import csv
import errno
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from dlrm_core.base.engines import function_at
from dlrm_core.base.errors import InputError
from dlrm_core.base.files import DISK_TROUBLE
from dlrm_core.base.text import shown_on


@dataclass(frozen=True)
class Subcommand:
    """One row of the table.

    ``handler`` is ``module:function``; the function takes the parsed arguments and
    returns an exit code (None is 0). It raises InputError for what the user must mend.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    handler: str


KINDS: dict[str, dict[str, Any]] = {
    "flag": {"action": "store_true"},
    "repeated": {"action": "append", "default": []},
    "or all": {"nargs": "?", "const": "all"},
    "optional": {"nargs": "?", "default": ""},
    "required": {"required": True},
    "several": {"required": True, "nargs": "+"},
    "text": {},
    "count": {"type": int},
    "number": {"type": float},
}
"""What argparse is given for each kind of option that a table names."""


PLACES = ("DIR", "FILE", "FOLDER", "PATH", "RECORDING")
"""What stands for the value of an option that names a file or folder."""


class _Place(argparse.Action):
    """Refuses an empty text: it would be this folder, or count as left out."""

    def __call__(self, parser: Any, arguments: Any, value: Any, option: Any = None) -> None:
        if value == "":
            raise InputError(
                f"{self.dest.replace('_', '-')} is empty, as of a shell's variable that is not "
                "set; expected a file or folder"
            )
        setattr(arguments, self.dest, value)


def listed_options(
    parser: argparse._ActionsContainer,
    module: str,
    command: str,
    choices: Mapping[str, Iterable[str]] | None = None,
    **more: Any,
) -> None:
    """The options of a command, as ``options.csv`` beside a module (its ``__file__``) lists them.

    ``choices`` holds the values of options that allow only some; ``more`` is given to argparse for
    each option as well.
    """
    with Path(module).with_name("options.csv").open(encoding="utf-8", newline="") as table:
        rows = [row for row in csv.DictReader(table) if row["command"] == command]
    for row in rows:
        asked = KINDS[row["kind"]] | {name: row[name] for name in ("help", "metavar") if row[name]}
        if row["default"]:
            asked["default"] = asked.get("type", str)(row["default"])
        if row["metavar"] in PLACES:
            asked["action"] = _Place
        if choices and row["option"] in choices:
            asked["choices"] = choices[row["option"]]
        parser.add_argument(*row["option"].split(), **asked | more)


def _options(command: str, parser: argparse.ArgumentParser) -> None:
    listed_options(parser, __file__, "file", required=True)
    for name in ("parameter", command):
        listed_options(parser, __file__, name)


SUBCOMMANDS = (
    Subcommand(
        "train",
        "train without a notebook",
        partial(_options, "train"),
        "dlrm_core.commands:command_train",
    ),
    Subcommand(
        "evaluate",
        "compute AUC, log loss and accuracy of a checkpoint on test data",
        partial(_options, "evaluate"),
        "dlrm_core.commands:command_evaluate",
    ),
    Subcommand(
        "infer",
        "measure the latency of predictions by batch size",
        lambda parser: function_at("dlrm_workbook.cli:options", "dlrm infer")("infer", parser),
        "dlrm_workbook.evidence.latency:command_infer",
    ),
)
DESCRIPTION = "Trains a Deep Learning Recommendation Model."


def parser_of(
    subcommands: Sequence[Subcommand], description: str, given: Sequence[str]
) -> argparse.ArgumentParser:
    """The command line, built from a table; only a subcommand that is given gets its arguments."""
    parser = argparse.ArgumentParser(prog="dlrm", description=description)
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for row in subcommands:
        sub = subparsers.add_parser(row.name, help=row.help, description=row.help)
        if row.name in given:
            row.add_arguments(sub)
        sub.set_defaults(handler=row.handler)
    return parser


def main(
    argv: Sequence[str] | None = None,
    subcommands: Sequence[Subcommand] = SUBCOMMANDS,
    description: str = DESCRIPTION,
    opened: Callable[[argparse.Namespace], AbstractContextManager[Any]] = nullcontext,
) -> int:
    """Run a subcommand; its module is imported in what ``opened`` makes of the arguments.

    Returns:
        0 when it did what was asked; 1 when it failed, or its output cannot be written; 2 when
        what the user gave cannot be used (one sentence on standard error); 130 after Ctrl-C.
    """
    from dlrm_core.base.machine import end_with_starter

    end_with_starter()
    # the next file that is opened would take the number of a stream that somebody closed
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = shown_on(sys.stdout or os.fdopen(1, "w"))
    sys.stderr = shown_on(sys.stderr or os.fdopen(2, "w"))
    # at its end Python would search for cycles in all that was imported, which takes seconds
    atexit.register(gc.freeze)
    given = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(["dlrm", *given[:1]])
    try:
        arguments = parser_of(subcommands, description, given).parse_args(given)
        arguments.argv = ["dlrm", *given]
        with opened(arguments):
            handler = function_at(arguments.handler, name)
        code = int(handler(arguments) or 0)
        # here, and not when Python ends, where nobody could say a word about it
        sys.stdout.flush()
        return code
    except InputError as error:
        _complain(f"{name}: {error}")
        return 2
    except KeyboardInterrupt:
        _complain(f"{name}: interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # the reader of our output (head, less) has gone: not an error of ours
        _forget(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            _complain(f"{name}: {str(error.filename)[:100]}...: {error.strerror}")
            return 2
        if error.errno not in DISK_TROUBLE:
            raise
        _forget(sys.stdout)
        where = f"{error.filename}: " if error.filename else "the output "
        _complain(f"{name}: {where}cannot be written: {error.strerror}")
        return 1


def _complain(sentence: str) -> None:
    """Print a sentence on standard error, which may be gone or full itself."""
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:
        _forget(sys.stderr)


def _forget(stream: TextIO) -> None:
    """Give a stream that cannot be written somewhere to flush to: Python tries again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
