"""Options of commands: those of a table, and those that say the parameters of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from dlrm_core.base.cli import file_option, parameter_option
from dlrm_workbook.ground.tables import rows_of

KINDS: dict[str, dict[str, Any]] = {
    "flag": {"action": "store_true"},
    "or all": {"nargs": "?", "const": "all"},
    "required": {"required": True},
    "several": {"required": True, "nargs": "+"},
    "text": {},
    "count": {"type": int},
    "number": {"type": float},
}
"""Kind of an option in a table to what argparse is told of it."""


def listed_options(
    parser: argparse.ArgumentParser,
    module: str,
    command: str,
    choices: Mapping[str, Iterable[str]] | None = None,
) -> None:
    """The options of a command, as ``options.csv`` beside a module (its ``__file__``) lists them;
    ``choices`` says what those may be that may not be anything."""
    for row in rows_of(module, "options.csv"):
        if row["command"] != command:
            continue
        asked = KINDS[row["kind"]] | {name: row[name] for name in ("help", "metavar") if row[name]}
        if row["default"]:
            asked["default"] = asked.get("type", str)(row["default"])
        if choices and row["option"] in choices:
            asked["choices"] = choices[row["option"]]
        parser.add_argument(row["option"], **asked)


def parameters_file(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """``-f`` or ``--like``, and ``-p``: the parameters of a run."""
    source = parser.add_mutually_exclusive_group(required=required)
    file_option(source)
    like_option(source)
    parameter_option(parser)


def like_option(parser: argparse._ActionsContainer) -> None:
    """``--like``: the parameters that a command of another DLRM program stands for."""
    parser.add_argument(
        "--like",
        metavar="COMMAND",
        help="instead of a file: a command of facebookresearch/dlrm, such as "
        "'dlrm_s_pytorch.py --mini-batch-size=2048 ...', of NVIDIA's dlrm.py or of DeepSpark's "
        "train.py, whose flags are translated",
    )


def read_like(arguments: argparse.Namespace) -> None:
    """Put the parameters of ``--like`` in the file's place, and print what had no effect.

    So are those of ``-f``, where that is a model configuration of DeepSpark's.
    """
    if getattr(arguments, "like", None) is None:
        if str(getattr(arguments, "file", None)).endswith(".json"):
            from dlrm_workbook.ground.vendors import model_configuration

            arguments.file = model_configuration(arguments.file) or arguments.file
        return
    from dlrm_workbook.ground.like import translated
    from dlrm_workbook.ground.vendors import SCRIPTS

    arguments.file, notes = translated(arguments.like, SCRIPTS)
    for note in notes:
        print(f"dlrm {arguments.subcommand}: --like: {note}", file=sys.stderr)
