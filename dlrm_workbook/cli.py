"""The ``dlrm`` command: a table of subcommands, each loaded only when it is called.

``dlrm train`` must start fast and run on a machine without papermill or plotly,
so nothing but the standard library is imported here. ``commands.csv`` lists them and
``options.csv`` what is their own; studies bring others (:mod:`dlrm_workbook.ground.studies`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from dlrm_core.base import cli as core
from dlrm_core.base.cli import Subcommand, listed_options
from dlrm_workbook.ground import studies
from dlrm_workbook.ground.options import like_option, parameters_file, read_like
from dlrm_workbook.ground.tables import rows_of

COMMANDS = {row["command"]: row for row in rows_of(__file__, "commands.csv")}
"""Name of a command to its ``handler`` in this package, whether parameters are ``required``,
``optional`` or none of its options, and what it does (``help``)."""

CHOICES = {"--protocol": ("steady", "nvidia"), "--to": ("perfetto", "speedscope")}
"""What an option of ``options.csv`` may be."""


def options(command: str, parser: argparse.ArgumentParser) -> None:
    """The options of a command: those of parameters, the core's, and those that are its own."""
    if needed := COMMANDS[command]["parameters"]:
        parameters_file(parser, required=needed == "required")
    listed_options(parser, core.__file__, command)
    listed_options(parser, __file__, command, CHOICES)
    if command == "parameters":
        like_option(parser)
    elif command == "record":
        # for the process that reads the recording while this one waits
        parser.add_argument("--together", nargs=2, default=(), help=argparse.SUPPRESS)
    elif command == "data":
        from dlrm_workbook.datasets.command import add_arguments

        add_arguments(parser)


SUBCOMMANDS = (
    *(
        Subcommand(name, row["help"], partial(options, name), f"dlrm_workbook.{row['handler']}")
        for name, row in COMMANDS.items()
    ),
    *studies.subcommands(),
)

DESCRIPTION = (
    "Runs a Deep Learning Recommendation Model, profiles it, and says with evidence what limits "
    "its speed."
)


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace) -> Iterator[None]:
    """Read ``--like``, then import what the block imports without grammars that nothing reads."""
    with _without_grammars():
        yield
    read_like(arguments)


@contextlib.contextmanager
def _without_grammars() -> Iterator[None]:
    """Import what the block imports without the grammars of internationalised addresses.

    nbformat imports jsonschema, which builds 39 parsers for formats of strings that no
    notebook has, if a package is there that Jupyter brings along: a second of every run.
    """
    name = "rfc3987_syntax"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def with_command(given: Sequence[str]) -> list[str]:
    """The words of ``dlrm run``, with what follows ``--`` as the parameter that it stands for."""
    if given[:1] != ["run"] or "--" not in given:
        return list(given)
    place = list(given).index("--")
    command = json.dumps(given[place + 1 :], ensure_ascii=False)
    return [*given[:place], "-p", f"profiling.command={command}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit code, as :func:`dlrm_core.base.cli.main` gives it."""
    given = with_command(sys.argv[1:] if argv is None else argv)
    return core.main(given, SUBCOMMANDS, DESCRIPTION, _opened)
